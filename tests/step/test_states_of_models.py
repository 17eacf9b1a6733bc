"""State and averages of models that are frozen, renamed, nested, given LoRA, saved and resumed."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
from models import X, Y, arrays, assert_equal, compiled, dense, fit, number
from saving_models import save

import keras_groupopt as kgo


def assert_close(one: Any, other: Any) -> None:
    # XLA rounds otherwise where a step has fewer variables.
    assert_equal(one, other, rtol=1e-5, atol=1e-8)


def averages(model: keras.Model) -> list[np.ndarray]:
    with kgo.averaged_weights(model):
        return arrays(model)


def nested(*layers: keras.layers.Layer, name: str = "body") -> tuple[keras.Model, keras.Model]:
    """Returns layers as a body, and a model of it and a head."""
    layers = layers or (keras.layers.Dense(3, name="enc"),)
    body = keras.Sequential([keras.Input((4,)), *layers], name=name)
    head = keras.layers.Dense(2, name="head")
    return body, keras.Sequential([keras.Input((4,)), body, head])


@pytest.mark.parametrize(("frozen", "rule"), [("enc", "nadam"), ("head", "adam")])
def test_a_model_frozen_in_part_after_its_first_steps_goes_on_from_a_file(frozen, rule, tmp_path):
    group = kgo.Group("enc", "enc", learning_rate_ratio=0.5, weight_decay=0.1, anchor="initial")
    model = fit(compiled(dense(), group, rule=rule), 2)
    model.optimizer.set_learning_rate_ratio("enc", 0.25)
    model.get_layer(frozen).trainable = False
    model.compile(optimizer=model.optimizer, loss="mse")
    fit(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(fit(loaded, 2), fit(model, 2))
    assert [group.name for group in loaded.optimizer.plan.groups] == ["enc", "default"]
    loaded.optimizer.plan.summary(print_fn=lambda text: None)
    loaded.optimizer.plan._repr_html_()
    loaded.save(tmp_path / "again.keras")
    again = keras.saving.load_model(tmp_path / "again.keras")
    assert_close(fit(again), fit(loaded))


def test_groups_whose_names_differ_in_odd_characters_keep_apart_in_a_state_tree():
    groups = kgo.Group("a b", "enc", weight_decay=0.1), kgo.Group("a_b", "head", weight_decay=0.1)
    model = fit(compiled(dense(), *groups, rule="adam"))
    tree = model.get_state_tree(value_format="numpy_array")
    flat = tree["optimizer_variables"]["grouped_optimizer"]
    assert set(flat["@learning_rate_ratio"]) == {"a b", "a_b"}
    assert (set(flat["a b"]), set(flat["a_b"])) == ({"enc", "@rule"}, {"head", "@rule"})


def test_the_file_of_a_backbone_anchors_it_inside_another_model(tmp_path):
    backbone, model = nested(name="back")
    backbone.save(tmp_path / "back.keras")
    pretrained = arrays(backbone)
    backbone.set_weights([np.zeros_like(value) for value in pretrained])
    group = kgo.Group("back", "back", weight_decay=0.1, anchor=str(tmp_path / "back.keras"))
    compiled(model, group).optimizer.build(model.trainable_variables)
    assert number(model.optimizer.anchor_drift()["back"]) == pytest.approx(
        np.linalg.norm(pretrained[0]), rel=1e-5
    )


def test_the_average_of_a_layer_new_to_a_resumed_run_starts_at_its_weights(tmp_path):
    model = dense()
    model.get_layer("enc").trainable = False
    fit(compiled(model, ema=kgo.EMA(0.5))).save_weights(tmp_path / "run.weights.h5")
    resumed = compiled(dense(), ema=kgo.EMA(0.5))
    resumed.set_weights([value + 1.0 for value in arrays(resumed)])
    resumed.optimizer.build(resumed.trainable_variables)
    with kgo.resuming(strict=False):
        resumed.load_weights(tmp_path / "run.weights.h5")
    averaged = averages(resumed)
    assert_equal(averaged[:1], arrays(model)[:1])
    assert_equal(averaged[2:3], averages(model)[2:3])


def with_statistics(name: str) -> keras.Model:
    layers = keras.layers.Dense(3, name="enc"), keras.layers.BatchNormalization(name="norm")
    _, model = nested(*layers, name=name)
    return compiled(model, rule="sgd", learning_rate=0.1, ema=kgo.EMA(0.9))


def test_averages_of_statistics_follow_a_renamed_layer(tmp_path):
    model = with_statistics("old")
    model.fit(X, Y, verbose=0, callbacks=[kgo.UseAveragedWeights()])
    model.save_weights(tmp_path / "run.weights.h5")
    renamed = with_statistics("new")
    with kgo.resuming(renames={"old": "new"}):
        renamed.optimizer.build(renamed.trainable_variables)
        renamed.load_weights(tmp_path / "run.weights.h5")
    assert not np.array_equal(arrays(renamed)[4], np.zeros(3))
    assert_equal(averages(renamed), averages(model))


def test_the_state_in_a_file_is_the_models_and_not_that_of_a_compiled_layer(tmp_path):
    body, model = nested()
    compiled(body, ema=kgo.EMA(0.5)).fit(X, X[:, :3], verbose=0)
    fit(compiled(model, ema=kgo.EMA(0.5)), 3)
    averaged = averages(model)
    for name in ("model.keras", "model.weights.h5"):
        path = save(model, tmp_path / name)
        manifest = kgo.read_manifest(path)
        assert manifest["iterations"] == 3
        assert "body/enc/kernel" in manifest["groups"]["default"]["variables"]
        other = compiled(keras.models.clone_model(model), ema=kgo.EMA(0.5))
        kgo.load_averages(other, path)
        assert_equal(other, averaged)


def with_lora(**options: Any) -> keras.Model:
    model = dense()
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
    pairs = [p for p in loaded.optimizer._average_pairs() if p[1].name.startswith("lora_")]
    assert {variable.name for _, variable in pairs} == {"lora_kernel_a", "lora_kernel_b"}
    for mean, variable in pairs:
        assert_equal(arrays([mean]), arrays([variable]))


@pytest.mark.filterwarnings("ignore:Weights in float16/bfloat16 lose")
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["run.keras", "run.weights.h5"])
def test_weights_and_averages_go_into_a_model_that_was_never_compiled(name, policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = fit(compiled(dense(), rule="adam", ema=kgo.EMA(0.5)))
    path = save(model, tmp_path / name)
    plain, averaged = dense(), averages(model)
    kgo.load_weights(plain, path, optimizer=False)
    assert_equal(plain, model)
    for other in (plain, model):
        kgo.load_averages(other, path)
        assert_equal(other, averaged)


def test_averages_of_statistics_go_with_their_layer_into_another_model():
    layers = keras.layers.Dense(2, name="enc"), keras.layers.BatchNormalization(name="norm")
    body, model = nested(*layers)
    compiled(body, learning_rate=0.1, ema=kgo.EMA(0.9))
    body.fit(X, Y, verbose=0, callbacks=[kgo.UseAveragedWeights()])
    averaged = averages(body)
    body.optimizer.rebuild(model)
    model.compile(optimizer=body.optimizer, loss="mse")
    with kgo.averaged_weights(model):
        assert_equal(body, averaged)


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
    assert_equal(arrays(resumed), arrays(straight))


def test_state_and_model_stay_as_they_are_while_averages_are_in_the_weights_place(tmp_path):
    model = fit(compiled(dense(), ema=kgo.EMA(0.5)), 2)
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
    averaged = averages(model)
    with pytest.raises(ValueError, match="are as they were"):
        kgo.load_weights(model, tmp_path / "run.weights.h5")
    assert_equal(averages(model), averaged)
