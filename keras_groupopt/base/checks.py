"""Checks of numbers that users give, shared by every declaration."""

from __future__ import annotations

import math
import numbers
from typing import Any


def is_schedule(value: Any) -> bool:
    """Whether `value` is a schedule: an object called with a step that has a config."""
    return callable(value) and hasattr(value, "get_config") and not isinstance(value, type)


def check_number(name: str, value: Any, *, where: str, positive: bool = False) -> float:
    """Returns `value` as a float; accepts int, float, NumPy scalars and 0-d arrays.

    Args:
        name: The argument's name, for the error.
        value: The value given.
        where: The owner's name, for the error.
        positive: Whether zero is refused.

    Raises:
        ValueError: If it is negative, NaN, infinite, or zero where `positive`.
        TypeError: If it is no number.
    """
    rule = "a positive finite number" if positive else "a finite number >= 0"
    received = f"Received: {name}={value!r} in {where}."
    scalar = getattr(value, "item", None)
    if scalar is not None and getattr(value, "shape", None) == () and not callable(value):
        value = scalar()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be {rule}. {received}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"`{name}` must be {rule}. {received}")
    return number


def check_count(name: str, value: Any, least: int, *, where: str) -> int:
    """Returns `value` as an int of at least `least`; accepts NumPy integers.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is smaller.
    """
    rule = f"an integer >= {least}"
    received = f"Received: {name}={value!r} in {where}."
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be {rule}. {received}")
    if value < least:
        raise ValueError(f"`{name}` must be {rule}. {received}")
    return int(value)


def check_switch(name: str, value: Any, *, where: str) -> bool:
    """Returns `value`, which is a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Received: {name}={value!r} in {where}.")
    return value


def check_scalar(name: str, value: Any, *, where: str) -> Any:
    """Returns `value` if it is a schedule, else as a checked float (`None` stays `None`)."""
    if value is None or is_schedule(value):
        return value
    if callable(value):
        raise TypeError(
            f"`{name}` must be a number or a schedule over optimizer steps. Received: "
            f"{name}={value!r} in {where}. Subclass "
            "`keras.optimizers.schedules.LearningRateSchedule` to compute it from the step."
        )
    return check_number(name, value, where=where)


def check_clipping(
    clipnorm: Any, global_clipnorm: Any, clipvalue: Any, *, where: str
) -> tuple[float | None, float | None, float | None]:
    """Returns the three clipping limits as positive floats; at most one may be given."""
    limits = {"clipnorm": clipnorm, "global_clipnorm": global_clipnorm, "clipvalue": clipvalue}
    given = {name: value for name, value in limits.items() if value is not None}
    if len(given) > 1:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            "Only one of `clipnorm`, `global_clipnorm` and `clipvalue` must be set. Received: "
            f"{listed} in {where}. A group's own clipping acts before the optimizer's "
            "`global_clipnorm`: to have both, set one on the group."
        )
    checked = {
        name: check_number(name, value, where=where, positive=True) for name, value in given.items()
    }
    return checked.get("clipnorm"), checked.get("global_clipnorm"), checked.get("clipvalue")
