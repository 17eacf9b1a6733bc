"""Which built rules a backend may move by a step on lists, and where they keep their state."""

from __future__ import annotations

from typing import Any

from keras_groupopt import backend
from keras_groupopt.backend.fused_step import FusedStep
from keras_groupopt.base import compat
from keras_groupopt.rules.registry import RULES, Registration

# A class that defines one of these moves variables in a way of its own.
_HOOKS = (
    "_backend_apply_gradients",
    "_backend_update_step",
    "_parallel_update_step",
    "_update",
    "apply",
    "assign",
    "assign_add",
    "assign_sub",
    "update_step",
)


def fused_step(rule: Any) -> tuple[FusedStep, list[list[Any]]] | None:
    """Returns the fused step that stands for a built rule on this backend, and the state it takes.

    A fused step stands for a rule's class, and for subclasses that leave its update alone. The
    result is `None` if there is none.
    """
    known = _registration_of(rule)
    if known is None or not known.fused_slots:
        return None
    step = backend.fused_step(known.name)
    return None if step is None else (step, slots_of(rule, known.fused_slots))


def slots_of(rule: Any, names: tuple[str, ...]) -> list[list[Any]]:
    """Returns the state of a built rule, a list per slot, without slots that are switched off."""
    return [list(slot) for name in names if (slot := getattr(rule, name, None))]


def _registration_of(rule: Any) -> Registration | None:
    if any(name in vars(rule) for name in _HOOKS):
        return None
    for cls in type(rule).__mro__:
        if cls in RULES:
            return RULES[cls]
        # A class that stands for another on a backend does the same as that.
        variant = compat.is_backend_variant(cls) or "stands_for" in vars(cls)
        if not variant and any(name in vars(cls) for name in _HOOKS):
            return None
    return None
