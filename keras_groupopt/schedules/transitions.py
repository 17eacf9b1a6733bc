"""Schedules that lead into another schedule, or out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import NUMBER, checked_by, count, one_of
from keras_groupopt.schedules.arithmetic import CURVES, mix
from keras_groupopt.schedules.base import Schedule, Wrapping, registered
from keras_groupopt.schedules.constant import schedule_or_number
from keras_groupopt.schedules.horizon import without_first

Tensor = Any


@registered
class Warmup(Wrapping):
    """A warm-up, then a schedule that counts its own steps from 0.

    For t < steps the value goes from `start` to schedule(0); then it is schedule(t − steps). A
    schedule with `total_steps="fit"` ends with the run: it is given the steps after the warm-up.

    torch: `SequentialLR([LinearLR(start_factor, total_iters=steps), scheduler], [steps])`.

    Args:
        schedule: A schedule, or a number to warm up to.
        steps: The number of warm-up steps, an integer >= 1.
        start: The value at step 0, a finite number >= 0. Default: 0.
        curve: The shape of the warm-up, `"linear"` or `"cosine"`. Default: `"linear"`.

    Raises:
        ValueError: If a number is out of range; when called, if the run is not longer than it.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Warmup(kgo.schedules.Linear(1.0, total_steps=4), steps=2)
    >>> [float(schedule(step)) for step in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    Reference:
        Goyal et al., Accurate, large minibatch SGD, 2017, arXiv:1706.02677.
    """

    schedule: Any = field(metadata=checked_by(schedule_or_number))
    steps: int = field(metadata=count(1))
    start: float = field(default=0.0, metadata=NUMBER)
    curve: str = field(default="linear", metadata=one_of(*CURVES))

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        with without_first(self.steps, "Warmup"):
            goal = self.schedule(ops.maximum(step - self.steps, 0))
        # From step `steps` on the share of `start` is 0, so the value is that of the schedule.
        return mix(self.start, ops.cast(goal, "float32"), step, self.steps, self.curve)

    def _of_inner(self, function: Callable[[Any], int | None]) -> int | None:
        with without_first(self.steps, "Warmup"):
            steps = function(self.schedule)
        return None if steps is None else steps + self.steps


def warmup(schedule: Any, steps: int, start: float = 0.0, curve: str = "linear") -> Warmup:
    """Returns a schedule with a warm-up in front of it.

    Args:
        schedule: A schedule, from Keras or elsewhere, or a number to warm up to. After the warm-up
            it counts its own steps from 0.
        steps: The number of warm-up steps, an integer >= 1.
        start: The value at step 0, a finite number >= 0. Default: 0.
        curve: The shape of the warm-up, `"linear"` or `"cosine"`. Default: `"linear"`.

    Returns:
        A schedule that is `steps` longer than the given one.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> cosine = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=900)
    >>> optimizer = kgo.GroupedOptimizer(learning_rate=kgo.warmup(cosine, steps=100))
    """
    return Warmup(schedule, steps, start, curve)


@registered
class SWA(Schedule):
    """Follows a schedule up to a step, then anneals to a fixed value, for averaging weights.

    With v = schedule(start_step): for t < start_step the value is schedule(t); then it goes from v
    to end_learning_rate in anneal_steps, and stays. Use it with `ema=kgo.SWA(start=start_step)`.

    torch: `SWALR(swa_lr=end_learning_rate, anneal_epochs=anneal_steps, anneal_strategy=curve)`,
    stepped in place of the scheduler from `swa_start` on. Here steps are optimizer steps.

    Args:
        schedule: A schedule, or a number.
        end_learning_rate: The value to hold, a finite number >= 0.
        start_step: The optimizer step at which it leaves `schedule`, an integer >= 0.
        anneal_steps: The number of annealing steps, an integer >= 0. Default: 10.
        curve: The shape of the annealing, `"cosine"` or `"linear"`. Default: `"cosine"`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.SWA(1.0, 0.5, start_step=10, anneal_steps=4, curve="linear")
    >>> [float(schedule(step)) for step in (10, 12, 14, 99)]
    [1.0, 0.75, 0.5, 0.5]

    Reference:
        Izmailov et al., Averaging weights leads to wider optima, 2018, arXiv:1803.05407.
    """

    schedule: Any = field(metadata=checked_by(schedule_or_number))
    end_learning_rate: float = field(metadata=NUMBER)
    start_step: int = field(metadata=count(0))
    anneal_steps: int = field(default=10, metadata=count(0))
    curve: str = field(default="cosine", metadata=one_of(*CURVES))

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        before = ops.cast(self.schedule(ops.minimum(step, self.start_step)), "float32")
        if self.anneal_steps == 0:
            return ops.where(step < self.start_step, before, self.end_learning_rate)
        elapsed = step - self.start_step
        return mix(before, self.end_learning_rate, elapsed, self.anneal_steps, self.curve)

    def end(self) -> int:
        """Returns the step from which on the value is held."""
        return self.start_step + self.anneal_steps

    def length(self) -> None:
        """Returns `None`, since the held value suits a run of any length."""
