"""Checksums of a model's weights, kept in the manifest: Keras' files have none.

They are of the arrays that layers write, by shape, and not by name: where Keras puts
which layer is its own business.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_groupopt.checkpoint.checksums import checksum_of
from keras_groupopt.selectors import layer_paths


def checksums_of(model: Any) -> dict[str, list[int]]:
    """Returns the checksums of all that a model's layers write, by shape."""
    found: dict[str, list[int]] = {}
    for layer in layer_paths.layers(model):
        store: dict[str, Any] = {}
        try:
            layer.save_own_variables(store)
            arrays = [keras.ops.convert_to_numpy(value) for value in store.values()]
        except Exception:  # a layer may want a store of Keras'; its arrays go unchecked
            continue
        for array in arrays:
            found.setdefault(_kind(array), []).append(checksum_of(array))
    return found


def differing(saved: Mapping[str, Iterable[int]], arrays: Iterable[Any]) -> list[str]:
    """Returns the shapes of which a saved array is gone and an unknown one is there.

    A file may hold more than layers write, and an old Keras leaves out layers in nested lists:
    neither alone is damage.

    Args:
        saved: What `checksums_of` returned.
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
    # Without the dtype, which may be what is damaged.
    return str(list(array.shape))
