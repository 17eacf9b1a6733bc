"""Odd models, names and sequences of calls, each with what it must come to."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest

import keras_groupopt as kgo

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :2] * 0.5


def two_layers(name: str | None = None) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="enc"),
            keras.layers.Dense(2, name="head"),
        ],
        name=name,
    )


def compiled(model: keras.Model, *groups: kgo.Group, **options: Any) -> keras.Model:
    optimizer = kgo.GroupedOptimizer(groups, model=model, **options)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fit(model: keras.Model, epochs: int = 1) -> keras.Model:
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0)
    return model


def weights(model: keras.Model) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.weights]


def assert_equal(one: keras.Model, other: keras.Model) -> None:
    # XLA rounds otherwise where a step has fewer variables.
    for value, expected in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("rule", ["adam", "nadam"])
@pytest.mark.parametrize("frozen", ["enc", "head"])
def test_a_model_frozen_in_part_after_its_first_steps_goes_on_from_a_file(frozen, rule, tmp_path):
    group = kgo.Group("enc", "enc", learning_rate_ratio=0.5, weight_decay=0.1, anchor="initial")
    model = fit(compiled(two_layers(), group, rule=rule), 2)
    model.optimizer.set_learning_rate_ratio("enc", 0.25)
    model.get_layer(frozen).trainable = False
    model.compile(optimizer=model.optimizer, loss="mse")
    fit(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_equal(fit(loaded, 2), fit(model, 2))
    assert [group.name for group in loaded.optimizer.plan.groups] == ["enc", "default"]
    loaded.optimizer.plan.summary(print_fn=lambda text: None)
    loaded.optimizer.plan._repr_html_()
    loaded.save(tmp_path / "again.keras")
    again = keras.saving.load_model(tmp_path / "again.keras")
    assert_equal(fit(again), fit(loaded))


class Adam(keras.optimizers.Adam):
    """A user's rule of the name of its base: each weight goes down by the rate."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, 0.0 * gradient + keras.ops.cast(learning_rate, variable.dtype))


def test_an_instance_of_a_users_class_is_not_taken_for_kerass_of_the_same_name():
    variable = keras.Variable([[1.0]], name="kernel")
    optimizer = kgo.GroupedOptimizer([kgo.Group("all", "**", rule=Adam(0.5))])
    optimizer.apply([keras.ops.zeros((1, 1))], [variable])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), [[0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ["@x", "@learning_rate_ratio"])
def test_a_groups_name_does_not_look_like_the_optimizers_own_state(name):
    # Its moments would be left out of the check of a file's layout.
    with pytest.raises(ValueError, match="must not start with `@`"):
        kgo.Group(name, "enc")


def test_groups_whose_names_differ_in_odd_characters_keep_apart_in_a_state_tree():
    groups = kgo.Group("a b", "enc", weight_decay=0.1), kgo.Group("a_b", "head", weight_decay=0.1)
    model = fit(compiled(two_layers(), *groups, rule="adam"))
    tree = model.get_state_tree(value_format="numpy_array")
    flat = tree["optimizer_variables"]["grouped_optimizer"]
    assert set(flat["@learning_rate_ratio"]) == {"a b", "a_b"}
    assert (set(flat["a b"]), set(flat["a_b"])) == ({"enc", "@rule"}, {"head", "@rule"})


def test_a_state_tree_of_another_model_of_the_same_code_goes_on():
    models = []
    for _ in range(2):
        model = two_layers("same")
        group = kgo.Group("enc", "enc", rule="nadam", weight_decay=0.1, anchor="initial")
        models.append(fit(compiled(model, group, rule="adam", name="optimizer")))
    first, second = models
    tree = fit(first, 2).get_state_tree(value_format="numpy_array")
    second.set_state_tree(tree)
    assert_equal(fit(second), fit(first))


def test_a_config_shares_nothing_with_its_optimizer():
    config = fit(compiled(two_layers())).optimizer.get_config()
    optimizer = kgo.GroupedOptimizer.from_config(config)
    records = [dict(record) for record in config["plan"]]
    config["plan"].pop()
    optimizer.get_config()["plan"][0]["group"] = "another"
    assert optimizer.get_config()["plan"] == records


@pytest.mark.backends("tensorflow", "torch", reason="JAX has no float64 by default")
def test_decay_of_float64_weights_is_of_float64():
    variable = keras.Variable(np.full((1, 1), 1.5), dtype="float64", name="kernel")
    optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1e-3, weight_decay=1e-4)
    optimizer.apply([keras.ops.zeros((1, 1), "float64")], [variable])
    decay = 1.5 - float(keras.ops.convert_to_numpy(variable)[0, 0])
    np.testing.assert_allclose(decay, 1.5e-7, rtol=1e-5)


@pytest.mark.backends("tensorflow", "torch", reason="JAX has no float64 by default")
@pytest.mark.parametrize("limit", ["global_clipnorm", "clipnorm", "clipvalue"])
def test_gradients_of_float64_are_clipped(limit):
    variable = keras.Variable(np.zeros((1, 1)), dtype="float64", name="kernel")
    optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1.0, **{limit: 0.5})
    optimizer.apply([keras.ops.full((1, 1), 3.0, dtype="float64")], [variable])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), [[-0.5]], rtol=1e-6)


def test_an_optimizer_built_in_another_order_than_the_models_never_mixes_up_layers(backend):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, use_bias=False, name="still"),
            keras.layers.Dense(4, use_bias=False, name="moving"),
        ]
    )
    still = kgo.Group("still", "still", learning_rate_ratio=0.0)
    compiled(model, still, rule="sgd", learning_rate=0.1)
    model.optimizer.build(model.trainable_variables[::-1])
    before = weights(model)
    if backend == "jax":
        # Keras passes values there, which only their order tells apart.
        with pytest.raises(ValueError, match=r"built with moving/kernel first"):
            model.fit(X, X, verbose=0)
    else:
        model.fit(X, X, verbose=0)
        assert not np.array_equal(weights(model)[1], before[1])
    np.testing.assert_array_equal(weights(model)[0], before[0])


def test_the_file_of_a_backbone_anchors_it_inside_another_model(tmp_path):
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="enc")], name="back")
    backbone.save(tmp_path / "back.keras")
    pretrained = np.array(keras.ops.convert_to_numpy(backbone.weights[0]))
    model = keras.Sequential([keras.Input((4,)), backbone, keras.layers.Dense(2, name="head")])
    backbone.set_weights([np.zeros_like(value) for value in weights(backbone)])
    group = kgo.Group("back", "back", weight_decay=0.1, anchor=str(tmp_path / "back.keras"))
    compiled(model, group).optimizer.build(model.trainable_variables)
    drift = float(keras.ops.convert_to_numpy(model.optimizer.anchor_drift()["back"]))
    assert drift == pytest.approx(np.linalg.norm(pretrained), rel=1e-5)


def test_a_loss_scale_cannot_be_set_where_a_compiled_step_would_ignore_it():
    optimizer = kgo.GroupedOptimizer(loss_scale_factor=2.0)
    with pytest.raises(AttributeError, match="`loss_scale_factor` is fixed at construction"):
        optimizer.loss_scale_factor = 4.0


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([kgo.Group("enc", "enc", frozen=True)], {}),
        ([kgo.Group("enc", "enc"), kgo.Group("default", frozen=True)], {}),
        ([kgo.Group("enc", "enc")], {"unclaimed": "freeze"}),
    ],
)
def test_a_plan_with_frozen_groups_is_shown_before_and_after_build(groups, options):
    model = two_layers()
    optimizer = kgo.GroupedOptimizer(groups, model=model, **options)
    for _ in range(2):
        lines: list[str] = []
        optimizer.plan.summary(print_fn=lines.append, expand=True)
        assert any("frozen" in line for line in lines)
        assert "frozen" in optimizer.plan._repr_html_()
        optimizer.build(model.trainable_variables)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: kgo.Group("enc", model.weights[0]), r"selector=<variable .*kernel>"),
        (
            lambda model: kgo.GroupedOptimizer([{"params": model.weights}]),
            r"`groups` must hold `kgo.Group` objects",
        ),
    ],
)
def test_an_error_never_prints_weights(make, message):
    model = two_layers()
    with pytest.raises(TypeError, match=message) as caught:
        make(model)
    assert len(str(caught.value)) < 400


def test_the_average_of_a_layer_new_to_a_resumed_run_starts_at_its_weights(tmp_path):
    model = two_layers()
    model.get_layer("enc").trainable = False
    fit(compiled(model, ema=kgo.EMA(0.5))).save_weights(tmp_path / "run.weights.h5")
    resumed = compiled(two_layers(), ema=kgo.EMA(0.5))
    resumed.set_weights([value + 1.0 for value in weights(resumed)])
    resumed.optimizer.build(resumed.trainable_variables)
    with kgo.resuming(strict=False):
        resumed.load_weights(tmp_path / "run.weights.h5")
    with kgo.averaged_weights(resumed):
        averaged = weights(resumed)
    np.testing.assert_array_equal(averaged[0], weights(model)[0])
    with kgo.averaged_weights(model):
        np.testing.assert_array_equal(averaged[2], weights(model)[2])


def with_statistics(name: str) -> keras.Model:
    layers = [keras.layers.Dense(3, name="enc"), keras.layers.BatchNormalization(name="norm")]
    body = keras.Sequential([keras.Input((4,)), *layers], name=name)
    model = keras.Sequential([keras.Input((4,)), body, keras.layers.Dense(2, name="head")])
    return compiled(model, rule="sgd", learning_rate=0.1, ema=kgo.EMA(0.9))


def test_averages_of_statistics_follow_a_renamed_layer(tmp_path):
    model = with_statistics("old")
    model.fit(X, Y, verbose=0, callbacks=[kgo.UseAveragedWeights()])
    model.save_weights(tmp_path / "run.weights.h5")
    renamed = with_statistics("new")
    with kgo.resuming(renames={"old": "new"}):
        renamed.optimizer.build(renamed.trainable_variables)
        renamed.load_weights(tmp_path / "run.weights.h5")
    assert not np.array_equal(weights(renamed)[4], np.zeros(3))
    for each in (model, renamed):
        with kgo.averaged_weights(each):
            each.averaged = weights(each)
    for value, expected in zip(renamed.averaged, model.averaged, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_the_state_in_a_file_is_the_models_and_not_that_of_a_compiled_layer(tmp_path):
    body = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="enc")], name="body")
    compiled(body, ema=kgo.EMA(0.5)).fit(X, X[:, :3], verbose=0)
    model = keras.Sequential([keras.Input((4,)), body, keras.layers.Dense(2, name="head")])
    fit(compiled(model, ema=kgo.EMA(0.5)), 3)
    with kgo.averaged_weights(model):
        averaged = weights(model)
    for name in ("model.keras", "model.weights.h5"):
        path = tmp_path / name
        model.save(path) if name.endswith(".keras") else model.save_weights(path)
        manifest = kgo.read_manifest(path)
        assert manifest["iterations"] == 3
        assert "body/enc/kernel" in manifest["groups"]["default"]["variables"]
        other = compiled(keras.models.clone_model(model), ema=kgo.EMA(0.5))
        kgo.load_averages(other, path)
        for value, expected in zip(weights(other), averaged, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_state_goes_to_the_same_variable_of_an_optimizer_without_a_model():
    body = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="enc")], name="body")
    model = keras.Sequential([keras.Input((4,)), body, keras.layers.Dense(2, name="head")])
    fit(compiled(model, rule="adam", ema=kgo.EMA(0.5)), 2)
    with kgo.averaged_weights(model):
        averaged = weights(model)
    optimizer = kgo.GroupedOptimizer(rule="adam", ema=kgo.EMA(0.5))
    report = kgo.transfer_state(model.optimizer, optimizer)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    assert (report.fresh, report.dropped) == ([], [])
    with kgo.averaged_weights(model):
        for value, expected in zip(weights(model), averaged, strict=True):
            np.testing.assert_array_equal(value, expected)


def with_lora(**options: Any) -> keras.Model:
    model = two_layers()
    model.get_layer("head").enable_lora(2)
    return compiled(model, rule="adam", ema=kgo.EMA(0.5), **options)


def test_averages_of_lora_in_a_file_of_keras_are_never_added_to_a_merged_kernel(tmp_path):
    model = fit(with_lora(), 8)
    model.save_weights(tmp_path / "run.weights.h5")
    raw = model.predict(X, verbose=0)
    with pytest.raises(ValueError, match=re.escape("Export the averages with `kgo.save_averaged")):
        kgo.load_averages(with_lora(), tmp_path / "run.weights.h5")
    loaded = with_lora()
    with pytest.warns(UserWarning, match=r"merged into its kernel.*head/lora_kernel_a"):
        loaded.load_weights(tmp_path / "run.weights.h5")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), raw, atol=1e-6)
    loaded.optimizer.build(loaded.trainable_variables)
    averages = {
        variable.name: (keras.ops.convert_to_numpy(mean), keras.ops.convert_to_numpy(variable))
        for mean, variable in loaded.optimizer._average_pairs()
        if variable.name.startswith("lora_")
    }
    assert set(averages) == {"lora_kernel_a", "lora_kernel_b"}
    for mean, variable in averages.values():
        np.testing.assert_array_equal(mean, variable)


def test_a_run_with_lora_goes_on_exactly_from_its_weights_and_its_optimizers_state(tmp_path):
    model = fit(with_lora(), 2)
    kept = model.get_weights()
    model.optimizer.save_state(tmp_path / "state.npz")
    other = with_lora()
    other.set_weights(kept)
    other.optimizer.load_state(tmp_path / "state.npz")
    for run in (model, other):
        run.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for here, there in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("name", ["run.keras", "run.weights.h5"])
def test_averages_beside_bfloat16_state_can_be_taken_out_of_a_file(name, tmp_path):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = two_layers()
        with pytest.warns(UserWarning, match="bfloat16"):
            fit(compiled(model, rule="adam", ema=kgo.EMA(0.5)))
        model.save(tmp_path / name) if name == "run.keras" else model.save_weights(tmp_path / name)
        with kgo.averaged_weights(model):
            averaged = weights(model)
        kgo.load_averages(model, tmp_path / name)
    finally:
        keras.config.set_dtype_policy(policy)
    for value, expected in zip(weights(model), averaged, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("name", ["run.keras", "run.weights.h5"])
def test_a_model_that_was_never_compiled_takes_weights_and_averages(name, tmp_path):
    model = fit(compiled(two_layers(), ema=kgo.EMA(0.5)))
    model.save(tmp_path / name) if name == "run.keras" else model.save_weights(tmp_path / name)
    plain = two_layers()
    kgo.load_weights(plain, tmp_path / name, optimizer=False)
    assert_equal(plain, model)
    kgo.load_averages(plain, tmp_path / name)
    with kgo.averaged_weights(model):
        assert_equal(plain, model)


def test_averages_of_statistics_go_with_their_layer_into_another_model():
    layers = [keras.layers.Dense(2, name="enc"), keras.layers.BatchNormalization(name="norm")]
    body = keras.Sequential([keras.Input((4,)), *layers], name="body")
    compiled(body, learning_rate=0.1, ema=kgo.EMA(0.9))
    body.fit(X, Y, verbose=0, callbacks=[kgo.UseAveragedWeights()])
    with kgo.averaged_weights(body):
        averaged = weights(body)
    model = keras.Sequential([keras.Input((4,)), body, keras.layers.Dense(2, name="head")])
    body.optimizer.rebuild(model)
    model.compile(optimizer=body.optimizer, loss="mse")
    with kgo.averaged_weights(model):
        for value, expected in zip(weights(body), averaged, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_a_backup_goes_on_with_the_masks_of_a_dropout_without_a_seed(tmp_path):
    def train(epochs: int, start: int, *callbacks: keras.callbacks.Callback) -> keras.Model:
        keras.utils.set_random_seed(start)
        layers = [keras.layers.Dense(6, name="enc"), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2, name="head")])
        compiled(model, rule="sgd", learning_rate=0.1)
        model.fit(X, Y, 4, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
        return model

    straight = train(3, 0)
    train(2, 0, kgo.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False))
    resumed = train(3, 1, kgo.BackupAndRestore(tmp_path / "backup"))
    for value, expected in zip(weights(resumed), weights(straight), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_weights_loaded_before_averages_begin_are_the_averages(tmp_path):
    pretrained = two_layers()
    pretrained.set_weights([value + 1.0 for value in weights(pretrained)])
    pretrained.save_weights(tmp_path / "pretrained.weights.h5")
    accumulating = compiled(two_layers(), gradient_accumulation_steps=2, ema=kgo.EMA(0.5))
    starting_later = compiled(two_layers(), ema=kgo.EMA(0.5, start=2))
    for model in (accumulating, starting_later):
        kgo.load_weights(fit(model), tmp_path / "pretrained.weights.h5", optimizer=False)
        with kgo.averaged_weights(model):
            for value, expected in zip(weights(model), weights(pretrained), strict=True):
                np.testing.assert_array_equal(value, expected)


def test_state_and_model_stay_as_they_are_while_averages_are_in_the_weights_place(tmp_path):
    model = fit(compiled(two_layers(), ema=kgo.EMA(0.5)), 2)
    model.save_weights(tmp_path / "run.weights.h5")
    fit(model)
    with kgo.averaged_weights(model):
        with pytest.raises(ValueError, match=r"within `kgo\.averaged_weights`"):
            model.load_weights(tmp_path / "run.weights.h5")
        with pytest.raises(ValueError, match=r"Call it outside of `kgo\.averaged_weights"):
            model.optimizer.rebuild(model)
        model.save(tmp_path / "export.keras")
    exported = keras.saving.load_model(tmp_path / "export.keras")
    assert (int(exported.optimizer.iterations), int(model.optimizer.iterations)) == (0, 3)


def test_averages_of_statistics_do_not_outlive_a_load_of_state_without_them(tmp_path):
    plain, model = with_statistics("body"), with_statistics("body")
    fit(plain, 2).save_weights(tmp_path / "run.weights.h5")
    model.fit(X + 1.0, Y, epochs=2, verbose=0, callbacks=[kgo.UseAveragedWeights()])
    model.load_weights(tmp_path / "run.weights.h5")
    for each in (model, plain):
        with kgo.averaged_weights(each):
            each.averaged = weights(each)
    for value, expected in zip(model.averaged, plain.averaged, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_load_that_fails_leaves_averages_of_statistics_as_they_were(tmp_path):
    def train(width: int) -> keras.Model:
        layers = [
            keras.layers.Dense(width, trainable=False, name="still"),
            keras.layers.Reshape((width, 1)),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(2, name="head"),
        ]
        model = keras.Sequential([keras.Input((4,)), *layers])
        compiled(model, ema=kgo.EMA(0.9))
        model.fit(X * width, Y, epochs=2, verbose=0, callbacks=[kgo.UseAveragedWeights()])
        return model

    train(3).save_weights(tmp_path / "run.weights.h5")
    model = train(4)
    with kgo.averaged_weights(model):
        averaged = weights(model)
    with pytest.raises(ValueError, match="are as they were"):
        kgo.load_weights(model, tmp_path / "run.weights.h5")
    with kgo.averaged_weights(model):
        for value, expected in zip(weights(model), averaged, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_training_batch_by_batch_averages_as_fit_does():
    fitted, stepped = (compiled(two_layers(), ema=kgo.EMA(0.5)) for _ in range(2))
    fit(fitted, 3)
    for _ in range(3):
        stepped.train_on_batch(X, Y)
    assert_equal(stepped, fitted)
    with kgo.averaged_weights(stepped), kgo.averaged_weights(fitted):
        assert_equal(stepped, fitted)
