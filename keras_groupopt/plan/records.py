"""A plan made again from its records, for a model that was rebuilt from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_groupopt.base import text
from keras_groupopt.plan.effective import effective_group
from keras_groupopt.plan.group import Group
from keras_groupopt.plan.plan import Defaults, Plan, PlannedGroup, planned_variable
from keras_groupopt.plan.resolve import frozen_rest
from keras_groupopt.selectors.variable_info import VariableInfo


def plan_from_records(
    records: Sequence[dict[str, Any]],
    groups: Sequence[Group],
    defaults: Defaults,
    variables: Sequence[VariableInfo],
    provisional: bool = False,
) -> Plan:
    """Makes a plan again from its records, for variables in the same order.

    Args:
        records: What `Plan.records` returned. A record with `"trainable": False` is of a variable
            that was frozen after the optimizer was built, and that may be missing.
        groups: The declared groups.
        defaults: The options of the optimizer for all groups.
        variables: The trainable variables that the optimizer is built with now.
        provisional: Whether the recorded paths are provisional. Default: False.

    Raises:
        ValueError: If the count, names, shapes or dtypes of the variables differ from the records.
    """
    names = dict.fromkeys(record["group"] for record in records)
    if len(variables) != len(records):
        records = [record for record in records if record.get("trainable", True)]
    _check_variables(records, variables, provisional)
    declared = list(groups)
    known = {group.name for group in groups}
    for name in names:
        if name not in known:
            freeze = defaults.unclaimed == "freeze"
            declared.append(frozen_rest(name, declared) if freeze else Group(name))
    planned = []
    # Groups without records were waiting for frozen layers.
    waiting = tuple(group for group in groups if group.name not in names)
    for group in declared:
        if group.name not in names:
            continue
        effective = effective_group(group, defaults)
        members = (
            planned_variable(
                dataclasses.replace(variables[i], path=record["path"]),
                i,
                effective,
                decayed=record["decayed"],
                ratio_index=record.get("ratio_index"),
            )
            for i, record in enumerate(records)
            if record["group"] == group.name
        )
        planned.append(PlannedGroup(effective, tuple(members)))
    return Plan(tuple(planned), defaults, provisional, waiting=waiting)


def _check_variables(
    records: Sequence[dict[str, Any]], variables: Sequence[VariableInfo], provisional: bool
) -> None:
    if records and not variables:
        raise ValueError(
            "`build` needs the trainable variables that the optimizer's config was saved with. "
            "Received: none, as from Keras' `load_model` of a legacy `.h5` file. Save the model "
            "as `.keras`, or load the file with `compile=False` and compile the model anew; the "
            "optimizer state in it cannot be used."
        )
    differences = []
    if len(records) != len(variables):
        differences.append(f"{len(records)} trainable variables were saved, {len(variables)} found")
    for record, info in zip(records, variables, strict=False):
        saved = f"{record['name']} {record['dtype']}{list(record['shape'])}"
        found = f"{info.name} {info.dtype}{list(info.shape)}"
        if saved != found:
            differences.append(f"{record['path']}: saved as {saved}, found {info.path} {found}")
    if differences:
        raise ValueError(
            "The model must have the trainable variables that the optimizer's config was saved "
            f"with. First differences:\n  {text.first_lines(differences)}"
            "\nCall `optimizer.rebuild(model)` for a model that changed."
        )
    if not provisional:
        return
    # Provisional paths may lack the parents of a layer, but not its name.
    expected = ["/".join(record["path"].split("/")[-2:]) for record in records]
    received = ["/".join(info.path.split("/")[-2:]) for info in variables]
    if expected != received and sorted(expected) == sorted(received):
        raise ValueError(
            "The variables must come in the order that the optimizer was built with, as its paths "
            f"were read without a model: {text.listing(expected)}. Received: "
            f"{text.listing(received)}. Pass `GroupedOptimizer(model=...)`, which needs no order, "
            "or build it with `model.trainable_variables`."
        )
