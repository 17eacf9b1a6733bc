"""From groups and a model's variables to a `Plan`, checked.

`resolve` assigns every trainable variable to one group. `plan_from_records` makes the same plan
again from its records, for a model that was rebuilt from a file.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from keras_groupopt.base import text
from keras_groupopt.base.checks import check_number
from keras_groupopt.plan.group import DEFAULT_GROUP, Anchor, Group
from keras_groupopt.plan.plan import Defaults, Plan, PlannedGroup, PlannedVariable, describe_scalar
from keras_groupopt.plan.ratios import Ratio
from keras_groupopt.plan.schedule_bindings import check_drives
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.selectors import Selector, everything
from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo


def effective_group(group: Group, defaults: Defaults) -> Group:
    """Returns `group` with what it leaves out taken from `defaults`, and its rate as a ratio.

    Raises:
        ValueError: If a number as the group's rate has no base number to be a ratio of, or an
            anchor is given without a decay.
    """
    if group.frozen:
        return group
    ratio, rate = group.learning_rate_ratio, group.learning_rate
    if isinstance(rate, float):
        ratio, rate = _as_ratio(rate, group, defaults.learning_rate), None
    own_clipping = group.clipnorm or group.global_clipnorm or group.clipvalue
    decay = defaults.weight_decay if group.weight_decay is None else group.weight_decay
    has_decay = decay is not None and decay != 0
    if not has_decay and group.anchor is not None and group.anchor.kind != "zero":
        raise ValueError(
            f"`anchor` must come with a `weight_decay` > 0. Received: anchor in {group.where} "
            f"with weight_decay={decay!r}. Without decay nothing pulls toward the anchor."
        )
    exclusion = group.exclude_from_decay
    return dataclasses.replace(
        group,
        rule=defaults.rule if group.rule is None else group.rule,
        learning_rate=rate,
        learning_rate_ratio=1.0 if ratio is None else ratio,
        weight_decay=decay if has_decay else None,
        anchor=(group.anchor or defaults.anchor or Anchor("zero")) if has_decay else None,
        exclude_from_decay=defaults.exclude_from_decay if exclusion is None else exclusion,
        clipnorm=group.clipnorm if own_clipping else defaults.clipnorm,
        clipvalue=group.clipvalue if own_clipping else defaults.clipvalue,
    )


def check_declared(groups: Sequence[Group], defaults: Defaults) -> None:
    """Refuses, before there is a model, what no model could make right.

    Raises:
        ValueError: If a group's rate has no base to be a ratio of, or an anchor has no decay.
    """
    effective = [effective_group(group, defaults) for group in groups]
    for group in effective:
        own, base = group.learning_rate, defaults.learning_rate
        if isinstance(own, FromBase) and isinstance(base, float):
            check_number(f"{own!r} of {base:g}", float(own.function(base)), where=group.where)
    anchor = defaults.anchor
    decays = defaults.weight_decay or any(group.weight_decay is not None for group in effective)
    if anchor is not None and anchor.kind != "zero" and not decays:
        raise ValueError(
            f'`anchor` must come with a `weight_decay` > 0. Received: anchor="{anchor.kind}" '
            "without decay. Without decay nothing pulls toward the anchor."
        )


def _as_ratio(rate: float, group: Group, base: Any) -> float:
    if not isinstance(base, float):
        raise ValueError(
            "`learning_rate` of a group must not be a number beside a base rate that is a "
            f"schedule or a function. Received: learning_rate={rate:g} in {group.where}, base "
            f"{describe_scalar(base)}. Either give `learning_rate_ratio=`, which follows the base, "
            f"or `learning_rate=kgo.constant({rate:g})`, which does not."
            + (
                f' The rate comes from the instance given as rule: `kgo.rule("{group.rule.label}", '
                "...)` has none."
                if group.rule is not None and group.rule.instance is not None
                else ""
            )
        )
    if base == 0:
        raise ValueError(
            "The base `learning_rate` must be > 0 when a group has a rate of its own. Received: "
            f"learning_rate=0 with learning_rate={rate:g} in {group.where}. A group's rate is the "
            "base times a ratio, and no ratio makes it from 0."
        )
    return rate / base


def resolve(
    groups: Sequence[Group], defaults: Defaults, catalog: VariableCatalog, trainable: Sequence[int]
) -> Plan:
    """Assigns each trainable variable to exactly one group.

    Args:
        groups: The declared groups, with unique names.
        defaults: What the optimizer says for all groups.
        catalog: All variables of the model.
        trainable: Positions in `catalog` of the trainable variables, in the optimizer's order.

    Raises:
        ValueError: If a selector matches nothing, a group is left empty, groups overlap where
            that is an error, a variable is claimed by none where that is an error, or every
            group is frozen.
    """
    order = {position: place for place, position in enumerate(trainable)}
    owners = {
        position: group.name
        for position, group in _assigned(
            (
                (group, _claims(group, catalog, order))
                for group in groups
                if group.selector is not None
            ),
            defaults.overlap,
            lambda first, second: _overlap_message(first, second, catalog, order),
        ).items()
    }
    rest = [position for position in trainable if position not in owners]
    declared = list(groups)
    if rest:
        name = _rest_group(declared, defaults, [catalog.infos[position] for position in rest])
        owners.update(dict.fromkeys(rest, name))

    members: dict[str, list[int]] = {group.name: [] for group in declared}
    for position in trainable:
        members[owners[position]].append(position)
    for group in declared:
        if not members[group.name]:
            raise ValueError(_empty_message(group, defaults))
    if trainable and all(group.frozen for group in declared):
        raise ValueError(
            "At least one group must not be frozen. Received: every trainable variable in a "
            f"frozen group ({', '.join(group.name for group in declared)})."
        )
    moving = {p for group in declared if not group.frozen for p in members[group.name]}
    ratios = _ratio_places(defaults, catalog, moving)
    planned = []
    for group in declared:
        effective = effective_group(group, defaults)
        decayed = _decayed(group, effective, catalog, members[group.name])
        planned.append(
            PlannedGroup(
                effective,
                tuple(
                    _planned_variable(
                        catalog.infos[p], order[p], p in decayed, ratios.get(p), effective
                    )
                    for p in members[group.name]
                ),
            )
        )
    plan = Plan(tuple(planned), defaults, catalog.provisional)
    check_drives(plan)
    return plan


def _claims(group: Group, catalog: VariableCatalog, order: dict[int, int]) -> Iterable[int]:
    try:
        matched = group.selector.resolve(catalog)
    except ValueError as error:
        raise ValueError(f"In {group.where}: {error}") from error
    claimed = [position for position in matched if position in order]
    if claimed:
        return claimed
    if matched:
        shown = _listing(catalog.infos[position].path for position in sorted(matched))
        raise ValueError(
            f"A selector must match at least one trainable variable. Received: {group.where}, "
            f"{group.selector.describe()}, which matches only variables that are not trainable: "
            f"{shown}. Set `trainable = True` on their layer, or leave the group out "
            "and call `optimizer.add_group(group)` when they are; with LoRA, select the layer."
        )
    raise ValueError(
        f"A selector must match at least one trainable variable. Received: {group.where}, "
        f"{group.selector.describe()}, which matches none."
    )


def _ratio_places(
    defaults: Defaults, catalog: VariableCatalog, moving: Collection[int]
) -> dict[int, int]:
    """Returns, per position in `catalog` that some ratio claims, which ratio counts."""

    def claims(ratio: Ratio) -> list[int]:
        try:
            claimed = ratio.selector.resolve(catalog)
        except ValueError as error:
            raise ValueError(f"In {ratio.where}: {error}") from error
        if not claimed:
            raise ValueError(
                f"A selector must match at least one variable. Received: {ratio.where}, which "
                "matches none."
            )
        return sorted(claimed.intersection(moving))

    def message(first: Ratio, second: Ratio) -> str:
        both = sorted(set(claims(first)) & set(claims(second)))
        return (
            f"Ratios must not overlap. Received: {first.where} and {second.where} both "
            f"claim {_listing(catalog.infos[p].path for p in both)}. Take them out "
            f"of one, as in `{first.selector.describe()} - {second.selector.describe()}`, "
            'or say which counts with overlap="first" or overlap="last".'
        )

    pairs = ((ratio, claims(ratio)) for ratio in defaults.ratios)
    assigned = _assigned(pairs, defaults.overlap, message)
    return {position: ratio.place for position, ratio in assigned.items()}


_Claimant = TypeVar("_Claimant")


def _assigned(
    claims: Iterable[tuple[_Claimant, Iterable[int]]],
    overlap: str,
    message: Callable[[_Claimant, _Claimant], str],
) -> dict[int, _Claimant]:
    """Returns which claimant gets each position.

    Raises:
        ValueError: With `message`, if two claim one where that is an error.
    """
    owners: dict[int, _Claimant] = {}
    for claimant, positions in claims:
        for position in positions:
            if position not in owners or overlap == "last":
                owners[position] = claimant
            elif overlap == "error":
                raise ValueError(message(owners[position], claimant))
    return owners


def _rest_group(declared: list[Group], defaults: Defaults, rest: Sequence[VariableInfo]) -> str:
    """Returns the name of the group that takes `rest`, added to `declared` where it is new."""
    if defaults.unclaimed == "error":
        raise ValueError(
            'Every trainable variable must be claimed with unclaimed="error". Received: no group '
            f"for {_listing((info.path for info in rest), most=None)}. Add a group, or use "
            'unclaimed="default" or unclaimed="freeze".'
        )
    if defaults.unclaimed == "freeze":
        name = _unused_name("frozen", declared)
        declared.append(_frozen_rest(name, declared))
        return name
    if not any(group.name == DEFAULT_GROUP for group in declared):
        declared.append(Group(DEFAULT_GROUP))
    elif all(group.selector is not None for group in declared):
        raise ValueError(
            f'The group "{DEFAULT_GROUP}" must have no selector when variables are left for it. '
            f"Received: a selector, and no group for {_listing(info.path for info in rest)}. "
            'Rename the group, or use unclaimed="error" or unclaimed="freeze".'
        )
    return DEFAULT_GROUP


def _frozen_rest(name: str, declared: Sequence[Group]) -> Group:
    claimed = (group.selector for group in declared if group.selector is not None)
    return Group(name, functools.reduce(operator.sub, claimed, everything()), frozen=True)


def _unused_name(name: str, declared: Sequence[Group]) -> str:
    taken = {group.name for group in declared}
    while name in taken:
        name += "_rest"
    return name


def _decayed(
    declared: Group, effective: Group, catalog: VariableCatalog, members: Sequence[int]
) -> set[int]:
    if effective.frozen or effective.weight_decay is None:
        return set()
    exclusion = effective.exclude_from_decay
    if not isinstance(exclusion, Selector):
        return set(members)
    try:
        decayed = set(members) - exclusion.resolve(catalog)
    except ValueError as error:
        raise ValueError(f"In `exclude_from_decay` of {declared.where}: {error}") from error
    if not decayed and declared.weight_decay is not None:
        raise ValueError(
            "A group with a `weight_decay` of its own must have a variable that decays. Received: "
            f"weight_decay={describe_scalar(declared.weight_decay)} in {declared.where}, all of "
            f"whose variables are excluded by {exclusion.describe()}. Pass "
            "`exclude_from_decay=()` to decay them, or leave `weight_decay` out."
        )
    return decayed


def _planned_variable(
    info: VariableInfo, position: int, decayed: bool, ratio: int | None, group: Group
) -> PlannedVariable:
    anchored = decayed and group.anchor is not None and group.anchor.kind != "zero"
    return PlannedVariable(
        position, info.path, info.name, tuple(info.shape), info.dtype, decayed, anchored, ratio
    )


def plan_from_records(
    records: Sequence[dict[str, Any]],
    groups: Sequence[Group],
    defaults: Defaults,
    variables: Sequence[VariableInfo],
    provisional: bool = False,
) -> Plan:
    """Makes a plan again from its records, for variables in the same order.

    Args:
        records: What `Plan.records` gave; `"trainable": False` in one marks a variable that was
            frozen after the optimizer was built, and that need not come.
        groups: The declared groups.
        defaults: What the optimizer says for all groups.
        variables: The trainable variables the optimizer is built with now.
        provisional: Whether the recorded paths are provisional.

    Raises:
        ValueError: If their count, names, shapes or dtypes are not the recorded ones.
    """
    names = dict.fromkeys(record["group"] for record in records)
    if len(variables) != len(records):
        records = [record for record in records if record.get("trainable", True)]
    differences = _record_differences(records, variables)
    if provisional and not differences:
        # Paths of `variable.path` may have lost what is above a layer, but not its name.
        saved = ["/".join(record["path"].split("/")[-2:]) for record in records]
        found = ["/".join(info.path.split("/")[-2:]) for info in variables]
        if saved != found and sorted(saved) == sorted(found):
            raise ValueError(
                "The variables must come in the order that the optimizer was built with, as its "
                f"paths were read without a model: {_listing(saved)}. Received: "
                f"{_listing(found)}. Pass `GroupedOptimizer(model=...)`, which needs no order, or "
                "build it with `model.trainable_variables`."
            )
    if differences:
        raise ValueError(
            "The model must have the trainable variables that the optimizer's config was saved "
            f"with. First differences:\n  {text.first_lines(differences)}"
            "\nCall `optimizer.rebuild(model)` for a model that changed."
        )
    declared = list(groups)
    known = {group.name for group in declared}
    for name in names:
        if name not in known:
            freeze = defaults.unclaimed == "freeze"
            declared.append(_frozen_rest(name, declared) if freeze else Group(name))
    planned = []
    for group in declared:
        effective = effective_group(group, defaults)
        members = tuple(
            _planned_variable(
                dataclasses.replace(variables[i], path=record["path"]),
                i,
                record["decayed"],
                record.get("ratio_index"),
                effective,
            )
            for i, record in enumerate(records)
            if record["group"] == group.name
        )
        planned.append(PlannedGroup(effective, members))
    return Plan(tuple(planned), defaults, provisional)


def _record_differences(
    records: Sequence[dict[str, Any]], variables: Sequence[VariableInfo]
) -> list[str]:
    differences = []
    if len(records) != len(variables):
        differences.append(f"{len(records)} trainable variables were saved, {len(variables)} found")
    for record, info in zip(records, variables, strict=False):
        saved = (record["name"], tuple(record["shape"]), record["dtype"])
        found = (info.name, tuple(info.shape), info.dtype)
        if saved != found:
            differences.append(
                f"{record['path']}: saved as {_signature(*saved)}, found {info.path} "
                f"{_signature(*found)}"
            )
    return differences


def _signature(name: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{name} {dtype}{list(shape)}"


def _overlap_message(
    other: Group, group: Group, catalog: VariableCatalog, order: dict[int, int]
) -> str:
    both = set(_claims(other, catalog, order)) & set(_claims(group, catalog, order))
    paths = _listing(catalog.infos[position].path for position in sorted(both))
    return (
        f"Groups must not overlap. Received: {other.where} ({other.selector.describe()}) and "
        f"{group.where} ({group.selector.describe()}) both claim {paths}. Take them out of one, as "
        f"in `{other.selector.describe()} - {group.selector.describe()}`, or say which wins with "
        'overlap="first" or overlap="last".'
    )


def _empty_message(group: Group, defaults: Defaults) -> str:
    if group.selector is None:
        return (
            f"A group must not be empty. Received: {group.where}, for which the other groups "
            "leave no trainable variable. Leave it out."
        )
    return (
        f"A group must not be empty. Received: {group.where} ({group.selector.describe()}), all "
        f'of whose variables went to other groups by overlap="{defaults.overlap}". Reorder the '
        "groups or leave it out."
    )


def _listing(paths: Iterable[str], most: int | None = text.SHOWN) -> str:
    every = list(paths)
    shown = ", ".join(every[:most])
    return shown if most is None or len(every) <= most else f"{shown} and {len(every) - most} more"
