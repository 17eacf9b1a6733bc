"""The bytes of optimizer state that a plan will need, computed before it is built."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_groupopt.base.dtypes import bytes_of
from keras_groupopt.plan.plan import Plan, PlannedGroup, PlannedVariable
from keras_groupopt.rules import slots
from keras_groupopt.rules.making import make_rule

# Distinct sizes show which dimensions of a variable a slot has.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def estimate(plan: Plan) -> dict[int, int]:
    """Returns the bytes of state that each variable will own, by its position.

    The rule of each group is built on a tiny variable, once per rank, dtype and name. Its slots are
    scaled to the real shape, which is exact if each slot has whole dimensions of its variable.

    Args:
        plan: A resolved plan.
    """
    sizes = {}
    defaults = plan.defaults
    wide = (defaults.ema is not None) + (defaults.gradient_accumulation_steps is not None)
    for planned in plan.groups:
        known: dict[tuple[Any, ...], list[tuple[list[int], str]]] = {}
        for variable in planned.variables:
            beside = bytes_of(variable.shape, variable.dtype) if variable.anchored else 0
            if not planned.group.frozen:
                beside += wide * bytes_of(variable.shape, _wider(variable.dtype))
            sizes[variable.position] = beside + _slot_bytes(planned, variable, known)
    return sizes


def _wider(dtype: str) -> str:
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _slot_bytes(
    planned: PlannedGroup,
    variable: PlannedVariable,
    known: dict[tuple[Any, ...], list[tuple[list[int], str]]],
) -> int:
    if planned.group.frozen or len(variable.shape) > len(_PRIMES):
        return 0
    key = (len(variable.shape), variable.dtype, variable.name)
    if key not in known:
        known[key] = _slots_of_tiny(planned, variable)
    return sum(
        bytes_of([variable.shape[axis] for axis in axes], dtype) for axes, dtype in known[key]
    )


def _slots_of_tiny(planned: PlannedGroup, variable: PlannedVariable) -> list[tuple[list[int], str]]:
    """Returns the axes of the variable that each slot has, and the slot's dtype."""
    shape = _PRIMES[: len(variable.shape)]
    tiny = keras.Variable(
        np.zeros(shape, "float32"), dtype=variable.dtype, name=variable.name, trainable=True
    )
    rule = make_rule(planned.group.rule, 0.0, planned.group.where)
    rule.build([tiny])
    names = slots.slot_names(rule, 1)
    return [
        ([shape.index(size) for size in slot.shape if size in shape], str(slot.dtype))
        for slot in rule.variables
        if slot is not rule.iterations and names[id(slot)][0] is not None
    ]
