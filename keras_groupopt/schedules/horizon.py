"""The number of optimizer steps of a run, and the number a schedule is made for.

A schedule with `total_steps="fit"` ends with the run, whose length only `fit` knows:

    with horizon(total):        # the training step
        rate = schedule(step)   # calls `steps_in_force`

The block holds for the thread that entered it. So enter it around the calls of schedules, inside
the function that a replica runs. A schedule that gives an inner schedule only a part of the run
enters a block with the length of that part.
"""

from __future__ import annotations

import functools
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any

from keras_groupopt.base.arguments import checked_by
from keras_groupopt.base.checks import check_count, message

FIT = "fit"


class _Run(threading.local):
    """The length of a thread's run. `torch.compile` cannot read a `ContextVar`."""

    total: Any = None


_RUN = _Run()


class horizon:  # noqa: N801 - it is used as a function
    """A `with` block in which a schedule with `total_steps="fit"` ends at `total`.

    Args:
        total: The number of optimizer steps of the run: an integer >= 1, or an integer scalar
            tensor or variable, which may change without a new trace. `None` hides an outer block.

    Raises:
        TypeError: If `total` is a number but not an integer.
        ValueError: If it is smaller than 1.
    """

    def __init__(self, total: Any) -> None:
        if isinstance(total, numbers.Real):
            total = check_count("total", total, 1, where="horizon")
        self.total: Any = total
        self._outer: list[Any] = []

    def __enter__(self) -> horizon:
        self._outer.append(_RUN.total)
        _RUN.total = self.total
        return self

    def __exit__(self, *error: object) -> None:
        _RUN.total = self._outer.pop()


def steps_in_force(total_steps: Any, where: str) -> Any:
    """Returns `total_steps`, or the length of the run if it is `"fit"`.

    Args:
        total_steps: An integer or `"fit"`.
        where: The schedule's name, for the error.

    Raises:
        ValueError: If it is `"fit"` and the length of the run is not known.
    """
    if not is_fit(total_steps):
        return total_steps
    if _RUN.total is None:
        raise ValueError(
            "`total_steps` must be known when a schedule is called. Received: "
            f'total_steps="fit" in {where}, outside of a run. Give a number of optimizer steps, or '
            "train with `GroupedOptimizer` in `fit`, which sets the length of the run."
        )
    return _RUN.total


def known_steps(total_steps: Any) -> int | None:
    """Returns `total_steps`, or the length of the run, if it is a plain integer, else `None`."""
    total = _RUN.total if is_fit(total_steps) else total_steps
    return total if isinstance(total, int) else None


def without_first(steps: int, where: str) -> horizon:
    """Returns a block for the rest of the run, after its first `steps`.

    Raises:
        ValueError: If the run is not longer than `steps`.
    """
    total = _RUN.total
    if total is None:
        return horizon(None)
    if isinstance(total, int) and total <= steps:
        raise ValueError(
            f"A run must be longer than the first part of its schedule. Received: {steps} steps "
            f"before another schedule in {where}, for a run of {total} optimizer steps. Train for "
            "longer, or shorten the first part."
        )
    return horizon(total - steps)


def is_fit(total_steps: Any) -> bool:
    """Whether `total_steps` means the length of the run."""
    return isinstance(total_steps, str) and total_steps == FIT


def check_total(name: str, value: Any, *, where: str, least: int = 1) -> Any:
    """Returns `value` if it is `"fit"`, else as an int of at least `least`.

    Raises:
        TypeError: If it is neither an integer nor a string.
        ValueError: If it is smaller, or another string.
    """
    if is_fit(value):
        return value
    if isinstance(value, str):
        must = f'an integer >= {least} or "fit", the length of the run'
        raise ValueError(message(name, value, must, where))
    return check_count(name, value, least, where=where)


def total(least: int) -> dict[str, Any]:
    """Returns the metadata of a field that holds an integer of at least `least`, or `"fit"`."""
    return checked_by(functools.partial(check_total, least=least))


# Of any schedule ---------------------------------------------------------------------------------


def needs_horizon(schedule: Any) -> bool:
    """Whether a schedule, or one that it wraps, ends with the run (`total_steps="fit"`).

    Args:
        schedule: A schedule. For anything else the answer is False.
    """
    ask = getattr(schedule, "needs_horizon", None)
    return bool(ask()) if callable(ask) else False


def end_of(schedule: Any) -> int | None:
    """Returns the optimizer step from which on the value no longer changes.

    Args:
        schedule: A schedule, or a number, for which it is 0.

    Returns:
        The step, or `None` if the value never becomes constant or the schedule is unknown. `"fit"`
        means the run of the `horizon` around the call.
    """
    if schedule is None or isinstance(schedule, (int, float)):
        return 0
    return _steps(schedule, "end", _ENDS)


def length_of(schedule: Any) -> int | None:
    """Returns the number of optimizer steps that a schedule is made for, from its arguments.

    Unlike `end_of`, it is `None` for a number, a constant and steps at milestones, which suit a run
    of any length.

    Args:
        schedule: A schedule, or a number.
    """
    return _steps(schedule, "length", _LENGTHS)


_Config = Mapping[str, Any]
_Table = Mapping[str, Callable[[_Config], float]]


def _steps(schedule: Any, method: str, table: _Table) -> int | None:
    """Returns what `method` of one of our schedules returns, or the entry of a Keras schedule."""
    if hasattr(schedule, "needs_horizon") and hasattr(schedule, method):
        steps = getattr(schedule, method)()
        return None if steps is None else int(steps)
    cls = type(schedule)
    if cls.__module__.partition(".")[0] != "keras" or cls.__name__ not in table:
        return None
    steps = table[cls.__name__](schedule.get_config())
    return math.ceil(steps) if math.isfinite(steps) else None


def _cosine(config: _Config) -> float:
    warmup = 0 if config.get("warmup_target") is None else config["warmup_steps"]
    return float(config["decay_steps"]) + float(warmup)


def _polynomial(config: _Config) -> float:
    return math.inf if config["cycle"] else float(config["decay_steps"])


def _piecewise(config: _Config) -> float:
    # A value holds up to and including its boundary.
    return float(config["boundaries"][-1]) + 1


# The lengths of Keras' schedules, from their configs. The other classes never become constant.
_LENGTHS: _Table = {
    "CosineDecay": _cosine,
    "PolynomialDecay": _polynomial,
}
_ENDS = {**_LENGTHS, "PiecewiseConstantDecay": _piecewise}
