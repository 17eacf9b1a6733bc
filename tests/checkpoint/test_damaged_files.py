"""Damaged files: a load gives exactly what was saved, or an error and everything as it was."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from saving_models import compiled, state, train

import keras_groupopt as kgo

ENDINGS = (".keras", ".weights.h5")
# How many flipped bits each kind of file is tried with.
FLIPS = int(os.environ.get("KERAS_GROUPOPT_FLIPS", "60"))


def with_statistics(seed: int = 1) -> keras.Model:
    """A model with weights that are not trained."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="body"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2, name="head"),
        ]
    )
    groups = [kgo.Group("body", "body", anchor="initial", weight_decay=0.5)]
    model.compile(optimizer=kgo.GroupedOptimizer(groups, model=model, rule="adam"), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def save(model: keras.Model, path: Path) -> bytes:
    (model.save if path.suffix == ".keras" else model.save_weights)(path)
    return path.read_bytes()


def assert_state(model: keras.Model, expected: list[np.ndarray]) -> None:
    for value, other in zip(state(model), expected, strict=True):
        assert value.dtype == other.dtype
        np.testing.assert_array_equal(value, other)


def flipped(data: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def refusal(load: Callable[..., Any], *arguments: Any) -> str | None:
    """What a load was refused with, if it was."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(*arguments)
    except ValueError as error:
        return str(error)
    return None


def put_back(variables: list[Any], values: list[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_flipped_bit_is_an_error_that_changes_nothing_or_changes_nothing_that_counts(
    ending, tmp_path
):
    path = tmp_path / f"model{ending}"
    source = train(with_statistics(), 2)
    data, saved = save(source, path), state(source)
    model = train(with_statistics(seed=2), 1)
    before = state(model)
    numbers = np.random.default_rng(0)
    refused = 0
    for position in numbers.choice(len(data), size=FLIPS, replace=False):
        path.write_bytes(flipped(data, int(position), int(numbers.integers(8))))
        message = refusal(kgo.load_weights, model, path)
        if message is None:
            assert_state(model, saved)
            put_back([*model.variables, *model.optimizer.variables], before)
        else:
            assert str(path) in message
            assert_state(model, before)
            refused += 1
    assert refused > 0


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_cut_anywhere_is_an_error_that_changes_nothing(ending, tmp_path):
    path = tmp_path / f"model{ending}"
    data = save(train(with_statistics(), 2), path)
    model = train(with_statistics(seed=2), 1)
    before = state(model)
    lengths = np.random.default_rng(1).choice(len(data), size=20, replace=False)
    for length in [0, 1, len(data) - 1, *lengths]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="must be a whole file"):
            kgo.load_weights(model, path)
        assert_state(model, before)


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_a_flipped_bit_of_saved_state_is_found_by_every_load_of_keras(built, tmp_path):
    path = tmp_path / "model.weights.h5"
    source = train(compiled(), 2)
    source.save_weights(path)
    data = path.read_bytes()
    moment = source.optimizer.state_dict()["groups"]["backbone"]["body/first/kernel"]["momentums"]
    place = data.index(moment.tobytes())
    path.write_bytes(flipped(data, place + 1, 3))
    model = compiled(seed=2)
    if built:
        model.optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.optimizer.variables]
    message = "damaged: the checksum of backbone/body/first/kernel/momentums differs"
    with pytest.raises(ValueError, match=message):
        model.load_weights(path)
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_flipped_bit_of_a_weight_is_found_where_the_optimizer_knew_its_model(tmp_path):
    path = tmp_path / "model.weights.h5"
    source = train(with_statistics(), 2)
    data = save(source, path)
    for weight in source.get_weights():
        if np.any(weight != weight.flat[0]):
            path.write_bytes(flipped(data, data.index(weight.tobytes()), 0))
            with pytest.raises(ValueError, match="checksum of a weight of shape"):
                kgo.load_weights(with_statistics(), path)


def test_weights_of_low_precision_are_verified_and_loaded(tmp_path):
    keras.config.set_floatx("bfloat16")
    keras.config.set_dtype_policy("bfloat16")
    path = tmp_path / "model.weights.h5"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights in float16/bfloat16 lose updates")
        source, model = train(compiled(), 2), train(compiled(seed=2), 1)
    data = save(source, path)
    kgo.load_weights(model, path)
    assert_state(model, state(source))
    kernel = np.asarray(source.get_weights()[0])
    path.write_bytes(flipped(data, data.index(kernel.tobytes()), 0))
    with pytest.raises(ValueError, match="checksum of a weight of shape"):
        kgo.load_weights(model, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, path: model.save_weights(path),
        lambda model, path: path.write_bytes(b"no file of Keras"),
    ],
    ids=["another model", "another kind of file"],
)
def test_what_does_not_fit_leaves_the_model_as_it_was(change: Callable[..., Any], tmp_path):
    path = tmp_path / "other.weights.h5"
    change(train(compiled(), 1), path)
    model = train(with_statistics(), 1)
    before = state(model)
    with pytest.raises(ValueError, match="model and its optimizer are as they were"):
        kgo.load_weights(model, path)
    assert_state(model, before)


def test_an_interrupt_leaves_the_model_as_it_was(tmp_path):
    class Slow(keras.layers.Dense):
        def load_own_variables(self, store: Any) -> None:
            super().load_own_variables(store)
            raise KeyboardInterrupt

    def made() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Slow(2)])
        model.compile(optimizer=kgo.GroupedOptimizer(model=model), loss="mse")
        return train(model, 1)

    path = tmp_path / "model.weights.h5"
    made().save_weights(path)
    model = made()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        kgo.load_weights(model, path)
    assert_state(model, before)


def test_refused_state_leaves_what_waits_for_the_build_waiting(tmp_path):
    first, second = tmp_path / "first.weights.h5", tmp_path / "second.weights.h5"
    source = train(compiled(), 3)
    source.save_weights(first)
    second.write_bytes(first.read_bytes()[:-100])
    model = compiled(seed=2)
    kgo.load_weights(model, first)
    with pytest.raises(ValueError, match="whole file"):
        kgo.load_weights(model, second)
    model.optimizer.build(model.trainable_variables)
    assert_state(model, state(source))


# The optimizer left alone -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_weights_alone_leave_step_moments_and_rates_as_they_are(ending, tmp_path):
    path = tmp_path / f"model{ending}"
    source = train(compiled(learning_rate=0.25), 3)
    save(source, path)
    model = train(compiled(seed=2), 1)
    before = [variable.numpy() for variable in model.optimizer.variables]
    kgo.load_weights(model, path, optimizer=False)
    for value, expected in zip(model.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_weights_alone_are_the_anchors_of_a_run_that_has_not_begun(tmp_path):
    path = tmp_path / "model.weights.h5"
    train(compiled(), 3).save_weights(path)
    model = compiled(seed=2)
    model.optimizer.build(model.trainable_variables)
    kgo.load_weights(model, path, optimizer=False)
    assert float(model.optimizer.anchor_drift()["backbone"]) == 0.0
    assert int(model.optimizer.iterations.numpy()) == 0


# State of an optimizer alone ----------------------------------------------------------------------


def test_a_damaged_file_of_state_is_an_error_that_changes_nothing(tmp_path):
    path = tmp_path / "state.npz"
    train(compiled(), 2).optimizer.save_state(path)
    data = path.read_bytes()
    model = train(compiled(seed=2), 1)
    before, saved = state(model), state(train(compiled(), 2))
    numbers = np.random.default_rng(2)
    weights = len(model.variables)
    for position in numbers.choice(len(data), size=FLIPS, replace=False):
        path.write_bytes(flipped(data, int(position), int(numbers.integers(8))))
        message = refusal(model.optimizer.load_state, path)
        if message is None:
            assert_state(model, before[:weights] + saved[weights:])
            put_back(model.optimizer.variables, before[weights:])
        else:
            assert "optimizer state" in message
            assert_state(model, before)
    for length in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="optimizer state is damaged"):
            model.optimizer.load_state(path)
        assert_state(model, before)


def test_pickled_objects_are_never_unpickled(tmp_path):
    path = tmp_path / "state.npz"
    with open(path, "wb") as file:
        np.savez(file, **{"@manifest": np.array([Boom()], dtype=object)})
    with pytest.raises(ValueError, match="optimizer state is damaged"):
        train(compiled(), 1).optimizer.load_state(path)


class Boom:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code in the file was run",))


# What a file says of itself -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write", "error", "message"),
    [
        ("gone.keras", None, FileNotFoundError, "must be an existing file. Received: .*gone.keras"),
        ("model.h5", b"", ValueError, r"ends in one of \.keras, \.weights\.h5"),
        ("model.keras", b"text", ValueError, "must be a whole file"),
        ("model.weights.h5", b"text", ValueError, "must be a whole file"),
        ("state.npz", b"text", ValueError, "optimizer state is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_a_clear_error(name, write, error, message, tmp_path):
    if write is not None:
        (tmp_path / name).write_bytes(write)
    with pytest.raises(error, match=message):
        kgo.read_manifest(tmp_path / name)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_without_our_state_has_no_manifest(ending, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer="adam", loss="mse")
    save(train(model, 1), tmp_path / f"model{ending}")
    with pytest.raises(ValueError, match="must hold the state of a GroupedOptimizer"):
        kgo.read_manifest(tmp_path / f"model{ending}")


@pytest.mark.parametrize("ending", [*ENDINGS, ".npz"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "in a LossScaleOptimizer"])
def test_a_manifest_tells_what_was_saved(scaled, ending, tmp_path):
    path = tmp_path / f"model{ending}"
    model = train(compiled(), 2)
    inner = model.optimizer
    if scaled:
        model.compile(optimizer=keras.optimizers.LossScaleOptimizer(inner), loss="mse")
        model.optimizer.build(model.trainable_variables)
    if ending == ".npz":
        inner.save_state(path)
    else:
        save(model, path)
    manifest = kgo.read_manifest(path)
    assert manifest["iterations"] == 2
    assert manifest["keras_groupopt"] == kgo.__version__
    assert list(manifest["groups"]) == ["backbone", "head"]
    assert manifest["groups"]["head"]["rule"] == "sgd"
    assert manifest["groups"]["head"]["anchors"] is None
    assert len(manifest["groups"]["backbone"]["anchors"]) == 64
    assert manifest["declared"]["@learning_rate"] == 0.125
    assert manifest["state"]["head/head/bias/momentums"][:2] == [[2], "float32"]


def test_a_zip_with_other_weights_inside_is_found(tmp_path):
    path = tmp_path / "model.keras"
    save(train(with_statistics(), 1), path)
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", config)
    with pytest.raises(ValueError, match="must be a whole file"):
        kgo.load_weights(train(with_statistics(), 1), path)
