"""Files that an earlier version wrote go on as they would have gone on there, bit for bit.

The files, and what a run from them came to, are in `earlier_files`, by backend. What is loaded must
be exactly what was saved. What training makes of it may differ in the last bits where another CPU
fuses other operations, so that it is compared to rounding; `KERAS_GROUPOPT_EXACT=1` compares it bit
for bit, on the machine that wrote the files.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from earlier_files import earlier_models
from earlier_files.earlier_models import BACKENDS, FOLDER

import keras_groupopt as kgo

EXACT = os.environ.get("KERAS_GROUPOPT_EXACT") == "1"
HERE = os.environ["KERAS_BACKEND"]


def expected(backend: str, moment: str) -> dict[str, np.ndarray]:
    """What was there when the files were `saved`, or `after` going on; by name."""
    with np.load(FOLDER / backend / "expected.npz") as packed:
        joined = {name: packed[name] for name in packed.files}
    arrays, read = {}, dict.fromkeys(joined, 0)
    for key, dtype, shape in json.loads(str(joined["layout"])):
        count = int(np.prod(shape))
        values = joined[dtype][read[dtype] :][:count].reshape(shape)
        read[dtype] += count
        if key.startswith(f"{moment}/"):
            arrays[key.removeprefix(f"{moment}/")] = values
    return arrays


def by_load_weights(
    folder: pathlib.Path, load: Callable[..., None] = kgo.load_weights, build: bool = False
) -> Any:
    model = unlike(earlier_models.compiled())
    if build:
        model.optimizer.build(model.trainable_variables)
    load(model, folder / "model.weights.h5")
    return model


WAYS: dict[str, Callable[[pathlib.Path], Any]] = {
    "load_model": lambda folder: keras.saving.load_model(folder / "model.keras"),
    "kgo.load_weights": by_load_weights,
    "model.load_weights": functools.partial(
        by_load_weights, load=lambda model, path: model.load_weights(path)
    ),
    "kgo.load_weights when built": functools.partial(by_load_weights, build=True),
}


# The files were written with Keras 3.15, whose layers have more in their configs than before.
WITH_LAYERS = pytest.param(
    "load_model",
    marks=pytest.mark.needs_keras("3.15", reason="older layers do not read configs of newer ones"),
)
WITHOUT_LAYERS = [way for way in WAYS if way != "load_model"]


def unlike(model: Any) -> Any:
    """The model with other weights, so that what was not loaded shows."""
    model.set_weights([weight + 1.0 for weight in model.get_weights()])
    return model


def assert_same(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], backend: str = HERE
) -> None:
    """Bit for bit, with the same names and dtypes."""
    assert sorted(found) == sorted(wanted)
    assert len(wanted) > 40
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
        # A counter that Keras calls "int" has 64 bits on TensorFlow alone.
        if backend == HERE or value.dtype.kind == "f":
            assert found[key].dtype == value.dtype, key


def assert_near(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], factor: float = 1.0
) -> None:
    """To rounding in float32, relative to the largest number of each array.

    From one file, the backends come within 5e-7 of each other in weights, and 8e-6 in moments.
    """
    assert sorted(found) == sorted(wanted)
    for key, value in wanted.items():
        assert found[key].shape == value.shape, key
        share = factor * (2e-6 if key.startswith("weights/") else 2e-5)
        limit = share * float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind == "f" else 0
        np.testing.assert_allclose(found[key], value, rtol=0, atol=limit, err_msg=key)


# Going on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [WITH_LAYERS, *WITHOUT_LAYERS])
def test_a_file_of_an_earlier_version_goes_on_as_it_did_there(way, caplog):
    model = WAYS[way](FOLDER / HERE)
    assert_same(earlier_models.state(model), expected(HERE, "saved"))
    compare = assert_same if EXACT else assert_near
    compare(earlier_models.go_on(model), expected(HERE, "after"))
    # For example, that a declaration changed since the file was saved.
    assert [record for record in caplog.records if record.name.startswith(kgo.__name__)] == []


@pytest.mark.parametrize("way", [WITH_LAYERS, "kgo.load_weights"])
@pytest.mark.parametrize("other", [backend for backend in BACKENDS if backend != HERE])
def test_a_file_of_another_backend_is_loaded_as_it_is_and_goes_on(other, way):
    model = WAYS[way](FOLDER / other)
    assert_same(earlier_models.state(model), expected(other, "saved"), other)
    # A file of JAX says that the step is compiled, which on torch takes a compiler and minutes.
    model.jit_compile = False
    assert_near(earlier_models.go_on(model), expected(other, "after"), factor=10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_files_were_written_in_the_middle_of_everything(backend):
    """Or the other tests would show little."""
    saved, after = expected(backend, "saved"), expected(backend, "after")
    assert [int(at["state/@iterations"]) for at in (saved, after)] == [3, 6]
    assert [int(at["state/@micro_batches"]) for at in (saved, after)] == [2, 1]
    assert int(saved["scaling/skipped_steps"]) == 1
    moved = {key for key, value in saved.items() if not np.array_equal(value, after[key])}
    still = {key for key, value in saved.items() if value.ndim and key not in moved}
    assert still == {"weights/0", "state/backbone/backbone/body/kernel/@anchor"}
    assert "scaling/dynamic_scale" in moved


# Files --------------------------------------------------------------------------------------------


def test_a_state_file_of_an_earlier_version_holds_what_it_held():
    folder = FOLDER / "jax"
    model = unlike(earlier_models.compiled())
    kgo.load_weights(model, folder / "model.keras", optimizer=False)
    report = model.optimizer.load_state(folder / "state.npz")
    model.optimizer.build(model.trainable_variables)
    assert not report.dropped
    wanted = {k: v for k, v in expected("jax", "saved").items() if not k.startswith("scaling/")}
    found = {k: v for k, v in earlier_models.state(model).items() if not k.startswith("scaling/")}
    assert_same(found, wanted, "jax")


def datasets(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array in a weights file by its place, but for the manifest, which is read as such."""
    found = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.endswith("@manifest"):
            found[name] = item[()]

    with h5py.File(path) as file:
        file.visititems(take)
    return found


def manifest(path: pathlib.Path) -> dict[str, Any]:
    """What a file says of itself, but for the version that wrote it and the sum over all."""
    said = kgo.read_manifest(path)
    kept = {key: said[key] for key in said if key not in ("keras_groupopt", "checksum")}
    return without_modules(kept)


def test_a_file_is_written_again_as_it_was(tmp_path):
    """An earlier version reads what this one writes: the same places, arrays and manifest."""
    earlier = FOLDER / HERE / "model.weights.h5"
    model = by_load_weights(FOLDER / HERE, build=True)
    kgo.save_weights(model, tmp_path / "model.weights.h5")
    assert_same(datasets(tmp_path / "model.weights.h5"), datasets(earlier))
    assert manifest(tmp_path / "model.weights.h5") == manifest(earlier)


# Configs ------------------------------------------------------------------------------------------


def written_configs() -> dict[str, Any]:
    return json.loads((FOLDER / "optimizer.json").read_text(encoding="utf-8"))


def without_modules(config: Any) -> Any:
    """The config as it is in a file, where tuples are lists, without the modules of this package.

    They may move, as classes are found by the names that they are registered by.
    """
    if isinstance(config, dict):
        return {
            key: without_modules(value)
            for key, value in config.items()
            if not (key == "module" and str(value).startswith(f"{kgo.__name__}."))
        }
    if isinstance(config, list | tuple):
        return [without_modules(value) for value in config]
    return config


def of_then(config: Any, written: Any) -> Any:
    """The config without arguments that the earlier version did not have."""
    known = {key: config["config"][key] for key in written["config"]}
    return without_modules({**config, "config": known})


@pytest.mark.parametrize("name", ["scheduled", "instances"])
def test_a_config_of_an_earlier_version_comes_back_and_is_that_of_what_is_declared_now(name):
    written = written_configs()[name]
    restored = keras.optimizers.deserialize(written)
    assert type(restored) is kgo.GroupedOptimizer
    for optimizer in (restored, earlier_models.declared()[name]):
        config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
        assert of_then(config, written) == without_modules(written)
