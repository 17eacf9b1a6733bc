"""Checks of a constructor's arguments, as metadata of dataclass fields.

A class declares each argument as a field, such as `rate: float = field(default=0.1,
metadata=POSITIVE)`. Its constructor passes every value to the check of its field, as
`check(name, value, where=class_name)`, and keeps what the check returns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

from keras_groupopt.base.checks import (
    check_choice,
    check_count,
    check_finite,
    check_fraction,
    check_number,
    check_positive,
    check_switch,
)


def checked_by(check: Any) -> dict[str, Any]:
    """Returns the metadata of a field that `check` checks."""
    return {"check": check}


def count(least: int) -> dict[str, Any]:
    """Returns the metadata of a field that holds an integer of at least `least`."""
    return checked_by(functools.partial(check_count, least=least))


def one_of(*choices: str) -> dict[str, Any]:
    """Returns the metadata of a field that holds one of a few strings."""
    return checked_by(functools.partial(check_choice, choices=choices))


NUMBER = checked_by(check_number)
POSITIVE = checked_by(check_positive)
FINITE = checked_by(check_finite)
FRACTION = checked_by(check_fraction)
SWITCH = checked_by(check_switch)


def set_checked(instance: Any, fields: Iterable[Field[Any]], values: Mapping[str, Any]) -> None:
    """Checks the values of arguments, and sets them as attributes.

    If `None` is the default of an argument, it is not checked.
    """
    for argument in fields:
        value, check = values[argument.name], argument.metadata.get("check")
        if check is not None and (value is not None or argument.default is not None):
            value = check(argument.name, value, where=type(instance).__name__)
        # A frozen dataclass refuses `setattr`.
        object.__setattr__(instance, argument.name, value)
