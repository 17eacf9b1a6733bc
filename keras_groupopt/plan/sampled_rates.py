"""A plan over time: its rates, ratios, decays and momentums as plain numbers, before training.

    {"steps": [0, 25, …], "shares": [0.0, None, …], "shared": {"ema.momentum": [0.9, …]},
     "groups": [{"name": "head", "frozen": False, "learning_rate": spread, "ratio": spread,
                 "weight_decay": [0.01, …] or None, "arguments": {"beta_1": [0.95, …]}}, …]}

A spread is `{"lowest": […], "highest": […]}` over the group's variables, which may have different
ratios. `shared` and the `arguments` of a rule hold the values that schedules drive. A frozen
group has no curves.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_groupopt.base.checks import check_count, is_schedule
from keras_groupopt.plan.schedule_bindings import ScheduleBinding, schedule_bindings
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.schedules.horizon import end_of, horizon, needs_horizon

Curves = dict[str, Any]

# A drawing starts with evenly spaced points. It gets more points if a curve differs from the line
# between two of them by more than this share of its range.
_EVEN, _MOST, _TOLERANCE = 64, 800, 0.003


_compile: Callable[[Any], Callable[[int], Any]] | None = None


def set_compiler(compiler: Callable[[Any], Callable[[int], Any]]) -> None:
    """Sets how a schedule becomes a function that is fast to call at many steps.

    This module does not import a backend, so a module that does calls this.

    Args:
        compiler: Takes a schedule, returns a function of a step. It is called once per drawing,
            since a schedule may depend on the run's length.
    """
    global _compile
    _compile = compiler


def curves(
    plan: Any, steps: Sequence[int], total: int | None = None, shares: Sequence[Any] = ()
) -> Curves:
    """Returns the values of a plan at some optimizer steps.

    Args:
        plan: A `Plan`.
        steps: Optimizer steps.
        total: The run's length, for schedules that end with the run. Default: unknown.
        shares: For each step the share of the run that it was given as, or `None`. Default: none.

    Raises:
        ValueError: If a schedule ends with the run and `total` is not given.
    """
    return _Reader(plan, total).at(steps, shares)


def sampled(plan: Any, total: int) -> Curves:
    """Returns the values of a plan over a run, at enough steps to draw every change.

    Args:
        plan: A `Plan`.
        total: The number of optimizer steps of the run, at least 1.
    """
    reader = _Reader(plan, total)
    known: dict[int, np.ndarray] = {}

    def learn(steps: list[int]) -> None:
        known.update(zip(steps, np.transpose(list(_lists(reader.at(steps)))), strict=True))

    learn(sorted({round(total * place / _EVEN) for place in range(_EVEN + 1)}))
    parts = _wide(itertools.pairwise(sorted(known)))
    while parts and len(known) + len(parts) <= _MOST:
        learn([(start + end) // 2 for start, end in parts])
        allowed = _TOLERANCE * np.ptp(list(known.values()), axis=0)
        halves = []
        for start, end in parts:
            middle = (start + end) // 2
            share = (middle - start) / (end - start)
            line = known[start] + (known[end] - known[start]) * share
            if np.any(np.abs(known[middle] - line) > allowed):
                halves += [(start, middle), (middle, end)]
        parts = _wide(halves)
    return reader.at(sorted(known))


def run_length(plan: Any, steps: Any) -> int:
    """Returns `steps`, or if it is `None` the step at which the last schedule of a plan ends.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is smaller than 1, or it is `None` and no schedule of the plan has a known
            end.
    """
    if steps is not None:
        return check_count("steps", steps, 1, where="plan")
    schedules = _schedules(plan)
    ends = [end for end in map(end_of, schedules) if end]
    if ends and not any(map(needs_horizon, schedules)):
        return max(ends)
    reason = (
        'total_steps="fit" in one of its schedules'
        if any(map(needs_horizon, schedules))
        else "no schedule that ends"
    )
    raise ValueError(
        "`steps` must be given if the plan does not tell how long a run is. Received: steps=None "
        f"and {reason}. Pass the optimizer steps of the run: `steps=epochs * steps_per_epoch`."
    )


def points_of(at: Any, plan: Any, steps: Any) -> tuple[list[int], list[float | None], int | None]:
    """Returns the optimizer steps for `at`, the shares they were given as, and the run's length.

    Args:
        at: Floats in [0, 1] are shares of the run, integers >= 0 are optimizer steps.
        plan: A `Plan`.
        steps: The run's length. `None` takes it from the plan if it is needed.

    Raises:
        TypeError: If `at` holds anything else.
        ValueError: If a number is out of range, `at` is empty, or the length is not known.
    """
    rule = "`at` must hold shares of the run (floats in [0, 1]) or optimizer steps (integers >= 0)"
    received = f"Received: at={at!r}."
    if isinstance(at, (str, bytes)) or not isinstance(at, (Iterable, numbers.Real)):
        raise TypeError(f"{rule}. {received}")
    given: list[Any] = [at] if isinstance(at, numbers.Real) else list(at)
    if not given:
        raise ValueError(f"{rule}, at least one. {received}")
    for point in given:
        if isinstance(point, bool) or not isinstance(point, numbers.Real):
            raise TypeError(f"{rule}. {received}")
        if not 0 <= float(point) <= (math.inf if isinstance(point, numbers.Integral) else 1.0):
            raise ValueError(f"{rule}. {received} For a step above 1 write an integer.")
    shares = [None if isinstance(p, numbers.Integral) else float(p) for p in given]
    known = steps is not None or any(map(needs_horizon, _schedules(plan)))
    asked = known or any(share is not None for share in shares)
    total = run_length(plan, steps) if asked else None
    places = [
        int(point) if share is None or total is None else round(share * total)
        for point, share in zip(given, shares, strict=True)
    ]
    return places, shares, total


class _Reader:
    """Computes the values of a plan at optimizer steps, each schedule once per step."""

    def __init__(self, plan: Any, total: int | None) -> None:
        self.plan = plan
        self.total = total
        self._functions: dict[int, Callable[[int], Any]] = {}
        self._known: dict[tuple[int, int], float] = {}

    def at(self, steps: Sequence[int], shares: Sequence[Any] = ()) -> Curves:
        driven = list(schedule_bindings(self.plan))
        with horizon(self.total):
            return {
                "steps": list(steps),
                "shares": list(shares) or [None] * len(steps),
                "shared": {
                    binding.field: self.values(binding.schedule, steps).tolist()
                    for binding in driven
                    if binding.group is None
                },
                "groups": [self.group(planned, driven, steps) for planned in self.plan.groups],
            }

    def group(
        self, planned: Any, driven: Sequence[ScheduleBinding], steps: Sequence[int]
    ) -> Curves:
        group, defaults = planned.group, self.plan.defaults
        found: Curves = {"name": group.name, "frozen": group.frozen, "arguments": {}}
        if group.frozen:
            return {**found, "learning_rate": None, "ratio": None, "weight_decay": None}
        base, rate = defaults.learning_rate, group.learning_rate
        if isinstance(rate, FromBase):
            rates = np.array([float(rate.function(value)) for value in self.values(base, steps)])
        else:
            rates = self.values(base if rate is None else rate, steps)
        ratio = self.values(group.learning_rate_ratio, steps)
        places = dict.fromkeys(variable.ratio_index for variable in planned.variables)
        factors = (1.0 if place is None else defaults.ratios[place].value for place in places)
        ratios = np.array([ratio * self.values(factor, steps) for factor in factors])
        decay = group.weight_decay
        return {
            **found,
            "learning_rate": _spread(rates * ratios),
            "ratio": _spread(ratios),
            "weight_decay": None if decay is None else self.values(decay, steps).tolist(),
            "arguments": {
                binding.field.removeprefix("rule."): self.values(binding.schedule, steps).tolist()
                for binding in driven
                if binding.group == group.name and binding.field.startswith("rule.")
            },
        }

    def values(self, scalar: Any, steps: Sequence[int]) -> np.ndarray:
        """Returns a number, a function without arguments, or a schedule at each step."""
        if is_schedule(scalar):
            return np.array([self.value(scalar, step) for step in steps])
        return np.full(len(steps), float(scalar() if callable(scalar) else scalar))

    def value(self, schedule: Any, step: int) -> float:
        # The plan holds its schedules, so ids are not reused.
        name = id(schedule)
        if name not in self._functions:
            self._functions[name] = schedule if _compile is None else _compile(schedule)
        if (name, step) not in self._known:
            self._known[name, step] = float(self._functions[name](step))
        return self._known[name, step]


def _schedules(plan: Any) -> list[Any]:
    """Returns the schedules that drive something in a plan."""
    return [found.schedule for found in schedule_bindings(plan) if is_schedule(found.schedule)]


def _spread(each: np.ndarray) -> Curves:
    return {"lowest": each.min(axis=0).tolist(), "highest": each.max(axis=0).tolist()}


def _lists(found: Any) -> Iterator[list[float]]:
    """Yields the curves in the result of a reader."""
    for name, value in found.items():
        if name in ("steps", "shares"):
            continue
        if isinstance(value, dict):
            yield from _lists(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                yield from _lists(item)
        elif isinstance(value, list):
            yield value


def _wide(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(start, end) for start, end in parts if end - start > 1]
