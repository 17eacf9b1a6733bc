"""State in a store: a mapping from names to arrays, such as a group of an H5 file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_groupopt import wording
from keras_groupopt.state import keys, manifest
from keras_groupopt.state.saved import Saved

MANIFEST = "@manifest"


def write(store: Any, layout: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Writes each entry once, and the manifest with checksums.

    Args:
        store: Where to.
        layout: The manifest.
        entries: Variables or arrays, by key.
    """
    checksums = manifest.Checksums()
    for key, entry in entries.items():
        value = keras.ops.convert_to_numpy(entry)
        checksums.add(key, value)
        store[keys.stored_name(key)] = value
    step = int(keras.ops.convert_to_numpy(entries[keys.ITERATIONS]))
    text = manifest.to_text(manifest.with_checksums(layout, checksums, step))
    store[MANIFEST] = np.frombuffer(text.encode(), dtype="uint8")


def read(store: Any) -> Saved:
    """Returns what `write` wrote, after checking all of it.

    Raises:
        ValueError: If there is no manifest, its format is another one, or anything is damaged.
    """
    found = read_manifest(store)
    checksums = manifest.Checksums()
    values = dict(_read_values(store, found, checksums))
    for name, group in found["groups"].items():
        if group["anchors"] != checksums.of_anchors(name):
            raise _damaged(f'the checksum of the anchors of group "{name}" differs')
    _check_scalars(found, values)
    return Saved(found, values)


def read_manifest(store: Any) -> dict[str, Any]:
    """Returns the manifest in `store`.

    Raises:
        ValueError: If there is none, it is damaged, or its format is another one.
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
    return manifest.from_text(text)


def _read_values(
    store: Any, found: Mapping[str, Any], checksums: manifest.Checksums
) -> Iterator[tuple[str, np.ndarray]]:
    for key, (shape, dtype, checksum) in found["state"].items():
        try:
            value = np.asarray(store[keys.stored_name(key)])
        except KeyError as error:
            raise _damaged(f"its manifest names {key}, which is missing") from error
        except (OSError, RuntimeError) as error:
            raise _damaged(f"{key} cannot be read: {error}") from error
        if list(value.shape) != shape:
            raise _damaged(f"{key} has shape {list(value.shape)}, its manifest says {shape}")
        if manifest.dtype_of(value) != dtype:
            raise _damaged(f"{key} is {manifest.dtype_of(value)}, its manifest says {dtype}")
        checksums.add(key, value)
        if checksums.of[key] != checksum:
            raise _damaged(f"the checksum of {key} differs")
        yield key, value


def _check_scalars(found: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> None:
    """Refuses numbers that no run can go on with."""
    for key in found["declared"]:
        if key in values and not np.isfinite(float(values[key])):
            raise _damaged(f"{key} is {values[key]}")
    if int(values[keys.ITERATIONS]) < 0:
        raise _damaged(f"{keys.ITERATIONS} is {values[keys.ITERATIONS]}")


def _damaged(reason: str) -> ValueError:
    return ValueError(f"The saved optimizer state is damaged: {reason}. Nothing was loaded.")
