"""Schedules made of schedules: one after another, multiplied, scaled, warmed up, annealed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_groupopt.base.checks import check_choice, check_count, check_number, is_schedule
from keras_groupopt.schedules.arithmetic import CURVES, mix
from keras_groupopt.schedules.base import Schedule, as_schedule
from keras_groupopt.schedules.constant import constant
from keras_groupopt.schedules.horizon import (
    end_of,
    horizon,
    length_of,
    needs_horizon,
    without_first,
)
from keras_groupopt.schedules.steps import check_milestones

Tensor = Any


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Sequential(Schedule):
    """One schedule after another, each counting its own steps from 0.

    From milestone m of a schedule on, and until the next one, the value is schedule(t − m).

    torch: `SequentialLR(schedulers, milestones)`. A schedule with `total_steps="fit"` ends where
    the next one begins; the last one ends with the run.

    Args:
        schedules: Schedules or numbers, at least one.
        milestones: The optimizer steps at which the second and later ones begin, increasing.

    Raises:
        ValueError: If there are none, milestones do not increase, or are not one fewer; when
            called, if a run is too short for the last to begin.
        TypeError: If an item is neither a schedule nor a number.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Sequential([1.0, kgo.schedules.Linear(1.0, 4)], milestones=[10])
    >>> [float(schedule(step)) for step in (0, 9, 10, 12, 14)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """

    arguments = ("schedules", "milestones")

    def __init__(self, schedules: Sequence[Any], milestones: Sequence[int]) -> None:
        self.schedules = _schedules(schedules, "Sequential")
        self.milestones = check_milestones(milestones, "Sequential", len(self.schedules) - 1)

    def inner(self) -> Sequence[Any]:
        """Returns the schedules, in order."""
        return self.schedules

    def needs_horizon(self) -> bool:
        """Returns whether the last one does: the others end at milestones."""
        return needs_horizon(self.schedules[-1])

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        starts = [0, *self.milestones]
        value = None
        for place, (start, schedule) in enumerate(zip(starts, self.schedules, strict=True)):
            with self._own_horizon(place):
                own = ops.cast(schedule(ops.maximum(step - start, 0)), "float32")
            value = own if value is None else ops.where(step >= start, own, value)
        return value

    def _own_horizon(self, place: int) -> horizon:
        starts = [0, *self.milestones]
        if place < len(self.milestones):
            return horizon(starts[place + 1] - starts[place])
        return without_first(starts[place], "Sequential")

    def _after_the_last(self, of: Callable[[Any], int | None]) -> int | None:
        with self._own_horizon(len(self.milestones)):
            steps = of(self.schedules[-1])
        return None if steps is None else steps + ([0, *self.milestones][-1])

    def end(self) -> int | None:
        """Returns the step from which on the value stays, or `None` where it never does."""
        return self._after_the_last(end_of)

    def length(self) -> int | None:
        """Returns the steps it is made for, or `None` where it suits a run of any length."""
        return self._after_the_last(length_of)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Chained(Schedule):
    """The product of schedules, all at the same step.

    At step t: schedule_1(t) · schedule_2(t) · … One of them holds the rate, the others are factors.

    torch: `ChainedScheduler(schedulers)`, of schedulers that multiply the rate (`ConstantLR`,
    `LinearLR`, `ExponentialLR`, `StepLR`, `MultiStepLR`, `PolynomialLR`, `MultiplicativeLR`).

    Args:
        schedules: Schedules or numbers, at least one.

    Raises:
        ValueError: If there are none.
        TypeError: If an item is neither a schedule nor a number.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedules = kgo.schedules
    >>> warm = schedules.Linear(0.5, total_steps=4, end_learning_rate=1.0)
    >>> schedule = schedules.Chained([schedules.Step(1.0, decay_steps=8, decay_rate=0.5), warm])
    >>> [float(schedule(step)) for step in (0, 2, 4, 8)]
    [0.5, 0.75, 1.0, 0.5]
    """

    arguments = ("schedules",)

    def __init__(self, schedules: Sequence[Any]) -> None:
        self.schedules = _schedules(schedules, "Chained")

    def inner(self) -> Sequence[Any]:
        """Returns the schedules, in order."""
        return self.schedules

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        value = None
        for schedule in self.schedules:
            own = ops.cast(schedule(step), "float32")
            value = own if value is None else value * own
        return value

    def end(self) -> int | None:
        """Returns the step from which on the value stays, or `None` where it never does."""
        ends = [end_of(schedule) for schedule in self.schedules]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None

    def length(self) -> int | None:
        """Returns the steps it is made for, or `None` where it suits a run of any length."""
        lengths = [length_of(schedule) for schedule in self.schedules]
        return max((length for length in lengths if length is not None), default=None)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Scaled(Schedule):
    """A schedule times a number: factor · schedule(t).

    Args:
        schedule: A schedule.
        factor: A finite number >= 0.

    Raises:
        ValueError: If `factor` is negative or not finite.
        TypeError: If `schedule` is none.

    Example:

    >>> import keras_groupopt as kgo
    >>> float(kgo.schedules.Scaled(kgo.constant(0.5), factor=0.25)(0))
    0.125
    """

    arguments = ("schedule", "factor")

    def __init__(self, schedule: Any, factor: float) -> None:
        self.schedule = as_schedule("schedule", schedule, "Scaled")
        self.factor = check_number("factor", factor, where="Scaled")

    def inner(self) -> Sequence[Any]:
        """Returns the schedule."""
        return (self.schedule,)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return ops.cast(self.schedule(step), "float32") * self.factor

    def end(self) -> int | None:
        """Returns the step from which on the value stays, or `None` where it never does."""
        return end_of(self.schedule)

    def length(self) -> int | None:
        """Returns the steps it is made for, or `None` where it suits a run of any length."""
        return length_of(self.schedule)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Warmup(Schedule):
    """A warm-up in front of a schedule, which then starts from its own step 0.

    For t < steps the way from `start` to schedule(0), then schedule(t − steps). With
    `total_steps="fit"` the schedule ends with the run, after the steps that are left of it.

    torch: `SequentialLR([LinearLR(start_factor, total_iters=steps), scheduler], [steps])`.

    Args:
        schedule: A schedule, or a number to warm up to.
        steps: Optimizer steps of the warm-up, an integer >= 1.
        start: The value at step 0, a finite number >= 0. Default 0.
        curve: The shape of the way, `"linear"` or `"cosine"`.

    Raises:
        ValueError: If a number is out of range; when called, if the run is no longer than it.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Warmup(kgo.schedules.Linear(1.0, total_steps=4), steps=2)
    >>> [float(schedule(step)) for step in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    Reference:
        Goyal et al., Accurate, large minibatch SGD, 2017, arXiv:1706.02677.
    """

    arguments = ("schedule", "steps", "start", "curve")

    def __init__(
        self, schedule: Any, steps: int, start: float = 0.0, curve: str = "linear"
    ) -> None:
        self.schedule = _schedules([schedule], "warmup")[0]
        self.steps = check_count("steps", steps, 1, where="warmup")
        self.start = check_number("start", start, where="warmup")
        self.curve = check_choice("curve", curve, CURVES, where="warmup")

    def inner(self) -> Sequence[Any]:
        """Returns the schedule."""
        return (self.schedule,)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        with without_first(self.steps, "warmup"):
            goal = self.schedule(ops.maximum(step - self.steps, 0))
        # At the end of the way nothing is left of `start`, and the value is the schedule's.
        return mix(self.start, ops.cast(goal, "float32"), step, self.steps, self.curve)

    def _after(self, of: Callable[[Any], int | None]) -> int | None:
        with without_first(self.steps, "warmup"):
            steps = of(self.schedule)
        return None if steps is None else steps + self.steps

    def end(self) -> int | None:
        """Returns the step from which on the value stays, or `None` where it never does."""
        return self._after(end_of)

    def length(self) -> int | None:
        """Returns the steps it is made for, or `None` where it suits a run of any length."""
        return self._after(length_of)


def warmup(schedule: Any, steps: int, start: float = 0.0, curve: str = "linear") -> Warmup:
    """Returns a schedule with a warm-up in front of it.

    Args:
        schedule: A schedule, Keras' own or any other, or a number to warm up to. It starts from its
            own step 0 after the warm-up.
        steps: Optimizer steps of the warm-up, an integer >= 1.
        start: The value at step 0, a finite number >= 0. Default 0.
        curve: The shape of the way up, `"linear"` or `"cosine"`.

    Returns:
        A schedule `steps` longer than the one given.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> cosine = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=900)
    >>> optimizer = kgo.GroupedOptimizer(learning_rate=kgo.warmup(cosine, steps=100))
    """
    return Warmup(schedule, steps, start, curve)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class SWA(Schedule):
    """Follows a schedule up to a step, then anneals to a fixed value, for an average of weights.

    With v = schedule(start_step): for t < start_step schedule(t), then over anneal_steps the way
    from v to end_learning_rate, which stays. Beside `ema=kgo.SWA(start=start_step)`.

    torch: `SWALR(swa_lr=end_learning_rate, anneal_epochs=anneal_steps, anneal_strategy=curve)`,
    stepped in place of the scheduler from `swa_start` on. Here steps are optimizer steps.

    Args:
        schedule: A schedule, or a number.
        end_learning_rate: The value to hold, a finite number >= 0.
        start_step: The optimizer step where it leaves `schedule`, an integer >= 0.
        anneal_steps: Optimizer steps of the way, an integer >= 0. Default 10.
        curve: The shape of the way, `"cosine"` or `"linear"`.

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

    arguments = ("schedule", "end_learning_rate", "start_step", "anneal_steps", "curve")

    def __init__(
        self,
        schedule: Any,
        end_learning_rate: float,
        start_step: int,
        anneal_steps: int = 10,
        curve: str = "cosine",
    ) -> None:
        where = "SWA"
        self.schedule = _schedules([schedule], where)[0]
        self.end_learning_rate = check_number("end_learning_rate", end_learning_rate, where=where)
        self.start_step = check_count("start_step", start_step, 0, where=where)
        self.anneal_steps = check_count("anneal_steps", anneal_steps, 0, where=where)
        self.curve = check_choice("curve", curve, CURVES, where=where)

    def inner(self) -> Sequence[Any]:
        """Returns the schedule."""
        return (self.schedule,)

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

    def length(self) -> int | None:
        """Returns `None`: the held value suits a run of any length."""


def _schedules(values: Any, where: str) -> list[Any]:
    """Returns schedules and numbers as schedules.

    Raises:
        TypeError: If it is no sequence of them.
        ValueError: If there are none, or a number is negative or not finite.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(
            f"`schedules` must be a list of schedules or numbers. Received: schedules={values!r} "
            f"in {where}."
        )
    if not values:
        raise ValueError(
            f"`schedules` must hold at least one schedule. Received: schedules={values!r} in "
            f"{where}."
        )
    return [
        as_schedule("schedules", value, where)
        if callable(value) or is_schedule(value)
        else constant(check_number("schedules", value, where=where))
        for value in values
    ]
