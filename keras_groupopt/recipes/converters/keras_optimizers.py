"""Converters from Keras optimizers, built or not, to a `GroupedOptimizer` with the same steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_groupopt import selectors
from keras_groupopt.base import compat, text
from keras_groupopt.base.checks import wrong_type
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.plan.group import DEFAULT_GROUP, Group
from keras_groupopt.plan.rule_spec import WHOLE_ONLY
from keras_groupopt.recipes.converters import exact_rates
from keras_groupopt.recipes.converters.copied_state import copy_state
from keras_groupopt.rules.making import rule_of
from keras_groupopt.rules.registry import rule_class, type_of
from keras_groupopt.schedules.constant import constant
from keras_groupopt.selectors import layer_paths

_ON_WHOLE = tuple(
    name for name in WHOLE_ONLY if name not in ("global_clipnorm", "loss_scale_factor")
)


def from_multi_optimizer(optimizer: Any, model: Any) -> GroupedOptimizer:
    """Turns a `keras.optimizers.MultiOptimizer`, or its map, into one `GroupedOptimizer`.

    Each inner optimizer that trains a variable becomes a group with its rule, its exact rate, its
    decay and exclusions, and its clipping. The `global_clipnorm` of an inner optimizer remains a
    limit of the norm over its group. For one norm over all groups make the optimizer with
    `global_clipnorm=`. The default optimizer becomes the group `"default"`, which gets variables
    that are added later. The other groups list their variables by layer path. Rates that are
    numbers become ratios of one base rate. A schedule remains the schedule of its group.

    The state of a built optimizer, moments and step, is copied, so both optimizers can train
    further. The next steps are the same.

    Args:
        optimizer: A `MultiOptimizer` (also inside a `LossScaleOptimizer`) or an `OptimizerMap`.
        model: The model it trains.

    Returns:
        A `GroupedOptimizer`, built if `optimizer` was. Compile the model with it.

    Raises:
        TypeError: If it is of another type, or the installed Keras has neither of them.
        ValueError: If an inner optimizer averages or accumulates, has a function as its rate, or
            has made another number of steps than the others, or if it does not know a variable of
            the model.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="encoder"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> if hasattr(keras.optimizers, "MultiOptimizer"):
    ...     inner = keras.optimizers.OptimizerMap(
    ...         keras.optimizers.SGD(0.5), {".*encoder/.*": keras.optimizers.Adam(0.25)})
    ...     optimizer = kgo.from_multi_optimizer(inner, model)
    ...     assert [group.name for group in optimizer.plan.groups] == ["encoder", "default"]
    """
    multi = _unwrap(optimizer)
    variables = list(model.trainable_variables)
    paths = {info.identity: info.path for info in layer_paths.describe_model(model).infos}
    owners = {id(variable): _inner_of(multi, variable) for variable in variables}
    unknown = [paths[key] for key, inner in owners.items() if inner is None]
    if unknown:
        raise ValueError(
            "`optimizer` must know every trainable variable of `model`. Received: unknown "
            f"{text.listing(unknown)}. Convert it before they become trainable, then call "
            "`optimizer.rebuild(model)`."
        )
    inners = list({id(inner): inner for inner in owners.values()}.values())
    default = getattr(_map_of(multi), "default_optimizer", None)
    names = _names(multi, inners, default)
    # The default optimizer comes first here, so that its rate becomes the base if possible.
    ordered = sorted(inners, key=lambda inner: inner is not default)
    base, rates = _rates(ordered, names)
    groups = []
    for inner in inners:
        name, members = names[id(inner)], [v for v in variables if owners[id(v)] is inner]
        is_default = name == DEFAULT_GROUP
        selector = None if is_default else selectors.variables(*(paths[id(v)] for v in members))
        options = _decay_and_clipping(inner, members, paths, name)
        groups.append(Group(name, selector, rule=rule_of(inner), **rates[id(inner)], **options))
    converted = GroupedOptimizer(
        sorted(groups, key=lambda group: group.name == DEFAULT_GROUP),
        model=model,
        rule=rule_of(ordered[0]),
        learning_rate=base,
        loss_scale_factor=getattr(multi, "loss_scale_factor", None),
    )
    if any(inner.built for inner in inners):
        copy_state(converted, model, owners, strict=True)
    return converted


def from_optimizer(optimizer: Any, model: Any, groups: Any = None) -> GroupedOptimizer:
    """Turns one Keras optimizer into a `GroupedOptimizer`, with its state.

    Its rule, rate, decay, exclusions and clipping become those of the new optimizer. Without
    `groups` the next steps are the same. A group gets the state if it has the optimizer's class and
    slots of the same shapes. Other groups start with fresh state at the current step of the
    schedule.

    Args:
        optimizer: A Keras optimizer (also inside a `LossScaleOptimizer`), built or not.
        model: The model it trains.
        groups: The groups, as in `GroupedOptimizer`. Default: one group.

    Returns:
        A `GroupedOptimizer`, built if `optimizer` was. Compile the model with it.

    Raises:
        TypeError: If it is not a Keras optimizer with its own algorithm.
        ValueError: If it averages or accumulates, or `groups` do not fit the model.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> kgo.from_optimizer(keras.optimizers.Adam(0.25), model).plan["default"].group.rule
    rule(adam)
    """
    inner = unwrap(optimizer)
    where = "`from_optimizer`"
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise wrong_type("optimizer", inner, "a Keras optimizer")
    rule_class(rule_of(inner), where)
    variables = list(model.trainable_variables)
    paths = {info.identity: info.path for info in layer_paths.describe_model(model).infos}
    options = _decay_and_clipping(inner, variables, paths, where)
    converted = GroupedOptimizer(
        () if groups is None else groups,
        model=model,
        rule=rule_of(inner),
        learning_rate=compat.declared_learning_rate(inner),
        loss_scale_factor=inner.loss_scale_factor,
        **options,
    )
    if inner.built:
        known = {id(variable) for variable in compat.built_variables(inner)}
        owners = {id(v): inner for v in variables if id(v) in known}
        copy_state(converted, model, owners, strict=groups is None)
    return converted


def _unwrap(optimizer: Any) -> Any:
    optimizer = unwrap(optimizer)
    classes = [getattr(keras.optimizers, name, None) for name in ("MultiOptimizer", "OptimizerMap")]
    known = tuple(cls for cls in classes if cls is not None)
    if not isinstance(optimizer, known):
        has = "" if known else f" Keras {keras.__version__} has neither."
        raise TypeError(
            "`optimizer` must be a `keras.optimizers.MultiOptimizer` or `OptimizerMap`. Received: "
            f"optimizer={optimizer!r} of type {type(optimizer).__name__}.{has} For one Keras "
            "optimizer use `kgo.from_optimizer`."
        )
    return optimizer


def _map_of(multi: Any) -> Any:
    return multi if hasattr(multi, "default_optimizer") else compat.optimizer_map_of(multi)


def _inner_of(multi: Any, variable: Any) -> Any:
    if multi is _map_of(multi):
        return multi(variable)
    return compat.inner_optimizer_of(multi, variable)


def _names(multi: Any, inners: Sequence[Any], default: Any) -> dict[int, str]:
    """Returns the names of the groups of inner optimizers, from their keys in the map."""
    mapping = _map_of(multi)
    items = list(mapping.items()) if isinstance(mapping, Mapping) else []
    names = {id(default): DEFAULT_GROUP}
    for inner in inners:
        if inner is not default:
            keys = [key for key, value in items if value is inner]
            plain = [re.sub(r"[^\w-]+", "_", key, flags=re.ASCII).strip("_") for key in keys]
            base = next(filter(None, plain), rule_of(inner).label)
            names[id(inner)] = text.untaken(base, names.values())
    return names


def _rates(
    inners: Sequence[Any], names: Mapping[int, str]
) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Returns the base rate, and for each inner optimizer its group's arguments for the rate."""
    declared = {id(inner): compat.declared_learning_rate(inner) for inner in inners}
    for inner in inners:
        rate = declared[id(inner)]
        if callable(rate) and not hasattr(rate, "get_config"):
            raise ValueError(
                "The rate of an inner optimizer must be a number or a schedule. Received: "
                f'{rate!r} for "{names[id(inner)]}". Make it a '
                "`keras.optimizers.schedules.LearningRateSchedule`."
            )
    numbers = {key: rate for key, rate in declared.items() if not callable(rate)}
    found: dict[int, dict[str, Any]] = {
        key: {"learning_rate": rate} for key, rate in declared.items() if callable(rate)
    }
    first = declared[id(inners[0])]
    if callable(first):
        # Variables that are added later follow the base rate.
        found |= {key: {} for key, rate in declared.items() if rate is first}
        found |= {key: {"learning_rate": constant(rate)} for key, rate in numbers.items()}
        return first, found
    base, ratios = exact_rates.split(list(numbers.values()))
    ratio_of = zip(numbers, ratios, strict=True)
    return base, found | {key: {"learning_rate_ratio": ratio} for key, ratio in ratio_of}


def _decay_and_clipping(
    inner: Any, variables: Sequence[Any], paths: Mapping[int, str], name: str
) -> dict[str, Any]:
    for option in _ON_WHOLE:
        if getattr(inner, option, None):
            raise ValueError(
                f"`{option}` must not be set on an optimizer that is converted. Received: "
                f'{option}={getattr(inner, option)!r} on {type_of(inner).__name__} ("{name}"). Set '
                f"it on {WHOLE_ONLY[option]}."
            )
    found = {
        limit: getattr(inner, limit)
        for limit in ("clipnorm", "clipvalue", "global_clipnorm")
        if getattr(inner, limit) is not None
    }
    decay = getattr(inner, "weight_decay", None)
    if not decay:
        return found
    kept = [paths[id(v)] for v in variables if not compat.is_decayed(inner, v)]
    if len(kept) == len(variables):
        return found
    found["weight_decay"] = decay
    found["exclude_from_decay"] = selectors.variables(*kept) if kept else ()
    return found
