"""Lookahead: slow weights that follow those of any rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.arguments import checked_by, count
from keras_groupopt.base.checks import check_share, is_schedule
from keras_groupopt.plan.rule_spec import LIFTED, RuleSpec, as_rule
from keras_groupopt.rules.making import make_rule
from keras_groupopt.rules.registry import register_rule, rule_class
from keras_groupopt.rules.scalars import scalar
from keras_groupopt.rules.serialization import deserialize_rule, serialize_rule
from keras_groupopt.rules.update_rule import Tensor, Untracked, UpdateRule


def _checked_rule(name: str, value: Any, *, where: str) -> RuleSpec:
    if isinstance(value, dict):
        value = deserialize_rule(value)
    rule = as_rule(value, where)
    if rule is None or rule.is_instance:
        raise TypeError(
            "`rule` of Lookahead must be the name of an optimizer, an optimizer class or "
            f"`kgo.rule(...)`. Received: rule={value!r}. An optimizer instance has a rate of its "
            "own; here the rate is that of Lookahead."
        )
    cls = rule_class(rule, where)
    if issubclass(cls, Lookahead):
        raise ValueError(
            f"`rule` must not itself wrap optimizers. Received: {rule!r} in {where}. Give the "
            "rule inside it."
        )
    for option, argument in rule.arguments.items():
        if argument is not None and (option in LIFTED or option.endswith("weight_decay")):
            raise ValueError(
                f"`{option}` must not be set on the rule within Lookahead. Received: {rule!r}. Set "
                "it on Lookahead or, in a GroupedOptimizer, on the group."
            )
        if is_schedule(argument):
            raise ValueError(
                f"`{option}` of the rule within Lookahead must be a number. Received: {rule!r}."
            )
    make_rule(rule, 0.0, where)
    return rule


@register_rule("lookahead")
class Lookahead(UpdateRule):
    """Moves slow weights toward those of a rule every k steps, and puts the rule back to them.

    With the weights `w` that the rule moves, slow weights `s`, steps `t` counted from 1,
    k = `sync_period` and α = `slow_step_size`:

        w ← a step of `rule`
        if t is a multiple of k:  s ← s + α (w - s);  w ← s

    `s` starts from the weights at the first step, so weights that were loaded before it count. The
    state of the rule stays as it is when the weights go back. A variable that has no gradient at a
    multiple of k goes back at the next multiple at which it has one.

    State per variable: the rule's, and one value per weight, in its dtype.

    Args:
        learning_rate: The rate of `rule`: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        rule: The rule that moves the weights: the name of an optimizer, an optimizer class, or
            `kgo.rule(...)` with numbers as arguments. Default: `"radam"`.
        sync_period: Steps k between two syncs, at least 1. Default: 6.
        slow_step_size: The share α of the way that the slow weights go, in [0, 1]. Default: 0.5.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled), `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: `sync_period` is below 1, `slow_step_size` is not in [0, 1], or `rule` is
            unknown, wraps optimizers, does not take its arguments, or has a decay, a clipping or a
            schedule of its own.
        TypeError: `rule` is an optimizer instance or not a rule, or a number has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([1.0])
        >>> optimizer = kgo.Lookahead(learning_rate=0.1, rule="sgd", sync_period=2)
        >>> for _ in range(2):
        ...     optimizer.apply([keras.ops.convert_to_tensor([1.0])], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.9]

    Reference:
        Zhang et al. 2019, "Lookahead Optimizer: k steps forward, 1 step back", arXiv:1907.08610.
    """

    rule: Any = field(default="radam", metadata=checked_by(_checked_rule))
    sync_period: int = field(default=6, metadata=count(1))
    slow_step_size: float = field(default=0.5, metadata=checked_by(check_share))

    # The optimizer that moves the weights, `None` before the build.
    _ahead: Any = Untracked(optimizer=None)

    def _build_more(self, variables: Sequence[Any]) -> None:
        optimizer = make_rule(self.rule, 0.0, type(self).__name__)
        optimizer = backend.without_reduction(optimizer)
        optimizer.name = self.name
        optimizer.build(list(variables))
        compat.share_counter(optimizer, self)
        compat.track_all_state(optimizer)
        # Keras would save an optimizer that is an attribute of an optimizer a second time.
        self._ahead = Untracked(optimizer=optimizer)
        self._slow_weights = self._add_copies(variables, "slow")
        # This optimizer owns the rule's state, under the names of its attributes, and saves it
        # once.
        for name, state in compat.state_attributes(optimizer).items():
            setattr(self, name, state)
        compat.track_all_state(self)

    @property
    def ahead(self) -> Any:
        """The optimizer that moves the weights; `None` before the build."""
        return self._ahead.optimizer

    def _backend_update_step(
        self, grads: Sequence[Tensor], trainable_variables: Any, learning_rate: Tensor
    ) -> None:
        variables = list(trainable_variables)
        slow = [self._slow_weights[compat.place_in(self, v)] for v in variables]
        both, size, made = [*slow, *variables], self.slow_step_size, self.iterations
        is_first = ops.equal(made, 0)
        is_due = ops.equal(ops.mod(made + 1, self.sync_period), 0)

        def run(gradients: list[Tensor]) -> None:
            backend.run_if(is_first, lambda: _start(slow, variables), both)
            # Not `apply`: this optimizer does what comes before and after a step.
            compat.update_step_of(self.ahead, gradients, variables, learning_rate)
            backend.run_if(is_due, lambda: _sync(slow, variables, size), both)

        backend.over_replicas(run, list(grads), [*self.variables, *variables])

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments.

        Returns:
            A dictionary of plain values, from which `from_config` makes an equal optimizer.
        """
        return {**super().get_config(), "rule": serialize_rule(self.rule)}


def _start(slow: Sequence[Any], variables: Sequence[Any]) -> None:
    for own, variable in zip(slow, variables, strict=True):
        own.assign(ops.copy(ops.convert_to_tensor(variable)))


def _sync(slow: Sequence[Any], variables: Sequence[Any], size: Any) -> None:
    for own, variable in zip(slow, variables, strict=True):
        dtype = UpdateRule.arithmetic_dtype(variable)
        old = ops.cast(own, dtype)
        new = old + (ops.cast(variable, dtype) - old) * scalar(size, dtype)
        new = ops.cast(new, own.dtype)
        own.assign(new)
        # JAX cannot donate a buffer that two variables share.
        variable.assign(ops.copy(new))
