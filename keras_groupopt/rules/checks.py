"""Checks of the numbers that update rules are made with."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any


def fraction(name: str, value: Any) -> float:
    """Returns `value` as a float in [0, 1).

    Raises:
        ValueError: If it is no such number.
    """
    return _within(name, value, 0.0 <= _float(value) < 1.0, "at least 0 and less than 1")


def share(name: str, value: Any) -> float:
    """Returns `value` as a float in [0, 1].

    Raises:
        ValueError: If it is no such number.
    """
    return _within(name, value, 0.0 <= _float(value) <= 1.0, "at least 0 and at most 1")


def amount(name: str, value: Any) -> float:
    """Returns `value` as a finite float of at least 0.

    Raises:
        ValueError: If it is no such number.
    """
    return _within(name, value, 0.0 <= _float(value) < math.inf, "at least 0 and finite")


def positive(name: str, value: Any) -> float:
    """Returns `value` as a finite float above 0.

    Raises:
        ValueError: If it is no such number.
    """
    return _within(name, value, 0.0 < _float(value) < math.inf, "more than 0 and finite")


def below_zero(name: str, value: Any) -> float:
    """Returns `value` as a finite float below 0.

    Raises:
        ValueError: If it is no such number.
    """
    return _within(name, value, -math.inf < _float(value) < 0.0, "less than 0 and finite")


def finite(name: str, value: Any) -> float:
    """Returns `value` as a finite float of any sign.

    Raises:
        ValueError: If it is no such number.
    """
    number = _float(value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number. Received: {name}={value!r}")
    return number


def count(name: str, value: Any, least: int) -> int:
    """Returns `value` as an int of at least `least`.

    Raises:
        ValueError: If it is no such integer.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise ValueError(f"`{name}` must be an integer >= {least}. Received: {name}={value!r}")
    return int(value)


def switch(name: str, value: Any) -> bool:
    """Returns `value`, which is a boolean.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}")
    return value


def numbers_of_keras(
    arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], where: str
) -> None:
    """Refuses numbers with which a rule of Keras' own would train to no end, and without a word.

    Args:
        arguments: The rule's arguments.
        parameters: What its class takes.
        where: The group's name, for errors.

    Raises:
        ValueError: If a share of a mean is not in [0, 1), an epsilon is negative, or a number is
            not finite.
    """
    for name, value in arguments.items():
        default = parameters[name].default if name in parameters else None
        if isinstance(default, bool) or not isinstance(default, (int, float)):
            continue
        check = finite
        if name == "momentum":
            check = share
        elif name == "rho" or ("beta" in name.split("_") and not name.endswith("decay")):
            check = fraction
        elif name.startswith("epsilon"):
            check = amount
        if value is not None:
            try:
                check(name, value)
            except ValueError as error:
                raise ValueError(f"{error} in {where}.") from error


def _float(value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _within(name: str, value: Any, holds: bool, rule: str) -> float:
    if not holds:
        raise ValueError(f"`{name}` must be a number of {rule}. Received: {name}={value!r}")
    return float(value)
