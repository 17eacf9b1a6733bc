"""The manifest beside saved state: what was saved, by which rules, for which variables."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_groupopt.checkpoint import keys
from keras_groupopt.checkpoint.checksums import bytes_of, checksum_of
from keras_groupopt.checkpoint.declared import declared_as, declared_scalars
from keras_groupopt.plan.plan import PlannedGroup
from keras_groupopt.plan.rule_spec import RuleSpec
from keras_groupopt.rules.registry import rule_class, type_of
from keras_groupopt.step import state_keys
from keras_groupopt.step.built import BuiltOptimizer

FORMAT = 2


def manifest_of(entries: Mapping[str, Any], built: BuiltOptimizer) -> dict[str, Any]:
    """Returns the manifest of an optimizer, without checksums.

    Args:
        entries: Its state variables, by key.
        built: Its groups, and what they share.
    """
    plan, rule = built.plan, built.gradient_state
    declared = {} if rule is None else rule.declared()
    return {
        "format": FORMAT,
        "keras_groupopt": _version(),
        "provisional": plan.provisional,
        "groups": {planned.name: _group(planned) for planned in plan.groups},
        "declared": declared_scalars(plan)
        | {key: declared_as(value) for key, value in declared.items()}
        | ({} if rule is None else {state_keys.GRADIENT_RULE: rule.wanted.name}),
        "state": {key: [list(v.shape), dtype_of(v)] for key, v in entries.items()},
    }


def _group(planned: PlannedGroup) -> dict[str, Any]:
    rule = planned.group.rule
    return {
        "rule": None if rule is None else rule.label,
        "class": None if rule is None else _class_name(rule, planned.group.where),
        "variables": {v.path: [list(v.shape), v.dtype] for v in planned.variables},
    }


def _class_name(rule: RuleSpec, where: str) -> str:
    """Returns the name a rule's class is registered under, however the rule was given."""
    target = rule.target
    if isinstance(target, str):
        target = rule_class(rule, where)
    elif not isinstance(target, type):
        target = type_of(target)
    return str(keras.saving.get_registered_name(target))


def _version() -> str:
    # The package imports this module, which therefore cannot import the package.
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def dtype_of(value: Any) -> str:
    """Returns the name of a variable's or an array's dtype, the same on all backends."""
    if isinstance(value, keras.Variable):
        # JAX without 64 bits holds variables of float64 in float32.
        value = value.value
    return str(keras.backend.standardize_dtype(value.dtype))


class Checksums:
    """Checksums of arrays, taken one array at a time."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self._anchors: dict[str | None, Any] = {}

    def add(self, key: str, value: Any) -> None:
        """Takes the checksums of one array."""
        self.of[key] = checksum_of(value)
        name = keys.parse(key)
        if name.slot == state_keys.ANCHOR:
            self._anchors.setdefault(name.group, hashlib.sha256()).update(bytes_of(value))

    def of_anchors(self, group: str) -> str | None:
        """Returns the SHA-256 of a group's anchors, in order, or `None` if it keeps none."""
        digest = self._anchors.get(group)
        return None if digest is None else digest.hexdigest()


def with_checksums(
    manifest: Mapping[str, Any], checksums: Checksums, iterations: int
) -> dict[str, Any]:
    """Returns a manifest with the checksums of the arrays beside it and of itself.

    Args:
        manifest: The manifest.
        checksums: Those of the arrays.
        iterations: The optimizer step.
    """
    whole = {
        **{name: value for name, value in manifest.items() if name != "checksum"},
        "iterations": iterations,
        "groups": {
            name: {**group, "anchors": checksums.of_anchors(name)}
            for name, group in manifest["groups"].items()
        },
        "state": {key: [*spec[:2], checksums.of[key]] for key, spec in manifest["state"].items()},
    }
    return {**whole, "checksum": _text_checksum(whole)}


def _text_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(to_text(manifest).encode())


def to_text(manifest: Mapping[str, Any]) -> str:
    """Returns a manifest as JSON."""
    return json.dumps(manifest, separators=(",", ":"), allow_nan=False)


def from_text(text: bytes) -> dict[str, Any]:
    """Returns the manifest in a JSON text, after checking it.

    Raises:
        ValueError: If it is damaged, or of another format.
    """
    try:
        manifest = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged(error) from error
    _check_format(manifest)
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    if manifest.get("checksum") != _text_checksum(rest):
        raise _damaged("its checksum differs")
    return checked(manifest)


def _check_format(manifest: Any) -> None:
    if not isinstance(manifest, dict):
        raise _damaged(f"it is of type {type(manifest).__name__}")
    found = manifest.get("format")
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        raise ValueError(
            f"The optimizer state must be of format {FORMAT}. Received: format {found!r}. "
            + (
                "Upgrade keras_groupopt to read it."
                if newer
                else "Only files of released versions can be read."
            )
        )


def checked(manifest: Any) -> dict[str, Any]:
    """Returns a manifest, after checking that all parts are there and have their types.

    Raises:
        ValueError: If a part is missing or of another type, or the format is another one.
    """
    _check_format(manifest)
    if not _is_whole(manifest):
        raise _damaged("it is not one of keras_groupopt")
    return dict(manifest)


def check_scalars(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Checks the numbers without which a run cannot go on.

    Raises:
        ValueError: If a rate, ratio or decay is not finite, or the step is negative.
    """
    for key in manifest["declared"]:
        if key in values and not np.isfinite(float(values[key])):
            raise damaged(f"{key} is {values[key]}")
    if int(values[state_keys.ITERATIONS]) < 0:
        raise damaged(f"{state_keys.ITERATIONS} is {values[state_keys.ITERATIONS]}")


def damaged(reason: str) -> ValueError:
    """Returns the error for state that changed after it was written."""
    return ValueError(f"The saved optimizer state is damaged: {reason}. No state was loaded.")


def _is_whole(manifest: Mapping[str, Any]) -> bool:
    """Returns whether everything that is read from a manifest later is there, with its type."""
    match manifest:
        case {"groups": dict(groups), "state": dict(state), "declared": dict()}:
            return (
                state_keys.ITERATIONS in state
                and all(map(_is_array, state.values()))
                and all(map(_is_group, groups.values()))
            )
    return False


def _is_group(group: Any) -> bool:
    match group:
        case {"rule": _, "class": _, "variables": dict(variables)}:
            return all(map(_is_array, variables.values()))
    return False


def _is_array(spec: Any) -> bool:
    match spec:
        case [[*sizes], str(), *_]:
            return all(isinstance(size, int) for size in sizes)
    return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"it holds {constant}")


def _damaged(reason: Any) -> ValueError:
    return ValueError(f"The manifest of the optimizer state is damaged: {reason}.")
