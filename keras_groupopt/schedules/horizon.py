"""How many optimizer steps a run has, and how many a schedule is made for.

A schedule with `total_steps="fit"` ends where the run does, which only `fit` knows:

    with horizon(total):        # what trains
        rate = schedule(step)   # asks `steps_in_force`

The block holds for the thread that entered it, so it belongs around the calls of schedules, inside
of what a replica runs. A wrapper that gives a schedule only a part of the run narrows it.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any

from keras_groupopt.base.checks import check_count

FIT = "fit"


class _Here(threading.local):
    """The steps of the run that a thread is in. `torch.compile` reads no `ContextVar`."""

    def __init__(self) -> None:
        self.total: Any = None


_HERE = _Here()


class horizon:  # noqa: N801 - it is used as a function
    """A `with` block in which a schedule with `total_steps="fit"` ends at `total`.

    Args:
        total: Optimizer steps of the run: an integer >= 1, or an integer scalar tensor or variable,
            which may change without a new trace. `None` hides a block around this one.

    Raises:
        TypeError: If `total` is a number but no integer.
        ValueError: If it is smaller than 1.
    """

    def __init__(self, total: Any) -> None:
        if isinstance(total, numbers.Real):
            total = check_count("total", total, 1, where="horizon")
        self.total: Any = total
        self._outer: list[Any] = []

    def __enter__(self) -> horizon:
        self._outer.append(_HERE.total)
        _HERE.total = self.total
        return self

    def __exit__(self, *error: object) -> None:
        _HERE.total = self._outer.pop()


def steps_in_force(total_steps: Any, where: str) -> Any:
    """Returns `total_steps`, or the steps of the run where it is `"fit"`.

    Args:
        total_steps: An integer or `"fit"`.
        where: The schedule's name, for the error.

    Raises:
        ValueError: If it is `"fit"` and the steps of the run are not known here.
    """
    if not is_fit(total_steps):
        return total_steps
    total = _HERE.total
    if total is None:
        raise ValueError(
            "`total_steps` must be known where a schedule is called. Received: "
            f'total_steps="fit" in {where}, outside of a run. Give a number of optimizer steps, or '
            "train with `GroupedOptimizer` in `fit`, which fills it in."
        )
    return total


def known_steps(total_steps: Any) -> int | None:
    """Returns `total_steps` as a plain integer where it is one now, else `None`."""
    total = _HERE.total if is_fit(total_steps) else total_steps
    return total if isinstance(total, int) else None


def without_first(steps: int, where: str) -> horizon:
    """Returns a block with what is left of the run after its first `steps`.

    Raises:
        ValueError: If the run is no longer than that.
    """
    total = _HERE.total
    if total is None:
        return horizon(None)
    if isinstance(total, int) and total <= steps:
        raise ValueError(
            f"What comes first must be shorter than the run. Received: {steps} steps before "
            f"another schedule in {where}, for a run of {total} optimizer steps. Train for longer, "
            "or shorten it."
        )
    return horizon(total - steps)


def is_fit(total_steps: Any) -> bool:
    """Whether `total_steps` asks for the length of the run."""
    return isinstance(total_steps, str) and total_steps == FIT


def check_total(name: str, value: Any, where: str, least: int = 1) -> Any:
    """Returns `value` if it is `"fit"`, else as an int of at least `least`.

    Raises:
        TypeError: If it is neither an integer nor a string.
        ValueError: If it is smaller, or another string.
    """
    if is_fit(value):
        return value
    if isinstance(value, str):
        raise ValueError(
            f'`{name}` must be an integer >= {least} or "fit", the length of the run. Received: '
            f"{name}={value!r} in {where}."
        )
    return check_count(name, value, least, where=where)


# Of any schedule ---------------------------------------------------------------------------------


def needs_horizon(schedule: Any) -> bool:
    """Whether a schedule, or one that it wraps, ends with the run (`total_steps="fit"`).

    Args:
        schedule: A schedule; anything else needs none.
    """
    ask = getattr(schedule, "needs_horizon", None)
    return bool(ask()) if callable(ask) else False


def end_of(schedule: Any) -> int | None:
    """Returns the optimizer step from which on the value no longer changes.

    Args:
        schedule: A schedule, or a number (0).

    Returns:
        That step, or `None` where the value never settles, or nothing is known of it. `"fit"` is
        the run of the `horizon` around the call.
    """
    if schedule is None or isinstance(schedule, (int, float)):
        return 0
    ask = getattr(schedule, "end", None)
    if hasattr(schedule, "needs_horizon") and callable(ask):
        end = ask()
        return None if end is None else int(end)
    return _of_keras(schedule, _ENDS)


def length_of(schedule: Any) -> int | None:
    """Returns the optimizer steps that a schedule is made for, as its arguments say.

    Unlike `end_of`, it is `None` for a number, a constant, or a few steps at milestones: they suit
    a run of any length.

    Args:
        schedule: A schedule, or a number.
    """
    ask = getattr(schedule, "length", None)
    if hasattr(schedule, "needs_horizon") and callable(ask):
        length = ask()
        return None if length is None else int(length)
    return _of_keras(schedule, _LENGTHS)


_Config = Mapping[str, Any]


def _cosine(config: _Config) -> float:
    warmup = 0 if config.get("warmup_target") is None else config["warmup_steps"]
    return float(config["decay_steps"]) + float(warmup)


def _polynomial(config: _Config) -> float:
    return math.inf if config["cycle"] else float(config["decay_steps"])


def _piecewise(config: _Config) -> float:
    # A value holds up to its boundary, that step included.
    return float(config["boundaries"][-1]) + 1


# What Keras' own schedules say in their configs, by the name of the class. The others never settle.
_LENGTHS: dict[str, Callable[[_Config], float]] = {
    "CosineDecay": _cosine,
    "PolynomialDecay": _polynomial,
}
_ENDS = {**_LENGTHS, "PiecewiseConstantDecay": _piecewise}


def _of_keras(schedule: Any, table: Mapping[str, Callable[[_Config], float]]) -> int | None:
    cls = type(schedule)
    if cls.__module__.partition(".")[0] != "keras" or cls.__name__ not in table:
        return None
    steps = table[cls.__name__](schedule.get_config())
    return math.ceil(steps) if math.isfinite(steps) else None
