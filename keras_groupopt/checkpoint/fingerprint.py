"""Protects state that Keras restores without asking the optimizer.

`model.set_state_tree`, and with it Orbax, assigns by `variable.path`. `optimizer.set_weights` and
Keras' LossScaleOptimizer assign by position. Therefore the path of each variable is its key of
saved state, and one variable, the fingerprint, refuses values of another layout.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.checkpoint import keys
from keras_groupopt.checkpoint.manifest import manifest_of
from keras_groupopt.checkpoint.resuming import present_terms
from keras_groupopt.step.built import BuiltOptimizer

NOT_BUILT = 0


class Fingerprint(keras.Variable):
    """Holds a checksum of an optimizer's groups and state, and refuses any other checksum."""

    def __init__(self) -> None:
        super().__init__(NOT_BUILT, dtype="int32", trainable=False, name="layout")
        self._digest = NOT_BUILT

    def stand_for(self, digest: int) -> None:
        """Sets the checksum, once the optimizer is built."""
        self._digest = digest
        # Keras' LossScaleOptimizer builds its inner optimizer while TensorFlow compiles the step.
        with backend.outside_compiled_step():
            super().assign(digest)

    def check(self, value: Any) -> bool:
        """Returns whether `value` is to be assigned.

        Raises:
            ValueError: If it is the checksum of another layout, unless `kgo.resuming` allows that.
        """
        try:
            found = int(keras.ops.convert_to_numpy(value))
        except Exception:  # in a compiled step there is no number; it came from this variable
            return True
        if found == self._digest:
            return True
        terms = present_terms()
        if not terms.strict or terms.renames:
            return False
        if self._digest == NOT_BUILT:
            raise ValueError(
                "The optimizer must be built before values are restored by position or from a "
                "tree. Received: one that is not built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        raise ValueError(
            "The state must have the layout of this optimizer: its groups, rules, layer paths and "
            "shapes, in their order. Received: state of another layout, restored by position or "
            "from a tree; values before it may have been assigned. Make the groups as they were, "
            "or restore a `.keras` or `.weights.h5` file, whose error names the differences."
        )

    def assign(self, value: Any) -> Any:
        """Assigns the checksum of this layout."""
        return super().assign(value) if self.check(value) else self.value


def protect_early(optimizer: Any) -> Fingerprint:
    """Gives an optimizer's first variables the paths of their keys, and returns a fingerprint."""
    fingerprint = Fingerprint()
    _set_paths(optimizer, {"@layout": fingerprint, **keys.first_entries(optimizer)})
    return fingerprint


def protect(optimizer: Any, built: BuiltOptimizer) -> int:
    """Gives all state the paths of its keys; returns a checksum of groups and state.

    Args:
        optimizer: The optimizer, with all its variables.
        built: What it has built.
    """
    entries = keys.entries_of(optimizer, built)
    _set_paths(optimizer, entries)
    manifest = manifest_of(entries, built)
    # The order counts, since `set_weights` has nothing but positions.
    text = json.dumps(
        [
            {group: spec["class"] for group, spec in manifest["groups"].items()},
            {k: spec for k, spec in manifest["state"].items() if not keys.parse(k).is_optional},
        ]
    )
    return zlib.crc32(text.encode()) & 0x7FFFFFFF or 1


def _set_paths(optimizer: Any, entries: Mapping[str, Any]) -> None:
    # An automatic name ends in a number, which differs between processes.
    name = re.sub(r"^(grouped_optimizer)_\d+$", r"\1", str(optimizer.name))
    for key, variable in entries.items():
        compat.set_path(variable, f"{name}/{key}")
