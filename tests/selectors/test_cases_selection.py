"""Reported ways in which variables ended up in the wrong group, seen in the weights after `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import path_cases
import pytest
import recipe_models
from chosen_gradients import groups_of, no_gradient, towers, train, weights
from models import dense, numpy_of, sgd

import keras_groupopt as kgo

pytestmark = pytest.mark.every_backend


# Shared variables ------------------------------------------------------------------------------


def two_places() -> keras.Model:
    """Two nested models, each with a scalar weight of its own and one that both share."""
    options = {"use_bias": False, "kernel_initializer": "zeros"}
    tied = keras.layers.Dense(1, name="tied", **options)
    inputs, outputs = [], []
    for name in ("first", "second"):
        x = keras.Input((1,))
        nested = keras.Model(
            x, keras.layers.Dense(1, name="own", **options)(x) + tied(x), name=name
        )
        inputs.append(keras.Input((1,)))
        outputs.append(nested(inputs[-1]))
    return keras.Model(inputs, outputs[0] + outputs[1])


@pytest.mark.parametrize(("overlap", "tied"), [("error", None), ("first", -1.0), ("last", -0.1)])
def test_overlap_says_which_of_two_rules_moves_a_shared_variable(overlap, tied):
    model = two_places()
    groups = [kgo.Group("a", "first"), kgo.Group("b", "second", learning_rate_ratio=0.1)]
    optimizer = sgd(model, groups, overlap=overlap)
    if tied is None:
        message = r'group "a".*group "b".*both claim first/tied/kernel\.'
        with pytest.raises(ValueError, match=message):
            train(model, optimizer, [0.5, 0.5])
        assert set(weights(model).values()) == {0.0}
        return
    # The shared weight's gradient is the sum over both uses.
    assert train(model, optimizer, [0.5, 0.5]) == {
        "first/own/kernel": pytest.approx(-0.5),
        "second/own/kernel": pytest.approx(-0.05),
        "first/tied/kernel": pytest.approx(tied),
    }


def test_a_head_tied_to_the_embedding_is_one_variable_of_one_group():
    model = path_cases.TiedEmbedding()
    model(np.zeros((1, 3)))
    optimizer = sgd(model, {"table": "tokens", "mix": "mix"}, learning_rate=0.5, weight_decay=0.1)
    assert groups_of(optimizer)["table"] == ["tokens/embeddings"]
    both = kgo.GroupedOptimizer({"table": "tokens", "head": "head"}, model=model)
    with pytest.raises(ValueError, match="both claim tokens/embeddings"):
        _ = both.plan
    start = weights(model)["tokens/embeddings"]
    model.compile(optimizer=optimizer, loss=no_gradient)
    model.fit(np.zeros((1, 3), "int32"), np.zeros((1, 3)), verbose=0)
    # One decay: 1 - 0.5 * 0.1, not its square.
    np.testing.assert_allclose(weights(model)["tokens/embeddings"], 0.95 * start, rtol=1e-6)


# Layers as selectors ---------------------------------------------------------------------------


@pytest.mark.parametrize("with_model", [True, False], ids=["model=", "no model"])
@pytest.mark.parametrize("form", ["layers", "selectors", "dict of layers"])
def test_lists_of_layers_and_nested_models_claim_all_their_weights(form, with_model):
    """A nested model in a list of layers lost weights of the layers inside it."""
    inside = [keras.layers.Dense(3) for _ in range(3)]
    nested = keras.Sequential([keras.Input((3,)), *inside], name="nested")
    outside = [keras.layers.Dense(3), nested, keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *outside])
    first, *others = model.layers
    groups: Any = {
        "layers": [kgo.Group("a", first), kgo.Group("b", others, learning_rate_ratio=0.5)],
        "selectors": [
            kgo.Group("a", kgo.layer(first)),
            kgo.Group("b", kgo.layer(others[0]) | others[1], learning_rate_ratio=0.5),
        ],
        "dict of layers": {"a": first, "b": tuple(others)},
    }[form]
    options = {"weight_decay": 0.5, "exclude_from_decay": (), "unclaimed": "error"}
    optimizer = sgd(model if with_model else None, groups, **options)
    before = model.get_weights()
    model.compile(optimizer=optimizer, loss=no_gradient)
    model.fit(np.ones((1, 3)), np.ones((1, 2)), verbose=0)
    planned = groups_of(optimizer)
    assert [len(planned["a"]), len(planned["b"])] == [2, 8]
    assert len(set(planned["a"] + planned["b"])) == len(model.trainable_variables)
    ratio_of_b = 1.0 if form == "dict of layers" else 0.5
    for at, (old, new) in enumerate(zip(before, model.get_weights(), strict=True)):
        ratio = 1.0 if at < 2 else ratio_of_b
        np.testing.assert_allclose(new, old * (1 - 0.5 * ratio), rtol=1e-6)


# What no group claims --------------------------------------------------------------------------


@pytest.mark.parametrize(("unclaimed", "expected"), [("freeze", 0.0), ("default", -1.0)])
def test_a_variable_no_group_claims_never_gets_its_raw_gradient(unclaimed, expected):
    """Unselected variables were moved by the gradient itself: +1 for a gradient of 1."""
    model = towers("selected", "other")
    moved = train(model, sgd(model, {"selected": "selected"}, unclaimed=unclaimed))
    assert moved == {"selected/kernel": -1.0, "other/kernel": expected}


def test_every_token_moves_at_the_rate_of_the_stem_and_does_not_decay():
    """Tokens that depth groups forget are named, and not trained at the full rate."""
    model = recipe_models.vit(1, flat=False)
    tokens = kgo.variable_name("class_token", "positions")

    def optimizer(stem: Any) -> kgo.GroupedOptimizer:
        groups = [kgo.Group("stem", stem, learning_rate_ratio=0.5), kgo.Group("block", "block_0")]
        return kgo.GroupedOptimizer(
            [*groups, kgo.Group("head", ["norm", "head"])],
            model=model,
            rule="adam",
            weight_decay=0.5,
            exclude_from_decay=kgo.default_exclude_from_decay | tokens,
            unclaimed="error",
        )

    with pytest.raises(ValueError, match="no group for tokens/positions"):
        _ = optimizer(kgo.path("patches") | kgo.variable_name("class_token")).plan
    before = weights(model)
    moved = recipe_models.moved(model, optimizer(kgo.path("patches") | "tokens"))
    # Adam's first step is the rate itself, beside which kernels decay.
    for name, ratio, decay in (
        ("tokens/class_token", 0.5, 0.0),
        ("tokens/positions", 0.5, 0.0),
        ("patches/kernel", 0.5, 0.5),
        ("head/kernel", 1.0, 0.5),
    ):
        steps = np.abs(moved[name] + 1e-3 * ratio * decay * before[name])
        assert np.median(steps) == pytest.approx(1e-3 * ratio, rel=2e-3)


# Adapters --------------------------------------------------------------------------------------


def adapted_model() -> keras.Model:
    """A Dense layer with LoRA, its `b` set to 1 so that decay shows."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="d")])
    layer = model.get_layer("d")
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
    return model


def test_a_pattern_for_kernels_does_not_reach_adapters_by_accident():
    """`kernel` as a substring also hits `lora_kernel_a`; a whole name or path does not."""
    model = adapted_model()
    only_frozen = r"matches only variables that are not trainable: d/kernel"
    for selector in (kgo.variable_name("kernel"), "**/kernel", kgo.regex(r"(.*/)?kernel")):
        with pytest.raises(ValueError, match=only_frozen):
            _ = kgo.GroupedOptimizer({"kernels": selector}, model=model).plan
    wide = kgo.GroupedOptimizer({"kernels": kgo.regex(".*kernel.*")}, model=model)
    assert groups_of(wide)["kernels"] == ["d/lora_kernel_a", "d/lora_kernel_b"]


def test_anchored_decay_pulls_an_adapter_toward_its_initial_value():
    model = adapted_model()
    groups = [
        kgo.Group("b", "**/lora_kernel_b", weight_decay=0.5, anchor=[np.zeros((2, 4))]),
        kgo.Group("a", "**/lora_kernel_a", weight_decay=0.5, anchor="initial"),
    ]
    optimizer = sgd(model, groups)
    before = weights(model)
    model.compile(optimizer=optimizer, loss=no_gradient)
    model.fit(np.ones((1, 4)), np.ones((1, 4)), verbose=0)
    after = weights(model)
    np.testing.assert_allclose(after["d/lora_kernel_b"], 0.5, rtol=1e-6)
    np.testing.assert_array_equal(after["d/lora_kernel_a"], before["d/lora_kernel_a"])
    np.testing.assert_array_equal(after["d/kernel"], before["d/kernel"])


# Muon for the hidden matrices ------------------------------------------------------------------


@pytest.mark.needs_keras("3.13", reason="steps of the first Muon had another size")
def test_muon_in_a_group_takes_the_step_of_muon_of_keras_alone():
    model = dense(hidden=8, head=3)
    groups = [kgo.Group("matrices", "hidden/kernel", rule="muon")]
    optimizer = sgd(model, groups, rule="adam", learning_rate=0.01)
    muon = keras.optimizers.Muon(0.01, weight_decay=None)
    random = np.random.default_rng(0)
    gradients = [random.normal(size=v.shape).astype("float32") for v in model.trainable_variables]
    before = weights(model)
    alone = keras.Variable(before["hidden/kernel"], name="alone")
    for _ in range(3):
        tensors = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply(tensors, model.trainable_variables)
        muon.apply(tensors[:1], [alone])
    after = weights(model)
    np.testing.assert_allclose(after["hidden/kernel"], numpy_of(alone), rtol=0, atol=1e-6)
    # Adam with equal gradients moves by the rate in every element.
    steps = before["head/kernel"] - after["head/kernel"]
    np.testing.assert_allclose(steps, 0.03 * np.sign(gradients[2]), rtol=1e-3)
