"""Names of state, the manifest beside it, and its transfer to and from a store.

State is keyed by `group/layer path/slot`, so a file says what each array is and can be checked
against the optimizer that reads it. Names that start with `@` are the optimizer's own:
`@iterations`, `@learning_rate`, `@learning_rate_ratio/<group>`, `@weight_decay/<group>`,
`<group>/@rule/<name>`, `<group>/<layer path>/@anchor` and `@manifest`, a JSON text as bytes. In a
store `/` is written `|`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt import config, wording
from keras_groupopt.parts import Parts
from keras_groupopt.plan import Plan

FORMAT = 1
MANIFEST = "@manifest"
ITERATIONS = "@iterations"
LEARNING_RATE = "@learning_rate"


def entries_of(optimizer: Any, parts: Parts) -> dict[str, Any]:
    """Returns every variable to save, by key; each once."""
    own = {ITERATIONS: optimizer.iterations}
    if isinstance(optimizer.learning_rate, keras.Variable):
        own[LEARNING_RATE] = optimizer.learning_rate
    return own | parts.entries()


def manifest_of(entries: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns the manifest: what is saved, under which names, shapes and dtypes."""
    return {
        "format": FORMAT,
        "rules": {p.name: p.group.rule.label for p in plan.groups if p.group.rule is not None},
        "declared": config.declared_scalars(plan),
        "provisional": plan.provisional,
        "state": {key: [list(v.shape), _dtype(v)] for key, v in entries.items()},
    }


def _dtype(variable: Any) -> str:
    return keras.backend.standardize_dtype(variable.dtype)


def stored_name(key: str) -> str:
    """Returns the name under which a store holds `key`: flat, as each H5 group costs a kilobyte.

    `/` becomes `|`; no two keys get one name.
    """
    return key.replace("%", "%25").replace("|", "%7C").replace("/", "|")


def write(store: Any, entries: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Writes each entry once, and the manifest."""
    text = json.dumps(manifest, separators=(",", ":"))
    store[MANIFEST] = np.frombuffer(text.encode(), dtype="uint8")
    for key, variable in entries.items():
        store[stored_name(key)] = keras.ops.convert_to_numpy(variable)


def read_manifest(store: Any) -> dict[str, Any]:
    """Returns the manifest in `store`.

    Raises:
        ValueError: If there is none, it cannot be read, or its format is newer.
    """
    try:
        text = bytes(np.asarray(store[MANIFEST], dtype="uint8"))
    except KeyError as error:
        raise ValueError(
            "The saved optimizer state must come from a GroupedOptimizer. Received: state "
            "without a manifest, with the entries "
            f"{', '.join(sorted(store.keys())[: wording.SHOWN])}. It was saved by another "
            "optimizer: compile with that one to load it, or load the weights alone into a model "
            "that is not compiled."
        ) from error
    try:
        manifest = json.loads(text)
        if not isinstance(manifest, dict):
            raise ValueError(f"it is of type {type(manifest).__name__}")
    except ValueError as error:
        raise ValueError(f"The manifest of the optimizer state is damaged: {error}.") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"The optimizer state must be of format {FORMAT}. Received: format "
            f"{manifest.get('format')!r}. Upgrade keras_groupopt to read it."
        )
    return manifest


def check_layout(
    manifest: Mapping[str, Any],
    expected: Mapping[str, Any],
    resting: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Refuses state of another layout.

    Args:
        manifest: The saved manifest.
        expected: The manifest of the optimizer that reads.
        resting: Records of variables frozen when the optimizer was saved, whose state is
            left out where the optimizer that reads was built without them.

    Raises:
        ValueError: With the first differences, if rules, names, shapes or dtypes differ.
    """
    differences = list(_differences(manifest, expected, resting))
    if not differences:
        return
    raise ValueError(
        "The saved optimizer state must have the layout of this optimizer. Nothing was loaded. "
        f"First differences:\n  {wording.first_lines(differences)}"
        "\nMake the groups as they were, or load the weights into a model that is not compiled."
    )


def _differences(
    manifest: Mapping[str, Any],
    expected: Mapping[str, Any],
    resting: Sequence[Mapping[str, Any]],
) -> Iterable[str]:
    saved_rules, rules = manifest["rules"], expected["rules"]
    for group in {**saved_rules, **rules}:
        if group not in rules:
            yield f'group "{group}" is saved, but not in this optimizer'
        elif group not in saved_rules:
            yield f'group "{group}" is in this optimizer, but not saved'
        elif rules[group] != saved_rules[group]:
            yield f'group "{group}": saved with rule {saved_rules[group]}, now {rules[group]}'
    saved, wanted = manifest["state"], expected["state"]
    # Scalars are declared values, not layout: one that is new or gone is not a difference.
    absent = {f"{record['group']}/{record['path']}" for record in resting}
    missing = [key for key in wanted if key not in saved and not _may_be_absent(key)]
    extra = [
        key
        for key in saved
        if key not in wanted and not _may_be_absent(key) and key.rpartition("/")[0] not in absent
    ]
    for key in missing:
        near = difflib.get_close_matches(key, extra, n=1)
        yield f"{key} is not saved" + (f" (nearest: {near[0]})" if near else "")
    for key in extra:
        yield f"{key} is saved, but not in this optimizer"
    for key, (shape, dtype) in wanted.items():
        if key in saved and [list(saved[key][0]), saved[key][1]] != [list(shape), dtype]:
            yield (
                f"{key}: saved as {saved[key][1]}{list(saved[key][0])}, now {dtype}{list(shape)}"
            )


def _may_be_absent(key: str) -> bool:
    """Whether a key is no part of the layout, as what it belongs to can be turned on or off."""
    return key.startswith("@") or key.endswith(("/@average", "/@accumulator"))


def read(store: Any, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns every saved array, checked against the manifest before anything is assigned.

    Raises:
        ValueError: If an array is missing or has another shape.
    """
    values = {}
    for key, (shape, _) in manifest["state"].items():
        try:
            value = np.asarray(store[stored_name(key)])
        except KeyError as error:
            raise ValueError(
                f"The saved optimizer state is damaged: its manifest names {key}, which is "
                "missing. Nothing was loaded."
            ) from error
        if list(value.shape) != list(shape):
            raise ValueError(
                f"The saved optimizer state is damaged: {key} has shape {list(value.shape)}, its "
                f"manifest says {list(shape)}. Nothing was loaded."
            )
        values[key] = value
    return values


def assign_early(
    optimizer: Any, declared: Any, manifest: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Gives an optimizer that is not built the step and the base rate, which are read before that.

    A callback that changes the rate does so before the first step, which may be what builds.

    Args:
        optimizer: The optimizer.
        declared: Its declared base rate.
        manifest: The saved manifest.
        values: The saved values.

    Returns:
        The values to assign when it is built: without the base rate, which may change until then.
    """
    optimizer.iterations.assign(values[ITERATIONS])
    later = dict(values)
    rate = later.pop(LEARNING_RATE, None)
    if rate is not None and config.declared_as(declared) == manifest["declared"][LEARNING_RATE]:
        optimizer.learning_rate = rate
    return later


def write_pending(
    store: Any, optimizer: Any, manifest: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Writes state that was read into an optimizer that is not built yet, as it was read."""
    scalars = {ITERATIONS: optimizer.iterations}
    if LEARNING_RATE in manifest["state"]:
        scalars[LEARNING_RATE] = optimizer.learning_rate
    write(store, {**values, **scalars}, manifest)


def assign(
    optimizer: Any,
    parts: Parts,
    manifest: Mapping[str, Any],
    values: Mapping[str, Any],
    resting: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Gives an optimizer the state that was read, after checking that it fits.

    Args:
        optimizer: The optimizer.
        parts: Its built parts.
        manifest: The saved manifest.
        values: The saved values.
        resting: As in `check_layout`.

    Raises:
        ValueError: If the layout is another one. Nothing is assigned then.
    """
    entries = entries_of(optimizer, parts)
    expected = manifest_of(entries, parts.plan)
    check_layout(manifest, expected, resting)
    kept = config.scalars_to_keep(manifest["declared"], expected["declared"])
    for key, variable in entries.items():
        if key in values and key not in kept:
            variable.assign(values[key])
    parts.anchors_are_due = False
    if parts.averages is not None:
        if "@averages_made" in values:
            parts.averages.settled = True
        else:
            parts.averages.restart(int(values[ITERATIONS]))
    if parts.window is not None:
        parts.window.weighted = None
        if "@micro_batches" not in values:
            parts.window.reset(parts.accumulators)
    for group in parts.groups:
        if not group.frozen:
            group.rule.iterations.assign(values[ITERATIONS])
            group.anchors_unknown = False
