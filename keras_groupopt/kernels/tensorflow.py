"""The operations on sparse gradients (`tf.IndexedSlices`), and conditionals, on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

Tensor = Any


def check_replicas() -> None:
    """Refuses a distribution in which gradients are still to be summed over replicas.

    Clipping before the sum, and summing again in each rule, would train with wrong steps.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise NotImplementedError(
            "GroupedOptimizer must run on one replica on TensorFlow. Received: "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas. Train on "
            "one device, or use the JAX backend with `keras.distribution`."
        )


def outside_compiled_step() -> AbstractContextManager[Any]:
    """Returns a context in which variables may be made while a step is being compiled.

    An assignment made while tracing would be part of the step and run at every step.
    """
    return tf.init_scope()


def combine_repeated_rows(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with each row once; a dense gradient as a tensor.

    Norms and second moments of slices that repeat a row are not those of the gradient.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _values(gradient: Tensor) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient: Tensor, values: Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm over all gradients, a float32 scalar."""
    squares = [
        tf.reduce_sum(tf.square(tf.cast(_values(gradient), tf.float32))) for gradient in gradients
    ]
    return tf.sqrt(tf.add_n(squares))


def scale(gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Returns each gradient times `factor`, in the gradient's dtype."""
    return [
        _with_values(gradient, _values(gradient) * tf.cast(factor, gradient.dtype))
        for gradient in gradients
    ]


def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Returns `gradient` with each element in `[-limit, limit]`."""
    return _with_values(gradient, tf.clip_by_value(_values(gradient), -limit, limit))


def shrink(variables: Sequence[Any], factor: Tensor) -> None:
    """Does `w ← w − factor · w` for each variable, in place."""
    for variable in variables:
        # A training loop of its own may bring variables of `tf.Module`.
        value = variable.value if isinstance(variable, keras.Variable) else variable
        value.assign_sub(value * tf.cast(factor, value.dtype))


def accumulate(
    accumulators: Sequence[Any], gradients: Sequence[Tensor], weight: Tensor | None, keep: Any
) -> None:
    """Does `a ← a + weight · g`; rows that a sparse gradient does not name are not touched."""
    if keep is not None:
        # Masks would be passes over memory of their own.
        add = functools.partial(accumulate, accumulators, gradients, weight, None)
        conditional(keep, add, accumulators)
        return
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        added = tf.cast(_values(gradient), accumulator.dtype)
        if weight is not None:
            added *= tf.cast(weight, accumulator.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            accumulator.value.scatter_add(tf.IndexedSlices(added, gradient.indices))
        else:
            accumulator.value.assign_add(added)


def average(averages: Sequence[Any], variables: Sequence[Any], share: Tensor, copies: bool) -> None:
    """Does `v ← v + share · (w − v)`; exactly `v ← w` where `share` is 1 and it `copies`."""
    for mean, variable in zip(averages, variables, strict=True):
        own = mean.value
        value = tf.cast(tf.convert_to_tensor(variable), own.dtype)
        part = tf.cast(share, own.dtype)
        if copies:
            own.assign(tf.where(part >= 1, value, own + part * (value - own)))
        else:
            own.assign_add(part * (value - own))


def known(predicate: Tensor) -> bool | None:
    """Returns a boolean scalar's value, or `None` while a step is being compiled."""
    return bool(predicate) if tf.executing_eagerly() else None


def conditional(predicate: Tensor, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body` if `predicate` holds, within a step that is being compiled."""
    del variables

    def taken() -> Tensor:
        body()
        return tf.constant(True)

    tf.cond(predicate, taken, lambda: tf.constant(False))


def choose(
    predicate: Tensor, then: Callable[[], list[Tensor]], otherwise: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Returns the tensors of one of two functions, within a step that is being compiled."""
    return list(
        tf.cond(predicate, lambda: list(map(dense, then())), lambda: list(map(dense, otherwise())))
    )


def dense(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with the rows it leaves out; a dense gradient as it is."""
    return tf.convert_to_tensor(gradient)


def _replicas() -> Any:
    """Returns the context of one of several replicas, or `None`."""
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return None
    return tf.distribute.get_replica_context()


def sum_over_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sum of each gradient over all replicas, where a strategy has several."""
    context = _replicas()
    if context is None or not gradients:
        return list(gradients)
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(gradients)))


def shares_of_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns what replicas sum up to `gradients`, of which each has the whole."""
    if _replicas() is None:
        return list(gradients)
    return scale(gradients, 1.0 / tf.distribute.get_strategy().num_replicas_in_sync)


def loss_of_all(loss: Tensor) -> Tensor:
    """Returns the loss that a replica's gradient is of, without its share of the batch."""
    return loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)


def assign_on_replicas(variables: Sequence[Any], values: Sequence[Tensor]) -> None:
    """Assigns values that are the same on all replicas, at once for all of them."""
    wide = [tf.cast(value, v.value.dtype) for v, value in zip(variables, values, strict=True)]
    targets = [variable.value for variable in variables]

    def assign(strategy: Any, reduced: Sequence[Tensor]) -> None:
        for target, value in zip(targets, reduced, strict=True):
            strategy.extended.update(target, _assign, args=(value,), group=False)

    context = _replicas()
    if context is None:
        for target, value in zip(targets, wide, strict=True):
            target.assign(value)
    else:
        context.merge_call(assign, args=(wide,))


def _assign(target: Any, value: Tensor) -> None:
    target.assign(value)


def select(predicate: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Returns `first` where a boolean scalar holds, else `second`; a branch copies neither."""
    return choose(predicate, lambda: list(first), lambda: list(second))
