"""Writes the files of the backend in use: `KERAS_BACKEND=jax python write_files.py`.

It was run with the version before the package's modules were taken apart. It is run again only to
add a format, never to make a failing test pass: files that users have are not written again.
"""

from __future__ import annotations

import json
from typing import Any

import earlier_models
import keras
import numpy as np

import keras_groupopt as kgo


def write() -> None:
    """One folder per backend, and the config of an optimizer, which all backends share."""
    folder = earlier_models.FOLDER / keras.backend.backend()
    folder.mkdir(exist_ok=True)
    model = earlier_models.compiled()
    earlier_models.fit(model, 0, earlier_models.BEFORE)
    model.save(folder / "model.keras")
    kgo.save_weights(model, folder / "model.weights.h5")
    # NumPy's numbers, so that one file does for all backends.
    if keras.backend.backend() == "jax":
        model.optimizer.save_state(folder / "state.npz")
    arrays: dict[str, Any] = {}
    arrays |= {f"saved/{key}": value for key, value in earlier_models.state(model).items()}
    arrays |= {f"after/{key}": value for key, value in earlier_models.go_on(model).items()}
    # One array per kind of number, and their names: a member of an archive takes 200 bytes.
    np.savez_compressed(folder / "expected.npz", **packed(arrays))
    configs = {
        name: keras.optimizers.serialize(optimizer)
        for name, optimizer in earlier_models.declared().items()
    }
    text = json.dumps(configs, indent=1, sort_keys=True)
    (earlier_models.FOLDER / "optimizer.json").write_text(f"{text}\n", encoding="utf-8")


def packed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays end to end, by dtype, beside a text of their names and shapes."""
    by_dtype: dict[str, list[np.ndarray]] = {}
    layout = []
    for key, value in arrays.items():
        by_dtype.setdefault(value.dtype.name, []).append(value.ravel())
        layout.append([key, value.dtype.name, list(value.shape)])
    joined = {name: np.concatenate(values) for name, values in by_dtype.items()}
    return {"layout": np.array(json.dumps(layout)), **joined}


if __name__ == "__main__":
    write()
