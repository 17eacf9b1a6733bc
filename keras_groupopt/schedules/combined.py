"""Schedules made of schedules: one after another, multiplied, scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import NUMBER, checked_by
from keras_groupopt.base.checks import message
from keras_groupopt.schedules.base import Schedule, Wrapping, registered
from keras_groupopt.schedules.constant import as_schedule, schedule_or_number
from keras_groupopt.schedules.horizon import (
    end_of,
    horizon,
    length_of,
    needs_horizon,
    without_first,
)
from keras_groupopt.schedules.steps import check_milestones

Tensor = Any


def check_schedules(name: str, value: Any, *, where: str) -> list[Any]:
    """Returns a sequence of schedules and numbers as a list of schedules.

    Raises:
        TypeError: If it is not a sequence of schedules and numbers.
        ValueError: If it is empty, or a number is negative or not finite.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(message(name, value, "a list of schedules or numbers", where))
    if not value:
        raise ValueError(message(name, value, "a list of at least one schedule", where))
    return [schedule_or_number(name, item, where=where) for item in value]


SCHEDULES = checked_by(check_schedules)


@registered
class Sequential(Wrapping):
    """One schedule after another. Each counts its own steps from 0.

    From the milestone m at which a schedule begins until the next milestone, the value is
    schedule(t − m).

    torch: `SequentialLR(schedulers, milestones)`. A schedule with `total_steps="fit"` ends at the
    next milestone; the last one ends with the run.

    Args:
        schedules: Schedules or numbers, at least one.
        milestones: The optimizer steps at which the second and later schedules begin, increasing.

    Raises:
        ValueError: If `schedules` is empty, or `milestones` do not increase or are not one fewer;
            when called, if a run is too short for the last schedule to begin.
        TypeError: If an item is neither a schedule nor a number.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Sequential([1.0, kgo.schedules.Linear(1.0, 4)], milestones=[10])
    >>> [float(schedule(step)) for step in (0, 9, 10, 12, 14)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """

    schedules: Sequence[Any] = field(metadata=SCHEDULES)
    milestones: Sequence[int] = field(metadata=checked_by(check_milestones))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.milestones) != len(self.schedules) - 1:
            raise ValueError(
                "`milestones` must be one fewer than the schedules. Received: "
                f"{len(self.milestones)} milestones for {len(self.schedules)} schedules in "
                "Sequential. Each is the step at which the next schedule begins."
            )

    def needs_horizon(self) -> bool:
        """Returns whether the last one ends with the run; the others end at milestones."""
        return needs_horizon(self.schedules[-1])

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        value = None
        for place, schedule in enumerate(self.schedules):
            start = self._start(place)
            with self._horizon_of(place):
                later = ops.cast(schedule(ops.maximum(step - start, 0)), "float32")
            value = later if value is None else ops.where(step >= start, later, value)
        return value

    def _start(self, place: int) -> int:
        return self.milestones[place - 1] if place else 0

    def _horizon_of(self, place: int) -> horizon:
        start = self._start(place)
        if place < len(self.milestones):
            return horizon(self.milestones[place] - start)
        return without_first(start, "Sequential")

    def _of_inner(self, function: Callable[[Any], int | None]) -> int | None:
        last = len(self.milestones)
        with self._horizon_of(last):
            steps = function(self.schedules[last])
        return None if steps is None else steps + self._start(last)


@registered
class Chained(Schedule):
    """The product of schedules, all at the same step.

    At step t: schedule_1(t) · schedule_2(t) · … One of them is the rate, the others are factors.

    torch: `ChainedScheduler(schedulers)`, of schedulers that multiply the rate (`ConstantLR`,
    `LinearLR`, `ExponentialLR`, `StepLR`, `MultiStepLR`, `PolynomialLR`, `MultiplicativeLR`).

    Args:
        schedules: Schedules or numbers, at least one.

    Raises:
        ValueError: If `schedules` is empty.
        TypeError: If an item is neither a schedule nor a number.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedules = kgo.schedules
    >>> warm = schedules.Linear(0.5, total_steps=4, end_learning_rate=1.0)
    >>> schedule = schedules.Chained([schedules.Step(1.0, decay_steps=8, decay_rate=0.5), warm])
    >>> [float(schedule(step)) for step in (0, 2, 4, 8)]
    [0.5, 0.75, 1.0, 0.5]
    """

    schedules: Sequence[Any] = field(metadata=SCHEDULES)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        first, *others = (ops.cast(schedule(step), "float32") for schedule in self.schedules)
        for factor in others:
            first = first * factor
        return first

    def end(self) -> int | None:
        """Returns the step after which the value is constant, or `None` if it never is."""
        ends = [end_of(schedule) for schedule in self.schedules]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None

    def length(self) -> int | None:
        """Returns the number of steps it is made for, or `None` if it suits any run."""
        lengths = [length_of(schedule) for schedule in self.schedules]
        return max((length for length in lengths if length is not None), default=None)


@registered
class Scaled(Wrapping):
    """A schedule times a number: factor · schedule(t).

    Args:
        schedule: A schedule.
        factor: A finite number >= 0.

    Raises:
        ValueError: If `factor` is negative or not finite.
        TypeError: If `schedule` is not a schedule.

    Example:

    >>> import keras_groupopt as kgo
    >>> float(kgo.schedules.Scaled(kgo.constant(0.5), factor=0.25)(0))
    0.125
    """

    schedule: Any = field(metadata=checked_by(as_schedule))
    factor: float = field(metadata=NUMBER)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return ops.cast(self.schedule(step), "float32") * self.factor

    def _of_inner(self, function: Callable[[Any], int | None]) -> int | None:
        return function(self.schedule)
