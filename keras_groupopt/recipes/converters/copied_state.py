"""Copies the state of built Keras optimizers by variable and slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_groupopt.base import compat, text
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.rules import slots
from keras_groupopt.rules.registry import type_of
from keras_groupopt.step.built_group import BuiltGroup


def copy_state(
    converted: GroupedOptimizer, model: Any, owners: Mapping[int, Any], *, strict: bool
) -> None:
    """Builds an optimizer and gives it the state of others.

    Args:
        converted: The optimizer, with its model attached.
        model: The model.
        owners: The built Keras optimizer that trained each variable, by the variable's identity.
        strict: Whether every slot must have a source. Otherwise slots without one start fresh.

    Raises:
        ValueError: If the optimizers made different numbers of steps, or a slot has no source and
            `strict` is True.
    """
    steps = {int(keras.ops.convert_to_numpy(inner.iterations)) for inner in owners.values()}
    if len(steps) > 1:
        raise ValueError(
            "The inner optimizers must have made the same number of steps, since a "
            "GroupedOptimizer has one counter. Received: "
            f"{', '.join(map(str, sorted(steps)))} steps."
        )
    converted.build(list(model.trainable_variables))
    groups = converted._require_built("converting").moving_groups
    pairs = {part.name: _pairs(part, owners, strict) for part in groups}
    for step in steps:
        converted.iterations.assign(step)
    for part in groups:
        for variable, source in pairs[part.name]:
            # JAX cannot donate a shared buffer.
            variable.assign(keras.ops.copy(keras.ops.convert_to_tensor(source)))
        # A rule without copied state starts its bias corrections at step 0.
        if pairs[part.name] or len(part.rule_variables) == 1:
            part.rule.iterations.assign(next(iter(steps), 0))


def _pairs(part: BuiltGroup, owners: Mapping[int, Any], strict: bool) -> list[tuple[Any, Any]]:
    """Returns the state variables of a group, each with the variable it is copied from."""
    found: dict[tuple[int | None, str], Any] = {}
    inners = {
        id(inner): inner
        for own in part.members
        if (inner := owners.get(id(own.variable))) is not None and not own.is_overwritten
    }
    for inner in inners.values():
        if type_of(inner) is not type_of(part.rule):
            continue
        variables = compat.built_variables(inner)
        names = slots.slot_names(inner, len(variables))
        for variable in inner.variables:
            index, slot = names[id(variable)]
            found[None if index is None else id(variables[index]), slot] = variable
    pairs, missing = [], []
    for variable in part.rule.variables:
        if variable is part.rule.iterations:
            continue
        own, slot = part.slots[id(variable)]
        source = found.get((None if own is None else id(own.variable), slot))
        if source is None or tuple(source.shape) != tuple(variable.shape):
            missing.append(slot if own is None else f"{own.path}/{slot}")
        else:
            pairs.append((variable, source))
    if missing and strict:
        raise ValueError(
            "`optimizer` must have the state of its class for every variable. Received: "
            f"{part.planned.group.where} without {text.listing(missing)}."
        )
    return pairs
