"""Recipes that return groups, and the ratios of gradual unfreezing: who is where, what moves."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import recipe_models as models
from chosen_gradients import weights
from keras import layers
from models import assert_equal

import keras_groupopt as kgo
from keras_groupopt import recipes, selectors
from keras_groupopt.selectors.layer_paths import describe_model


def assigned(groups, model):
    """The group of every trainable variable, as the plan resolves them."""
    plan = kgo.GroupedOptimizer(groups, model=model).plan
    return {v.path: planned.name for planned in plan.groups for v in planned.variables}


def layers_of(groups, model, name):
    paths = [path for path, group in assigned(groups, model).items() if group == name]
    return list(dict.fromkeys(path.rsplit("/", 1)[0] for path in paths))


def changed(model, optimizer, steps=1):
    """How far each weight moved in `fit`."""
    moved = models.moved(model, optimizer, steps)
    return {path: np.abs(difference).max() for path, difference in moved.items()}


def chain():
    return models.chain("a b c")


# backbone_and_head -----------------------------------------------------------------------------


def sequential_head():
    body = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(8)], name="body")
    new = [layers.Dense(4, name="hidden"), layers.Dense(2, name="head")]
    return keras.Sequential([keras.Input((4,)), body, *new])


HEADS = {
    "flat": (models.convnext, ["head_norm", "head"]),
    "transformer": (models.vit, ["head"]),
    "a hidden layer": (models.vgg, ["fc1", "fc2"]),
    "nested": (lambda: models.nested(models.resnet(1, 1, top=False)), ["hidden", "head"]),
    "nested, without pooling": (sequential_head, ["hidden", "head"]),
    "no positions": (chain, ["c"]),
    "one output per token": (models.text, ["head"]),
}


@pytest.mark.parametrize(("build", "head"), HEADS.values(), ids=HEADS)
def test_the_head_is_found_in_the_graph(build, head):
    model = build()
    groups = recipes.backbone_and_head(model)
    assert [group.name for group in groups] == ["backbone", "head"]
    assert layers_of(groups, model, "head") == head
    assert set(assigned(groups, model).values()) == {"backbone", "head"}
    for group in groups:
        assert eval(repr(group.selector), vars(selectors)) == group.selector


def test_the_backbone_moves_slowly_toward_its_anchor_and_the_head_as_told():
    model = models.nested(models.resnet(1, 1, top=False))
    groups = recipes.backbone_and_head(model, 0.0, head="head", weight_decay=0.1, anchor="initial")
    assert groups[0].anchor.kind == "initial"
    moved = changed(model, kgo.GroupedOptimizer(groups, model=model, rule="sgd"))
    trained = {info.path for info in describe_model(model) if info.trainable}
    assert {path for path in trained if moved[path]} == {"head/kernel", "head/bias"}
    assert recipes.backbone_and_head(models.vit(), frozen=True)[0].frozen


# discriminative --------------------------------------------------------------------------------


# fastai: even_mults(start, stop, n) = start · (stop / start) ** (i / (n − 1)), and slice(stop) is
# stop / 10 for all but the last.
RATES = [
    (slice(1e-5, 1e-3), 3, [1e-5, 1e-4, 1e-3]),
    (slice(1e-6, 1e-4), 5, [1e-6, 3.16227766e-6, 1e-5, 3.16227766e-5, 1e-4]),
    (slice(1e-3, 1e-3), 2, [1e-3, 1e-3]),
    (slice(1e-3), 4, [1e-4, 1e-4, 1e-4, 1e-3]),
    (slice(1e-5, 1e-3), 1, [1e-3]),
    (slice(1e-3), 1, [1e-3]),
    (1e-3, 3, [1e-3, 1e-3, 1e-3]),
]


@pytest.mark.parametrize(("rates", "count", "expected"), RATES, ids=str)
def test_rates_are_spread_as_by_fastai(rates, count, expected):
    stop = rates.stop if isinstance(rates, slice) else rates
    parts = ["a", "b", "c", "d", "e"][:count]
    groups = recipes.discriminative(parts, rates)
    np.testing.assert_allclose(
        [stop * group.learning_rate_ratio for group in groups], expected, rtol=1e-7
    )
    assert [group.selector for group in groups] == [kgo.path(part) for part in parts]


def test_parts_of_a_model_move_at_the_rates_of_a_slice():
    model = models.chain("a b c d")
    groups = recipes.discriminative(model, slice(1e-4, 1e-1))
    assert [group.name for group in groups] == ["part_0", "part_1", "part_2", "head"]
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="lion", learning_rate=1e-1)
    moved = changed(model, optimizer)
    for name, rate in zip("abcd", [1e-4, 1e-3, 1e-2, 1e-1], strict=True):
        assert moved[f"{name}/kernel"] == pytest.approx(rate, rel=1e-2)


def test_parts_of_a_model_join_to_a_number_of_groups():
    model = models.resnet()
    groups = recipes.discriminative(model, slice(1e-5, 1e-3), count=3)
    assert [group.name for group in groups] == ["part_0", "part_1", "head"]
    first = layers_of(groups, model, "part_0")
    assert "stem_conv" in first
    assert first[-1].startswith("stage_1_block_0")
    assert layers_of(groups, model, "head") == ["head"]


def test_parts_that_are_frozen_are_left_out_and_shift_none():
    model = chain()
    model.get_layer("b").trainable = False
    groups = recipes.discriminative(model, slice(1e-5, 1e-3))
    ratios = {group.name: group.learning_rate_ratio for group in groups}
    assert ratios == {"part_0": pytest.approx(0.01), "head": 1.0}


# muon_with_adamw -------------------------------------------------------------------------------


BLOCKS = ("0_block_0", "1_block_0", "2_block_0", "2_block_1", "3_block_0")
ROUTES = {
    "flat transformer": (models.vit, {}, [f"block_{k}_mlp{n}" for k in range(2) for n in (1, 2)]),
    "kernels of rank 2": (
        lambda: models.vit(1, flat=False),
        {},
        [f"block_0/{n}" for n in ("attention/queries", "attention/values", "attention/out", "mlp")],
    ),
    "convolutions": (
        models.convnext,
        {"head": "head"},
        [f"stage_{block}_mlp{n}" for block in BLOCKS for n in (1, 2)],
    ),
    "a language model": (models.text, {}, ["block_0_mlp", "block_1_mlp"]),
    "a chain": (chain, {}, ["a", "b"]),
    "more for AdamW": (chain, {"adamw": "a"}, ["b"]),
    "no head": (lambda: models.chain("a b"), {"head": ()}, ["a", "b"]),
    "the head is given": (models.subclassed, {"head": "last"}, ["first", "second"]),
}


@pytest.mark.parametrize(("build", "options", "expected"), ROUTES.values(), ids=ROUTES)
def test_hidden_matrices_are_those_of_muon(build, options, expected):
    model = build()
    routes = assigned(recipes.muon_with_adamw(model, **options), model)
    assert [path for path, name in routes.items() if name == "muon"] == [
        f"{layer}/kernel" for layer in expected
    ]
    assert set(routes.values()) == {"muon", "adamw"}


@pytest.mark.every_backend
def test_each_rule_keeps_the_state_that_is_its_own():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 8, name="embedding")(inputs)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    # A name that Keras' own Muon would take for an embedding's.
    x = layers.Dense(8, name="after_embedding")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    groups = recipes.muon_with_adamw(model, muon_arguments={"ns_steps": 3})
    assert groups[0].rule.arguments == {"ns_steps": 3}
    optimizer = kgo.GroupedOptimizer(groups, model=model, weight_decay=0.01)
    moved = changed(model, optimizer, 2)
    assert all(moved.values())
    kept = [v.path.split("/", 1)[1].rpartition("/") for v in optimizer.variables]
    first = {owner for owner, _, slot in kept if "momentum" in slot}
    second = {owner for owner, _, slot in kept if "velocit" in slot}
    assert first - second == {"muon/after_embedding/kernel"}
    assert second == {f"adamw/{path}" for path in moved} - {"adamw/after_embedding/kernel"}


def test_muon_times_layerwise_decay():
    model = models.vit(2, flat=False)
    start = model.get_weights()
    moved = []
    for muon_ratio, ratios in ((1.0, ()), (0.5, recipes.layerwise_decay(model, 0.5))):
        model.set_weights(start)
        groups = recipes.muon_with_adamw(model, muon_ratio=muon_ratio)
        moved.append(changed(model, kgo.GroupedOptimizer(groups, model=model, ratios=ratios)))
    full, scaled = moved
    assert all(scaled.values())
    for block, ratio in (("block_0", 0.5 * 0.25), ("block_1", 0.5 * 0.5)):
        path = f"{block}/mlp/kernel"
        assert scaled[path] == pytest.approx(ratio * full[path], rel=1e-2)


# gradual_unfreezing ----------------------------------------------------------------------------


@pytest.mark.every_backend
def test_parts_join_one_after_another_and_keep_their_moments(tmp_path):
    model = chain()
    ratios = recipes.gradual_unfreezing(recipes.layerwise_decay(model, 0.5), 2)
    assert [(s.step, s.ratio) for _, s in ratios] == [(4, 0.25), (2, 0.5), (0, 1.0)]
    optimizer = kgo.GroupedOptimizer(model=model, rule="adam", weight_decay=0.1, ratios=ratios)
    start = weights(model)
    whole = []
    for _ in range(6):
        moved = changed(model, None if model.compiled else optimizer)
        whole.append({path[0] for path, difference in moved.items() if difference})
        if len(whole) == 3:
            model.save(tmp_path / "stage.keras")
    assert whole == [{"c"}, {"c"}, {"c", "b"}, {"c", "b"}, {"c", "b", "a"}, {"c", "b", "a"}]
    resumed = keras.models.load_model(tmp_path / "stage.keras")
    assert np.array_equal(weights(resumed)["a/kernel"], start["a/kernel"])
    models.fit(resumed, steps=3)
    assert_equal(resumed, model, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("parts", "steps", "starts"),
    [
        (["a", "b", "c"], 10, [20, 10, 0]),
        (["a", "b", "c"], [5, 10], [15, 5, 0]),
        ([kgo.Group("low", "a"), kgo.path("b")], 3, [3, 0]),
        ([["a", "b"], "c"], 3, [3, 0]),
        (["c"], 7, [0]),
    ],
    ids=str,
)
def test_stages_begin_at_their_steps(parts, steps, starts):
    pairs = recipes.gradual_unfreezing(parts, steps)
    assert [schedule.step for _, schedule in pairs] == starts
    model = chain()
    kgo.GroupedOptimizer(model=model, ratios=pairs).build(model.trainable_variables)


# lora ------------------------------------------------------------------------------------------


def with_lora():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 8, name="embedding")(inputs)
    x = layers.Dense(8, name="dense")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    for name in ("embedding", "dense"):
        model.get_layer(name).enable_lora(4)
    return model


@pytest.mark.parametrize("freeze_rest", [False, True])
def test_the_second_factor_of_lora_has_the_greater_rate(freeze_rest):
    model = with_lora()
    groups = recipes.lora(model, 8.0, freeze_rest=freeze_rest)
    routes = assigned(groups, model)
    assert [path for path, name in routes.items() if name == "lora_a"] == [
        "embedding/lora_embeddings_a",
        "dense/lora_kernel_a",
    ]
    rest = "rest" if freeze_rest else "default"
    assert {routes[p] for p in ("dense/bias", "head/kernel", "head/bias")} == {rest}
    # Adam's steps have the size of the rate, once both factors have gradients: A's needs B ≠ 0.
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam", learning_rate=1e-3)
    moved = changed(model, optimizer)
    assert moved["dense/lora_kernel_b"] == pytest.approx(8e-3, rel=1e-2)
    assert moved["dense/lora_kernel_a"] == 0
    assert bool(moved["head/kernel"]) is not freeze_rest
    moved = changed(model, None)
    assert moved["dense/lora_kernel_a"] < 2e-3
    assert moved["dense/lora_kernel_b"] > 4e-3
    assert moved["dense/kernel"] == moved["embedding/embeddings"] == 0


# All -------------------------------------------------------------------------------------------


@pytest.mark.backends("tensorflow", "torch", reason="JAX compiles an initializer for every shape")
def test_recipes_read_an_application_below_a_new_head():
    size = (32, 32, 3)
    body = keras.applications.MobileNetV2(size, weights=None, include_top=False, alpha=0.35)
    pooled = layers.GlobalAveragePooling2D()(body.output)
    hidden = layers.Dense(4, name="hidden")(pooled)
    flat = keras.Model(body.input, layers.Dense(2, name="new")(hidden))
    assert layers_of(recipes.backbone_and_head(flat), flat, "head") == ["hidden", "new"]
    nested = models.nested(body)
    assert repr(recipes.backbone_and_head(nested)[0].selector) == 'layer("backbone")'
    assert len(recipes.discriminative(flat, slice(1e-5, 1e-3))) == 19
    muon = assigned(recipes.muon_with_adamw(flat), flat)
    assert [path for path, name in muon.items() if name == "muon"] == ["hidden/kernel"]
    stages = recipes.gradual_unfreezing(flat, 10)
    assert [schedule.step for _, schedule in stages][::-1] == list(range(0, 190, 10))


def test_what_a_recipe_returns_can_be_edited():
    model = chain()
    backbone, head = recipes.backbone_and_head(model)
    edited = [dataclasses.replace(backbone, rule="lion"), head, kgo.Group("bias", "c/bias")]
    ratios = [*recipes.layerwise_decay(model)[1:], ("a", 0.0)]
    optimizer = kgo.GroupedOptimizer(edited, model=model, ratios=ratios, overlap="last")
    moved = changed(model, optimizer)
    assert moved["a/kernel"] == 0
    assert moved["b/kernel"] == pytest.approx(1e-3 * 0.1 * 0.75, rel=1e-2)


def test_a_group_reads_as_it_was_written():
    group = kgo.Group("head", "head", "adam", learning_rate_ratio=0.5, weight_decay=0.0)
    said = "selector=path(\"head\"), rule=rule('adam'), learning_rate_ratio=0.5, weight_decay=0.0"
    assert repr(group) == f"Group(name='head', {said})"


# What is refused -------------------------------------------------------------------------------


def with_a_frozen_backbone():
    model = models.nested(models.resnet(1, 1, top=False))
    model.layers[0].trainable = False
    return model


def outer_block():
    inputs = keras.Input((4, 4))
    return keras.Model(inputs, models.Block(name="block")(inputs))


# By recipe: a call of it, and the error.
WRONG_VALUES = {
    recipes.backbone_and_head: [
        (lambda f: f(models.subclassed()), "`head` must be .*no graph.*'first', 'second', 'last'"),
        (lambda f: f(models.unet()), "`head` must be given.*Candidates are.*'head'"),
        (lambda f: f(models.resnet(1, top=False)), "`head` must select.*Candidates are .*norm"),
        (lambda f: f(models.vit(), head=()), r"`head` must select a head.*head=\(\)"),
        (lambda f: f(models.vit(), head="haed"), "In `head`: Selector.*Nearest paths: 'head'"),
        (lambda f: f(models.vit(), ratio=-1), "learning_rate_ratio.*-1"),
        (lambda f: f(models.vit(), head="*"), "The backbone must have trainable variables"),
        # As it would be forgotten.
        (
            lambda f: f(with_a_frozen_backbone()),
            r"The backbone must .*layer\(\"hidden\", \"head\"\)",
        ),
    ],
    recipes.layerwise_decay: [
        (lambda f: f(models.subclassed()), "an order of layers.*'first', 'second', 'last'.*bloc"),
        (lambda f: f(models.subclassed(), blocks=["first"]), "`head` must be given.*head="),
        (lambda f: f(models.unet()), "an order of blocks.*from 'down_1a' to 'up_1b'.*blocks="),
        (lambda f: f(models.unet(), blocks=["down_*"]), "`head` must be given.*Candidates are"),
        (lambda f: f(models.vgg(), blocks=["conv_9"]), r"In `blocks\[0\]`.*Nearest paths: 'conv_"),
        (lambda f: f(models.vgg(), blocks=["conv_1", "conv_*"]), "not overlap.*conv_1/kernel"),
        (lambda f: f(models.vgg(), blocks=["fc1"]), "not have variables of the head.*fc1/kernel"),
        (lambda f: f(models.vgg(), head="haed"), "In `head`: Selector"),
        (lambda f: f(models.vgg(), decay=0), r"`decay` must be a number in \(0, 1\].*decay=0"),
        (lambda f: f(models.vgg(), decay=1.5), "decay=1.5"),
        (lambda f: f(models.vgg(), decay=float("nan")), "decay=nan"),
        (lambda f: f(models.vgg(), min_ratio=-1), "min_ratio=-1"),
        (lambda f: f(keras.Sequential([layers.Dense(2)])), "`model` must be built"),
    ],
    recipes.discriminative: [
        (lambda f: f(["a"], 0), "`rates` must be a positive finite number.*rates=0"),
        (lambda f: f(["a"], slice(0, 1)), r"`rates\.start` must be a positive finite number"),
        (lambda f: f(["a"], slice(1, float("inf"))), r"`rates\.stop` must be .*inf"),
        (lambda f: f(["a"], slice(1, None)), r"slice\(start, stop\) or slice\(stop\)"),
        (lambda f: f(["a"], 1e-3, count=1), "given with a model only"),
        (lambda f: f(chain(), 1e-3, count=4), "`count` must be from 2 to 3.*count=4"),
    ],
    recipes.muon_with_adamw: [
        (lambda f: f(models.subclassed()), "`head` must be given.*no graph"),
        (
            lambda f: f(models.resnet(1)),
            r"trainable matrix for Muon.*stem_conv/kernel \(3, 3, 3, 4",
        ),
        (lambda f: f(models.chain("a")), "trainable matrix for Muon.*a/kernel"),
        (lambda f: f(models.chain("a b"), adamw="a"), "trainable matrix for Muon"),
        (lambda f: f(models.chain("a b"), adamw="c"), "In `adamw`: Selector"),
        (lambda f: f(outer_block()), "`head` must be given if the last layer holds several"),
    ],
    recipes.gradual_unfreezing: [
        (lambda f: f(["a", "b"], 0), "`steps_per_stage` must be an integer >= 1.*=0"),
        (lambda f: f(["a", "b"], [1, 2]), "for each stage except the last, 1 for 2 parts"),
        (lambda f: f([kgo.Group("default")], 1), r"a selector.*group \"default\".*parts\[0\]"),
    ],
    recipes.lora: [(lambda f: f(models.vgg(1)), r"enable_lora\(rank\).*such as .*fc1")],
}
WRONG_TYPES = {
    recipes.layerwise_decay: [
        (lambda f: f(models.vgg(), blocks="conv_0"), "`blocks` must be a list.*'conv_0'"),
        (lambda f: f(models.vgg(), blocks=[]), "`blocks` must be a list"),
        (lambda f: f(models.vgg(), decay="0.75"), "decay='0.75'"),
        (lambda f: f(3), "`model` must be a Keras model"),
    ],
    recipes.discriminative: [
        (lambda f: f(["a"], "1e-3"), "`rates` must be a positive finite number"),
        (lambda f: f("a", 1e-3), "`parts` must be a Keras model, or a list"),
        (lambda f: f(chain(), 1e-3, count=1.5), "`count` must be an integer"),
    ],
    recipes.gradual_unfreezing: [
        (lambda f: f(["a", "b"], 1.5), "`steps_per_stage` must be an integer >= 1"),
        (lambda f: f("a", 1), "`parts` must be a Keras model, or a list of parts"),
        (lambda f: f([], 1), "`parts` must be"),
        (lambda f: f([("a", kgo.schedules.UnfreezeAt(1))], 1), r"numbers as ratios.*parts\[0\]"),
    ],
}


@pytest.mark.parametrize(
    ("recipe", "call", "message", "error"),
    [
        (recipe, *row, error)
        for table, error in ((WRONG_VALUES, ValueError), (WRONG_TYPES, TypeError))
        for recipe, rows in table.items()
        for row in rows
    ],
)
def test_what_a_recipe_cannot_do_is_refused_with_a_way_out(recipe, call, message, error):
    with pytest.raises(error, match=f"(?s){message}"):
        call(recipe)
