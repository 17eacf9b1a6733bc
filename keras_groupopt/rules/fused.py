"""Which rules a backend may do by a step on lists, and where they keep their state.

A fused step stands for a class and for subclasses that leave its update alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.backend.fused_step import FusedStep
from keras_groupopt.base import compat
from keras_groupopt.rules.adabelief import AdaBelief
from keras_groupopt.rules.adan import Adan
from keras_groupopt.rules.nadamw import NAdamW
from keras_groupopt.rules.radam import RAdam

# What a class replaces that moves variables in a way of its own.
_HOOKS = (
    "_backend_update_step",
    "_parallel_update_step",
    "_update",
    "assign",
    "assign_add",
    "assign_sub",
    "update_step",
)


@dataclasses.dataclass(frozen=True)
class Fusible:
    """A rule whose variables may be moved together.

    Args:
        kind: The name of the fused step.
        slots: The attributes with one state variable per variable, in the order the step takes
            them.
        optional: Those among them that exist under a condition on the rule.
    """

    kind: str
    slots: tuple[str, ...]
    optional: dict[str, Callable[[Any], bool]] = dataclasses.field(default_factory=dict)

    def slots_of(self, rule: Any) -> list[list[Any]]:
        """Returns the state of a built rule, a list per slot."""
        return [
            list(getattr(rule, name))
            for name in self.slots
            if self.optional.get(name, lambda _: True)(rule)
        ]


_optimizers = keras.optimizers
FUSIBLE: dict[type, Fusible] = {
    _optimizers.Adadelta: Fusible("adadelta", ("_accumulated_grads", "_accumulated_delta_vars")),
    _optimizers.Adagrad: Fusible("adagrad", ("_accumulators",)),
    _optimizers.Adam: Fusible(
        "adam",
        ("_momentums", "_velocities", "_velocity_hats"),
        {"_velocity_hats": lambda rule: bool(rule.amsgrad)},
    ),
    _optimizers.Adamax: Fusible("adamax", ("_m", "_u")),
    _optimizers.Ftrl: Fusible("ftrl", ("_accumulators", "_linears")),
    _optimizers.Lion: Fusible("lion", ("_momentums",)),
    _optimizers.RMSprop: Fusible(
        "rmsprop",
        ("_velocities", "_momentums", "_average_gradients"),
        {
            "_momentums": lambda rule: rule.momentum > 0,
            "_average_gradients": lambda rule: bool(rule.centered),
        },
    ),
    _optimizers.SGD: Fusible("sgd", ("momentums",), {"momentums": lambda rule: rule.momentum != 0}),
    AdaBelief: Fusible(
        "adabelief",
        ("_momentums", "_variances", "_largest"),
        {"_largest": lambda rule: bool(rule.amsgrad)},
    ),
    Adan: Fusible(
        "adan", ("_momentums", "_differences", "_velocities", "_last_gradients", "_started")
    ),
    NAdamW: Fusible("nadamw", ("_momentums", "_velocities")),
    RAdam: Fusible("radam", ("_momentums", "_velocities")),
}


def fusible(rule: Any) -> Fusible | None:
    """Returns how a built rule may be fused, or `None` where it moves variables in its own way."""
    if any(name in vars(rule) for name in _HOOKS):
        return None
    for cls in type(rule).__mro__:
        if cls in FUSIBLE:
            return FUSIBLE[cls]
        # What stands for a rule on a backend does the same.
        variant = compat.is_backend_variant(cls) or "stands_for" in vars(cls)
        if not variant and any(name in vars(cls) for name in _HOOKS):
            return None
    return None


def fused_step(rule: Any) -> tuple[FusedStep, list[list[Any]]] | None:
    """Returns the fused step that stands for a built rule here, and the state it takes."""
    found = fusible(rule)
    step = None if found is None else backend.fused_step(found.kind)
    return None if found is None or step is None else (step, found.slots_of(rule))
