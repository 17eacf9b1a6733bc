"""The values of a `LossScaleOptimizer` in a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_groupopt.checkpoint.store import MANIFEST
from keras_groupopt.step.nonfinite import NONE

# The values: the kinds of dtype and the least value that each may have, and both in words.
NAMES: dict[str, tuple[str, float, str]] = {
    "dynamic_scale": ("f", np.nextafter(0.0, 1.0), "a positive finite number"),
    "step_counter": ("iu", 0, "an integer >= 0"),
    "skipped_steps": ("iu", 0, "an integer >= 0"),
    "nonfinite_group_index": ("iu", NONE, f"an integer >= {NONE}"),
}
# Keras' class saves by position, and neither counts skipped steps nor keeps a group at fault.
_PLACES_IN_KERAS = {"step_counter": "2", "dynamic_scale": "3"}
_ABSENT_IN_KERAS = {"skipped_steps": 0, "nonfinite_group_index": NONE}


def read(store: Any) -> dict[str, Any]:
    """Returns the values in a file, by name, after checking them; none if the file holds none.

    Args:
        store: What `LossScaleOptimizer` or Keras' class of that name wrote.

    Raises:
        ValueError: If they are damaged, or another optimizer wrote them.
    """
    names = set(store.keys())
    if not names:
        return {}
    if MANIFEST in names:
        raise ValueError(
            "The saved optimizer state must come from a LossScaleOptimizer. Received: state "
            "of a GroupedOptimizer without one. Compile with the GroupedOptimizer and "
            "`auto_scale_loss=False` to load it, then compile with "
            "`kgo.LossScaleOptimizer(model.optimizer)`."
        )
    if "dynamic_scale" in names:
        return {name: _read(store, name, name) for name in NAMES}
    found = {name: _read(store, name, place) for name, place in _PLACES_IN_KERAS.items()}
    return {**_ABSENT_IN_KERAS, **found}


def _read(store: Any, name: str, place: str) -> np.ndarray:
    """Returns one of the values in a file."""
    try:
        value = np.asarray(store[place])
    except KeyError as error:
        raise ValueError(
            "The saved optimizer state must come from a LossScaleOptimizer. Received: state "
            f"without `{name}`. It is damaged, or was saved by another optimizer. No state was "
            "loaded."
        ) from error
    kinds, least, rule = NAMES[name]
    if value.shape or value.dtype.kind not in kinds or not least <= value < np.inf:
        raise ValueError(
            f"The saved `{name}` must be {rule}. Received: {value!r}. The file is damaged, or was "
            "saved by another optimizer. No state was loaded."
        )
    return value
