"""State as a plain nested dict of arrays, by group, layer path and slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_groupopt.checkpoint import keys, manifest
from keras_groupopt.checkpoint.saved import Saved


def to_nested(saved: Saved) -> dict[str, Any]:
    """Returns `{"scalars": {…}, "groups": {group: {layer path: {slot: array}}}, "manifest": …}`."""
    scalars: dict[str, Any] = {}
    groups: dict[str, Any] = {name: {} for name in saved.manifest["groups"]}
    for key, value in saved.values.items():
        name = keys.parse(key)
        if name.owner is None:
            scalars[key] = value
        else:
            groups[str(name.group)].setdefault(name.owner, {})[name.slot] = value
    return {"manifest": dict(saved.manifest), "scalars": scalars, "groups": groups}


def from_nested(state: Any) -> Saved:
    """Returns the state that `to_nested` was given, after checking it.

    Raises:
        TypeError: If it is not such a dict.
        ValueError: If arrays are missing, too many, or not what the manifest says.
    """
    if not isinstance(state, Mapping) or not {"manifest", "scalars", "groups"} <= set(state):
        raise TypeError(
            "`state` must be a dict that `optimizer.state_dict()` returned, with the entries "
            f'"manifest", "scalars" and "groups". Received: {_shown(state)}.'
        )
    layout = manifest.checked(state["manifest"])
    values = dict(_flattened(state))
    extra = [key for key in values if key not in layout["state"]]
    if extra:
        raise _wrong(f"{extra[0]}, which its manifest does not name")
    for key, (shape, dtype, *_) in layout["state"].items():
        if key not in values:
            raise _wrong(f"no {key}, which its manifest names")
        found = values[key]
        if list(found.shape) != list(shape) or manifest.dtype_of(found) != dtype:
            raise _wrong(
                f"{key} as {manifest.dtype_of(found)}{list(found.shape)}, where its manifest says "
                f"{dtype}{list(shape)}"
            )
    manifest.check_scalars(layout, values)
    return Saved(layout, {key: values[key] for key in layout["state"]})


def _flattened(state: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    try:
        yield from ((key, _array(key, value)) for key, value in state["scalars"].items())
        for group, owners in state["groups"].items():
            for owner, slots in owners.items():
                for slot, value in slots.items():
                    key = str(keys.Key(group, owner, slot))
                    yield key, _array(key, value)
    except AttributeError as error:
        raise TypeError(
            '`state` must hold dicts: "scalars" by name, and "groups" by group, layer path and '
            f"slot. Received: {error}."
        ) from error


def _array(key: str, value: Any) -> np.ndarray:
    array = np.array(value, copy=True)
    if array.dtype == object:
        raise TypeError(f"`state` must hold arrays. Received: {_shown(value)} for {key}.")
    return array


def _shown(value: Any) -> str:
    names = f" with the entries {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
    return f"an object of type {type(value).__name__}{names}"


def _wrong(what: str) -> ValueError:
    return ValueError(
        f"`state` must be as `optimizer.state_dict()` returned it. Received: {what}. No state was "
        "loaded."
    )
