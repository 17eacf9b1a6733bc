"""From groups and a model's variables to a `Plan`: each trainable variable gets one group."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from keras_groupopt.base import text
from keras_groupopt.base.checks import errors_in
from keras_groupopt.plan.effective import effective_group
from keras_groupopt.plan.group import DEFAULT_GROUP, Group
from keras_groupopt.plan.plan import Defaults, Plan, PlannedGroup, planned_variable
from keras_groupopt.plan.plan_dict import describe_scalar
from keras_groupopt.plan.ratios import Ratio
from keras_groupopt.plan.schedule_bindings import check_drives
from keras_groupopt.selectors import Selector, everything
from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo

_Claimant = TypeVar("_Claimant", Group, Ratio)


def resolve(
    groups: Sequence[Group], defaults: Defaults, catalog: VariableCatalog, trainable: Sequence[int]
) -> Plan:
    """Assigns each trainable variable to exactly one group.

    A group whose layers are all frozen waits: it is in the plan, without variables.

    Args:
        groups: The declared groups, with unique names.
        defaults: The options of the optimizer for all groups.
        catalog: All variables of the model.
        trainable: Positions in `catalog` of the trainable variables, in the optimizer's order.

    Raises:
        ValueError: If a selector matches nothing, a group is empty, groups overlap or a variable is
            unclaimed and that is an error, or every group is frozen.
    """
    order = {position: place for place, position in enumerate(trainable)}
    claims = [
        (group, _trainable(group, catalog, order)) for group in groups if group.selector is not None
    ]
    waiting = tuple(group for group, claimed in claims if not claimed)
    names = {group.name for group in waiting}
    groups = [group for group in groups if group.name not in names]
    owners = _assign(claims, defaults.overlap, catalog)
    rest = [position for position in trainable if position not in owners]
    declared = list(groups)
    if rest:
        group = _rest_group(declared, defaults, [catalog.infos[position] for position in rest])
        owners.update(dict.fromkeys(rest, group))
    members: dict[str, list[int]] = {group.name: [] for group in declared}
    for position in trainable:
        members[owners[position].name].append(position)
    _check_members(declared, members, defaults)

    moving = {p for group in declared if not group.frozen for p in members[group.name]}
    ratio_claims = (
        (ratio, _matched(ratio, catalog).intersection(moving)) for ratio in defaults.ratios
    )
    ratios = _assign(ratio_claims, defaults.overlap, catalog)
    planned = []
    for group in declared:
        effective = effective_group(group, defaults)
        decayed = _decayed(group, effective, catalog, members[group.name])
        variables = (
            planned_variable(
                catalog.infos[p],
                order[p],
                effective,
                decayed=p in decayed,
                ratio_index=ratios[p].place if p in ratios else None,
            )
            for p in members[group.name]
        )
        planned.append(PlannedGroup(effective, tuple(variables)))
    plan = Plan(tuple(planned), defaults, catalog.provisional, waiting=waiting)
    check_drives(plan)
    return plan


def frozen_rest(name: str, declared: Iterable[Group]) -> Group:
    """Returns a frozen group of the variables that no declared group claims."""
    claimed = (group.selector for group in declared if group.selector is not None)
    return Group(name, functools.reduce(operator.sub, claimed, everything()), frozen=True)


def _matched(claimant: Group | Ratio, catalog: VariableCatalog) -> frozenset[int]:
    with errors_in(claimant.where):
        matched: frozenset[int] = claimant.selector.resolve(catalog)
    if not matched:
        raise ValueError(
            f"A selector must match at least one variable. Received: {_named(claimant)}, which "
            "matches none."
        )
    return matched


def _trainable(group: Group, catalog: VariableCatalog, order: dict[int, int]) -> frozenset[int]:
    matched = _matched(group, catalog)
    claimed = matched.intersection(order)
    if not claimed and not any(catalog.infos[position].waits for position in matched):
        raise ValueError(
            f"A selector must match at least one trainable variable. Received: {_named(group)}, "
            f"which matches only variables that are not trainable: {_listing(catalog, matched)}. "
            "Set `trainable = True` on their layer, or leave the group out and call "
            "`optimizer.add_group(group)` when they are; with LoRA, select the layer."
        )
    return claimed


def _assign(
    claims: Iterable[tuple[_Claimant, Collection[int]]], overlap: str, catalog: VariableCatalog
) -> dict[int, _Claimant]:
    """Returns the group or ratio that gets each position.

    Raises:
        ValueError: If two claim the same position and that is an error.
    """
    owners: dict[int, _Claimant] = {}
    for claimant, positions in claims:
        both = sorted(owners.keys() & positions)
        if both and overlap == "error":
            first = owners[both[0]]
            shared = [position for position in both if owners[position] is first]
            kind = "Groups" if isinstance(claimant, Group) else "Ratios"
            raise ValueError(
                f"{kind} must not overlap. Received: {_named(first)} and {_named(claimant)} both "
                f"claim {_listing(catalog, shared)}. Remove them from one, as in "
                f"`{first.selector.describe()} - {claimant.selector.describe()}`, or choose which "
                'one wins with overlap="first" or overlap="last".'
            )
        for position in positions:
            if overlap == "last" or position not in owners:
                owners[position] = claimant
    return owners


def _rest_group(declared: list[Group], defaults: Defaults, rest: Sequence[VariableInfo]) -> Group:
    """Returns the group that gets the variables `rest`, and adds it to `declared` if it is new."""
    names = {group.name: group for group in declared}
    paths = [info.path for info in rest]
    if defaults.unclaimed == "error":
        raise ValueError(
            'Every trainable variable must be claimed with unclaimed="error". Received: no group '
            f'for {", ".join(paths)}. Add a group, or use unclaimed="default" or '
            'unclaimed="freeze".'
        )
    if defaults.unclaimed == "freeze":
        name = "frozen"
        while name in names:
            name += "_rest"
        declared.append(frozen_rest(name, declared))
    elif DEFAULT_GROUP not in names:
        declared.append(Group(DEFAULT_GROUP))
    elif names[DEFAULT_GROUP].selector is not None:
        raise ValueError(
            f'The group "{DEFAULT_GROUP}" must have no selector if variables are left for it. '
            f"Received: a selector, and no group for {text.listing(paths)}. Rename the group, or "
            'use unclaimed="error" or unclaimed="freeze".'
        )
    else:
        return names[DEFAULT_GROUP]
    return declared[-1]


def _check_members(
    declared: Sequence[Group], members: dict[str, list[int]], defaults: Defaults
) -> None:
    for group in declared:
        if members[group.name]:
            continue
        if group.selector is None:
            raise ValueError(
                f"A group must not be empty. Received: {group.where}, for which the other groups "
                "leave no trainable variable. Leave it out."
            )
        raise ValueError(
            f"A group must not be empty. Received: {_named(group)}, all of whose variables went to "
            f'other groups by overlap="{defaults.overlap}". Reorder the groups or leave it out.'
        )
    if any(members.values()) and all(group.frozen for group in declared):
        raise ValueError(
            "At least one group must not be frozen. Received: every trainable variable in a "
            f"frozen group ({', '.join(group.name for group in declared)})."
        )


def _decayed(
    declared: Group, effective: Group, catalog: VariableCatalog, members: Sequence[int]
) -> set[int]:
    if effective.frozen or effective.weight_decay is None:
        return set()
    exclusion = effective.exclude_from_decay
    if not isinstance(exclusion, Selector):
        return set(members)
    with errors_in(f"`exclude_from_decay` of {declared.where}"):
        decayed = set(members) - exclusion.resolve(catalog)
    if not decayed and declared.weight_decay is not None:
        raise ValueError(
            "A group with a `weight_decay` must have a variable that decays. Received: "
            f"weight_decay={describe_scalar(declared.weight_decay)} in {declared.where}, all of "
            f"whose variables are excluded by {exclusion.describe()}. Pass "
            "`exclude_from_decay=()` to decay them, or leave `weight_decay` out."
        )
    return decayed


def _named(claimant: Group | Ratio) -> str:
    return f"{claimant.where} ({claimant.selector.describe()})"


def _listing(catalog: VariableCatalog, positions: Iterable[int]) -> str:
    return text.listing([catalog.infos[position].path for position in sorted(positions)])
