"""State that does not fit: an error, and everything stays as it was."""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import saving_models
from bad_input import pattern, rows
from models import number
from saving_models import (
    X,
    Y,
    by_dict,
    by_state_file,
    compiled,
    either_way,
    fit,
    new_head,
    refused,
    save,
    split,
    store_of,
    train,
    with_adam,
)

import keras_groupopt as kgo

# Another layout -----------------------------------------------------------------------------------

NOTHING = r'(?s)No state was loaded\. First differences.*"first"'


def by_weights_file(source: keras.Model, target: keras.Model, path: Path) -> None:
    target.load_weights(save(source, path / "model.weights.h5"))


def by_weights_file_where_keras_skips(*arguments: Any) -> None:
    source, target, path = arguments
    with kgo.resuming() as report, pytest.warns(UserWarning, match=NOTHING) as caught:
        target.load_weights(save(source, path / "model.weights.h5"), skip_mismatch=True)
    assert (report.status, report.kept) == ("refused", [])
    assert str(report).startswith("Optimizer state: refused.")
    raise ValueError(next(str(w.message) for w in caught if "No state" in str(w.message)))


@pytest.mark.parametrize(
    "road", [by_dict, by_state_file, by_weights_file, by_weights_file_where_keras_skips]
)
def test_a_refused_layout_reaches_the_user_on_every_road(road, tmp_path):
    source, model = train(compiled(), 1), compiled(groups_=split())
    model.set_weights(source.get_weights())
    model.optimizer.build(model.trainable_variables)
    with refused(model, ValueError, NOTHING):
        road(source, model, tmp_path)


@either_way
@pytest.mark.parametrize(
    "other", [lambda: train(compiled(), 1), with_adam], ids=["other groups", "plain Adam"]
)
def test_weights_and_state_come_both_or_not_at_all(other, build, tmp_path):
    path = save(other(), tmp_path / "model.weights.h5")
    model = compiled(seed=2, groups_=split(), build=build)
    with refused(model, ValueError, "(?s)saved optimizer state must.*are as they were"):
        kgo.load_weights(model, path)
    assert model.optimizer.built == build
    if build:
        # Keras has loaded the weights when the state is refused: they are the anchors then.
        with pytest.raises(ValueError, match=r"`kgo\.load_weights\(model, path\)` loads both"):
            model.load_weights(path)
        assert {number(drift) for drift in model.optimizer.anchor_drift().values()} == {0.0}


def test_a_step_does_not_go_on_where_loaded_state_was_refused():
    model = compiled(groups_=split())
    model.optimizer.load_state_dict(train(compiled(), 1).optimizer.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match="No state was loaded"):
            fit(model, 1)
        # TensorFlow cannot use a step again whose first compilation failed.
        model.compile(optimizer=model.optimizer, loss="mse")
    model.compile(optimizer=saving_models.optimizer(model, split()), loss="mse")
    fit(model, 1)


def by_tree(source: keras.Model, target: keras.Model) -> None:
    tree = source.get_state_tree(value_format="numpy_array")
    target.set_state_tree({"optimizer_variables": tree["optimizer_variables"]})


def by_position(source: keras.Model, target: keras.Model) -> None:
    target.optimizer.set_weights([variable.numpy() for variable in source.optimizer.variables])


@pytest.mark.parametrize("given", [lambda own: own, keras.optimizers.serialize])
@pytest.mark.parametrize("restore", [by_tree, by_position])
def test_state_of_another_layout_is_refused_where_only_values_come(restore, given):
    def grouped(*names: str) -> keras.Model:
        named = [kgo.Group(name, name) for name in names]
        model = compiled("sequential", groups_=named, rule="sgd", learning_rate=0.1)
        # Keras makes a serialized optimizer with tracking switched off.
        model.compile(optimizer=given(model.optimizer), loss="mse")
        return train(model, 1)

    # The numbers of variables and their shapes are the same.
    source, target = grouped("dense", "dense_1"), grouped("dense_1", "dense")
    with refused(target, ValueError, "must have the layout of this optimizer"):
        restore(source, target)
    restore(source, grouped("dense", "dense_1"))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model, path: model.optimizer.state_dict(), "`state_dict` needs a built optimizer"),
        (
            lambda model, path: model.optimizer.save_state(path / "a.npz"),
            "`save_state` needs a bui",
        ),
        (
            lambda model, path: by_tree(train(compiled()), model),
            r"must be built before.*`optimizer\.build\(",
        ),
    ],
)
def test_an_optimizer_that_is_not_built_has_no_state_to_give_or_take(use, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        use(compiled(seed=2), tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_config_bound_to_another_model_is_refused_with_the_differences():
    config = compiled().optimizer.get_config()
    model = new_head("head", 5)
    model.compile(optimizer=kgo.GroupedOptimizer.from_config(config), loss="mse")
    message = r"head/kernel: saved as kernel float32\[3, 2\], found .*\[3, 5\]"
    with pytest.raises(ValueError, match=message):
        model.fit(X, np.zeros((len(Y), 5)), verbose=0)


# Wrong files and dicts ----------------------------------------------------------------------------


def damage(key: str, value: Any = None) -> Any:
    def change(file: h5py.File) -> None:
        stored = file["optimizer/vars"]
        del stored[key]
        if value is not None:
            stored[key] = value

    return change


def changed_moment(file: h5py.File) -> None:
    file["optimizer/vars"][MOMENT][0, 0] *= 2


def of_adam(file: h5py.File) -> None:
    stored = file["optimizer/vars"]
    stored.clear()
    for key, value in store_of(with_adam()).items():
        stored[key] = value


def another_format(file: h5py.File) -> None:
    stored = file["optimizer/vars"]
    manifest = json.loads(bytes(stored["@manifest"][()])) | {"format": 99}
    damage("@manifest", np.frombuffer(json.dumps(manifest).encode(), "uint8"))(file)


ANCHOR, MOMENT = (f"backbone|body|first|kernel|{slot}" for slot in ("@anchor", "momentums"))


@either_way
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(ANCHOR), "manifest names backbone/body/first/kernel/@anchor, which is missing"),
        (damage(ANCHOR, np.ones((2, 2))), r"@anchor has shape \[2, 2\] .*manifest says \[4, 3\]"),
        (changed_moment, "checksum of backbone/body/first/kernel/momentums differs"),
        (of_adam, "must come from a GroupedOptimizer. Received: state without a manifest"),
        (damage("@manifest", np.frombuffer(b'{"form', "uint8")), "manifest .* is damaged"),
        (damage("@manifest", np.frombuffer(b"\xff\xfe", "uint8")), "manifest .* is damaged"),
        (damage("@manifest", np.frombuffer(b"[1]", "uint8")), "manifest .* is damaged"),
        (another_format, "must be of format 2. Received: format 99"),
    ],
    ids=["missing", "shape", "moment", "of Adam", "cut", "bytes", "no dict", "format"],
)
def test_a_damaged_file_leaves_the_optimizer_as_it_was(change, message, build, tmp_path):
    path = save(train(compiled(), 1), tmp_path / "model.weights.h5")
    with h5py.File(path, "r+") as file:
        change(file)
    model = compiled(seed=2, build=build)

    def state() -> list[np.ndarray]:
        # Anchors follow the weights until the first step, and Keras has loaded these.
        own = model.optimizer.variables
        return [variable.numpy() for variable in own if not variable.name.endswith("anchor")]

    before = state()
    with pytest.raises(ValueError, match=message):
        model.load_weights(path)
    np.testing.assert_equal(state(), before)
    # And nothing is left to be applied later.
    model.optimizer.build(model.trainable_variables)
    assert int(model.optimizer.iterations.numpy()) == 0


def without(*place: str) -> Callable[[dict[str, Any]], Any]:
    return put(None, *place)


def put(value: Any, *place: str) -> Callable[[dict[str, Any]], Any]:
    """Puts a value into a dict of state, or takes out what is there."""

    def change(taken: dict[str, Any]) -> Any:
        at = functools.reduce(operator.getitem, place[:-1], taken)
        if value is None:
            del at[place[-1]]
        else:
            at[place[-1]] = value
        return taken

    return change


KERNEL = ("groups", "backbone", "body/first/kernel")
WRONG = [
    *rows(
        TypeError,
        (lambda taken: [1], "that `optimizer.state_dict … of type list"),
        (without("manifest"), "with the entries 'scalars', 'groups'"),
        (put([1], "groups"), "must hold dicts"),
        (put({1, 2}, *KERNEL, "@anchor"), "must hold arrays"),
    ),
    *rows(
        ValueError,
        (put(1, "manifest", "format"), "must be of format 2"),
        (without("manifest", "state"), "manifest … is damaged"),
        (put(3, "manifest"), "manifest … is damaged"),
        (without(*KERNEL, "momentums"), "Received: no backbone/body/first/kernel/momentums"),
        (put(np.zeros(3), *KERNEL, "speed"), "kernel/speed, which its manifest does not name"),
        (
            put(np.zeros((2, 2), "float32"), *KERNEL, "@anchor"),
            "@anchor as float32[2, 2], where its manifest says float32[4, 3]",
        ),
        (put(np.zeros((4, 3)), *KERNEL, "@anchor"), "@anchor as float64[4, 3]"),
        (put(np.float32(np.nan), "scalars", "@learning_rate"), "@learning_rate is nan"),
        (
            put(np.array(-3, keras.backend.standardize_dtype("int")), "scalars", "@iterations"),
            "@iterations is -3",
        ),
    ),
]


@either_way
@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_a_wrong_dict_is_a_clear_error_that_changes_nothing(change, error, text, build):
    taken = change(train(compiled()).optimizer.state_dict())
    model = compiled(seed=2)
    with refused(train(model, 1) if build else model, error, pattern(text)):
        model.optimizer.load_state_dict(taken)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("state.h5", ValueError, r"must end in `\.npz`\. Received: path=.*state\.h5"),
        ("gone.npz", FileNotFoundError, r"must be an existing file\. Received: path=.*gone\.npz"),
        ("other.npz", ValueError, "without a manifest, with the entries a"),
        ("code.npz", ValueError, "optimizer state is damaged"),
    ],
)
def test_a_wrong_file_of_state_is_a_clear_error(name, error, message, tmp_path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "code.npz", **{"@manifest": np.array([Boom()], dtype=object)})
    with pytest.raises(error, match=message):
        train(compiled(), 1).optimizer.load_state(tmp_path / name)


class Boom:
    """Pickled objects are never unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code in the file was run",))
