"""State in a store: a mapping from names to arrays, such as a group of an H5 file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_groupopt.base import text
from keras_groupopt.checkpoint import checksums, keys, manifest
from keras_groupopt.checkpoint.saved import Saved
from keras_groupopt.step import state_keys

MANIFEST = "@manifest"


def write(
    store: Any, layout: Mapping[str, Any], entries: Mapping[str, Any], model: Any = None
) -> None:
    """Writes each entry once, and the manifest with checksums.

    Args:
        store: Where to write.
        layout: The manifest.
        entries: Variables or arrays, by key.
        model: The model whose weights go into the same file, for their checksums. Default: `None`.
    """
    sums = manifest.Checksums()
    for key, entry in entries.items():
        value = keras.ops.convert_to_numpy(entry)
        sums.add(key, value)
        store[keys.stored_name(key)] = value
    step = int(keras.ops.convert_to_numpy(entries[state_keys.ITERATIONS]))
    if model is not None:
        layout = {**layout, "weights": checksums.weights_of(model)}
    written = manifest.to_text(manifest.with_checksums(layout, sums, step))
    store[MANIFEST] = np.frombuffer(written.encode(), dtype="uint8")


def read(store: Any) -> Saved:
    """Returns what `write` wrote, after checking all of it.

    Raises:
        ValueError: If there is no manifest, it has another format, or anything is damaged.
    """
    found = read_manifest(store)
    sums = manifest.Checksums()
    values = dict(_read_values(store, found, sums))
    for name, group in found["groups"].items():
        if group.get("anchors") != sums.of_anchors(name):
            raise manifest.damaged(f'the checksum of the anchors of group "{name}" differs')
    manifest.check_scalars(found, values)
    return Saved(found, values)


def read_manifest(store: Any) -> dict[str, Any]:
    """Returns the manifest in `store`.

    Raises:
        ValueError: If there is none, it is damaged, or it has another format.
    """
    try:
        found = bytes(np.asarray(store[MANIFEST], dtype="uint8"))
    except KeyError as error:
        raise ValueError(
            "The saved optimizer state must come from a GroupedOptimizer. Received: state "
            "without a manifest, with the entries "
            f"{', '.join(sorted(store.keys())[: text.SHOWN])}. It was saved by another "
            "optimizer: load it with that one and convert it with `kgo.from_optimizer("
            "model.optimizer, model)`, or take the weights alone: `kgo.load_weights(model, path, "
            "optimizer=False)`."
        ) from error
    return manifest.from_text(found)


def _read_values(
    store: Any, found: Mapping[str, Any], sums: manifest.Checksums
) -> Iterator[tuple[str, np.ndarray]]:
    for key, (shape, dtype, *saved_sums) in found["state"].items():
        try:
            value = _in_dtype(np.asarray(store[keys.stored_name(key)]), dtype)
        except KeyError as error:
            raise manifest.damaged(f"its manifest names {key}, which is missing") from error
        except (OSError, RuntimeError) as error:
            raise manifest.damaged(f"{key} cannot be read: {error}") from error
        found_as = [list(value.shape), manifest.dtype_of(value)]
        if found_as != [shape, dtype]:
            raise manifest.damaged(
                f"{key} has shape {found_as[0]} and dtype {found_as[1]}, its manifest says "
                f"{shape} and {dtype}"
            )
        sums.add(key, value)
        if saved_sums != [sums.of[key]]:
            raise manifest.damaged(f"the checksum of {key} differs")
        yield key, value


def in_known_dtype(array: Any) -> np.ndarray:
    """Returns an array. If NumPy cannot name its dtype in a file, it is of unsigned integers."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}") if _is_unknown(array.dtype) else array


def _in_dtype(array: np.ndarray, name: str) -> np.ndarray:
    """Returns an array in the dtype that it had when it was saved.

    If NumPy does not know that dtype (bfloat16), a `.npz` file holds unsigned integers, and an H5
    file holds bytes without a dtype.
    """
    with contextlib.suppress(TypeError):
        dtype = np.dtype(name)
        is_alike = array.dtype.kind in "uV" and array.dtype.itemsize == dtype.itemsize
        return array.view(dtype) if is_alike and _is_unknown(dtype) else array
    return array


def _is_unknown(dtype: Any) -> bool:
    return dtype.kind == "V" or not hasattr(np, dtype.name)
