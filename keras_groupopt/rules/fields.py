"""Scalar arguments of a rule that are schedules over optimizer steps: `rule("adam", beta_1=...)`.

A rule keeps its arguments as attributes, which it reads when it updates. Those that are schedules
hold the schedule's first value while the rule is made, and its present value during a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base.checks import is_schedule
from keras_groupopt.plan.group import RuleSpec
from keras_groupopt.schedules.horizon import end_of, horizon

Tensor = Any

# Shapes that some rules treat apart.
_SHAPES = ((2, 2), (2,), (2, 2, 2))
# Optimizer steps of a run that is long, and of one for schedules that never settle.
_LONG, _UNSETTLED = 2**30, 10_000
# Where the values of a schedule are tried.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# While a step is being compiled a schedule gives no number.
_values: weakref.WeakKeyDictionary[Any, dict[float, float]] = weakref.WeakKeyDictionary()


def scheduled(rule: RuleSpec) -> dict[str, Any]:
    """Returns the arguments of a rule that are schedules, by name."""
    given = rule.arguments if rule.config is None else rule.config
    return {name: value for name, value in given.items() if is_schedule(value)}


def with_numbers(arguments: Mapping[str, Any], share: float = 0.0) -> dict[str, Any]:
    """Returns arguments with each schedule replaced by its value at a share of its length."""
    return {
        name: value_of(value, share) if is_schedule(value) else value
        for name, value in arguments.items()
    }


def value_of(schedule: Any, share: float) -> float:
    """Returns a schedule's value at a share of its length, from 0 at the start to 1 at the end."""
    known = _values.setdefault(schedule, {})
    if share not in known:
        # Of any run: where it ends matters to no share of it.
        with horizon(_LONG):
            end = end_of(schedule)
            step = round((_UNSETTLED if end is None else end) * share)
            known[share] = float(backend.on_host(schedule(step)))
    return known[share]


class ScheduledFields:
    """The arguments of one made rule that follow schedules.

    Args:
        instance: The rule, made with the first value of each.
        schedules: The schedules by argument.
    """

    def __init__(self, instance: Any, schedules: Mapping[str, Any]) -> None:
        self._instance = instance
        self._schedules = dict(schedules)
        self._numbers = {name: getattr(instance, name) for name in schedules}

    @contextlib.contextmanager
    def at(self, step: Tensor) -> Iterator[None]:
        """Gives each its value at `step` within the context.

        Args:
            step: The optimizer step, an integer scalar.
        """
        values = {
            name: ops.cast(schedule(step), "float32") for name, schedule in self._schedules.items()
        }
        try:
            self._set(values)
            yield
        finally:
            # A traced value must not outlive its trace.
            self._set(self._numbers)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            # Keras would look for state in what is set.
            object.__setattr__(self._instance, name, value)


def check_fields(
    rule: RuleSpec, make: Any, parameters: Mapping[str, inspect.Parameter], where: str
) -> None:
    """Tries the schedules of a rule on small variables, as a compiled step would.

    Args:
        rule: The rule.
        make: Returns a new optimizer for it.
        parameters: What its class takes.
        where: The group's name, for errors.

    Raises:
        ValueError: If the rule does not read one while it updates, so that it would drive nothing.
        TypeError: If the rule needs a number there.
    """
    schedules = scheduled(rule)
    if not schedules:
        return
    instance = make()
    for name, schedule in schedules.items():
        if not hasattr(instance, name):
            raise ValueError(_drives_nothing(rule, name, schedule, where))
        number = getattr(instance, name)
        default = parameters[name].default if name in parameters else number
        if isinstance(default, bool) or not isinstance(number, (int, float)):
            raise TypeError(_not_scheduled(rule, name, schedule, where, "it is no quantity"))
    found = [_fields_read(make, schedules, shape, rule, where) for shape in _SHAPES]
    tried = [read for read in found if read is not None]
    for name, schedule in schedules.items():
        if tried and not any(name in read for read in tried):
            raise ValueError(_drives_nothing(rule, name, schedule, where))


def _fields_read(
    make: Any, schedules: Mapping[str, Any], shape: tuple[int, ...], rule: RuleSpec, where: str
) -> set[str] | None:
    """Returns which fields a rule reads for a variable of a shape; `None` if it takes none such."""
    read: set[str] = set()

    def one_step(scheduled: Mapping[str, Any]) -> None:
        variable = keras.Variable(np.full(shape, 0.5, "float32"))
        instance = make()
        instance.build([variable])
        _watch(instance, frozenset(schedules), read)
        fields = ScheduledFields(instance, scheduled)
        read.clear()

        def step(count: Tensor) -> None:
            with horizon(_LONG), fields.at(count):
                instance.apply([ops.full(shape, 0.5)], [variable])

        backend.trace(step)

    try:
        backend.outside_strategy(lambda: one_step({}))
    except Exception:
        return None
    for name, schedule in schedules.items():
        try:
            backend.outside_strategy(functools.partial(one_step, {name: schedule}))
        except Exception as error:
            reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
            raise TypeError(_not_scheduled(rule, name, schedule, where, reason)) from error
    return read


def _watch(instance: Any, names: frozenset[str], read: set[str]) -> None:
    """Notes which of some attributes are read."""
    cls: Any = type(instance)

    def get(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return cls.__getattribute__(self, name)

    object.__setattr__(instance, "__class__", type(cls.__name__, (cls,), {"__getattribute__": get}))


def _drives_nothing(rule: RuleSpec, name: str, schedule: Any, where: str) -> str:
    return (
        f"A schedule must drive something. Received: {name}={type(schedule).__name__}(...) in "
        f"{where}, whose rule {rule.label!r} does not read `{name}` when it updates. Give a "
        "number."
    )


def _not_scheduled(rule: RuleSpec, name: str, schedule: Any, where: str, reason: str) -> str:
    return (
        f"`{name}` must be a number for the rule {rule.label!r}. Received: "
        f"{name}={type(schedule).__name__}(...) in {where}: {reason}."
    )
