"""Replicas of a `tf.distribute` strategy: one reduction, then the same step on each device.

`strategy.extended.update` runs a step once for each device. The step reads and assigns that
device's copy of every variable. It may branch there, and it never has to merge replicas. A call
that merges replicas may not be under a condition.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_groupopt.base import compat

Tensor = Any

# Each of these strategies keeps a copy of every variable on every device, and all copies equal.
_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
_thread = threading.local()


def over_replicas(
    function: Callable[[list[Tensor]], None],
    gradients: Sequence[Tensor],
    variables: Sequence[Any],
    largest: Sequence[bool] = (),
) -> None:
    """Runs `function` on the gradients summed over replicas, once on each device.

    Args:
        function: Takes the gradients; assigns to some of `variables` and to nothing else.
        gradients: The gradients of one replica, without `None`.
        variables: Every Keras variable that `function` reads or assigns. The first is a variable
            of the optimizer.
        largest: For each gradient, whether replicas are reduced to the largest value and not to
            the sum. Default: to the sum for all.

    Raises:
        NotImplementedError: If the strategy does not keep equal copies, or if XLA compiles the
            replicas.
        ValueError: If a variable was not made under the strategy.
    """
    strategy = None if _is_within_step() else _strategy_of(variables)
    if strategy is None:
        function(list(gradients))
        return
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            # In a step that XLA compiles, nothing can run once per device, and each assignment
            # would reduce its value over the replicas.
            raise NotImplementedError(
                f"A model under {type(strategy).__name__} must be compiled without XLA. Received: "
                "a step that XLA compiles. Use `compile(..., jit_compile=False)`."
            )
        reduced = _reduce(gradients, largest or [False] * len(gradients))

        def merged(strategy: Any, gradients: list[Tensor]) -> None:
            _on_each_device(strategy, function, gradients, variables[0])

        tf.distribute.get_replica_context().merge_call(merged, args=(reduced,))
        return
    if any(
        isinstance(gradient, tf.types.experimental.distributed.PerReplica) for gradient in gradients
    ):
        raise ValueError(
            "`apply` must get tensors outside of `strategy.run`. Received: values that differ per "
            "replica. Call it within `strategy.run`, where they are summed."
        )
    with strategy.scope():
        _on_each_device(strategy, function, list(gradients), variables[0])


def _on_each_device(
    strategy: Any, function: Callable[[list[Tensor]], None], gradients: list[Tensor], variable: Any
) -> None:
    errors: list[Exception] = []

    @tf.autograph.experimental.do_not_convert
    def step(copy: Any, gradients: list[Tensor]) -> None:
        del copy
        with _within_step():
            try:
                function(list(gradients))
            except Exception as error:
                # The other devices must make the same calls that this one made before it failed,
                # so the error is raised after all of them.
                errors.append(error)

    strategy.extended.update(raw(variable), step, args=(gradients,), group=False)
    if errors:
        raise errors[0]


def sum_over_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of the whole batch from those of one replica's part of it."""
    return _reduce(gradients, [False] * len(gradients))


def _reduce(gradients: Sequence[Tensor], largest: Sequence[bool]) -> list[Tensor]:
    if _is_within_step() or not tf.distribute.has_strategy():
        return list(gradients)
    context = tf.distribute.get_replica_context()
    if context is None:
        return list(gradients)
    summed = [g for g, is_largest in zip(gradients, largest, strict=True) if not is_largest]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, summed) if summed else ())
    return [
        tf.reduce_max(context.all_gather(gradient[None], axis=0), axis=0)
        if is_largest
        else next(sums)
        for gradient, is_largest in zip(gradients, largest, strict=True)
    ]


def _replicas() -> Any:
    """Returns the context of one of several replicas, or `None`."""
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return None
    return tf.distribute.get_replica_context()


def has_replicas() -> bool:
    """Whether this runs in one of several replicas."""
    return _replicas() is not None


def loss_of_all(loss: Tensor) -> Tensor:
    """Returns the loss that a replica's gradient is of, without its share of the batch."""
    return loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)


def assign_on_replicas(variables: Sequence[Any], values: Sequence[Tensor], only_if: Tensor) -> None:
    """Assigns values that are the same on all replicas, if a boolean scalar holds."""
    targets = [raw(variable) for variable in variables]
    wide = [tf.cast(value, target.dtype) for target, value in zip(targets, values, strict=True)]

    def merged(strategy: Any, values: Sequence[Tensor], only_if: Tensor) -> None:
        for target, value in zip(targets, values, strict=True):
            strategy.extended.update(target, _assign, args=(value, only_if), group=False)

    context = _replicas()
    if context is None:
        _assign_all(targets, wide, only_if)
    else:
        context.merge_call(merged, args=(wide, only_if))


@tf.autograph.experimental.do_not_convert
def _assign(target: Any, value: Tensor, only_if: Tensor) -> None:
    _assign_all([target], [value], only_if)


def _assign_all(targets: Sequence[Any], values: Sequence[Tensor], only_if: Tensor) -> None:
    def assign() -> Tensor:
        for target, value in zip(targets, values, strict=True):
            target.assign(value)
        return tf.constant(True)

    tf.cond(only_if, assign, lambda: tf.constant(False))


def once_per_step(function: Callable[[], None]) -> None:
    """Runs `function` once for all replicas, outside of a step that is being compiled."""
    if _is_within_step() or not tf.distribute.has_strategy():
        with tf.init_scope():
            function()
        return

    def merged(strategy: Any) -> None:
        with tf.init_scope(), strategy.scope():
            function()

    if tf.distribute.in_cross_replica_context():
        merged(tf.distribute.get_strategy())
    else:
        tf.distribute.get_replica_context().merge_call(merged)


def on_devices_of(variables: Sequence[Any]) -> AbstractContextManager[Any]:
    """Returns a context in which variables are made on the devices that `variables` are on.

    Raises:
        ValueError: If it is called in one of several replicas. Each would make its own variables.
    """
    if tf.distribute.has_strategy():
        if not tf.distribute.in_cross_replica_context():
            raise ValueError(
                "The optimizer must be built outside of `strategy.run`. Received: a call in a "
                f"replica of {type(tf.distribute.get_strategy()).__name__}. Call "
                "`optimizer.build(model.trainable_variables)` under `strategy.scope()` first."
            )
        _strategy_of(variables)
        return contextlib.nullcontext()
    strategies = [strategy for v in variables if (strategy := _owner(v)) is not None]
    return strategies[0].scope() if strategies else contextlib.nullcontext()


class _WithoutReduction(compat.backend_optimizer()):  # type: ignore[misc]
    """Comes between a rule's class and Keras' class for TensorFlow, which sums over replicas."""

    def _backend_update_step(
        self, gradients: Sequence[Tensor], variables: Sequence[Any], learning_rate: Tensor
    ) -> None:
        if not _is_within_step():
            super()._backend_update_step(gradients, variables, learning_rate)
            return
        for gradient, variable in zip(gradients, variables, strict=True):
            self.update_step(gradient, raw(variable), learning_rate)


def without_reduction(rule: Any) -> Any:
    """Lets a rule take gradients that have been summed over replicas.

    The method of Keras' class would sum them again, in a call that may not be under a condition.
    The rule's class comes before ours. If it overrides that method, its own method still runs.
    """
    cls = type(rule)
    names = {"__module__": cls.__module__, "stands_for": cls}
    own = type(cls.__name__, (cls, _WithoutReduction), names)
    object.__setattr__(rule, "__class__", own)
    return rule


def _strategy_of(variables: Sequence[Any]) -> Any:
    """Returns the strategy under which a step on `variables` runs, or `None`."""
    owner = _owner(variables[0])
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else owner
    if strategy is None:
        return None
    if not isinstance(strategy, _STRATEGIES):
        known = ", ".join(cls.__name__ for cls in _STRATEGIES)
        raise NotImplementedError(
            f"GroupedOptimizer must train on one device or under one of {known}. Received: "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas."
        )
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return strategy
    for variable in variables:
        if _owner(variable) is not strategy:
            raise ValueError(
                "Model and optimizer must be made under the strategy that trains them. Received: "
                f"{getattr(variable, 'path', variable.name)}, made outside of the "
                f"{type(strategy).__name__}. Make both within `with strategy.scope():`."
            )
    return strategy


def _owner(variable: Any) -> Any:
    value = raw(variable)
    spread = isinstance(value, tf.distribute.DistributedValues)
    return value.distribute_strategy if spread else None


def raw(variable: Any) -> Any:
    """Returns TensorFlow's variable of a Keras variable, or a variable of its own as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _is_within_step() -> bool:
    return getattr(_thread, "depth", 0) > 0


@contextlib.contextmanager
def _within_step() -> Iterator[None]:
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1
