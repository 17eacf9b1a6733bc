"""Reported ways in which variables ended up in the wrong group, seen in the weights after `fit`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from chosen_gradients import (
    fit,
    fit_ones,
    groups_of,
    mean_output,
    no_gradient,
    ones_model,
    towers,
    train,
    weights,
)

import keras_groupopt as kgo


def backbone_and_head() -> keras.Model:
    backbone = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(3)], name="bb"
    )
    return keras.Sequential(
        [
            keras.Input((3,)),
            backbone,
            keras.layers.LayerNormalization(),
            keras.layers.Dense(2, name="head"),
        ]
    )


# Patterns that match nothing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "nearest"),
    [
        ("bb/.*", "Nearest paths: 'bb'"),
        ("bb/denze_1", "Nearest paths: 'bb/dense_1'"),
        (kgo.regex("backbone/.*"), "The model begins with"),
        ("LayerNorm", "Nearest paths: 'layer_normalization'"),
        (kgo.layer("haed"), "Nearest paths: 'head'"),
        (kgo.layer_type("LayerNorm"), "Nearest classes: 'LayerNormalization'"),
        (kgo.variable_name("weight"), "last names: 'beta', 'bias', 'gamma', 'kernel'"),
        (kgo.variables("head/kernal"), "Nearest paths: 'head/kernel'"),
        (~kgo.path("haed"), "Nearest paths: 'head'"),
        (kgo.everything() - "haed", "Nearest paths: 'head'"),
        (kgo.path("head") | "bbb", "Nearest paths: 'bb'"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", ["selector", "exclude_from_decay"])
def test_a_selector_that_matches_nothing_is_refused_and_shows_near_paths(selector, nearest, place):
    """A misspelt pattern used to be accepted, and its group never existed."""
    model = backbone_and_head()
    if place == "selector":
        groups = [kgo.Group("wanted", selector)]
    else:
        groups = [kgo.Group("wanted", "bb", weight_decay=0.1, exclude_from_decay=selector)]
    optimizer = kgo.GroupedOptimizer(groups, model=model)
    with pytest.raises(ValueError, match='group "wanted"') as caught:
        optimizer.build(model.trainable_variables)
    assert nearest in str(caught.value)
    assert not optimizer.built


def test_fit_stops_before_the_first_step_where_a_pattern_matches_nothing():
    model = backbone_and_head()
    optimizer = kgo.GroupedOptimizer({"backbone": "bb/.*"}, model=model)
    model.compile(optimizer=optimizer, loss="mse")
    before = weights(model)
    with pytest.raises(ValueError, match=r'group "backbone".*path\("bb/\.\*"\)'):
        model.fit(np.ones((1, 3)), np.ones((1, 2)), verbose=0)
    for path, value in weights(model).items():
        np.testing.assert_array_equal(value, before[path])


# Shared variables ------------------------------------------------------------------------------


def test_a_layer_used_twice_is_one_group_and_moves_once():
    """A tied weight reached by two rules was updated by both."""
    tied = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="tied")
    first, second = keras.Input((1,)), keras.Input((1,))
    model = keras.Model([first, second], tied(first) + tied(second))
    optimizer = kgo.GroupedOptimizer(
        {"tied": "tied"}, model=model, rule="sgd", learning_rate=0.1, unclaimed="error"
    )
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


def test_rules_that_reach_one_variable_at_two_places_are_refused_by_its_name():
    model = two_places()
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group("a", "first"), kgo.Group("b", "second", learning_rate_ratio=0.1)],
        model=model,
        rule="sgd",
    )
    model.compile(optimizer=optimizer, loss=mean_output)
    with pytest.raises(ValueError, match=r'group "a".*group "b".*both claim first/tied/kernel\.'):
        fit(model)
    assert set(weights(model).values()) == {0.0}


@pytest.mark.parametrize(("overlap", "tied"), [("first", -0.1), ("last", -0.01)])
def test_overlap_says_which_of_two_rules_moves_a_shared_variable(overlap, tied):
    model = two_places()
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group("a", "first"), kgo.Group("b", "second", learning_rate_ratio=0.1)],
        model=model,
        rule="sgd",
        learning_rate=0.1,
        overlap=overlap,
    )
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
    optimizer = kgo.GroupedOptimizer(
        {"table": "tokens"}, model=model, rule="sgd", learning_rate=0.5, weight_decay=0.1
    )
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
    nested = keras.Sequential(
        [keras.Input((3,))] + [keras.layers.Dense(3) for _ in range(3)], name="nested"
    )
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3), nested, keras.layers.Dense(2)]
    )
    first, *others = model.layers
    pair = {
        "layers": (first, others),
        "selectors": (kgo.layer(first), kgo.layer(others[0]) | kgo.layer(others[1])),
        "dict of layers": (first, tuple(others)),
    }[form]
    if form == "dict of layers":
        groups = {"a": pair[0], "b": pair[1]}
    else:
        groups = [kgo.Group("a", pair[0]), kgo.Group("b", pair[1], learning_rate_ratio=0.5)]
    optimizer = kgo.GroupedOptimizer(
        groups,
        model=model if with_model else None,
        rule="sgd",
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
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, name="d", kernel_initializer="ones", bias_initializer="ones"),
        ]
    )
    optimizer = kgo.GroupedOptimizer(
        [
            kgo.Group("kernels", "**/kernel", weight_decay=0.1),
            kgo.Group("biases", kgo.variable_name("bias"), learning_rate_ratio=2.0),
        ],
        model=model,
        rule="sgd",
        learning_rate=0.1,
    )
    # 1 − 0.1 · 0.1 · 1 − 0.1 and 1 − 0.2.
    assert train(model, optimizer) == {
        "d/kernel": pytest.approx(0.89),
        "d/bias": pytest.approx(0.80),
    }


# What no group claims --------------------------------------------------------------------------


@pytest.mark.parametrize(("unclaimed", "expected"), [("freeze", 0.0), ("default", -0.1)])
def test_a_variable_no_group_claims_never_gets_its_raw_gradient(unclaimed, expected):
    """Unselected variables were moved by the gradient itself: +1 for a gradient of 1."""
    model = towers("selected", "other")
    optimizer = kgo.GroupedOptimizer(
        {"selected": "selected"}, model=model, rule="sgd", learning_rate=0.1, unclaimed=unclaimed
    )
    moved = train(model, optimizer)
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


def vit(blocks: int = 12) -> keras.Model:
    """A stack with the names and the depth of a ViT, and nothing of its inside."""
    x = inputs = keras.Input((1, 1))
    x = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="patch")(x)
    x = Tokens(name="tokens")(x)
    for index in range(blocks):
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", name=f"block_{index}"
        )
        x = layer(x)
    x = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="head")(x)
    return keras.Model(inputs, x)


def depth_groups(stem, blocks: int, decay: float) -> list[kgo.Group]:
    depth = blocks + 1
    return [
        kgo.Group("stem", stem, learning_rate_ratio=decay**depth),
        *(
            kgo.Group(
                f"block_{index}", f"block_{index}", learning_rate_ratio=decay ** (blocks - index)
            )
            for index in range(blocks)
        ),
        kgo.Group("head", "head"),
    ]


def test_tokens_forgotten_by_depth_groups_are_named_instead_of_trained_at_the_full_rate():
    model = vit()
    stem = kgo.path("patch") | kgo.variable_name("cls_token", "pos_embed")
    optimizer = kgo.GroupedOptimizer(depth_groups(stem, 12, 0.75), model=model, unclaimed="error")
    with pytest.raises(ValueError, match="no group for tokens/reg_token"):
        _ = optimizer.plan


def test_every_token_moves_at_the_rate_of_the_stem_and_does_not_decay():
    model = vit()
    stem = kgo.path("patch") | "tokens"
    optimizer = kgo.GroupedOptimizer(
        depth_groups(stem, 12, 0.75),
        model=model,
        rule="adam",
        learning_rate=1e-3,
        weight_decay=0.05,
        exclude_from_decay=kgo.default_exclude_from_decay
        | kgo.variable_name("cls_token", "reg_token", "pos_embed"),
        unclaimed="error",
    )
    model.compile(optimizer=optimizer, loss=mean_output, jit_compile=False)
    model.fit(np.ones((1, 1, 1)), np.zeros((1, 1, 1)), verbose=0)
    after = weights(model)
    for name in ("cls_token", "reg_token", "pos_embed"):
        # Adam's first step is the rate itself.
        assert 1 - after[f"tokens/{name}"] == pytest.approx(1e-3 * 0.75**13, rel=2e-3)
    assert 1 - after["head/kernel"] == pytest.approx(1e-3 + 1e-3 * 0.05, rel=2e-3)
    assert 1 - after["block_11/kernel"] == pytest.approx(0.75e-3 * 1.05, rel=2e-3)


@pytest.mark.parametrize("copies", ["none", "frozen group", "not trainable"])
def test_a_frozen_copy_of_the_blocks_does_not_change_the_rates_of_the_others(copies):
    """Frozen blocks were counted as layers and shifted everyone's ratio."""
    names = ["b0", "b1", "b2"]
    frozen = [] if copies == "none" else ["copy_b0", "copy_b1", "copy_b2"]
    model = towers(*frozen, *names)
    if copies == "not trainable":
        for name in frozen:
            model.get_layer(name).trainable = False
    groups = [
        kgo.Group(name, name, learning_rate_ratio=0.5 ** (2 - at)) for at, name in enumerate(names)
    ]
    if copies == "frozen group":
        groups.append(kgo.Group("copy", "copy_*", frozen=True))
    optimizer = kgo.GroupedOptimizer(
        groups, model=model, rule="sgd", learning_rate=1.0, unclaimed="error"
    )
    moved = train(model, optimizer)
    assert [moved[f"{name}/kernel"] for name in names] == pytest.approx([-0.25, -0.5, -1.0])
    assert [moved[f"{name}/kernel"] for name in frozen] == [0.0] * len(frozen)


def test_the_exclusion_names_what_is_not_decayed_and_not_what_is():
    """With zero gradients a flipped mask shows: bias and norm would move, the kernel would not."""
    model = ones_model()
    optimizer = kgo.GroupedOptimizer(
        model=model,
        rule="sgd",
        learning_rate=1.0,
        weight_decay=0.01,
        exclude_from_decay=kgo.variable_name("bias") | kgo.layer_type("LayerNormalization"),
    )
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


def test_adapters_are_what_is_trainable_and_the_frozen_kernel_is_not():
    model = adapted_model()
    optimizer = kgo.GroupedOptimizer(model=model)
    assert sorted(groups_of(optimizer)["default"]) == [
        "d/bias",
        "d/lora_kernel_a",
        "d/lora_kernel_b",
    ]


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
    optimizer = kgo.GroupedOptimizer(
        [
            kgo.Group("b", "**/lora_kernel_b", weight_decay=0.5, anchor=[np.zeros((2, 4))]),
            kgo.Group("a", "**/lora_kernel_a", weight_decay=0.5, anchor="initial"),
        ],
        model=model,
        rule="sgd",
        learning_rate=1.0,
    )
    before = weights(model)
    model.compile(optimizer=optimizer, loss=no_gradient)
    model.fit(np.ones((1, 4)), np.ones((1, 4)), verbose=0)
    after = weights(model)
    np.testing.assert_allclose(after["d/lora_kernel_b"], 0.5, rtol=1e-6)
    np.testing.assert_array_equal(after["d/lora_kernel_a"], before["d/lora_kernel_a"])
    np.testing.assert_array_equal(after["d/kernel"], before["d/kernel"])


# Variables that appear later -------------------------------------------------------------------


class TwoHeads(keras.Model):
    """A model whose second head makes its weights when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        options = {"use_bias": False, "kernel_initializer": "zeros"}
        self.first = keras.layers.Dense(1, name="first", **options)
        self.second = keras.layers.Dense(1, name="second", **options)
        self.use_second = False

    def build(self, shape):
        self.first.build(shape)

    def call(self, x):
        return self.first(x) + self.second(x) if self.use_second else self.first(x)


@pytest.mark.parametrize("with_model", [True, False], ids=["model=", "no model"])
def test_weights_made_after_build_are_refused_by_their_paths(with_model):
    """They raised a KeyError that showed an internal number, or were skipped without a word."""
    model = TwoHeads()
    model.build((None, 1))
    optimizer = kgo.GroupedOptimizer(
        model=model if with_model else None, rule="sgd", learning_rate=1.0
    )
    model.compile(optimizer=optimizer, loss=mean_output)
    x = np.ones((1, 1), "float32")
    model.fit(x, x, verbose=0)
    assert weights(model) == {"first/kernel": -1.0}
    model.use_second = True
    model(x)  # makes the weights
    message = r"unknown (two_heads/)?second/kernel\b.*added.*Call `optimizer\.rebuild\(model\)`"
    with pytest.raises(ValueError, match=message):
        optimizer.apply([x, x], model.trainable_variables)
    assert weights(model) == {"first/kernel": -1.0, "second/kernel": 0.0}
    assert int(optimizer.iterations) == 1
    model.compile(optimizer=optimizer, loss=mean_output)
    with pytest.raises(ValueError, match=message):
        model.fit(x, x, verbose=0)


# Muon for the hidden matrices ------------------------------------------------------------------


def test_muon_moves_hidden_matrices_and_adamw_the_rest():
    """Muon crashed on TensorFlow, or orthogonalised the embedding and the head."""
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(10, 8, name="tokens")(tokens)
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = keras.layers.Dense(8, name="hidden")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(tokens, keras.layers.Dense(3, activation="softmax", name="head")(x))
    matrices = kgo.rank(2) - kgo.layer_type("Embedding") - "head" - kgo.default_exclude_from_decay
    optimizer = kgo.GroupedOptimizer(
        [
            # One step of its iteration: fewer operations to compile.
            kgo.Group("matrices", matrices, rule=kgo.rule("muon", ns_steps=1)),
            kgo.Group("rest", ~matrices, rule="adamw"),
        ],
        model=model,
        learning_rate=0.01,
    )
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    model.fit(np.arange(60).reshape(10, 6) % 10, np.arange(10) % 3, verbose=0)
    assert groups_of(optimizer)["matrices"] == ["hidden/kernel"]
    assert {v.path for v in optimizer.plan["rest"].variables} == {
        "tokens/embeddings",
        "head/kernel",
        "head/bias",
        "hidden/bias",
        *(f"attention/{part}/{name}" for part in ("query", "key", "value", "attention_output")
          for name in ("kernel", "bias")),
    }  # fmt: skip
    # One slot for Muon, two for AdamW: the second is the second moment.
    slots = {v.path: v.state_bytes / (4 * np.prod(v.shape)) for v in optimizer.plan.variables}
    assert slots == {path: 1.0 if path == "hidden/kernel" else 2.0 for path in slots}


@pytest.mark.needs_keras("3.13", reason="steps of the first Muon had another size")
def test_muon_in_a_group_takes_the_step_of_muon_of_keras_alone():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="hidden"),
            keras.layers.Dense(3, name="head"),
        ]
    )
    optimizer = kgo.GroupedOptimizer(
        {"matrices": kgo.Group("matrices", "hidden/kernel", rule="muon")},
        model=model,
        rule="adam",
        learning_rate=0.01,
    )
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


# Nesting ---------------------------------------------------------------------------------------


def test_a_grouped_optimizer_as_the_rule_of_a_group_is_refused_at_construction():
    inner = kgo.GroupedOptimizer()
    with pytest.raises(ValueError, match=r'must not itself wrap.*GroupedOptimizer in group "a"'):
        kgo.GroupedOptimizer([kgo.Group("a", "a", rule=inner)])
