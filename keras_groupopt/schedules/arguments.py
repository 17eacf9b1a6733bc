"""Checks of a schedule's arguments, as metadata of dataclass fields.

A schedule declares its arguments as the fields of a dataclass. `Schedule.__post_init__` passes
each value to the check of its field, as `check(name, value, where=class_name)`, and keeps what the
check returns.
"""

from __future__ import annotations

import functools
from typing import Any

from keras_groupopt.base.checks import (
    check_choice,
    check_count,
    check_number,
    check_positive,
    check_switch,
)
from keras_groupopt.schedules.horizon import check_total

CURVES = ("linear", "cosine")


def checked_by(check: Any) -> dict[str, Any]:
    """Returns the metadata of a field that `check` checks."""
    return {"check": check}


def count(least: int) -> dict[str, Any]:
    """Returns the metadata of a field that holds an integer of at least `least`."""
    return checked_by(functools.partial(check_count, least=least))


def total(least: int) -> dict[str, Any]:
    """Returns the metadata of a field that holds an integer of at least `least`, or `"fit"`."""
    return checked_by(functools.partial(check_total, least=least))


def one_of(*choices: str) -> dict[str, Any]:
    """Returns the metadata of a field that holds one of a few strings."""
    return checked_by(functools.partial(check_choice, choices=choices))


NUMBER = checked_by(check_number)
POSITIVE = checked_by(check_positive)
SWITCH = checked_by(check_switch)
