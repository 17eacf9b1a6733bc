"""The rules that are known by name: this package's, which register themselves, and Keras'."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import keras

from keras_groupopt.base import compat
from keras_groupopt.plan.rule_spec import FOREIGN_OPTIMIZER, RuleSpec

_WRAPPERS = ("lossscaleoptimizer", "multioptimizer", "optimizer")


@dataclasses.dataclass(frozen=True)
class Registration:
    """What the package knows about a rule.

    Args:
        name: Its name in `rule=`, and in the tables of fused steps.
        fused_slots: The attributes that hold one state variable per variable, in the order in
            which a fused step takes them; empty if the rule has no fused step. An attribute that
            is missing or empty, because an option is off, is left out.
        if_scheduled: The class that takes the rule's place if a schedule drives an argument; `None`
            for the class itself. Default: `None`.
        stand_in: The class that always takes the rule's place; `None` for the class itself.
            Default: `None`.
    """

    name: str
    fused_slots: tuple[str, ...] = ()
    if_scheduled: type | None = None
    stand_in: type | None = None


# Every rule of this package, and those of Keras about which there is something to know.
RULES: dict[type, Registration] = {}


def register_rule(name: str) -> Callable[[Any], Any]:
    """Returns a decorator for rules of this package: `rule=` knows the class by `name`.

    Where Keras has a rule of the same name, the one of this package is meant. Keras saves the class
    as `keras_groupopt>ClassName`.
    """

    def register(cls: Any) -> Any:
        RULES[cls] = Registration(name, cls.fused_slots)
        return keras.saving.register_keras_serializable(package="keras_groupopt")(cls)

    return register


def rule_names() -> dict[str, Any]:
    """Returns every name that `rule=` knows, with its class."""
    classes = (getattr(keras.optimizers, name) for name in dir(keras.optimizers))
    of_keras = {
        cls.__name__.lower(): cls
        for cls in classes
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
    }
    known = of_keras | {registration.name: cls for cls, registration in RULES.items()}
    return {name: cls for name, cls in known.items() if name not in _WRAPPERS}


def rule_class(rule: RuleSpec, where: str) -> Any:
    """Returns the optimizer class of `rule`.

    Raises:
        ValueError: If the name is unknown, or the class wraps other optimizers.
        TypeError: If the class is not a Keras optimizer.
    """
    target = rule.target
    if isinstance(target, str):
        known = rule_names()
        key = target.lower().replace("_", "")
        cls = known.get(key) or keras.saving.get_registered_object(target)
        if cls is None:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(
                f"`rule` must be the name of an optimizer. Received: rule={target!r} in {where}. "
                f"{hint}The names are: {', '.join(sorted(known))}."
            )
    else:
        cls = target if isinstance(target, type) else type(target)
    if not (isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)):
        raise TypeError(
            "`rule` must be a `keras.optimizers.Optimizer`. Received: "
            f"{cls.__module__}.{cls.__qualname__} in {where}. {FOREIGN_OPTIMIZER}"
        )
    if cls is keras.optimizers.Optimizer:
        raise ValueError(
            "`rule` must be an optimizer that has an algorithm. Received: the base class "
            f"keras.optimizers.Optimizer in {where}. The names are: "
            f"{', '.join(sorted(rule_names()))}."
        )
    is_grouped = any(base.__name__ == "GroupedOptimizer" for base in cls.__mro__)
    if is_grouped or hasattr(cls, "inner_optimizer") or cls.__name__.lower() in _WRAPPERS:
        raise ValueError(
            f"`rule` must not itself wrap optimizers. Received: {cls.__name__} in {where}. "
            "Declare its parts as groups of one GroupedOptimizer."
        )
    return cls


def type_of(instance: Any) -> type:
    """Returns the class that a user wrote, also if another class stands in for it.

    Keras uses a subclass of its own on torch. This package does on TensorFlow, and for some rules
    of Keras whose arguments are scheduled.
    """
    cls: type = type(instance)
    while "stands_for" in vars(cls):
        cls = vars(cls)["stands_for"]
    if not compat.is_keras_own(cls):
        # A user's class may have the name of its base.
        return cls
    known = rule_names().get(cls.__name__.lower())
    return known if known is not None and issubclass(cls, known) else cls
