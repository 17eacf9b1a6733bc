"""State that is carried over within one process, in which variables keep their identities."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_groupopt.checkpoint import keys
from keras_groupopt.checkpoint.saved import Saved
from keras_groupopt.plan.plan import Plan
from keras_groupopt.step import averages, state_keys
from keras_groupopt.step.built import BuiltOptimizer


class Copies(collections.UserDict[str, Any]):
    """Variables by key, whose values are copied each time they are read.

    No two variables that get such values share a buffer, since JAX refuses to donate one buffer
    twice. For example, several rules may take one counter.
    """

    def __getitem__(self, key: str) -> Any:
        variable = self.data[key]
        if not variable.shape:
            return np.array(keras.ops.convert_to_numpy(variable))
        return keras.ops.copy(keras.ops.convert_to_tensor(variable))


def carried(
    saved: Saved, old: BuiltOptimizer, present: Mapping[int, str], plan: Plan | None
) -> tuple[Saved, list[str]]:
    """Returns state under the paths that its variables have now, and the keys that are left out.

    If none of the old variables is among the present ones, the model was made anew, and paths stay.
    If some are present, the others are gone, even if a new variable has the path of one of them. An
    anchor is left out if the plan has another kind of anchor or other values for it, or if its
    values are not known.

    Args:
        saved: The state.
        old: The built optimizer it was taken from.
        present: The layer path of each variable of the model now, by identity.
        plan: The plan that the state is given to, or `None` if it is not known.
    """
    paths = old.paths
    same_model = any(identity in present for identity in paths)
    moved = {
        path: present.get(identity, None if same_model else path)
        for identity, path in paths.items()
    }
    kinds = {} if plan is None else _anchor_kinds(plan)
    before = _anchor_kinds(old.plan)
    unknown = {group.name for group in old.groups if group.anchors_unknown}
    values, state, left_out = {}, {}, []
    layers = {_layer_of(path): _layer_of(new) for path, new in moved.items() if new is not None}
    for key, spec in saved.manifest["state"].items():
        name = keys.parse(key)
        statistic = averages.statistics_path(key)
        if statistic is not None:
            # A statistic has no identity here. It goes with the weights of its layer.
            layer, _, last = statistic.rpartition("/")
            present_path = f"{layers.get(layer, layer)}/{last}".strip("/")
            present_key = averages.statistics_key(present_path)
        else:
            owner = moved.get(str(name.owner), name.owner)
            is_gone = owner is None and name.owner is not None
            has_other_anchor = name.slot == state_keys.ANCHOR and (
                name.group in unknown
                or (owner in kinds and kinds[owner] != before[str(name.owner)])
            )
            if is_gone or has_other_anchor:
                left_out.append(key)
                continue
            present_key = str(name._replace(owner=owner))
        state[present_key], values[present_key] = spec, saved.values[key]
    groups = {
        name: {
            **group,
            "variables": {
                moved[path]: spec
                for path, spec in group["variables"].items()
                if moved[path] is not None
            },
        }
        for name, group in saved.manifest["groups"].items()
    }
    return Saved({**saved.manifest, "groups": groups, "state": state}, values), left_out


def _layer_of(path: str) -> str:
    return path.rpartition("/")[0]


def _anchor_kinds(plan: Plan) -> dict[str, Any]:
    """Returns each variable's kind of anchor, by path. Each set of given values is its own kind."""
    return {
        variable.path: (
            id(planned.group.anchor.source)
            if planned.group.anchor.source is not None
            else planned.group.anchor.kind
        )
        for planned in plan.groups
        for variable in planned.variables
        if planned.group.anchor is not None
    }
