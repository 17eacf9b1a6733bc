"""Checks of the arguments that users give.

Each check takes an argument's name and value and, as `where`, the name of its owner for the error.
It returns the value as a plain type. It raises a TypeError if the value has the wrong type, and a
ValueError if it is out of range.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def is_schedule(value: Any) -> bool:
    """Returns whether `value` is a schedule: an object called with a step that has a config."""
    return callable(value) and hasattr(value, "get_config") and not isinstance(value, type)


def message(name: str, value: Any, must: str, where: str = "", advice: str = "") -> str:
    """Returns the message of an error about an argument.

    Args:
        name: The argument.
        value: What was received.
        must: What it must be.
        where: The owner of the argument. Default: not named.
        advice: What to do, in whole sentences. Default: none.
    """
    place = where and f" in {where}"
    return f"`{name}` must be {must}. Received: {name}={value!r}{place}. {advice}".rstrip()


def wrong_type(name: str, value: Any, must: str) -> TypeError:
    """Returns the error for an argument of the wrong type."""
    return TypeError(
        f"`{name}` must be {must}. Received: {name}={value!r} (of type {type(value).__name__})."
    )


def answer_unknown(habits: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Returns a class decorator: an argument that the class does not take is an error with a hint.

    Args:
        habits: What other libraries call the arguments, and the names here.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__  # type: ignore[misc]
        known = list(inspect.signature(init).parameters)[1:]

        @wraps(init)
        def checked(self: Any, *args: Any, **arguments: Any) -> None:
            for name, value in arguments.items():
                if name in known:
                    continue
                near = difflib.get_close_matches(name, known, n=1)
                best = habits.get(name, near[0] if near else "")
                hint = f"Use `{best}`." if best else f"The arguments are: {', '.join(known)}."
                raise TypeError(
                    f"`{cls.__name__}` has no argument `{name}`. Received: {name}={value!r}. {hint}"
                )
            init(self, *args, **arguments)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate


@contextlib.contextmanager
def errors_in(where: str) -> Iterator[None]:
    """Adds a place to the message of a TypeError or ValueError raised within."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"In {where}: {error}") from error


def _real(
    name: str, value: Any, *, where: str, must: str, is_in_range: Callable[[float], bool]
) -> float:
    """Returns `value` as a finite float; accepts int, float, NumPy scalars and 0-d arrays."""
    number = value
    if hasattr(value, "item") and getattr(value, "shape", None) == () and not callable(value):
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(message(name, value, must, where))
    number = float(number)
    if not (math.isfinite(number) and is_in_range(number)):
        raise ValueError(message(name, value, must, where))
    return number


check_number = partial(_real, must="a finite number >= 0", is_in_range=lambda x: x >= 0)
check_positive = partial(_real, must="a positive finite number", is_in_range=lambda x: x > 0)
check_negative = partial(_real, must="a negative finite number", is_in_range=lambda x: x < 0)
check_finite = partial(_real, must="a finite number", is_in_range=math.isfinite)
check_fraction = partial(_real, must="a number in [0, 1)", is_in_range=lambda x: 0 <= x < 1)
check_share = partial(_real, must="a number in [0, 1]", is_in_range=lambda x: 0 <= x <= 1)
check_factor = partial(_real, must="a number in (0, 1]", is_in_range=lambda x: 0 < x <= 1)


def check_count(name: str, value: Any, least: int, *, where: str) -> int:
    """Returns an integer of at least `least`; accepts NumPy integers."""
    must = f"an integer >= {least}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message(name, value, must, where))
    if value < least:
        raise ValueError(message(name, value, must, where))
    return int(value)


def check_switch(name: str, value: Any, *, where: str) -> bool:
    """Returns a boolean."""
    if not isinstance(value, bool):
        raise TypeError(message(name, value, "True or False", where))
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...], *, where: str) -> str:
    """Returns one of `choices`."""
    if value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(message(name, value, f"one of {listed}", where))
    return str(value)


def check_scalar(name: str, value: Any, *, where: str) -> Any:
    """Returns a schedule, `None`, or a finite number of at least 0."""
    if value is None or is_schedule(value):
        return value
    if callable(value):
        must = "a number or a schedule over optimizer steps"
        base = "`keras.optimizers.schedules.LearningRateSchedule`"
        advice = f"Subclass {base} to compute it from the step."
        raise TypeError(message(name, value, must, where, advice))
    return check_number(name, value, where=where)


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a check that also accepts `None`."""

    def check_unless_none(name: str, value: Any, *, where: str) -> Any:
        return None if value is None else check(name, value, where=where)

    return check_unless_none


def check_clipping(
    clipnorm: Any, global_clipnorm: Any, clipvalue: Any, *, where: str
) -> tuple[float | None, float | None, float | None]:
    """Returns the three clipping limits as positive numbers; at most one may be given."""
    limits = {"clipnorm": clipnorm, "global_clipnorm": global_clipnorm, "clipvalue": clipvalue}
    given = {name: value for name, value in limits.items() if value is not None}
    if len(given) > 1:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            "Only one of `clipnorm`, `global_clipnorm` and `clipvalue` must be set. Received: "
            f"{listed} in {where}. A group's own clipping acts before the optimizer's "
            "`global_clipnorm`: to have both, set one on the group."
        )
    checked = {name: check_positive(name, value, where=where) for name, value in given.items()}
    return checked.get("clipnorm"), checked.get("global_clipnorm"), checked.get("clipvalue")
