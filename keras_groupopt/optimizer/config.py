"""The optimizer's declaration as plain JSON and back, and warnings about what it cannot hold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt import selectors
from keras_groupopt.base import text
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.plan.averages import EMA, SWA
from keras_groupopt.plan.group import Anchor, Group
from keras_groupopt.plan.plan import Defaults, Plan
from keras_groupopt.plan.ratios import Ratio
from keras_groupopt.rules.serialization import deserialize_rule, serialize_rule
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.schedules.serialization import (
    deserialize_scalar,
    is_registered,
    registered_function,
    registered_function_name,
    serialize_scalar,
)
from keras_groupopt.selectors import Selector
from keras_groupopt.step.built import BuiltOptimizer

_PLAIN = ("clipnorm", "clipvalue")
_LOW_PRECISION = ("float16", "bfloat16")
# Rules of Keras that take 1 - β₂ᵗ in the dtype of the weights.
_WITH_BETA_2 = ("adam", "adamw", "lamb", "nadam")

selectors.set_function_serializer(registered_function_name, registered_function)


def to_config(
    optimizer: Any, declaration: Declaration, built: BuiltOptimizer | None
) -> dict[str, Any]:
    """Returns the declaration, the present scalars where they were changed, and the plan.

    Raises:
        ValueError: If a function in the declaration is not registered with Keras.
    """
    defaults = declaration.defaults
    records, provisional = _records(optimizer, declaration, built)
    # Known once there are records: a plan was resolved.
    catalog = declaration.catalog
    return {
        "name": optimizer.name,
        "groups": [_group_config(group, catalog) for group in declaration.groups],
        "rule": serialize_rule(defaults.rule),
        "learning_rate": serialize_scalar(defaults.learning_rate, "the base learning rate"),
        "weight_decay": serialize_scalar(defaults.weight_decay, "weight_decay"),
        "anchor": _anchor_config(defaults.anchor),
        "exclude_from_decay": _selector_config(defaults.exclude_from_decay, catalog),
        "ratios": _ratios_config(defaults.ratios, catalog),
        "global_clipnorm": defaults.global_clipnorm,
        **{name: getattr(defaults, name) for name in _PLAIN},
        "gradient_accumulation_steps": defaults.gradient_accumulation_steps,
        "ema": _average_config(defaults.ema),
        "on_nonfinite": defaults.on_nonfinite,
        "fused": defaults.fused,
        "use_ema": optimizer.use_ema,
        "ema_momentum": serialize_scalar(optimizer.ema_momentum, "ema_momentum"),
        "ema_overwrite_frequency": optimizer.ema_overwrite_frequency,
        "unclaimed": defaults.unclaimed,
        "overlap": defaults.overlap,
        "loss_scale_factor": optimizer.loss_scale_factor,
        "current": _current(optimizer, declaration, built),
        "plan": records,
        "plan_is_provisional": provisional,
        "frozen_groups": list(declaration.frozen_groups),
    }


def _records(
    optimizer: Any, declaration: Declaration, built: BuiltOptimizer | None
) -> tuple[list[dict[str, Any]] | None, bool]:
    if built is not None:
        records = _in_model_order(built, declaration.live_model(required=False))
        known = {(record["group"], record["path"]) for record in records}
        absent = [r for r in declaration.resting if (r["group"], r["path"]) not in known]
        return records + copy.deepcopy(absent), built.plan.provisional
    if declaration.records is not None:
        return copy.deepcopy(declaration.records), declaration.records_provisional
    model = declaration.live_model(required=False)
    if model is None or not model.built:
        return None, False
    preview = optimizer.plan
    return preview.records, preview.provisional


def _in_model_order(built: BuiltOptimizer, model: Any) -> list[dict[str, Any]]:
    """Returns the plan's records in the order in which a loaded model will give its variables.

    Where the optimizer was built in another order, binding by order would mix up variables of
    equal name and shape. Variables frozen after the build are marked: a loaded model, frozen as
    this one is, does not give them.
    """
    records = [
        record if getattr(variable, "trainable", True) else {**record, "trainable": False}
        for variable, record in zip(built.variables, built.plan.records, strict=True)
    ]
    if model is None:
        return records
    order = {id(variable): place for place, variable in enumerate(model.variables)}
    places = [order.get(id(variable)) for variable in built.variables]
    if None in places:
        return records
    return [record for _, record in sorted(zip(places, records, strict=True), key=_first)]


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _current(
    optimizer: Any, declaration: Declaration, built: BuiltOptimizer | None
) -> dict[str, Any]:
    current: dict[str, Any] = {}
    base = declaration.defaults.learning_rate
    if isinstance(base, float):
        value = _present(optimizer.learning_rate)
        if value != np.float32(base):
            current["learning_rate"] = value
    for group in [] if built is None else built.groups:
        for name, scalar in group.scalars.items():
            if scalar.variable is None:
                continue
            value = _present(scalar.variable)
            if value != np.float32(scalar.declared):
                current.setdefault(name, {})[group.name] = value
    if built is None:
        for (group_name, name), value in declaration.current.items():
            current.setdefault(name, {})[group_name] = value
    return current


def _present(variable: Any) -> float:
    return float(keras.ops.convert_to_numpy(variable))


def from_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the constructor's arguments, and what `restore` needs."""
    arguments = dict(config)
    kept = ("current", "plan", "plan_is_provisional", "frozen_groups")
    rest = {name: arguments.pop(name, None) for name in kept}
    arguments["groups"] = [_group_from_config(group) for group in arguments["groups"]]
    arguments["rule"] = deserialize_rule(arguments["rule"])
    for name in ("learning_rate", "weight_decay", "ema_momentum"):
        arguments[name] = deserialize_scalar(arguments[name], name)
    arguments["ratios"] = [
        (_selector_from_config(ratio["selector"]), deserialize_scalar(ratio["ratio"], "a ratio"))
        for ratio in arguments.get("ratios", ())
    ]
    arguments["ema"] = _average_from_config(arguments["ema"])
    arguments["anchor"] = _anchor_from_config(arguments["anchor"])
    arguments["exclude_from_decay"] = _selector_from_config(arguments["exclude_from_decay"])
    return arguments, rest


def restore(optimizer: Any, declaration: Declaration, rest: Mapping[str, Any]) -> None:
    """Gives a new optimizer the plan and the present scalars of its config."""
    declaration.records = copy.deepcopy(rest["plan"])
    declaration.records_provisional = bool(rest["plan_is_provisional"])
    declaration.frozen_groups = tuple(rest["frozen_groups"] or ())
    current = dict(rest["current"] or {})
    if "learning_rate" in current:
        optimizer.learning_rate = current.pop("learning_rate")
    declaration.current = {
        (group, name): value for name, values in current.items() for group, value in values.items()
    }


def _group_config(group: Group, catalog: Any) -> dict[str, Any]:
    where = group.where
    return {
        "name": group.name,
        "selector": _selector_config(group.selector, catalog),
        "rule": serialize_rule(group.rule),
        "learning_rate_ratio": serialize_scalar(
            group.learning_rate_ratio, f"learning_rate_ratio of {where}"
        ),
        "learning_rate": serialize_scalar(group.learning_rate, f"learning_rate of {where}"),
        "weight_decay": serialize_scalar(group.weight_decay, f"weight_decay of {where}"),
        "anchor": _anchor_config(group.anchor),
        "exclude_from_decay": _selector_config(group.exclude_from_decay, catalog),
        "clipnorm": group.clipnorm,
        "global_clipnorm": group.global_clipnorm,
        "clipvalue": group.clipvalue,
        "frozen": group.frozen,
    }


def _ratios_config(ratios: Sequence[Ratio], catalog: Any) -> list[dict[str, Any]]:
    return [
        {
            "selector": _selector_config(ratio.selector, catalog),
            "ratio": serialize_scalar(ratio.value, ratio.where),
        }
        for ratio in ratios
    ]


def _group_from_config(config: Mapping[str, Any]) -> Group:
    arguments = dict(config)
    where = f'group "{arguments["name"]}"'
    for name in ("learning_rate_ratio", "learning_rate", "weight_decay"):
        arguments[name] = deserialize_scalar(arguments[name], f"{name} of {where}")
    arguments["rule"] = deserialize_rule(arguments["rule"])
    arguments["anchor"] = _anchor_from_config(arguments["anchor"])
    for name in ("selector", "exclude_from_decay"):
        arguments[name] = _selector_from_config(arguments[name])
    return Group(**arguments)


def _anchor_config(anchor: Anchor | None) -> str | None:
    return None if anchor is None else anchor.kind


def _anchor_from_config(kind: str | None) -> Anchor | None:
    return None if kind is None else Anchor(kind)


def _average_config(average: Any) -> dict[str, Any] | None:
    if not isinstance(average, (EMA, SWA)):
        # Keras' `use_ema` has keys of its own.
        return None
    fields = {name: getattr(average, name) for name in average.__dataclass_fields__}
    if "momentum" in fields:
        fields["momentum"] = serialize_scalar(fields["momentum"], "the momentum of EMA")
    return {"kind": type(average).__name__, **fields}


def _average_from_config(config: Mapping[str, Any] | None) -> Any:
    if config is None:
        return None
    fields = dict(config)
    kind = fields.pop("kind")
    if "momentum" in fields:
        fields["momentum"] = deserialize_scalar(fields["momentum"], "the momentum of EMA")
    return {"EMA": EMA, "SWA": SWA}[kind](**fields)


def _selector_config(selector: Any, catalog: Any) -> Any:
    if isinstance(selector, Selector):
        return selector.get_config(catalog)
    return None if selector is None else []


def _selector_from_config(config: Any) -> Any:
    return Selector.from_config(config) if isinstance(config, dict) else config


def warn_unserializable(groups: Sequence[Group], defaults: Defaults) -> None:
    """Warns, before hours of training, about what the first checkpoint could not save."""
    reasons = []
    rate = defaults.learning_rate
    if callable(rate) and not hasattr(rate, "get_config") and not is_registered(rate):
        reasons.append(f"the base learning rate is the function {rate!r}")
    for group in groups:
        own = group.learning_rate
        if isinstance(own, FromBase) and not is_registered(own.function):
            reasons.append(f"`learning_rate` of {group.where} is {own!r}")
        for name in ("selector", "exclude_from_decay"):
            selector = getattr(group, name)
            if isinstance(selector, Selector) and not selector.is_serializable():
                reasons.append(f"`{name}` of {group.where} is {selector.describe()}")
    for ratio in defaults.ratios:
        if not ratio.selector.is_serializable():
            reasons.append(f"the selector of {ratio.where} is a function")
    exclusion = defaults.exclude_from_decay
    if isinstance(exclusion, Selector) and not exclusion.is_serializable():
        reasons.append(f"`exclude_from_decay` is {exclusion.describe()}")
    if reasons:
        warnings.warn(
            "A model with this optimizer cannot be saved whole (`model.save`, ModelCheckpoint), "
            f"because {'; '.join(reasons)}. Decorate the function with "
            "`@keras.saving.register_keras_serializable()`.",
            stacklevel=3,
        )


def warn_about_variables(plan: Plan, variables: Sequence[Any]) -> None:
    """Warns about decay that a variable's precision swallows, and decay beside a regularizer."""
    low = [v.path for v in plan.variables if v.dtype in _LOW_PRECISION]
    still = [v.path for planned in plan.groups for v in planned.variables if _rests(planned, v)]
    if low:
        resting = (
            " Of Keras' Adam, AdamW, Nadam and Lamb, a `beta_2` that bfloat16 rounds to 1 leaves "
            f"these weights where they are: {text.listing(still)}. There give a `beta_2` of at "
            'most 0.99, or `rule="radam"`.'
        )
        warnings.warn(
            f"Weights in {'/'.join(_LOW_PRECISION)} lose updates and decay smaller than their "
            f"rounding step: {text.listing(low)}. Use a `mixed_` dtype policy, which keeps "
            f"float32 weights.{resting if still else ''}",
            stacklevel=3,
        )
    twice = [
        v.path
        for v in plan.variables
        if v.decayed and getattr(variables[v.position], "regularizer", None) is not None
    ]
    if twice:
        warnings.warn(
            f"These weights have a regularizer and decay as well: {text.listing(twice)}. Both "
            "act. Drop the regularizer, or exclude them with `exclude_from_decay`.",
            stacklevel=3,
        )


def _rests(planned: Any, variable: Any) -> bool:
    """Whether a rule of Keras has a bias correction of 0 for a variable, at every step."""
    rule = planned.group.rule
    if rule is None or variable.dtype != "bfloat16" or rule.label not in _WITH_BETA_2:
        return False
    given = rule.arguments if rule.config is None else rule.config
    beta_2 = given.get("beta_2", 0.999)
    # Half a step of bfloat16 below 1.
    return isinstance(beta_2, (int, float)) and beta_2 >= 1.0 - 2.0**-9
