"""State in memory and in a file of its own: nested by group, layer path and slot."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from saving_models import assert_equal, compiled, state, train

import keras_groupopt as kgo


def by_dict(source: Any, target: Any, folder: Any) -> Any:
    return target.load_state_dict(source.state_dict())


def by_file(source: Any, target: Any, folder: Any) -> Any:
    source.save_state(folder / "state.npz")
    return target.load_state(folder / "state.npz")


ROADS = {"dict": by_dict, "file": by_file}
each_road = pytest.mark.parametrize("road", ROADS.values(), ids=list(ROADS))


def moved_over(source: keras.Model, target: keras.Model, road: Callable[..., Any], at: Any) -> Any:
    target.set_weights(source.get_weights())
    return road(source.optimizer, target.optimizer, at)


@each_road
@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_state_alone_goes_on_bit_for_bit(built, road, tmp_path):
    source, target = train(compiled()), compiled(seed=2)
    source.optimizer.learning_rate = 0.0625
    source.optimizer.set_learning_rate_ratio("backbone", 0.5)
    if built:
        target.optimizer.build(target.trainable_variables)
    report = moved_over(source, target, road, tmp_path)
    assert report.status == ("loaded" if built else "waits for the build")
    assert_equal(train(target, 1), train(source, 1))
    assert (report.status, report.fresh, report.dropped) == ("loaded", [], [])


@each_road
def test_state_of_low_precision_goes_on_bit_for_bit(road, tmp_path):
    keras.config.set_floatx("bfloat16")
    keras.config.set_dtype_policy("bfloat16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights in float16/bfloat16 lose updates")
        source, target = train(compiled()), train(compiled(seed=2), 1)
    moved_over(source, target, road, tmp_path)
    assert {value.dtype.name for value in state(target)} >= {"bfloat16", "float32"}
    assert_equal(train(target, 1), train(source, 1))


@each_road
def test_state_inside_a_loss_scale_optimizer_goes_on_bit_for_bit(road, tmp_path):
    models = [compiled(seed=seed) for seed in (1, 2)]
    for model in models:
        scaled = keras.optimizers.LossScaleOptimizer(model.optimizer)
        model.compile(optimizer=scaled, loss="mse")
        scaled.build(model.trainable_variables)
    source, target = models
    train_inside(source)
    target.set_weights(source.get_weights())
    road(source.optimizer.inner_optimizer, target.optimizer.inner_optimizer, tmp_path)
    for value, expected in zip(
        target.optimizer.inner_optimizer.variables,
        source.optimizer.inner_optimizer.variables,
        strict=True,
    ):
        np.testing.assert_array_equal(value.numpy(), expected.numpy())


def train_inside(model: keras.Model) -> None:
    gradients = [
        keras.ops.convert_to_tensor(np.full(v.shape, 0.1, "float32"))
        for v in model.trainable_variables
    ]
    model.optimizer.inner_optimizer.apply(gradients, model.trainable_variables)


def test_the_dict_is_nested_by_group_layer_path_and_slot():
    model = train(compiled())
    taken = model.optimizer.state_dict()
    assert list(taken) == ["manifest", "scalars", "groups"]
    assert set(taken["scalars"]) == {
        "@iterations",
        "@learning_rate",
        "@learning_rate_ratio/backbone",
        "@learning_rate_ratio/head",
        "@weight_decay/backbone",
        "@skipped_steps",
        "@first_nonfinite_group",
    }
    assert set(taken["groups"]["backbone"]) == {
        "@rule",
        *(f"body/{layer}/{name}" for layer in ("first", "dense") for name in ("kernel", "bias")),
    }
    kernel = taken["groups"]["backbone"]["body/first/kernel"]
    assert set(kernel) == {"momentums", "velocities", "@anchor"}
    assert all(type(value) is np.ndarray and value.shape == (4, 3) for value in kernel.values())
    assert json.loads(json.dumps(taken["manifest"])) == taken["manifest"]


def test_what_was_taken_does_not_change_with_later_steps():
    model = train(compiled())
    taken = model.optimizer.state_dict()
    before = copy.deepcopy(taken)
    train(model)
    for group, paths in before["groups"].items():
        for path, slots in paths.items():
            for slot, value in slots.items():
                np.testing.assert_array_equal(taken["groups"][group][path][slot], value)
    model.optimizer.load_state_dict(taken)
    train(model, 1)
    assert int(taken["scalars"]["@iterations"]) == 3


def test_trying_rates_leaves_nothing_behind():
    model, straight = train(compiled()), train(compiled())
    weights, taken = model.get_weights(), model.optimizer.state_dict()
    for rate in (1e-3, 1.0):
        model.optimizer.learning_rate = rate
        train(model, 2)
    model.set_weights(weights)
    model.optimizer.load_state_dict(taken)
    assert_equal(train(model), train(straight))


# Refused ------------------------------------------------------------------------------------------


def without(*place: str) -> Callable[[dict[str, Any]], Any]:
    def change(taken: dict[str, Any]) -> Any:
        at = taken
        for name in place[:-1]:
            at = at[name]
        del at[place[-1]]
        return taken

    return change


def put(value: Any, *place: str) -> Callable[[dict[str, Any]], Any]:
    def change(taken: dict[str, Any]) -> Any:
        at = taken
        for name in place[:-1]:
            at = at[name]
        at[place[-1]] = value
        return taken

    return change


KERNEL = ("groups", "backbone", "body/first/kernel")
WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no dict": (lambda taken: [1], TypeError, "that `optimizer.state_dict.* of type list"),
    "no manifest": (without("manifest"), TypeError, r"with the entries 'scalars', 'groups'"),
    "manifest of another format": (put(1, "manifest", "format"), ValueError, "must be of format 2"),
    "manifest cut": (without("manifest", "state"), ValueError, "manifest .* is damaged"),
    "manifest no dict": (put(3, "manifest"), ValueError, "manifest .* is damaged"),
    "groups no dict": (put([1], "groups"), TypeError, "must hold dicts"),
    "slot missing": (
        without(*KERNEL, "momentums"),
        ValueError,
        "Received: no backbone/body/first/kernel/momentums",
    ),
    "slot unknown": (
        put(np.zeros(3), *KERNEL, "speed"),
        ValueError,
        "backbone/body/first/kernel/speed, which its manifest does not name",
    ),
    "shape": (
        put(np.zeros((2, 2), "float32"), *KERNEL, "@anchor"),
        ValueError,
        r"@anchor as float32\[2, 2\], where its manifest says float32\[4, 3\]",
    ),
    "dtype": (
        put(np.zeros((4, 3)), *KERNEL, "@anchor"),
        ValueError,
        r"@anchor as float64\[4, 3\]",
    ),
    "no array": (put({1, 2}, *KERNEL, "@anchor"), TypeError, "must hold arrays"),
    "rate not finite": (
        put(np.array(np.nan, "float32"), "scalars", "@learning_rate"),
        ValueError,
        "@learning_rate is nan",
    ),
    "step negative": (
        lambda taken: put(-taken["scalars"]["@iterations"], "scalars", "@iterations")(taken),
        ValueError,
        "@iterations is -3",
    ),
}


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_dict_is_a_clear_error_that_changes_nothing(case, built):
    change, error, message = WRONG[case]
    taken = change(train(compiled()).optimizer.state_dict())
    model = compiled(seed=2)
    if built:
        train(model, 1)
    before = state(model)
    with pytest.raises(error, match=message):
        model.optimizer.load_state_dict(taken)
    for value, expected in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(value, expected)


@each_road
def test_another_layout_is_refused_or_matched_by_path(road, tmp_path):
    source = train(compiled())
    groups = [kgo.Group("first", "body/first")]
    target = compiled(seed=2, groups_=groups, rule=kgo.rule("adam"))
    target.optimizer.build(target.trainable_variables)
    with pytest.raises(ValueError, match=r"Nothing was loaded\. First differences"):
        road(source.optimizer, target.optimizer, tmp_path)
    assert int(target.optimizer.iterations.numpy()) == 0
    renames = {"group:backbone": "group:first"}
    report = target.optimizer.load_state_dict(
        source.optimizer.state_dict(), strict=False, renames=renames
    )
    assert "first/body/first/kernel/momentums" in report.kept
    assert "default/head/kernel/momentums" in report.fresh
    assert "head/head/kernel/momentums" in report.dropped


@pytest.mark.parametrize("asked", ["state_dict", "save_state"])
def test_an_optimizer_that_is_not_built_has_no_state_to_give(asked, tmp_path):
    arguments = [tmp_path / "state.npz"] if asked == "save_state" else []
    with pytest.raises(ValueError, match=f"`{asked}` needs a built optimizer"):
        getattr(compiled().optimizer, asked)(*arguments)
    assert os.listdir(tmp_path) == []


def test_state_that_waits_for_the_build_can_be_taken_again():
    first = train(compiled()).optimizer.state_dict()
    model = compiled(seed=2)
    model.optimizer.load_state_dict(first)
    again = model.optimizer.state_dict()
    assert again["scalars"].keys() == first["scalars"].keys()
    kernel = [taken["groups"]["backbone"]["body/first/kernel"] for taken in (first, again)]
    for slot, value in kernel[0].items():
        np.testing.assert_array_equal(kernel[1][slot], value)


# Files --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("state.h5", ValueError, r"must end in `\.npz`\. Received: path=.*state\.h5"),
        ("gone.npz", FileNotFoundError, r"must be an existing file\. Received: path=.*gone\.npz"),
    ],
)
def test_a_wrong_path_is_a_clear_error(name, error, message, tmp_path):
    with pytest.raises(error, match=message):
        train(compiled(), 1).optimizer.load_state(tmp_path / name)


def test_a_file_of_other_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="without a manifest, with the entries a"):
        train(compiled(), 1).optimizer.load_state(tmp_path / "other.npz")


# A tree of the state, as Orbax saves it -----------------------------------------------------------


def tree(model: keras.Model) -> Any:
    return model.get_state_tree(value_format="numpy_array")["optimizer_variables"]


def test_a_tree_of_the_state_goes_on_bit_for_bit():
    source, target = train(compiled()), train(compiled(seed=2), 1)
    assert source.trainable_variables[2].path != target.trainable_variables[2].path
    target.set_weights(source.get_weights())
    target.set_state_tree({"optimizer_variables": tree(source)})
    assert_equal(train(target, 1), train(source, 1))


def test_a_tree_is_nested_by_group_layer_path_and_slot():
    model = train(compiled())
    (found,) = tree(model).values()
    taken = model.optimizer.state_dict()
    for path, slots in taken["groups"]["backbone"].items():
        at = found["backbone"]
        for name in path.split("/"):
            at = at[name]
        for slot, value in slots.items():
            np.testing.assert_array_equal(at[slot], value)


@pytest.mark.parametrize(
    "restore",
    [
        lambda source, target: target.set_state_tree({"optimizer_variables": tree(source)}),
        lambda source, target: target.optimizer.set_weights(
            [variable.numpy() for variable in source.optimizer.variables]
        ),
    ],
    ids=["tree", "by position"],
)
def test_state_of_another_layout_is_refused_where_only_values_come(restore):
    def grouped(*names: str) -> keras.Model:
        groups = [kgo.Group(name, name) for name in names]
        return train(compiled("sequential", groups_=groups, rule="sgd", learning_rate=0.1), 1)

    # The numbers of variables and their shapes are the same.
    source, target = grouped("dense", "dense_1"), grouped("dense_1", "dense")
    with pytest.raises(ValueError, match="must have the layout of this optimizer"):
        restore(source, target)
    restore(source, grouped("dense", "dense_1"))


def test_a_tree_for_an_optimizer_that_is_not_built_is_refused():
    source, target = train(compiled()), compiled(seed=2)
    with pytest.raises(ValueError, match=r"must be built before.*`optimizer\.build\("):
        target.set_state_tree({"optimizer_variables": tree(source)})


def test_renames_hold_inside_a_loss_scale_optimizer_of_keras(tmp_path):
    def scaled(group: str, seed: int) -> keras.Model:
        named = [kgo.Group(group, "body"), kgo.Group("head", "head")]
        model = compiled(seed=seed, groups_=named)
        outer = keras.optimizers.LossScaleOptimizer(model.optimizer)
        model.compile(optimizer=outer, loss="mse")
        outer.build(model.trainable_variables)
        return model

    source, target = scaled("backbone", 1), scaled("trunk", 2)
    train_inside(source)
    source.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="must have the layout of this optimizer"):
        target.load_weights(tmp_path / "model.weights.h5")
    with kgo.resuming(renames={"group:backbone": "group:trunk"}) as report:
        target.load_weights(tmp_path / "model.weights.h5")
    assert (report.status, report.fresh) == ("loaded", [])
    taken = [one.optimizer.inner_optimizer.state_dict()["groups"] for one in (source, target)]
    for path, slots in taken[0]["backbone"].items():
        for slot, value in slots.items():
            np.testing.assert_array_equal(taken[1]["trunk"][path][slot], value)
