"""Checksums of arrays and of a model's weights, since Keras' files have none.

The manifest keeps the checksums of weights by shape and not by name, so that it does not depend on
where Keras puts each layer in a file.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_groupopt.selectors import layer_paths


def bytes_of(array: Any) -> Any:
    """Returns the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view("uint8").data


def checksum_of(array: Any) -> int:
    """Returns a CRC-32 of the values and the dtype, so that a damaged dtype is noticed too."""
    dtype = np.asarray(array).dtype
    # H5 has no low-precision dtypes such as bfloat16.
    name = "" if dtype.kind == "V" else str(dtype)
    return zlib.crc32(bytes_of(array), zlib.crc32(name.encode()))


def weights_of(model: Any) -> dict[str, list[int]]:
    """Returns the checksums of all arrays that a model's layers write, by shape."""
    found: dict[str, list[int]] = {}
    for layer in layer_paths.layers(model):
        store: dict[str, Any] = {}
        try:
            layer.save_own_variables(store)
            arrays = [keras.ops.convert_to_numpy(value) for value in store.values()]
        except Exception:  # a layer may need a store of Keras: its arrays are not checked
            continue
        for array in arrays:
            found.setdefault(_kind(array), []).append(checksum_of(array))
    return found


def differing_weights(saved: Mapping[str, Iterable[int]], arrays: Iterable[Any]) -> list[str]:
    """Returns the shapes for which a file lacks a saved array and holds an unknown one.

    A file may hold more than layers write, and an old Keras leaves out layers in nested lists.
    Neither alone means damage.

    Args:
        saved: What `weights_of` returned.
        arrays: The arrays in the file.
    """
    found: dict[str, collections.Counter[int]] = {}
    for array in arrays:
        found.setdefault(_kind(array), collections.Counter())[checksum_of(array)] += 1
    wrong = []
    for kind, checksums in saved.items():
        wanted, there = collections.Counter(checksums), found.get(kind, collections.Counter())
        if wanted - there and there - wanted:
            wrong.append(kind)
    return wrong


def _kind(array: Any) -> str:
    # The dtype is left out, since it may be the part that is damaged.
    return str(list(array.shape))
