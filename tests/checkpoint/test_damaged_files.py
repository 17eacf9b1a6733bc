"""Damaged files: a load gives exactly what was saved, or an error and everything as it was."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from saving_models import (
    assert_state,
    compiled,
    grouped,
    in_loss_scale,
    refused,
    save,
    state,
    train,
    with_adam,
)

import keras_groupopt as kgo

ENDINGS = (".keras", ".weights.h5")
# How many flipped bits each kind of file is tried with.
FLIPS = int(os.environ.get("KERAS_GROUPOPT_FLIPS", "40"))

# Damaged bits -------------------------------------------------------------------------------------


def with_statistics(seed: int = 1) -> keras.Model:
    """A model with weights that are not trained."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(3, name="body"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(2, name="head")])
    anchored = [kgo.Group("body", "body", anchor="initial", weight_decay=0.5)]
    model.compile(optimizer=kgo.GroupedOptimizer(anchored, model=model, rule="adam"), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def flipped(data: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def load_whole(model: keras.Model, path: Path) -> None:
    kgo.load_weights(model, path)


def load_state(model: keras.Model, path: Path) -> None:
    model.optimizer.load_state(path)


def refusal(load: Callable[..., None], *arguments: Any) -> str | None:
    """What a load was refused with, if it was."""
    try:
        load(*arguments)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", [*ENDINGS, ".npz"])
def test_a_flipped_bit_or_a_cut_changes_nothing_or_nothing_that_counts(ending, tmp_path):
    path = tmp_path / f"model{ending}"
    source, model = train(with_statistics(), 2), train(with_statistics(seed=2), 1)
    before, loaded = state(model), state(source)
    if ending == ".npz":
        source.optimizer.save_state(path)
        loaded[: len(model.variables)] = before[: len(model.variables)]
    else:
        save(source, path)
    load, says = (load_state, "optimizer state") if ending == ".npz" else (load_whole, str(path))
    data, numbers, refusals = path.read_bytes(), np.random.default_rng(0), 0
    for position in numbers.choice(len(data), size=FLIPS, replace=False):
        path.write_bytes(flipped(data, int(position), int(numbers.integers(8))))
        message = refusal(load, model, path)
        assert_state(model, before if message else loaded)
        if message:
            assert says in message
            refusals += 1
        else:
            variables = [*model.variables, *model.optimizer.variables]
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
    assert refusals > 0
    whole = "optimizer state is damaged" if ending == ".npz" else "must be a whole file"
    for length in [0, 1, len(data) - 1, *numbers.choice(len(data), size=12, replace=False)]:
        path.write_bytes(data[:length])
        with refused(model, ValueError, whole):
            load(model, path)


@pytest.mark.filterwarnings("ignore:Weights in float16/bfloat16 lose updates")
@pytest.mark.parametrize(("make", "dtype"), [(with_statistics, "float32"), (compiled, "bfloat16")])
def test_a_flipped_bit_of_a_weight_is_found_where_the_optimizer_knew_its_model(
    make, dtype, tmp_path
):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    source = train(make(), 2)
    path = save(source, tmp_path / "model.weights.h5")
    model = train(make(seed=2), 1)
    kgo.load_weights(model, path)
    assert_state(model, state(source))
    data = path.read_bytes()
    for weight in map(np.asarray, source.get_weights()):
        if np.any(weight != weight.flat[0]):
            path.write_bytes(flipped(data, data.index(weight.tobytes()), 0))
            with refused(model, ValueError, "checksum of a weight of shape"):
                kgo.load_weights(model, path)


def another_model(path: Path) -> None:
    save(train(compiled(), 1), path)


def no_file_of_keras(path: Path) -> None:
    path.write_bytes(b"no file of Keras")


def no_weights(path: Path) -> None:
    save(train(with_statistics(), 1), path)
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", config)


AS_THEY_WERE = "model and its optimizer are as they were"


@pytest.mark.parametrize(
    ("write", "ending", "message"),
    [
        (another_model, ".weights.h5", AS_THEY_WERE),
        (no_file_of_keras, ".weights.h5", AS_THEY_WERE),
        (no_weights, ".keras", "must be a whole file"),
    ],
)
def test_what_does_not_fit_leaves_the_model_as_it_was(write, ending, message, tmp_path):
    path = tmp_path / f"other{ending}"
    write(path)
    model = train(with_statistics(), 1)
    with refused(model, ValueError, message):
        kgo.load_weights(model, path)


def test_a_cut_file_leaves_all_as_it_was_in_a_load_of_keras_too(tmp_path):
    path = save(train(compiled(), 1), tmp_path / "model.weights.h5")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    model = train(compiled(seed=2), 1)
    with refused(model, OSError, "truncated"):
        model.load_weights(path)


def test_an_interrupt_leaves_the_model_as_it_was(tmp_path):
    class Slow(keras.layers.Dense):
        def load_own_variables(self, store: Any) -> None:
            super().load_own_variables(store)
            raise KeyboardInterrupt

    def made() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Slow(2)])
        model.compile(optimizer=kgo.GroupedOptimizer(model=model), loss="mse")
        return train(model, 1)

    path = save(made(), tmp_path / "model.weights.h5")
    model = made()
    with refused(model, KeyboardInterrupt, None):
        kgo.load_weights(model, path)


def test_a_load_that_fails_leaves_what_waits_for_the_build_waiting(tmp_path, monkeypatch):
    source = train(compiled())
    first, cut, later = (tmp_path / f"{name}.weights.h5" for name in ("first", "cut", "later"))
    cut.write_bytes(save(source, first).read_bytes()[:-100])
    expected = state(source)
    save(train(source), later)
    model = compiled(seed=2)
    kgo.load_weights(model, first)
    with pytest.raises(ValueError, match="whole file"):
        kgo.load_weights(model, cut)

    def interrupted(*arguments: Any) -> None:
        keras.Model.load_weights(model, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "load_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kgo.load_weights(model, later)
    model.optimizer.build(model.trainable_variables)
    assert_state(model, expected)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    model = train(compiled())
    model.optimizer.save_state(path)
    old = path.read_bytes()
    train(model, 1)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        model.optimizer.save_state(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["state.npz"]


# What a file says of itself -----------------------------------------------------------------------


def of_adam(path: Path) -> None:
    save(with_adam(), path)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("gone.keras", None, FileNotFoundError, "must be an existing file. Received: .*gone.keras"),
        ("model.h5", b"", ValueError, r"ends in one of \.keras, \.weights\.h5"),
        ("model.keras", b"text", ValueError, "must be a whole file"),
        ("model.weights.h5", b"text", ValueError, "must be a whole file"),
        ("state.npz", b"text", ValueError, "optimizer state is damaged"),
        ("model.keras", of_adam, ValueError, "must hold the state of a GroupedOptimizer"),
        ("model.weights.h5", of_adam, ValueError, "must hold the state of a GroupedOptimizer"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_a_clear_error(name, content, error, message, tmp_path):
    if callable(content):
        content(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        kgo.read_manifest(tmp_path / name)


@pytest.mark.parametrize("ending", [*ENDINGS, ".npz"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "in a LossScaleOptimizer"])
def test_a_manifest_tells_what_was_saved(scaled, ending, tmp_path):
    path = tmp_path / f"model{ending}"
    model = train(compiled(), 2)
    if scaled:
        in_loss_scale(model)
    grouped(model).save_state(path) if ending == ".npz" else save(model, path)
    manifest = kgo.read_manifest(path)
    assert manifest["iterations"] == 2
    assert manifest["keras_groupopt"] == kgo.__version__
    assert list(manifest["groups"]) == ["backbone", "head"]
    assert manifest["groups"]["head"]["rule"] == "sgd"
    assert manifest["groups"]["head"]["anchors"] is None
    assert len(manifest["groups"]["backbone"]["anchors"]) == 64
    assert manifest["declared"]["@learning_rate"] == 0.125
    assert manifest["state"]["head/head/bias/momentums"][:2] == [[2], "float32"]
