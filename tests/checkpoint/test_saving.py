"""State and declaration through files, dicts and trees: nothing is lost, and training goes on."""

from __future__ import annotations

import copy
import functools
import json
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import saving_models
from comparing import state_of
from models import number
from saving_models import (
    MODELS,
    assert_equal,
    by_dict,
    by_state_file,
    compiled,
    either_way,
    grouped,
    groups,
    in_loss_scale,
    load,
    save,
    state,
    store_of,
    train,
)

import keras_groupopt as kgo

CosineDecay = keras.optimizers.schedules.CosineDecay

# Round trips --------------------------------------------------------------------------------------


def through_file(name: str, **options: Any) -> Callable[..., keras.Model]:
    return lambda source, make, folder: load(save(source, folder / name), lambda: make(**options))


def through_two_files(source: keras.Model, make: Any, folder: pathlib.Path) -> keras.Model:
    """State that is loaded before the optimizer is built is saved again without a step."""
    between = load(save(source, folder / "1.weights.h5"), make)
    return load(save(between, folder / "2.weights.h5"), make)


def through_shards(source: keras.Model, make: Any, folder: pathlib.Path) -> keras.Model:
    largest = max(np.asarray(value).nbytes for value in store_of(source).values())
    path = folder / "model.weights.json"
    source.save_weights(path, max_shard_size=(largest + 1) / 1024**3)
    assert len(list(folder.glob("*.h5"))) > 1
    return load(path, make)


def into_a_keras_file_for_weights(source: keras.Model, make: Any, folder: pathlib.Path) -> Any:
    model = make()
    model.load_weights(save(source, folder / "model.keras"))
    return model


def state_alone(move: Callable[..., Any], build: bool) -> Callable[..., keras.Model]:
    def road(source: keras.Model, make: Any, folder: pathlib.Path) -> keras.Model:
        target = make(build=build)
        target.set_weights(source.get_weights())
        report = move(source, target, folder)
        assert report.status == ("loaded" if build else "waits for the build")
        target.optimizer.build(target.trainable_variables)
        assert (report.status, report.fresh, report.dropped) == ("loaded", [], [])
        return target

    return road


def tree(model: keras.Model) -> Any:
    """The state as Orbax saves it."""
    return model.get_state_tree(value_format="numpy_array")["optimizer_variables"]


def as_tree(source: keras.Model, make: Any, folder: pathlib.Path) -> keras.Model:
    target = train(make(), 1)
    assert source.trainable_variables[2].path != target.trainable_variables[2].path
    target.set_weights(source.get_weights())
    target.set_state_tree({"optimizer_variables": tree(source)})
    return target


ROADS: dict[str, Callable[..., keras.Model]] = {
    "model": through_file("model.keras"),
    "weights": through_file("model.weights.h5"),
    "weights, built": through_file("model.weights.h5", build=True),
    "weights of a model's file": into_a_keras_file_for_weights,
    "two files": through_two_files,
    "shards": through_shards,
    "dict": state_alone(by_dict, build=False),
    "dict, built": state_alone(by_dict, build=True),
    "state's file": state_alone(by_state_file, build=False),
    "state's file, built": state_alone(by_state_file, build=True),
    "tree": as_tree,
}
shards = pytest.mark.needs_keras("3.11", reason="one object's variables may not be in two shards")


@pytest.mark.filterwarnings("ignore:Weights in float16/bfloat16 lose updates")
@pytest.mark.parametrize(
    ("road", "kind", "dtype"),
    [
        *(
            pytest.param(road, "nested", "float32", marks=shards if road == "shards" else ())
            for road in ROADS
        ),
        *((road, "subclassed", "float32") for road in ("model", "weights", "weights, built")),
        *(("model", kind, "float32") for kind in ("sequential", "twice nested")),
        *((road, "nested", "bfloat16") for road in ("model", "weights", "dict", "state's file")),
        *((road, "nested", "float64") for road in ("model", "dict")),
    ],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_training_goes_on_bit_for_bit(road, kind, dtype, tmp_path):
    """With a rate and a ratio that were set on the way, and the anchors of the first run."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    source = train(compiled(kind))
    source.optimizer.learning_rate = 0.0625
    source.optimizer.set_learning_rate_ratio("backbone", 0.5)
    target = ROADS[road](source, functools.partial(compiled, kind, seed=2), tmp_path)
    assert int(target.optimizer.iterations.numpy()) == 3
    assert_equal(train(target, 1), train(source, 1))
    if dtype == "float64" and keras.backend.backend() == "jax":
        # JAX holds it in 32 bits.
        dtype = "float32"
    assert dtype in {value.dtype.name for value in state(target)}


@pytest.mark.parametrize("move", [by_dict, by_state_file])
def test_state_inside_a_loss_scale_optimizer_goes_on(move, tmp_path):
    source, target = in_loss_scale(compiled()), in_loss_scale(compiled(seed=2))
    train_inside(source)
    move(source, target, tmp_path)
    found, expected = (state_of(grouped(model)) for model in (target, source))
    np.testing.assert_equal(found, expected)


def train_inside(model: keras.Model) -> None:
    variables = model.trainable_variables
    gradients = [keras.ops.full(v.shape, 0.1) for v in variables]
    model.optimizer.inner_optimizer.apply(gradients, variables)


def test_renames_hold_inside_a_loss_scale_optimizer_of_keras(tmp_path):
    def scaled(group: str, seed: int) -> keras.Model:
        named = [kgo.Group(group, "body"), kgo.Group("head", "head")]
        return in_loss_scale(compiled(seed=seed, groups_=named))

    source, target = scaled("backbone", 1), scaled("trunk", 2)
    train_inside(source)
    path = save(source, tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="must have the layout of this optimizer"):
        target.load_weights(path)
    with kgo.resuming(renames={"group:backbone": "group:trunk"}) as report:
        target.load_weights(path)
    assert (report.status, report.fresh) == ("loaded", [])
    saved, loaded = (m.optimizer.inner_optimizer.state_dict()["groups"] for m in (source, target))
    np.testing.assert_equal(loaded["trunk"], saved["backbone"])


@pytest.mark.parametrize("steps", [0, 2])
def test_config_round_trips_at_any_time(steps):
    config = train(compiled(), steps).optimizer.get_config()
    assert json.loads(json.dumps(config)) == config
    assert kgo.GroupedOptimizer.from_config(config).get_config() == config


def test_a_legacy_file_is_answered_with_what_can_be_loaded(tmp_path):
    model = compiled()
    model.compile(model.optimizer, loss=keras.losses.MeanSquaredError())
    train(model, 1).save(tmp_path / "model.h5")
    with pytest.raises(ValueError, match=r"legacy `\.h5` file\. Save the model as `\.keras`, or"):
        keras.saving.load_model(tmp_path / "model.h5")
    again = keras.saving.load_model(tmp_path / "model.h5", compile=False)
    np.testing.assert_equal(again.get_weights(), model.get_weights())


def test_load_model_leaves_names_to_bind():
    model = train(compiled("twice nested"))
    again = kgo.GroupedOptimizer.from_config(model.optimizer.get_config())
    again.build(model.trainable_variables)
    again.bind(model)
    assert again.plan.records == model.optimizer.plan.records


def test_groups_in_another_order_give_the_same_numbers():
    model = train(compiled())
    other = compiled(seed=2, groups_=groups()[::-1])
    other.set_weights(model.get_weights())
    other.optimizer.load_state_dict(model.optimizer.state_dict())
    train(model, 1), train(other, 1)
    np.testing.assert_equal(other.get_weights(), model.get_weights())
    np.testing.assert_equal(state_of(other.optimizer), state_of(model.optimizer))


# What is held -------------------------------------------------------------------------------------

WEIGHTS = [f"body/{layer}/{name}" for layer in ("first", "dense") for name in ("kernel", "bias")]
SCALARS = {"@iterations", "@learning_rate", "@weight_decay/backbone", "@skipped_steps"}
SCALARS |= {"@first_nonfinite_group", "@learning_rate_ratio/backbone", "@learning_rate_ratio/head"}
KEYS = SCALARS | {f"{group}/@rule/@iterations" for group in ("backbone", "head")}
KEYS |= {f"backbone/{path}/{slot}" for path in WEIGHTS for slot in ("momentums", "velocities")}
KEYS |= {f"backbone/body/{layer}/kernel/@anchor" for layer in ("first", "dense")}
KEYS |= {f"head/head/{name}/momentums" for name in ("kernel", "bias")}


def test_state_is_keyed_by_group_layer_path_and_slot_and_written_once(tmp_path):
    with h5py.File(save(train(compiled()), tmp_path / "model.weights.h5")) as file:
        stored = file["optimizer/vars"]
        manifest = json.loads(bytes(stored["@manifest"][()]))
        names = set(stored)
        anchor = stored["backbone|body|first|kernel|@anchor"][()]
    assert set(manifest["state"]) == KEYS
    assert names == {"@manifest", *(key.replace("/", "|") for key in KEYS)}
    assert {n: g["rule"] for n, g in manifest["groups"].items()} == {
        "backbone": "adam",
        "head": "sgd",
    }
    assert manifest["groups"]["head"]["variables"] == {
        "head/kernel": [[3, 2], "float32"],
        "head/bias": [[2], "float32"],
    }
    assert (manifest["format"], manifest["iterations"], manifest["provisional"]) == (2, 3, False)
    # The first run's weights.
    np.testing.assert_array_equal(anchor, compiled().get_weights()[0])


def test_dict_and_tree_are_nested_by_group_layer_path_and_slot():
    model = train(compiled())
    taken = model.optimizer.state_dict()
    assert list(taken) == ["manifest", "scalars", "groups"]
    assert set(taken["scalars"]) == SCALARS
    assert set(taken["groups"]["backbone"]) == {"@rule", *WEIGHTS}
    kernel = taken["groups"]["backbone"]["body/first/kernel"]
    assert set(kernel) == {"momentums", "velocities", "@anchor"}
    assert all(type(value) is np.ndarray and value.shape == (4, 3) for value in kernel.values())
    assert json.loads(json.dumps(taken["manifest"])) == taken["manifest"]
    (found,) = tree(model).values()
    for path, slots in taken["groups"]["backbone"].items():
        at = functools.reduce(lambda at, name: at[name], path.split("/"), found["backbone"])
        for slot, value in slots.items():
            np.testing.assert_array_equal(at[slot], value)


def test_trying_rates_changes_neither_what_was_taken_nor_what_comes_after():
    model, straight = train(compiled()), train(compiled())
    weights, taken = model.get_weights(), model.optimizer.state_dict()
    before = copy.deepcopy(taken)
    for rate in (1e-3, 1.0):
        model.optimizer.learning_rate = rate
        train(model, 2)
    np.testing.assert_equal(taken, before)
    model.set_weights(weights)
    model.optimizer.load_state_dict(taken)
    assert_equal(train(model), train(straight))
    np.testing.assert_equal(taken, before)


def test_state_that_waits_for_the_build_can_be_taken_again():
    first = train(compiled()).optimizer.state_dict()
    model = compiled(seed=2)
    model.optimizer.load_state_dict(first)
    again = model.optimizer.state_dict()
    np.testing.assert_equal(again["groups"], first["groups"])
    assert again["scalars"].keys() == first["scalars"].keys()


def test_a_file_without_anchors_is_at_most_2_percent_larger_than_plain_adams(tmp_path):
    layers = [keras.layers.Dense(64, name="first"), *(keras.layers.Dense(64) for _ in range(20))]
    model = keras.Sequential([keras.Input((4,)), *layers])
    grouped = kgo.GroupedOptimizer({"first": "first"}, model=model, rule="adam")
    sizes = []
    for optimizer in (keras.optimizers.Adam(), grouped):
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        sizes.append(save(model, tmp_path / "model.keras").stat().st_size)
    assert sizes[1] <= 1.02 * sizes[0]


# Weights without the optimizer's state ------------------------------------------------------------


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_weights_alone_leave_step_moments_and_rates_as_they_are(ending, tmp_path):
    source = train(compiled(learning_rate=0.25))
    path = save(source, tmp_path / f"model{ending}")
    model = train(compiled(seed=2), 1)
    before = state_of(model.optimizer)
    kgo.load_weights(model, path, optimizer=False)
    np.testing.assert_equal(model.get_weights(), source.get_weights())
    np.testing.assert_equal(state_of(model.optimizer), before)


def test_weights_alone_are_the_anchors_of_a_run_that_has_not_begun(tmp_path):
    model = compiled(seed=2, build=True)
    path = save(train(compiled()), tmp_path / "model.weights.h5")
    kgo.load_weights(model, path, optimizer=False)
    assert float(model.optimizer.anchor_drift()["backbone"]) == 0.0
    assert int(model.optimizer.iterations.numpy()) == 0


# Anchors that were given --------------------------------------------------------------------------


def body_and_head(selector: Any = "body", **options: Any) -> list[kgo.Group]:
    return [kgo.Group("backbone", selector, **options), kgo.Group("head", "head")]


def test_anchors_given_as_arrays_come_back_with_the_model(tmp_path):
    shapes = {"first": (4, 3), "dense": (3, 3)}
    given = {f"body/{layer}/kernel": np.full(shape, 2.0) for layer, shape in shapes.items()}
    model = train(compiled(groups_=body_and_head(anchor=given)))
    loaded = load(save(model, tmp_path / "model.keras"), compiled)
    assert_equal(train(loaded, 1), train(model, 1))
    kernels = [loaded.get_weights()[position] - 2.0 for position in (0, 2)]
    drift = np.sqrt(sum(np.sum(kernel**2) for kernel in kernels))
    assert float(loaded.optimizer.anchor_drift()["backbone"]) == pytest.approx(drift, rel=1e-5)


# Rates in the file and in the code ----------------------------------------------------------------


def rates_of(optimizer: Any) -> dict[str, float]:
    rates = {name: float(rate) for name, rate in optimizer.learning_rates.items()}
    return {"base": number(optimizer.learning_rate), **rates}


DECAYED = 0.125 * 0.5 * (1 + np.cos(np.pi * 3 / 10))
OTHERWISE = "learning_rate: declared as 0.125 when it was saved, now {}; the present declaration"
# What the code declares, the rates then, and what is logged.
DECLARED: dict[str, tuple[dict[str, Any], dict[str, float], list[str]]] = {
    "alike": ({}, {"base": 0.0625, "backbone": 0.03125, "head": 0.0625}, []),
    "otherwise": (
        {"learning_rate": 0.25},
        {"base": 0.25, "backbone": 0.125, "head": 0.25},
        [OTHERWISE.format("0.25")],
    ),
    "as a schedule": (
        {"learning_rate": CosineDecay(0.125, 10)},
        {"base": DECAYED, "backbone": 0.5 * DECAYED, "head": DECAYED},
        [OTHERWISE.format("CosineDecay")[:30]],
    ),
}


@either_way
@pytest.mark.parametrize("case", DECLARED)
def test_of_values_declared_alike_the_files_count_and_else_the_codes(case, build, tmp_path, caplog):
    declared, rates, logged = DECLARED[case]
    source = train(compiled())
    source.optimizer.learning_rate = 0.0625
    source.optimizer.set_learning_rate_ratio("backbone", 0.5)
    model = compiled(seed=2, build=build, **declared)
    with caplog.at_level(logging.WARNING):
        model.load_weights(save(source, tmp_path / "model.weights.h5"))
        model.optimizer.build(model.trainable_variables)
    assert rates_of(model.optimizer) == pytest.approx(rates, rel=1e-6)
    assert len(caplog.records) == len(logged)
    for record, text in zip(caplog.records, logged, strict=True):
        assert record.getMessage().startswith(text)
    # The rest is that of the file.
    found, saved = state_of(model.optimizer), state_of(source.optimizer)
    for key in set(saved) - {"@learning_rate"}:
        np.testing.assert_array_equal(found[key], saved[key], err_msg=key)


def test_a_rate_set_between_loading_and_the_first_step_stays(tmp_path):
    model = load(save(train(compiled()), tmp_path / "model.weights.h5"), compiled)
    model.optimizer.learning_rate = 0.03125
    train(model, 1)
    assert float(model.optimizer.learning_rate.numpy()) == 0.03125


# What comes back with a model ---------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="test_saving")
class Heavy(keras.optimizers.Optimizer):
    """A rule from elsewhere, with a slot of its own."""

    def __init__(self, learning_rate: Any = 0.1, mass: float = 2.0, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.mass = mass

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.speeds = self.add_optimizer_variables(variables, "speed")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        speed = self.speeds[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign(speed, keras.ops.subtract(speed / self.mass, rate * gradient))
        self.assign_add(variable, speed)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "mass": self.mass}


class Unregistered(keras.optimizers.SGD):
    """A rule from elsewhere that says nothing of saving, as most do."""


@keras.saving.register_keras_serializable(package="test_saving")
def is_in_the_body(info: Any) -> bool:
    return info.path.startswith("body/")


@keras.saving.register_keras_serializable(package="test_saving")
def eighth() -> float:
    return 0.125


# What is declared, and the rates of what is loaded.
CUSTOM: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, float]]] = {
    "a rule and functions that are registered": (
        lambda: {
            "groups_": body_and_head(kgo.where(is_in_the_body), rule=kgo.rule(Heavy, mass=4.0)),
            "learning_rate": eighth,
        },
        {"base": 0.125, "backbone": 0.125, "head": 0.125},
    ),
    "a rule's instance": (
        lambda: {"groups_": body_and_head(rule=Heavy(0.0625, mass=8.0))},
        {"base": 0.125, "backbone": 0.0625, "head": 0.125},
    ),
    "a rule that is not registered": (
        lambda: {
            "groups_": body_and_head(rule=kgo.rule(Unregistered, momentum=0.5)),
            "rule": Unregistered,
        },
        {"base": 0.125, "backbone": 0.125, "head": 0.125},
    ),
    "a schedule": (
        lambda: {"learning_rate": CosineDecay(0.125, 10)},
        {"base": DECAYED, "backbone": 0.25 * DECAYED, "head": DECAYED},
    ),
}


@pytest.mark.parametrize("case", CUSTOM)
def test_rules_functions_and_schedules_come_back_with_the_model(case, tmp_path):
    make, rates = CUSTOM[case]
    model = train(compiled(**make()))
    path = save(model, tmp_path / "model.keras")
    loaded = keras.saving.load_model(path, custom_objects={"Unregistered": Unregistered})
    assert rates_of(loaded.optimizer) == pytest.approx(rates, rel=1e-6)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_equal(train(loaded, 1), train(model, 1))


def unregistered(info: Any) -> bool:
    return info.path.startswith("head")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"groups_": {"head": kgo.where(unregistered)}}, r'`selector` of group "head" is where\('),
        ({"learning_rate": lambda: 0.125}, "the base learning rate is the function"),
        ({"exclude_from_decay": kgo.where(unregistered)}, r"decay` is where\(unregistered\)"),
    ],
    ids=["selector", "rate", "exclusion"],
)
def test_a_warning_at_construction_names_what_cannot_be_saved(changes, names, tmp_path):
    model = MODELS["nested"]()
    with pytest.warns(UserWarning, match=rf"(?s){names}.*register_keras_serializable"):
        optimizer = saving_models.optimizer(model, **changes)
    model.compile(optimizer=optimizer, loss="mse")
    train(model, 1)
    with pytest.raises(ValueError, match="must be registered to be saved"):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")


def test_a_function_that_is_not_registered_any_more_is_named():
    config = json.dumps(compiled(learning_rate=eighth).optimizer.get_config())
    with pytest.raises(ValueError, match=re.escape('"test_saving>gone"')):
        kgo.GroupedOptimizer.from_config(json.loads(config.replace(">eighth", ">gone")))
