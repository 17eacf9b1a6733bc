"""Scalar arguments of a rule that are schedules over optimizer steps: `rule("adam", beta_1=...)`.

A rule keeps its arguments as attributes, which it reads when it updates. An attribute that a
schedule drives holds the schedule's first value while the rule is made, and its present value
during a step.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base.checks import is_schedule
from keras_groupopt.plan.rule_spec import RuleSpec
from keras_groupopt.schedules.horizon import end_of, horizon

Tensor = Any

# Some rules treat matrices, vectors and other shapes in different ways.
_SHAPES = ((2, 2), (2,), (2, 2, 2))
# Optimizer steps of a long run, and of one for schedules that never settle.
_LONG, _UNSETTLED = 2**30, 10_000
# The values of a schedule are checked at these shares of its length.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# A schedule gives no numbers while a step is being compiled, so that they are kept.
_values: weakref.WeakKeyDictionary[Any, dict[float, float]] = weakref.WeakKeyDictionary()


def scheduled(rule: RuleSpec) -> dict[str, Any]:
    """Returns the arguments of a rule that are schedules, by name."""
    return {name: value for name, value in rule.given.items() if is_schedule(value)}


def with_numbers(rule: RuleSpec, share: float = 0.0) -> dict[str, Any]:
    """Returns a rule's arguments with each schedule replaced by its value at a share of its length.

    The share is 0 at the start and 1 at the end. Default: 0.0.
    """
    return {
        name: _value_of(value, share) if is_schedule(value) else value
        for name, value in rule.given.items()
    }


def _value_of(schedule: Any, share: float) -> float:
    known = _values.setdefault(schedule, {})
    if share not in known:
        # A share of the length is the same share of any run, whatever the run's length.
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
        """Returns a context in which each argument has its value at `step`.

        Args:
            step: The optimizer step, an integer scalar.
        """
        values = {
            name: ops.cast(schedule(step), "float32") for name, schedule in self._schedules.items()
        }
        try:
            _set(self._instance, values)
            yield
        finally:
            # A traced value must not outlive its trace.
            _set(self._instance, self._numbers)


def _set(instance: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        # Keras' own `__setattr__` would look for state in the value.
        object.__setattr__(instance, name, value)


def check_fields(
    rule: RuleSpec,
    make: Callable[[], Any],
    parameters: Mapping[str, inspect.Parameter],
    where: str,
) -> None:
    """Tries the schedules of a rule on small variables, as a compiled step would.

    Args:
        rule: The rule.
        make: Returns a new optimizer for it.
        parameters: The parameters of its class.
        where: The group's name, for errors.

    Raises:
        ValueError: If the rule does not read an argument while it updates, so that the schedule
            would drive nothing.
        TypeError: If the rule needs a number for an argument.
    """
    schedules = scheduled(rule)
    if not schedules:
        return
    instance = make()
    shapes = [shape for shape in _SHAPES if _error_of_step(make, shape) is None]
    for name, schedule in schedules.items():
        received = f"Received: {name}={type(schedule).__name__}(...) in {where}"
        must_be_number = f"`{name}` must be a number for the rule {rule.label!r}. {received}"
        number = getattr(instance, name, 0.0)
        default = parameters[name].default if name in parameters else number
        if isinstance(default, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{must_be_number}: it is no quantity.")
        # A step that succeeds without the attribute does not read it.
        is_read = hasattr(type(instance), name) or (
            hasattr(instance, name)
            and (not shapes or any(_error_of_step(make, s, without=name) for s in shapes))
        )
        if not is_read:
            raise ValueError(
                f"A schedule must drive something. {received}, whose rule {rule.label!r} does not "
                f"read `{name}` when it updates. Give a number."
            )
        for shape in shapes:
            error = _error_of_step(make, shape, {name: schedule})
            if error is not None:
                reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
                raise TypeError(f"{must_be_number}: {reason}.") from error


def _error_of_step(
    make: Callable[[], Any],
    shape: tuple[int, ...],
    schedules: Mapping[str, Any] | None = None,
    without: str | None = None,
) -> Exception | None:
    """Traces a step of a new optimizer for a variable of a shape, and returns its error, if any."""

    def one_step() -> None:
        variable = keras.Variable(np.full(shape, 0.5, "float32"))
        instance = make()
        instance.build([variable])
        fields = ScheduledFields(instance, schedules or {})
        if without is not None:
            object.__delattr__(instance, without)

        def step(count: Tensor) -> None:
            with horizon(_LONG), fields.at(count):
                instance.apply([ops.full(shape, 0.5)], [variable])

        backend.trace(step)

    try:
        backend.outside_strategy(one_step)
    except Exception as error:
        return error
    return None
