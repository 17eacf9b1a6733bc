"""Protects state that Keras restores without asking the optimizer.

`model.set_state_tree`, and with it Orbax, assigns by `variable.path`; `optimizer.set_weights` and
Keras' LossScaleOptimizer assign by position. Therefore variables have the keys of saved state as
their paths, and one variable, the fingerprint, refuses values of another layout.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.checkpoint import keys
from keras_groupopt.checkpoint.manifest import manifest_of
from keras_groupopt.checkpoint.resuming import present_terms
from keras_groupopt.step import state_keys
from keras_groupopt.step.built import BuiltOptimizer

NOT_BUILT = 0


class Fingerprint(keras.Variable):
    """Holds a checksum of an optimizer's groups and state, and refuses another one."""

    def __init__(self) -> None:
        super().__init__(NOT_BUILT, dtype="int32", trainable=False, name="layout")
        self._digest = NOT_BUILT

    def stand_for(self, digest: int) -> None:
        """Sets the checksum, when the optimizer is built."""
        self._digest = digest
        # Keras' LossScaleOptimizer builds while TensorFlow compiles the step.
        with backend.outside_compiled_step():
            super().assign(digest)

    def check(self, value: Any) -> bool:
        """Returns whether `value` is to be assigned.

        Raises:
            ValueError: If it is the checksum of another layout, unless `kgo.resuming` allows that.
        """
        try:
            found = int(keras.ops.convert_to_numpy(value))
        except Exception:  # a value in a compiled step came from this variable
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
    compat.set_path(fingerprint, f"{_name(optimizer)}/@layout")
    compat.set_path(optimizer.iterations, f"{_name(optimizer)}/{state_keys.ITERATIONS}")
    base = compat.rate_variable(optimizer)
    if base is not None:
        compat.set_path(base, f"{_name(optimizer)}/{state_keys.LEARNING_RATE}")
    return fingerprint


def protect(optimizer: Any, built: BuiltOptimizer) -> int:
    """Gives all state the paths of its keys; returns a checksum of groups and state.

    Args:
        optimizer: The optimizer, with all its variables.
        built: What it has built.
    """
    entries = keys.entries_of(optimizer, built)
    for key, variable in entries.items():
        compat.set_path(variable, f"{_name(optimizer)}/{key}")
    manifest = manifest_of(entries, built)
    # In order, as positions are all that `set_weights` has.
    text = json.dumps(
        [
            {group: spec["class"] for group, spec in manifest["groups"].items()},
            {k: spec for k, spec in manifest["state"].items() if not keys.parse(k).is_optional},
        ]
    )
    return zlib.crc32(text.encode()) & 0x7FFFFFFF or 1


def _name(optimizer: Any) -> str:
    """Returns the optimizer's name; the number in an automatic one differs between processes."""
    return re.sub(r"^(grouped_optimizer)_\d+$", r"\1", str(optimizer.name))
