"""A constant rate, for a group that must not follow a scheduled base rate."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import keras

from keras_groupopt.base.arguments import NUMBER
from keras_groupopt.base.checks import check_number, is_schedule, message
from keras_groupopt.schedules.base import Schedule, registered


@registered
class ConstantRate(Schedule):
    """The same rate at every optimizer step: `learning_rate(t) = rate`.

    Args:
        rate: The rate per optimizer step, a finite number >= 0.

    Raises:
        ValueError: If `rate` is negative or not finite.

    Example:
    >>> import keras_groupopt as kgo
    >>> round(float(kgo.ConstantRate(1e-4)(1000)), 6)
    0.0001
    """

    rate: float = field(metadata=NUMBER)

    def at(self, step: Any) -> Any:
        """Returns the rate, whatever the step."""
        return keras.ops.convert_to_tensor(self.rate, dtype="float32")

    def end(self) -> int:
        """Returns 0, since the value never changes."""
        return 0

    def length(self) -> None:
        """Returns `None`, since it suits a run of any length."""


def constant(rate: float) -> ConstantRate:
    """Returns a fixed rate for `Group(learning_rate=...)` beside a scheduled base rate.

    Args:
        rate: The rate per optimizer step, a finite number >= 0.

    Returns:
        A schedule that does not follow the base rate.

    Raises:
        ValueError: If `rate` is negative or not finite.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.Group("head", "head", learning_rate=kgo.constant(1e-4)).learning_rate.rate
    0.0001
    """
    return ConstantRate(rate)


def as_schedule(name: str, value: Any, *, where: str) -> Any:
    """Returns `value` if it is a schedule.

    Raises:
        TypeError: If it is not a schedule.
    """
    if is_schedule(value):
        return value
    advice = (
        "Write a fixed value as `kgo.constant(value)`, and a function as "
        "`kgo.schedules.Lambda(function)`."
    )
    raise TypeError(message(name, value, "a schedule over optimizer steps", where, advice))


def schedule_or_number(name: str, value: Any, *, where: str) -> Any:
    """Returns a schedule as it is, and a number as a constant schedule.

    Raises:
        TypeError: If it is neither.
        ValueError: If a number is negative or not finite.
    """
    if callable(value):
        return as_schedule(name, value, where=where)
    return constant(check_number(name, value, where=where))
