"""What can be read and set while an optimizer runs: rates, decay and anchors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.checks import check_count, check_number
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.schedules.horizon import horizon
from keras_groupopt.step import nonfinite, run_length
from keras_groupopt.step.built import BuiltOptimizer

Tensor = Any


class RunningValues:
    """The part of `GroupedOptimizer` that reads and sets values of a run."""

    on_nonfinite: str
    _declaration: Declaration
    _built: BuiltOptimizer | None
    _learning_rate: Any
    _iterations: Any
    _get_current_learning_rate: Any

    @property
    def learning_rate(self) -> Any:
        """The base rate, per optimizer step. Groups follow it by their ratios."""
        with self.in_run():
            return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        if compat.rate_variable(self) is None:
            raise TypeError(
                "The base `learning_rate` is a schedule or a function and cannot be set. "
                f"Received: learning_rate={learning_rate!r}. Make the optimizer with a number "
                "to set it while training."
            )
        if callable(learning_rate):
            raise TypeError(
                "The base `learning_rate` must be set to a number. Received: "
                f"learning_rate={learning_rate!r}. Make the optimizer with the schedule."
            )
        if not ops.is_tensor(learning_rate) and not isinstance(learning_rate, keras.Variable):
            learning_rate = check_number("learning_rate", learning_rate, where="GroupedOptimizer")
        self._learning_rate.assign(learning_rate)

    @property
    def learning_rates(self) -> dict[str, Tensor]:
        """The present rate of each group that moves, by name; float32 scalars.

        The rate of a variable is that of its group times its own of `ratios`.
        """
        built = self._require_built("learning_rates")
        base = ops.cast(self.learning_rate, "float32")
        at = ops.convert_to_tensor(self._iterations)
        with self.in_run():
            return {group.name: group.rate(base, at) for group in built.groups if not group.frozen}

    def in_run(self) -> AbstractContextManager[Any]:
        """Returns a block in which schedules may be called that end with the run."""
        return nullcontext() if self._built is None else self._built.in_run(self._iterations)

    @property
    def total_steps(self) -> Any:
        """The optimizer steps of the run, for schedules with `total_steps="fit"`; an integer.

        0 while it is not known: the first `fit` that trains tells it, and it is kept and saved.
        Set it where there is no `fit`, or to let a further `fit` stretch the schedules.
        """
        length = None if self._built is None else self._built.run_length
        return (self._declaration.total_steps or 0) if length is None else length.variable

    @total_steps.setter
    def total_steps(self, total_steps: int) -> None:
        total = check_count("total_steps", total_steps, 1, where="GroupedOptimizer")
        self._declaration.total_steps = total
        if self._built is None:
            return
        if self._built.run_length is None:
            raise ValueError(
                '`total_steps` is for schedules with total_steps="fit". Received: '
                f"total_steps={total_steps!r} for an optimizer without one."
            )
        self._built.run_length.set(total)

    def check_run_length(self, end: int) -> None:
        """Warns, once for each, of schedules made for fewer steps than the run has.

        Args:
            end: The optimizer step at which the run ends.
        """
        built = self._require_built("check_run_length")
        total = None if built.run_length is None else backend.on_host(built.run_length.variable)
        with horizon(total or None):
            run_length.warn_if_shorter(built.plan, end, self._declaration.said_short)

    @property
    def learning_rate_ratios(self) -> dict[str, Tensor]:
        """The present ratio of each group that moves, by name; float32 scalars."""
        built = self._require_built("learning_rate_ratios")
        at = ops.convert_to_tensor(self._iterations)
        return {
            group.name: group.scalars["learning_rate_ratio"].at(at)
            for group in built.groups
            if not group.frozen
        }

    def set_learning_rate_ratio(self, group: str, ratio: float) -> None:
        """Sets the ratio of a group, from the next step on, without a retrace.

        Args:
            group: The group's name.
            ratio: A finite number >= 0.

        Raises:
            KeyError: If there is no such group.
            TypeError: If the ratio was declared as a schedule.
            ValueError: If `ratio` is negative or not finite, or the group is frozen.
        """
        self._set_scalar(group, "learning_rate_ratio", ratio)

    def set_weight_decay(self, group: str, weight_decay: float) -> None:
        """Sets the decay coefficient of a group that decays, without a retrace.

        Args:
            group: The group's name.
            weight_decay: A finite number >= 0.

        Raises:
            KeyError: If there is no such group.
            TypeError: If the decay was declared as a schedule.
            ValueError: If it is negative or not finite, or the group was built without decay.
        """
        self._set_scalar(group, "weight_decay", weight_decay)

    def _set_scalar(self, group: str, name: str, value: float) -> None:
        part = self._require_built(f"set_{name}")[group]
        if name not in part.scalars:
            raise ValueError(
                f'`{name}` of group "{group}" cannot be set: it was declared '
                f"{'frozen' if part.frozen else 'without it'}. Received: {name}={value!r}."
            )
        part.scalars[name].set(value)

    @property
    def iterations(self) -> Any:
        """The optimizer steps done, an integer variable. Micro-batches do not count."""
        return self._iterations

    @property
    def skipped_steps(self) -> Any:
        """The steps, or micro-batches, skipped as gradients were not finite; an integer."""
        guard = None if self._built is None else self._built.guard
        return 0 if guard is None else guard.skipped

    @property
    def first_nonfinite_group(self) -> str | None:
        """The first group at fault in the last step that was skipped; `None` if none was.

        Reads a value of the device.
        """
        built = self._built
        if built is None or built.guard is None:
            return None
        number = backend.on_host(built.guard.first)
        return None if number == nonfinite.NONE else built.groups[number].name

    @property
    def micro_batches(self) -> Any:
        """The micro-batches in the window of gradient accumulation that is open; an integer."""
        window = None if self._built is None else self._built.window
        return 0 if window is None else window.count

    def check_finite(self) -> None:
        """Raises, with `on_nonfinite="raise"`, if a compiled step was skipped since the last call.

        Reads a value of the device.

        Raises:
            FloatingPointError: If so; it names the first group at fault.
        """
        built = self._built
        if built is None or built.guard is None or self.on_nonfinite != "raise":
            return
        number = backend.on_host(built.guard.first)
        if number != nonfinite.NONE:
            built.guard.first.assign(nonfinite.NONE)
            raise FloatingPointError(nonfinite.message(built.groups[number].name))

    def average_pairs(self) -> list[tuple[Any, Any]]:
        """Returns each average and the variable it is of, both Keras variables.

        Raises:
            ValueError: If the optimizer is not built, or keeps no averages.
        """
        built = self._require_built("average_pairs")
        if built.averages is None:
            raise ValueError(
                "`average_pairs` needs an optimizer with averages. Received: one without. Make it "
                "with `GroupedOptimizer(ema=kgo.EMA(0.999))`."
            )
        built.capture_due(self._iterations)
        return built.average_pairs()

    @property
    def average_momentum(self) -> Tensor:
        """`β_t` of the next average, a float32 scalar: 0 where it will be a copy of the weights.

        Raises:
            ValueError: If the optimizer is not built, or keeps no averages.
        """
        averages = self._require_built("average_momentum").averages
        if averages is None:
            raise ValueError(
                "`average_momentum` needs an optimizer with averages. Received: one without. Make "
                "it with `GroupedOptimizer(ema=kgo.EMA(0.999))`."
            )
        return averages.momentum_at(ops.convert_to_tensor(self._iterations))

    @property
    def _model_variables_moving_average(self) -> Any:
        # Keras' SwapEMAWeights asks for it. Its swap leaves the average in place of the weights
        # after `predict`, and saves the one as the other.
        raise ValueError(
            "`SwapEMAWeights` must not be used with GroupedOptimizer: files it saves in `fit` hold "
            "the averages in place of the weights. Use `kgo.UseAveragedWeights()`."
        )

    def _require_built(self, asked: str) -> BuiltOptimizer:
        if self._built is None:
            raise ValueError(
                f"`{asked}` needs a built optimizer. Received: one that is not built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        return self._built

    def capture_anchors(self) -> None:
        """Takes the present weights as the anchors of all anchored groups."""
        for group in self._require_built("capture_anchors").groups:
            group.capture_anchors()

    def anchor_drift(self) -> dict[str, Tensor]:
        """Returns `‖w − anchor‖` per group that has a stored anchor; float32 scalars."""
        built = self._require_built("anchor_drift")
        built.capture_due(self._iterations)
        return {
            group.name: group.drift()
            for group in built.groups
            if any(anchor is not None for anchor in group.anchors)
        }
