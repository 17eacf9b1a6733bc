"""Recipes that return groups, and the ratios of gradual unfreezing: who is where, what moves."""

from __future__ import annotations

import dataclasses
import re

import keras
import numpy as np
import pytest
import recipe_models as models
from keras import layers

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
    before = models.values(model)
    models.fit(model, optimizer, steps)
    after = models.values(model)
    return {path: np.abs(after[path] - before[path]).max() for path in before}


# backbone_and_head -----------------------------------------------------------------------------


def sequential_head():
    body = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(8)], name="body")
    new = [layers.Dense(4, name="hidden"), layers.Dense(2, name="head")]
    return keras.Sequential([keras.Input((4,)), body, *new])


HEADS = [
    ("flat", models.convnext, ["head_norm", "head"]),
    ("transformer", models.vit, ["head"]),
    ("a hidden layer", models.vgg, ["fc1", "fc2"]),
    ("nested", lambda: models.nested(models.resnet(1, 1, top=False)), ["hidden", "head"]),
    ("nested, without pooling", sequential_head, ["hidden", "head"]),
    ("no positions", lambda: models.chain("a b c"), ["c"]),
    ("one output per token", models.text, ["head"]),
    ("a graph without order", models.unet, None),
]


@pytest.mark.parametrize(
    ("build", "head"), [row[1:] for row in HEADS], ids=[row[0] for row in HEADS]
)
def test_the_head_is_found_in_the_graph(build, head):
    model = build()
    if head is None:
        with pytest.raises(ValueError, match=r"`head` must be given.*Candidates are.*'head'"):
            recipes.backbone_and_head(model)
        return
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
    frozen = recipes.backbone_and_head(models.vit(), frozen=True)
    assert frozen[0].frozen


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (models.subclassed, {}, "`head` must be given.*no graph.*'first', 'second', 'last'"),
        (lambda: models.resnet(1, top=False), {}, "`head` must select.*Candidates are .*norm"),
        (models.vit, {"head": ()}, r"`head` must select a head.*head=\(\)"),
        (models.vit, {"head": "haed"}, "In `head`: Selector.*Nearest paths: 'head'"),
        (models.vit, {"ratio": -1}, "learning_rate_ratio.*-1"),
        (models.vit, {"head": "*"}, "The backbone must have trainable variables"),
    ],
)
def test_a_head_that_cannot_be_told_is_refused_with_candidates(build, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        recipes.backbone_and_head(build(), **options)


def test_a_frozen_backbone_is_refused_as_it_would_be_forgotten():
    model = models.nested(models.resnet(1, 1, top=False))
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"The backbone must have.*layer\(\"hidden\", \"head\"\)"):
        recipes.backbone_and_head(model)


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
    model = models.chain("a b c")
    model.get_layer("b").trainable = False
    groups = recipes.discriminative(model, slice(1e-5, 1e-3))
    ratios = {group.name: group.learning_rate_ratio for group in groups}
    assert ratios == {"part_0": pytest.approx(0.01), "head": 1.0}


BAD_SLICES = [
    ((["a"], 0), {}, ValueError, "`rates` must be a positive finite number.*rates=0"),
    ((["a"], "1e-3"), {}, TypeError, "`rates` must be a positive finite number"),
    ((["a"], slice(0, 1)), {}, ValueError, r"`rates\.start` must be a positive finite number"),
    ((["a"], slice(1, float("inf"))), {}, ValueError, r"`rates\.stop` must be .*inf"),
    ((["a"], slice(1, None)), {}, ValueError, r"slice\(start, stop\) or slice\(stop\)"),
    (("a", 1e-3), {}, TypeError, "`parts` must be a Keras model, or a list"),
    ((["a"], 1e-3), {"count": 1}, ValueError, "given with a model only"),
    ((None, 1e-3), {"count": 4}, ValueError, "`count` must be from 2 to 3.*count=4"),
    ((None, 1e-3), {"count": 1.5}, TypeError, "`count` must be an integer"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD_SLICES)
def test_bad_slices_are_refused(arguments, options, error, message):
    parts, rates = arguments
    with pytest.raises(error, match=message):
        recipes.discriminative(parts or models.chain("a b c"), rates, **options)


# muon_with_adamw -------------------------------------------------------------------------------


ROUTES = [
    (
        "flat transformer",
        models.vit,
        {},
        [f"block_{k}_mlp{n}/kernel" for k in range(2) for n in (1, 2)],
    ),
    (
        "kernels of rank 2",
        lambda: models.vit(1, flat=False),
        {},
        [f"block_0/attention/{n}/kernel" for n in ("queries", "values", "out")]
        + ["block_0/mlp/kernel"],
    ),
    ("convolutions", models.convnext, {"head": "head"}, None),
    ("a language model", models.text, {}, ["block_0_mlp/kernel", "block_1_mlp/kernel"]),
    ("a chain", lambda: models.chain("a b c"), {}, ["a/kernel", "b/kernel"]),
    ("more for AdamW", lambda: models.chain("a b c"), {"adamw": "a"}, ["b/kernel"]),
    ("no head", lambda: models.chain("a b"), {"head": ()}, ["a/kernel", "b/kernel"]),
    ("the head is given", models.subclassed, {"head": "last"}, ["first/kernel", "second/kernel"]),
]


@pytest.mark.parametrize(
    ("build", "options", "expected"), [row[1:] for row in ROUTES], ids=[row[0] for row in ROUTES]
)
def test_hidden_matrices_are_those_of_muon(build, options, expected):
    model = build()
    groups = recipes.muon_with_adamw(model, **options)
    routes = assigned(groups, model)
    if expected is None:
        expected = [path for path in routes if re.search(r"_mlp\d/kernel", path)]
    assert [path for path, name in routes.items() if name == "muon"] == expected
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
    groups = recipes.muon_with_adamw(model, muon_ratio=0.5)
    ratios = recipes.layerwise_decay(model, 0.5)
    optimizer = kgo.GroupedOptimizer(groups, model=model, ratios=ratios)
    moved = changed(model, optimizer)
    assert all(moved.values())
    # In the first step the update of Muon has one size, whatever the gradient's.
    low, high = moved["block_0/mlp/kernel"], moved["block_1/mlp/kernel"]
    assert low == pytest.approx(0.5 * high, rel=0.5)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (models.subclassed, {}, "`head` must be given.*no graph"),
        (lambda: models.resnet(1), {}, r"trainable matrix for Muon.*stem_conv/kernel \(3, 3, 3, 4"),
        (lambda: models.chain("a"), {}, "trainable matrix for Muon.*a/kernel"),
        (lambda: models.chain("a b"), {"adamw": "a"}, "trainable matrix for Muon"),
        (lambda: models.chain("a b"), {"adamw": "c"}, "In `adamw`: Selector"),
        (lambda: outer_block(), {}, "`head` must be given if the last layer holds several"),
    ],
)
def test_a_model_without_hidden_matrices_is_refused(build, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        recipes.muon_with_adamw(build(), **options)


def outer_block():
    inputs = keras.Input((4, 4))
    return keras.Model(inputs, models.Block(name="block")(inputs))


# gradual_unfreezing ----------------------------------------------------------------------------


@pytest.mark.every_backend
def test_parts_join_one_after_another_and_keep_their_moments(tmp_path):
    model = models.chain("a b c")
    ratios = recipes.gradual_unfreezing(recipes.layerwise_decay(model, 0.5), 2)
    assert [(s.step, s.ratio) for _, s in ratios] == [(4, 0.25), (2, 0.5), (0, 1.0)]
    optimizer = kgo.GroupedOptimizer(model=model, rule="adam", weight_decay=0.1, ratios=ratios)
    start = models.values(model)
    whole = []
    for _ in range(6):
        before = models.values(model)
        models.fit(model, optimizer) if not model.compiled else go_on(model)
        after = models.values(model)
        whole.append({path[0] for path in before if not np.array_equal(before[path], after[path])})
        if len(whole) == 3:
            model.save(tmp_path / "stage.keras")
    assert whole == [{"c"}, {"c"}, {"c", "b"}, {"c", "b"}, {"c", "b", "a"}, {"c", "b", "a"}]
    resumed = keras.models.load_model(tmp_path / "stage.keras")
    assert np.array_equal(models.values(resumed)["a/kernel"], start["a/kernel"])
    for _ in range(3):
        go_on(resumed)
    for path, value in models.values(model).items():
        np.testing.assert_allclose(models.values(resumed)[path], value, rtol=1e-5, atol=1e-7)


def go_on(model):
    x, y = models.batch(model)
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)


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
    model = models.chain("a b c")
    kgo.GroupedOptimizer(model=model, ratios=pairs).build(model.trainable_variables)


BAD_STAGES = [
    ((["a", "b"], 0), ValueError, "`steps_per_stage` must be an integer >= 1.*=0"),
    ((["a", "b"], 1.5), TypeError, "`steps_per_stage` must be an integer >= 1"),
    ((["a", "b"], [1, 2]), ValueError, "one number for each stage except the last, 1 for 2 parts"),
    (("a", 1), TypeError, "`parts` must be a Keras model, or a list of parts"),
    (([], 1), TypeError, "`parts` must be"),
    (
        ([kgo.Group("default")], 1),
        ValueError,
        r"must have a selector.*group \"default\".*parts\[0\]",
    ),
    (([("a", kgo.schedules.UnfreezeAt(1))], 1), TypeError, r"numbers as ratios.*parts\[0\]"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_STAGES)
def test_bad_stages_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        recipes.gradual_unfreezing(*arguments)


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
    moved = changed(model, model.optimizer)
    assert moved["dense/lora_kernel_a"] < 2e-3
    assert moved["dense/lora_kernel_b"] > 4e-3
    assert moved["dense/kernel"] == moved["embedding/embeddings"] == 0


def test_the_error_for_a_model_without_lora_says_how_to_get_it():
    with pytest.raises(ValueError, match=r"enable_lora\(rank\).*such as .*fc1"):
        recipes.lora(models.vgg(1))


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
    model = models.chain("a b c")
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
