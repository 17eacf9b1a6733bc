"""State and declaration through files: nothing is lost, nothing goes where it does not belong."""

from __future__ import annotations

import json
import logging
import re
import warnings
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import saving_models
from saving_models import MODELS, X, Y, assert_equal, compiled, fit, groups, state, train

import keras_groupopt as kgo

CosineDecay = keras.optimizers.schedules.CosineDecay


# Round trips --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_keras_file_goes_on_bit_for_bit(kind, tmp_path):
    model = fit(compiled(kind))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_equal(loaded, model)
    assert_equal(fit(loaded, 1), fit(model, 1))
    assert int(loaded.optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("kind", ["nested", "subclassed"])
def test_a_weights_file_goes_on_bit_for_bit(kind, built, tmp_path):
    model = fit(compiled(kind))
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = compiled(kind, seed=2)
    if built:
        loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "model.weights.h5")
    assert int(loaded.optimizer.iterations.numpy()) == 3
    assert_equal(fit(loaded, 1), fit(model, 1))


def test_another_process_goes_on_bit_for_bit_under_shifted_names(new_process, tmp_path):
    model = fit(compiled("sequential"))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    fit(model, 1)
    program = """
import keras, numpy as np
import saving_models
for _ in range(5):
    keras.layers.Dense(1)
model = keras.saving.load_model("model.keras")
again = saving_models.compiled("sequential", seed=2)
again.load_weights("model.weights.h5")
for name, one in (("keras", model), ("weights", again)):
    np.savez(name, *saving_models.state(saving_models.fit(one, 1)))
"""
    new_process(program)
    for name in ("keras", "weights"):
        with np.load(tmp_path / f"{name}.npz") as values:
            for value, expected in zip(values.values(), state(model), strict=True):
                np.testing.assert_array_equal(value, expected)


@pytest.mark.needs_keras("3.11", reason="one object's variables may not be in two shards")
def test_sharded_weights_go_on_bit_for_bit(tmp_path):
    model = train(compiled())
    largest = max(np.asarray(value).nbytes for value in store_of(model).values())
    gigabytes = (largest + 1) / 1024**3
    model.save_weights(tmp_path / "model.weights.json", max_shard_size=gigabytes)
    assert len(list(tmp_path.glob("*.h5"))) > 1
    loaded = compiled(seed=2)
    loaded.load_weights(tmp_path / "model.weights.json")
    assert_equal(train(loaded, 1), train(model, 1))


def test_bfloat16_weights_and_state_go_on_bit_for_bit(tmp_path):
    keras.config.set_floatx("bfloat16")
    keras.config.set_dtype_policy("bfloat16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights in float16/bfloat16 lose updates")
        model = train(compiled())
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_equal(loaded, model)
    assert {value.dtype.name for value in state(model)} >= {"bfloat16", "float32"}
    assert_equal(train(loaded, 1), train(model, 1))


@pytest.mark.parametrize("steps", [0, 2])
def test_config_round_trips_at_any_time(steps):
    model = train(compiled(), steps) if steps else compiled()
    config = model.optimizer.get_config()
    assert json.loads(json.dumps(config)) == config
    assert kgo.GroupedOptimizer.from_config(config).get_config() == config


def test_state_loaded_before_build_is_saved_again_without_a_step(tmp_path):
    model = train(compiled())
    model.save_weights(tmp_path / "first.weights.h5")
    between = compiled(seed=2)
    between.load_weights(tmp_path / "first.weights.h5")
    between.save_weights(tmp_path / "second.weights.h5")
    loaded = compiled(seed=3)
    loaded.load_weights(tmp_path / "second.weights.h5")
    assert_equal(train(loaded, 1), train(model, 1))


def test_load_model_leaves_names_to_bind():
    model = train(compiled("twice nested"))
    again = kgo.GroupedOptimizer.from_config(model.optimizer.get_config())
    again.build(model.trainable_variables)
    again.bind(model)
    assert again.plan.records == model.optimizer.plan.records


# What a file holds --------------------------------------------------------------------------------


def test_state_is_keyed_by_group_layer_path_and_slot_and_written_once(tmp_path):
    model = train(compiled())
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        stored = file["optimizer/vars"]
        manifest = json.loads(bytes(stored["@manifest"][()]))
        names = set(stored)
        anchor = stored["backbone|body|first|kernel|@anchor"][()]
    weights = [
        f"body/{layer}/{name}" for layer in ("first", "dense") for name in ("kernel", "bias")
    ]
    expected = {"@iterations", "@learning_rate", "@weight_decay/backbone"}
    expected |= {"@skipped_steps", "@first_nonfinite_group"}
    expected |= {f"@learning_rate_ratio/{group}" for group in ("backbone", "head")}
    expected |= {
        f"backbone/{path}/{slot}" for path in weights for slot in ("momentums", "velocities")
    }
    expected |= {f"backbone/body/{layer}/kernel/@anchor" for layer in ("first", "dense")}
    expected |= {f"head/head/{name}/momentums" for name in ("kernel", "bias")}
    expected |= {f"{group}/@rule/@iterations" for group in ("backbone", "head")}
    assert set(manifest["state"]) == expected
    assert names == {"@manifest", *(key.replace("/", "|") for key in expected)}
    assert {n: g["rule"] for n, g in manifest["groups"].items()} == {
        "backbone": "adam",
        "head": "sgd",
    }
    assert manifest["groups"]["head"]["variables"] == {
        "head/kernel": [[3, 2], "float32"],
        "head/bias": [[2], "float32"],
    }
    assert manifest["format"] == 2
    assert manifest["iterations"] == 3
    assert manifest["provisional"] is False
    np.testing.assert_array_equal(anchor, compiled().get_weights()[0])


def test_a_file_without_anchors_is_at_most_2_percent_larger_than_plain_adams(tmp_path):
    model = keras.Sequential([keras.Input((4,))])
    model.add(keras.layers.Dense(64, name="first"))
    for _ in range(20):
        model.add(keras.layers.Dense(64))
    sizes = []
    for optimizer in (
        keras.optimizers.Adam(),
        kgo.GroupedOptimizer({"first": "first"}, model=model, rule="adam"),
    ):
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        model.save(tmp_path / "model.keras")
        sizes.append((tmp_path / "model.keras").stat().st_size)
    plain, grouped = sizes
    assert grouped <= 1.02 * plain


# Anchors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["load_model", "built", "not built"])
def test_the_first_runs_anchors_are_restored_and_never_the_loaded_weights(road, tmp_path):
    model = train(compiled())
    model.save(tmp_path / "model.keras")
    if road == "load_model":
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    else:
        loaded = compiled(seed=2)
        if road == "built":
            loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(tmp_path / "model.keras")
        loaded.optimizer.build(loaded.trainable_variables)
    drift = float(loaded.optimizer.anchor_drift()["backbone"])
    weights, initial = loaded.get_weights(), compiled().get_weights()
    expected = np.sqrt(sum(np.sum((weights[i] - initial[i]) ** 2) for i in (0, 2)))
    assert expected > 0.1
    assert drift == pytest.approx(expected, rel=1e-5)


def given(model: keras.Model) -> dict[str, np.ndarray]:
    paths = [f"body/{layer}/kernel" for layer in ("first", "dense")]
    shapes = [model.trainable_variables[position].shape for position in (0, 2)]
    return {path: np.full(shape, 2.0) for path, shape in zip(paths, shapes, strict=True)}


def with_given_anchors(seed: int = 1) -> keras.Model:
    model = saving_models.fill(MODELS["nested"](), seed)
    given_groups = [kgo.Group("backbone", "body", anchor=given(model)), kgo.Group("head", "head")]
    optimizer = saving_models.optimizer(model, given_groups)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def test_anchors_given_as_arrays_come_back_with_the_model(tmp_path):
    model = train(with_given_anchors())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_equal(train(loaded, 1), train(model, 1))
    drift = float(loaded.optimizer.anchor_drift()["backbone"])
    kernels = [loaded.get_weights()[position] - 2.0 for position in (0, 2)]
    assert drift == pytest.approx(np.sqrt(sum(np.sum(k**2) for k in kernels)), rel=1e-5)


def test_a_config_alone_does_not_forget_that_anchors_were_given():
    model = with_given_anchors()
    again = kgo.GroupedOptimizer.from_config(model.optimizer.get_config())
    model.compile(optimizer=again, loss="mse")
    with pytest.raises(ValueError, match=r'anchors of group "backbone" are not known'):
        train(model, 1)


# Refused layouts ----------------------------------------------------------------------------------


def store_of(model: keras.Model) -> dict[str, Any]:
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    return store


def renamed_head() -> keras.Model:
    inputs = keras.Input((4,))
    backbone = MODELS["nested"]().get_layer("body")
    return keras.Model(inputs, keras.layers.Dense(2, name="classifier")(backbone(inputs)))


def wider() -> keras.Model:
    inputs = keras.Input((4,))
    backbone = MODELS["nested"]().get_layer("body")
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(backbone(inputs)))


def body_and_head(backbone: str = "backbone", head: str = "head", pattern: str = "head") -> list:
    rule = kgo.rule("sgd", momentum=0.5)
    return [
        kgo.Group(backbone, "body", learning_rate_ratio=0.25, anchor="initial"),
        kgo.Group(head, pattern, rule=rule, weight_decay=0.0),
    ]


def three_groups() -> list[kgo.Group]:
    first = kgo.Group("first", "body/first", learning_rate_ratio=0.25, anchor="initial")
    rest = kgo.Group("backbone", "body/dense", learning_rate_ratio=0.25, anchor="initial")
    return [first, rest, body_and_head()[1]]


OTHER_LAYOUTS = {
    "group added": (
        "nested",
        three_groups,
        r'group "first" is in this optimizer, but not saved\n'
        r".*first/body/first/kernel/momentums is not saved "
        r"\(nearest: backbone/body/first/kernel/momentums\)",
    ),
    "group removed": (
        "nested",
        lambda: [kgo.Group("backbone", kgo.everything(), anchor="initial")],
        r'group "head" is saved, but not in this optimizer',
    ),
    "group renamed": (
        "nested",
        lambda: body_and_head(backbone="body"),
        r'group "backbone" is saved, but not in this optimizer\n.*group "body" is in this',
    ),
    "rule changed": (
        "nested",
        lambda: groups(rule="lion"),
        r'group "head": saved with rule sgd, now lion',
    ),
    "slots changed": (
        "nested",
        lambda: groups(rule=kgo.rule("sgd", momentum=0.0)),
        r"head/head/kernel/momentums is saved, but not in this optimizer",
    ),
    "anchor dropped": (
        "nested",
        lambda: [kgo.Group("backbone", "body", learning_rate_ratio=0.25), groups()[1]],
        r"backbone/body/first/kernel/@anchor is saved, but not in this optimizer",
    ),
    "layer renamed": (
        renamed_head,
        lambda: body_and_head(pattern="classifier"),
        r"head/classifier/kernel/momentums is not saved \(nearest: head/head/kernel/momentums\)",
    ),
    "shape changed": (
        wider,
        groups,
        r"head/head/kernel/momentums: saved as float32\[3, 2\], now float32\[3, 5\]",
    ),
}


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_another_layout_is_refused_with_its_first_differences(case, built):
    kind, other_groups, message = OTHER_LAYOUTS[case]
    store = store_of(train(compiled(), 1))
    model = kind() if callable(kind) else MODELS[kind]()
    optimizer = saving_models.optimizer(model, other_groups())
    if built:
        optimizer.build(model.trainable_variables)
        before = [variable.numpy() for variable in optimizer.variables]
        with pytest.raises(ValueError, match=message):
            optimizer.load_own_variables(store)
        for variable, value in zip(optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
    else:
        optimizer.load_own_variables(store)
        for _ in range(2):  # the second try does not go on as if nothing had been loaded
            with pytest.raises(ValueError, match=message):
                optimizer.build(model.trainable_variables)
        assert not optimizer.built


def test_a_refused_layout_reaches_the_user_of_load_weights(tmp_path):
    train(compiled(), 1).save_weights(tmp_path / "model.weights.h5")
    model = compiled(groups_=three_groups())
    model.optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.optimizer.variables]
    with pytest.raises(ValueError, match=r'(?s)Nothing was loaded\. First differences.*"first"'):
        model.load_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match=r'(?s)Nothing was loaded\. First differences.*"first"'):
        model.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_step_does_not_go_on_where_loaded_state_was_refused():
    store = store_of(train(compiled(), 1))
    model = compiled(groups_=three_groups())
    model.optimizer.load_own_variables(store)
    for _ in range(2):
        with pytest.raises(ValueError, match="Nothing was loaded"):
            fit(model, 1)
        # TensorFlow cannot use a step again whose first compilation failed.
        model.compile(optimizer=model.optimizer, loss="mse")
    model.compile(optimizer=saving_models.optimizer(model, three_groups()), loss="mse")
    fit(model, 1)


def test_groups_in_another_order_give_the_same_numbers():
    model = train(compiled())
    other = compiled(seed=2, groups_=groups()[::-1])
    other.set_weights(model.get_weights())
    other.optimizer.load_own_variables(store_of(model))
    train(model, 1)
    train(other, 1)
    for value, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    stores = (store_of(other), store_of(model))
    for key in set(stores[0]) - {"@manifest"}:
        np.testing.assert_array_equal(stores[0][key], stores[1][key], err_msg=key)


def test_a_file_of_a_plain_keras_optimizer_is_refused_clearly(tmp_path):
    plain = MODELS["nested"]()
    plain.compile(optimizer="adam", loss="mse")
    train(plain, 1).save_weights(tmp_path / "model.weights.h5")
    message = "must come from a GroupedOptimizer. Received: state without a manifest"
    for built in (True, False):
        model = compiled()
        if built:
            model.optimizer.build(model.trainable_variables)
        with pytest.raises(ValueError, match=message):
            model.load_weights(tmp_path / "model.weights.h5")


# Damaged files ------------------------------------------------------------------------------------


def damage(key: str, value: Any = None) -> Any:
    def change(file: h5py.File) -> None:
        stored = file["optimizer/vars"]
        del stored[key]
        if value is not None:
            stored[key] = value

    return change


def another_format(file: h5py.File) -> None:
    stored = file["optimizer/vars"]
    manifest = json.loads(bytes(stored["@manifest"][()])) | {"format": 99}
    damage("@manifest", np.frombuffer(json.dumps(manifest).encode(), "uint8"))(file)


ANCHOR = "backbone|body|first|kernel|@anchor"


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(ANCHOR), "manifest names backbone/body/first/kernel/@anchor, which is missing"),
        (
            damage(ANCHOR, np.ones((2, 2))),
            r"@anchor has shape \[2, 2\] .*, its manifest says \[4, 3\]",
        ),
        (damage("@manifest"), "without a manifest"),
        (damage("@manifest", np.frombuffer(b'{"form', "uint8")), "manifest .* is damaged"),
        (damage("@manifest", np.frombuffer(b"\xff\xfe", "uint8")), "manifest .* is damaged"),
        (damage("@manifest", np.frombuffer(b"[1]", "uint8")), "manifest .* is damaged"),
        (another_format, "must be of format 2. Received: format 99"),
    ],
    ids=["missing", "shape", "no manifest", "cut manifest", "bytes", "no dict", "other format"],
)
def test_a_damaged_file_leaves_the_optimizer_as_it_was(change, message, built, tmp_path):
    path = tmp_path / "model.weights.h5"
    train(compiled(), 1).save_weights(path)
    with h5py.File(path, "r+") as file:
        change(file)
    model = compiled(seed=2)
    if built:
        model.optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.optimizer.variables]
    with pytest.raises(ValueError, match=message):
        model.load_weights(path)
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    if not built:  # and nothing is left to be applied later
        model.optimizer.build(model.trainable_variables)
        assert int(model.optimizer.iterations.numpy()) == 0


def test_a_truncated_file_leaves_model_and_optimizer_as_they_were(tmp_path):
    path = tmp_path / "model.weights.h5"
    train(compiled(), 1).save_weights(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    model = train(compiled(seed=2), 1)
    before = state(model)
    with pytest.raises(OSError, match="truncated"):
        model.load_weights(path)
    for value, expected in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(value, expected)


# Rates in the file and in the code ----------------------------------------------------------------


def scalars(optimizer: Any) -> dict[str, float]:
    rates = {name: float(rate) for name, rate in optimizer.learning_rates.items()}
    return {"base": float(optimizer.learning_rate.numpy()), **rates}


def changed_while_training() -> keras.Model:
    model = train(compiled())
    model.optimizer.learning_rate = 0.0625
    model.optimizer.set_learning_rate_ratio("backbone", 0.5)
    return model


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_of_values_declared_alike_the_files_present_ones_count(built, tmp_path):
    changed_while_training().save_weights(tmp_path / "model.weights.h5")
    model = compiled()
    if built:
        model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "model.weights.h5")
    assert float(model.optimizer.learning_rate.numpy()) == 0.0625
    model.optimizer.build(model.trainable_variables)
    assert scalars(model.optimizer) == {"base": 0.0625, "backbone": 0.03125, "head": 0.0625}


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_of_values_declared_otherwise_the_codes_count_and_that_is_logged(built, tmp_path, caplog):
    changed_while_training().save_weights(tmp_path / "model.weights.h5")
    model = compiled(learning_rate=0.25)
    if built:
        model.optimizer.build(model.trainable_variables)
    with caplog.at_level(logging.WARNING):
        model.load_weights(tmp_path / "model.weights.h5")
        model.optimizer.build(model.trainable_variables)
    assert scalars(model.optimizer) == {"base": 0.25, "backbone": 0.125, "head": 0.25}
    assert [record.getMessage() for record in caplog.records] == [
        "learning_rate: declared as 0.125 when it was saved, now 0.25; the present declaration "
        "counts."
    ]
    assert int(model.optimizer.iterations.numpy()) == 3


def test_a_rate_set_between_loading_and_the_first_step_stays(tmp_path):
    train(compiled()).save_weights(tmp_path / "model.weights.h5")
    model = compiled()
    model.load_weights(tmp_path / "model.weights.h5")
    model.optimizer.learning_rate = 0.03125
    train(model, 1)
    assert float(model.optimizer.learning_rate.numpy()) == 0.03125


def test_load_model_takes_everything_from_the_file(tmp_path):
    model = changed_while_training()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert scalars(loaded.optimizer) == scalars(model.optimizer)


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_slots_and_step_survive_a_number_made_a_schedule(built, tmp_path, caplog):
    model = train(compiled())
    model.save_weights(tmp_path / "model.weights.h5")
    scheduled = compiled(seed=2, learning_rate=CosineDecay(0.125, 10))
    if built:
        scheduled.optimizer.build(scheduled.trainable_variables)
    with caplog.at_level(logging.WARNING):
        scheduled.load_weights(tmp_path / "model.weights.h5")
        scheduled.optimizer.build(scheduled.trainable_variables)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["learning_rate"]
    rate = float(scheduled.optimizer.learning_rates["head"])
    assert rate == pytest.approx(0.125 * 0.5 * (1 + np.cos(np.pi * 3 / 10)), rel=1e-6)
    mine, saved = store_of(scheduled), store_of(model)
    for key in set(saved) - {"@manifest", "@learning_rate"}:
        np.testing.assert_array_equal(mine[key], saved[key], err_msg=key)


def test_a_schedule_goes_on_where_it_was(tmp_path):
    schedule = CosineDecay(0.125, 10)
    model = train(compiled(learning_rate=schedule))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    expected = 0.125 * 0.5 * (1 + np.cos(np.pi * 3 / 10))
    assert float(loaded.optimizer.learning_rates["head"]) == pytest.approx(expected, rel=1e-6)
    assert_equal(train(loaded, 1), train(model, 1))


# Custom objects -----------------------------------------------------------------------------------


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


@keras.saving.register_keras_serializable(package="test_saving")
def is_in_the_body(info: Any) -> bool:
    return info.path.startswith("body/")


@keras.saving.register_keras_serializable(package="test_saving")
def eighth() -> float:
    return 0.125


def custom(**changes: Any) -> keras.Model:
    custom_groups = [
        kgo.Group("backbone", kgo.where(is_in_the_body), rule=kgo.rule(Heavy, mass=4.0)),
        kgo.Group("head", "head", learning_rate_ratio=0.5),
    ]
    return compiled(groups_=custom_groups, learning_rate=eighth, **changes)


def test_third_party_rules_and_registered_functions_come_back_with_the_model(tmp_path):
    model = train(custom())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.plan["backbone"].group.rule.label == "heavy"
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_equal(train(loaded, 1), train(model, 1))


def test_a_rule_given_as_an_instance_comes_back_with_the_model(tmp_path):
    instance = Heavy(0.0625, mass=8.0)
    instance_groups = [kgo.Group("backbone", "body", rule=instance), kgo.Group("head", "head")]
    model = train(compiled(groups_=instance_groups))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert scalars(loaded.optimizer) == {"base": 0.125, "backbone": 0.0625, "head": 0.125}
    assert_equal(train(loaded, 1), train(model, 1))


class Unregistered(keras.optimizers.SGD):
    """A rule from elsewhere that says nothing of saving, as most do."""


def test_a_third_party_rule_that_is_not_registered_is_loaded_by_custom_objects(tmp_path):
    rule = kgo.rule(Unregistered, momentum=0.5)
    model = train(compiled(groups_=[kgo.Group("body", "body", rule=rule)], rule=Unregistered))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(
        tmp_path / "model.keras", custom_objects={"Unregistered": Unregistered}
    )
    assert_equal(train(loaded, 1), train(model, 1))


def unregistered(info: Any) -> bool:
    return info.path.startswith("head")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"groups_": {"head": kgo.where(unregistered)}}, r'`selector` of group "head" is where\('),
        ({"learning_rate": lambda: 0.125}, "the base learning rate is the function"),
        (
            {"exclude_from_decay": kgo.where(unregistered)},
            r"`exclude_from_decay` is where\(unregistered\)",
        ),
    ],
    ids=["selector", "rate", "exclusion"],
)
def test_what_cannot_be_saved_is_told_at_construction(changes, names, tmp_path):
    model = MODELS["nested"]()
    with pytest.warns(UserWarning, match=rf"(?s){names}.*register_keras_serializable"):
        optimizer = saving_models.optimizer(model, **changes)
    model.compile(optimizer=optimizer, loss="mse")
    train(model, 1)
    with pytest.raises(ValueError, match="must be registered to be saved"):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")


def test_a_function_that_is_not_registered_any_more_is_named(tmp_path):
    config = custom().optimizer.get_config()
    text = json.dumps(config).replace("test_saving>eighth", "test_saving>gone")
    with pytest.raises(ValueError, match=re.escape('"test_saving>gone"')):
        kgo.GroupedOptimizer.from_config(json.loads(text))


# Another model ------------------------------------------------------------------------------------


def test_a_config_bound_to_another_model_is_refused_with_the_differences():
    config = compiled().optimizer.get_config()
    model = wider()
    model.compile(optimizer=kgo.GroupedOptimizer.from_config(config), loss="mse")
    with pytest.raises(
        ValueError, match=r"head/kernel: saved as kernel float32\[3, 2\], found .*\[3, 5\]"
    ):
        model.fit(X, np.zeros((len(Y), 5)), verbose=0)
