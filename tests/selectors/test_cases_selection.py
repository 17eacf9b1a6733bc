"""Reported ways in which variables ended up in the wrong group, seen in the weights after `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from chosen_gradients import (
    fit_ones,
    groups_of,
    mean_output,
    no_gradient,
    ones_model,
    towers,
    train,
    weights,
)
from models import dense

import keras_groupopt as kgo

pytestmark = pytest.mark.every_backend


def sgd(groups: Any = (), **options: Any) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(groups, **{"rule": "sgd", "learning_rate": 0.1, **options})


# Shared variables ------------------------------------------------------------------------------


def test_a_layer_used_twice_is_one_group_and_moves_once():
    """A tied weight reached by two rules was updated by both."""
    tied = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="tied")
    first, second = keras.Input((1,)), keras.Input((1,))
    model = keras.Model([first, second], tied(first) + tied(second))
    optimizer = sgd({"tied": "tied"}, model=model, unclaimed="error")
    # Each use gives half of the gradient of 1.
    assert train(model, optimizer, [0.5, 0.5]) == {"tied/kernel": pytest.approx(-0.1)}
    assert groups_of(optimizer) == {"tied": ["tied/kernel"]}


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


@pytest.mark.parametrize(("overlap", "tied"), [("error", None), ("first", -0.1), ("last", -0.01)])
def test_overlap_says_which_of_two_rules_moves_a_shared_variable(overlap, tied):
    model = two_places()
    groups = [kgo.Group("a", "first"), kgo.Group("b", "second", learning_rate_ratio=0.1)]
    optimizer = sgd(groups, model=model, overlap=overlap)
    if tied is None:
        message = r'group "a".*group "b".*both claim first/tied/kernel\.'
        with pytest.raises(ValueError, match=message):
            train(model, optimizer, [0.5, 0.5])
        assert set(weights(model).values()) == {0.0}
        return
    # The shared weight's gradient is the sum over both uses.
    assert train(model, optimizer, [0.5, 0.5]) == {
        "first/own/kernel": pytest.approx(-0.05),
        "second/own/kernel": pytest.approx(-0.005),
        "first/tied/kernel": pytest.approx(tied),
    }


class Unembed(keras.layers.Layer):
    """Scores of tokens by the table of an embedding elsewhere in the model."""

    def __init__(self, embedding: keras.layers.Embedding, **kwargs) -> None:
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def test_a_head_tied_to_the_embedding_is_one_variable_of_one_group():
    embedding = keras.layers.Embedding(5, 4, name="tokens")
    tokens = keras.Input((3,), dtype="int32")
    model = keras.Model(tokens, Unembed(embedding, name="unembed")(embedding(tokens)))
    optimizer = sgd({"table": "tokens"}, model=model, learning_rate=0.5, weight_decay=0.1)
    assert groups_of(optimizer) == {"table": ["tokens/embeddings"]}
    both = kgo.GroupedOptimizer({"table": "tokens", "head": "unembed"}, model=model)
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
    optimizer = sgd(
        groups,
        model=model if with_model else None,
        learning_rate=1.0,
        weight_decay=0.5,
        exclude_from_decay=(),
        unclaimed="error",
    )
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


def test_kernel_and_bias_of_one_layer_have_their_own_rates_and_decays():
    ones = {"kernel_initializer": "ones", "bias_initializer": "ones"}
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="d", **ones)])
    kernels = kgo.Group("kernels", "**/kernel", weight_decay=0.1)
    biases = kgo.Group("biases", kgo.variable_name("bias"), learning_rate_ratio=2.0)
    # 1 − 0.1 · 0.1 · 1 − 0.1 and 1 − 0.2.
    assert train(model, sgd([kernels, biases], model=model)) == {
        "d/kernel": pytest.approx(0.89),
        "d/bias": pytest.approx(0.80),
    }


# What no group claims --------------------------------------------------------------------------


@pytest.mark.parametrize(("unclaimed", "expected"), [("freeze", 0.0), ("default", -0.1)])
def test_a_variable_no_group_claims_never_gets_its_raw_gradient(unclaimed, expected):
    """Unselected variables were moved by the gradient itself: +1 for a gradient of 1."""
    model = towers("selected", "other")
    moved = train(model, sgd({"selected": "selected"}, model=model, unclaimed=unclaimed))
    assert moved["selected/kernel"] == pytest.approx(-0.1)
    assert moved["other/kernel"] == pytest.approx(expected)
    if unclaimed == "freeze":
        assert moved["other/kernel"] == 0.0


class Tokens(keras.layers.Layer):
    """The learned tokens and positions before a transformer's blocks."""

    def build(self, shape):
        for name in ("cls_token", "reg_token", "pos_embed"):
            weight = self.add_weight(shape=(1, 1, shape[-1]), initializer="ones", name=name)
            setattr(self, name, weight)

    def call(self, x):
        return x + self.cls_token + self.reg_token + self.pos_embed


def test_every_token_moves_at_the_rate_of_the_stem_and_does_not_decay():
    """Tokens that depth groups forget are named, and not trained at the full rate."""

    def scalar(name: str) -> keras.layers.Layer:
        return keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)

    blocks = [f"block_{index}" for index in range(12)]
    layers = [scalar("patch"), Tokens(name="tokens"), *map(scalar, blocks), scalar("head")]
    model = keras.Sequential([keras.Input((1, 1)), *layers])
    tokens = kgo.variable_name("cls_token", "reg_token", "pos_embed")
    depth = [kgo.Group(b, b, learning_rate_ratio=0.75 ** (12 - k)) for k, b in enumerate(blocks)]

    def optimizer(stem: Any) -> kgo.GroupedOptimizer:
        stem = kgo.Group("stem", stem, learning_rate_ratio=0.75**13)
        return kgo.GroupedOptimizer(
            [stem, *depth, kgo.Group("head", "head")],
            model=model,
            rule="adam",
            learning_rate=1e-3,
            weight_decay=0.05,
            exclude_from_decay=kgo.default_exclude_from_decay | tokens,
            unclaimed="error",
        )

    forgotten = kgo.path("patch") | kgo.variable_name("cls_token", "pos_embed")
    with pytest.raises(ValueError, match="no group for tokens/reg_token"):
        _ = optimizer(forgotten).plan
    model.compile(optimizer=optimizer(kgo.path("patch") | "tokens"), loss=mean_output)
    model.fit(np.ones((1, 1, 1)), np.zeros((1, 1, 1)), verbose=0)
    after = weights(model)
    for name in ("cls_token", "reg_token", "pos_embed"):
        # Adam's first step is the rate itself.
        assert 1 - after[f"tokens/{name}"] == pytest.approx(1e-3 * 0.75**13, rel=2e-3)
    assert 1 - after["head/kernel"] == pytest.approx(1e-3 + 1e-3 * 0.05, rel=2e-3)
    assert 1 - after["block_11/kernel"] == pytest.approx(0.75e-3 * 1.05, rel=2e-3)


def test_the_exclusion_names_what_is_not_decayed_and_not_what_is():
    """With zero gradients a flipped mask shows: bias and norm would move, the kernel would not."""
    model = ones_model()
    excluded = kgo.variable_name("bias") | kgo.layer_type("LayerNormalization")
    settings = {"learning_rate": 1.0, "weight_decay": 0.01, "exclude_from_decay": excluded}
    optimizer = sgd(model=model, **settings)
    after = fit_ones(model, optimizer)
    np.testing.assert_allclose(after["head/kernel"], 0.99, rtol=1e-6)
    np.testing.assert_array_equal(after["head/bias"], 1.0)
    np.testing.assert_array_equal(after["ln_final/gamma"], 1.0)
    np.testing.assert_array_equal(after["ln_final/beta"], 0.0)


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
    optimizer = sgd(groups, model=model, learning_rate=1.0)
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
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam", learning_rate=0.01)
    random = np.random.default_rng(0)
    gradients = [random.normal(size=v.shape).astype("float32") for v in model.trainable_variables]
    before = weights(model)
    alone = keras.Variable(before["hidden/kernel"], name="alone")
    for _ in range(3):
        optimizer.apply(
            [keras.ops.convert_to_tensor(g) for g in gradients], model.trainable_variables
        )
    muon = keras.optimizers.Muon(0.01, weight_decay=None)
    for _ in range(3):
        muon.apply([keras.ops.convert_to_tensor(gradients[0])], [alone])
    after = weights(model)
    np.testing.assert_allclose(
        after["hidden/kernel"], keras.ops.convert_to_numpy(alone), rtol=0, atol=1e-6
    )
    # Adam with equal gradients moves by the rate in every element.
    np.testing.assert_allclose(
        before["head/kernel"] - after["head/kernel"], 0.03 * np.sign(gradients[2]), rtol=1e-3
    )
