"""An optimizer's declaration as plain JSON and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_groupopt import selectors
from keras_groupopt.base import compat
from keras_groupopt.plan.averages import EMA, SWA
from keras_groupopt.plan.group import Anchor, Group
from keras_groupopt.rules.serialization import deserialize_rule, serialize_rule
from keras_groupopt.schedules.serialization import (
    deserialize_scalar,
    registered_function,
    registered_function_name,
    serialize_scalar,
)
from keras_groupopt.selectors import Selector
from keras_groupopt.step.built import BuiltOptimizer

# Arguments that are neither groups nor defaults of groups.
_OTHERS = ("name", "use_ema", "ema_momentum", "ema_overwrite_frequency", "loss_scale_factor")
_SCALARS = ("learning_rate_ratio", "learning_rate", "weight_decay", "ema_momentum", "momentum")
_SELECTORS = ("selector", "exclude_from_decay")
# What a config holds beside arguments of the constructor.
_STATE = ("current", "plan", "plan_is_provisional", "frozen_groups")

selectors.set_function_serializer(registered_function_name, registered_function)


def get_config(optimizer: Any) -> dict[str, Any]:
    """Returns the declaration, the present scalars and the resolved plan, as plain JSON.

    Raises:
        ValueError: If a function in the declaration is not registered with Keras.
    """
    declared = optimizer._declared
    others = {name: getattr(optimizer, name) for name in _OTHERS}
    records, provisional, catalog = _plan(optimizer)

    def write(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {name: _write(name, value, where, catalog) for name, value in arguments.items()}

    return {
        "groups": [write(vars(group), group.where) for group in declared.groups],
        **write(vars(declared.defaults) | others, "GroupedOptimizer"),
        "current": _current(optimizer),
        "plan": records,
        "plan_is_provisional": provisional,
        "frozen_groups": list(optimizer._run.frozen_groups),
    }


def from_config(cls: type[Any], config: Mapping[str, Any], custom_objects: Any = None) -> Any:
    """Returns the optimizer that `get_config` described, without its state."""
    with compat.custom_objects(custom_objects):
        arguments = {
            name: _read(name, value, "GroupedOptimizer")
            for name, value in config.items()
            if name not in _STATE
        }
        optimizer = cls(**arguments)
    link, run = optimizer._link, optimizer._run
    link.records = copy.deepcopy(config.get("plan"))
    link.records_provisional = bool(config.get("plan_is_provisional"))
    run.frozen_groups = tuple(config.get("frozen_groups") or ())
    current = dict(config.get("current") or {})
    if "learning_rate" in current:
        optimizer.learning_rate = current.pop("learning_rate")
    run.current = {
        (group, name): value for name, values in current.items() for group, value in values.items()
    }
    return optimizer


# Arguments ---------------------------------------------------------------------------------------


def _write(name: str, value: Any, where: str, catalog: Any) -> Any:
    """Returns plain JSON for an argument of a group or of the optimizer."""
    if name in _SCALARS:
        return serialize_scalar(value, f"{name} of {where}")
    if name in _SELECTORS:
        if isinstance(value, Selector):
            return value.get_config(catalog)
        return None if value is None else []
    if name == "rule":
        return serialize_rule(value)
    if name == "anchor":
        return None if value is None else value.kind
    if name == "ratios":
        return [
            {
                "selector": ratio.selector.get_config(catalog),
                "ratio": serialize_scalar(ratio.value, ratio.where),
            }
            for ratio in value
        ]
    if name == "ema":
        if not isinstance(value, (EMA, SWA)):
            # Keras' `use_ema` has its own keys.
            return None
        kind = type(value).__name__
        fields = {own: _write(own, part, kind, catalog) for own, part in vars(value).items()}
        return {"kind": kind, **fields}
    return value


def _read(name: str, value: Any, where: str) -> Any:
    """Returns the argument that `_write` was given."""
    if name == "groups":
        return [_read_group(group) for group in value]
    if name in _SCALARS:
        return deserialize_scalar(value, f"{name} of {where}")
    if name in _SELECTORS:
        return Selector.from_config(value) if isinstance(value, dict) else value
    if name == "rule":
        return deserialize_rule(value)
    if name == "anchor":
        return None if value is None else Anchor(value)
    if name == "ratios":
        return [
            (Selector.from_config(pair["selector"]), deserialize_scalar(pair["ratio"], "a ratio"))
            for pair in value
        ]
    if name == "ema" and value is not None:
        fields = {own: _read(own, part, "EMA") for own, part in value.items()}
        return {"EMA": EMA, "SWA": SWA}[fields.pop("kind")](**fields)
    return value


def _read_group(config: Mapping[str, Any]) -> Group:
    where = f'group "{config["name"]}"'
    return Group(**{name: _read(name, value, where) for name, value in config.items()})


# The plan and present values ---------------------------------------------------------------------


def _plan(optimizer: Any) -> tuple[list[dict[str, Any]] | None, bool, Any]:
    """Returns the records of the plan, whether their paths are provisional, and the catalog."""
    built, link = optimizer._built, optimizer._link
    if built is not None:
        records = _in_model_order(built, link.model)
        known = {(record["group"], record["path"]) for record in records}
        absent = [r for r in link.resting if (r["group"], r["path"]) not in known]
        return records + copy.deepcopy(absent), built.plan.provisional, link.catalog
    if link.records is not None:
        return copy.deepcopy(link.records), link.records_provisional, link.catalog
    if link.model is None or not link.model.built:
        return None, False, link.catalog
    plan, catalog = link.resolve(optimizer._declared, list(link.model.trainable_variables))
    return plan.records, plan.provisional, catalog


def _in_model_order(built: BuiltOptimizer, model: Any) -> list[dict[str, Any]]:
    """Returns the plan's records in the order in which a loaded model will give its variables.

    If the optimizer was built in another order, binding by order would mix up variables of
    equal name and shape. Variables frozen after the build are marked: a loaded model, frozen as
    this one is, does not give them.
    """
    records = [
        record if getattr(variable, "trainable", True) else {**record, "trainable": False}
        for variable, record in zip(built.variables, built.plan.records, strict=True)
    ]
    order = {id(v): place for place, v in enumerate([] if model is None else model.variables)}
    if any(id(variable) not in order for variable in built.variables):
        return records
    places = [order[id(variable)] for variable in built.variables]
    return [records[i] for i in sorted(range(len(records)), key=places.__getitem__)]


def _current(optimizer: Any) -> dict[str, Any]:
    """Returns the present numbers that differ from what was declared, by name and group."""
    current: dict[str, Any] = {}
    base = optimizer._declared.defaults.learning_rate
    if isinstance(base, float):
        value = _present(optimizer.learning_rate)
        if value != np.float32(base):
            current["learning_rate"] = value
    if optimizer._built is None:
        for (group_name, name), value in optimizer._run.current.items():
            current.setdefault(name, {})[group_name] = value
        return current
    for group in optimizer._built.groups:
        for name, scalar in group.scalars.items():
            if scalar.variable is not None:
                value = _present(scalar.variable)
                if value != np.float32(scalar.declared):
                    current.setdefault(name, {})[group.name] = value
    return current


def _present(variable: Any) -> float:
    return float(keras.ops.convert_to_numpy(variable))
