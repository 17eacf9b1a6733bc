"""Rules as plain JSON, which holds names and arguments but no code, and back."""

from __future__ import annotations

import sys
from typing import Any

import keras

from keras_groupopt.plan.rule_spec import RuleSpec
from keras_groupopt.rules.registry import rule_names, type_of


def serialize_rule(rule: RuleSpec | None) -> Any:
    """Returns plain JSON for a rule: its name or class, its arguments, and its config if any."""
    if rule is None:
        return None
    arguments = {
        name: serialize_rule(value) if isinstance(value, RuleSpec) else value
        for name, value in rule.arguments.items()
    }
    saved: dict[str, Any] = {"arguments": keras.saving.serialize_keras_object(arguments)}
    if rule.config is not None:
        config = {**rule.config, "learning_rate": 0.0}
        saved["config"] = keras.saving.serialize_keras_object(config)
    if isinstance(rule.target, str):
        return {"name": rule.target, **saved}
    cls = rule.target if isinstance(rule.target, type) else type_of(rule.target)
    name = keras.saving.get_registered_name(cls)
    return {"class": name, "module": cls.__module__, **saved}


def deserialize_rule(config: Any) -> RuleSpec | None:
    """Returns the rule that `serialize_rule` was given.

    Raises:
        ValueError: If its class is not registered, not among the custom objects, and not defined in
            a module that was imported.
    """
    if config is None:
        return None
    arguments = {
        name: deserialize_rule(value) if _is_rule(value) else value
        for name, value in keras.saving.deserialize_keras_object(config["arguments"]).items()
    }
    full = keras.saving.deserialize_keras_object(config.get("config"))
    target = config["name"] if "name" in config else _class_of(config["class"], config["module"])
    return RuleSpec(target, arguments, full)


def _is_rule(argument: Any) -> bool:
    return isinstance(argument, dict) and (
        argument.keys() >= {"name", "arguments"} or argument.keys() >= {"class", "module"}
    )


def _class_of(name: str, module: str) -> type:
    registered = keras.saving.get_registered_object(name)
    if isinstance(registered, type):
        return registered
    known = rule_names().get(name.lower())
    if known is not None and known.__module__ == module:
        return known
    # A file must not import code, but it may name a class that the program has imported.
    imported = getattr(sys.modules.get(module), name, None)
    if isinstance(imported, type) and issubclass(imported, keras.optimizers.Optimizer):
        return imported
    raise ValueError(
        f"The class {name} of a saved rule, from the module {module}, is not known. Import the "
        f'module first, or pass `custom_objects={{"{name}": ...}}` when loading.'
    )
