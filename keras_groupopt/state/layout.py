"""What protects state where Keras restores it without asking the optimizer.

`model.set_state_tree`, and with it Orbax, assigns by `variable.path`; `optimizer.set_weights` and
Keras' LossScaleOptimizer assign by position. So paths are those of saved state, and one variable
refuses the values of another layout.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import keras

from keras_groupopt import _compat
from keras_groupopt.parts import Parts
from keras_groupopt.state import keys
from keras_groupopt.state.manifest import manifest_of
from keras_groupopt.state.resuming import present_terms


class LayoutVariable(keras.Variable):
    """Holds a number that stands for a layout, and refuses another one.

    Args:
        digest: The number.
        name: The variable's name.
    """

    def __init__(self, digest: int, name: str) -> None:
        super().__init__(digest, dtype="int32", trainable=False, name=name)
        self._digest = digest

    def check(self, value: Any) -> bool:
        """Returns whether `value` is to be assigned.

        Raises:
            ValueError: If it stands for another layout, unless `kgo.resuming` allows that.
        """
        try:
            found = int(keras.ops.convert_to_numpy(value))
        except Exception:  # a value in a compiled step, which came from this very variable
            return True
        if found == self._digest:
            return True
        terms = present_terms()
        if terms.strict and not terms.renames:
            raise ValueError(
                "The state must have the layout of this optimizer: its groups, rules, layer paths "
                "and shapes, in their order. Received: state of another layout, restored by "
                "position or from a tree; values before it may have been assigned. Make the groups "
                "as they were, or restore a `.keras` or `.weights.h5` file, which tells the "
                "differences."
            )
        return False

    def assign(self, value: Any) -> Any:
        """Assigns a value that stands for this layout."""
        return super().assign(value) if self.check(value) else self.value


def protect(optimizer: Any, parts: Parts) -> Any:
    """Gives all state the paths of its keys, and adds the variable that stands for the layout.

    Args:
        optimizer: The optimizer, with all its variables.
        parts: Its built parts.

    Returns:
        That variable.
    """
    entries = keys.entries_of(optimizer, parts)
    # The number in an automatic name differs between processes.
    name = re.sub(r"^(grouped_optimizer)_\d+$", r"\1", optimizer.name)
    for key, variable in entries.items():
        _compat.set_path(variable, f"{name}/{key}")
    layout = manifest_of(entries, parts.plan)
    # In order, as positions are all that `set_weights` has.
    text = json.dumps(
        [
            {group: spec["class"] for group, spec in layout["groups"].items()},
            {key: spec for key, spec in layout["state"].items() if not keys.parse(key).is_optional},
        ]
    )
    digest = LayoutVariable(zlib.crc32(text.encode()) & 0x7FFFFFFF, "layout")
    _compat.set_path(digest, f"{name}/@layout")
    _compat.track_variable(optimizer, digest)
    return digest
