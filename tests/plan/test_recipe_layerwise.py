"""Rates that fall from the head to the input: whose they are, and what moves."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import recipe_models as models
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import keras_groupopt as kgo
from keras_groupopt import selectors
from keras_groupopt.recipes.cuts import components, cut
from keras_groupopt.selectors import Selector
from keras_groupopt.selectors.layer_paths import describe_model

# The parts of equal scale, up to the head's 1, each 0.75 of the next. From timm 1.0.31, torch 2.13:
#   timm.optim.param_groups_layer_decay(timm.create_model(name, ...), layer_decay=0.75)
# with `vit_tiny_patch16_224(depth=4)`, `convnext_atto(depths=(1, 1, 2, 1))`, `resnet18`, `vgg11`.
# Per layer here, what timm gives the one in its place.
VIT = ["patches|tokens", "block_0.*", "block_1.*", "block_2.*", "block_3.*|norm", "head"]
CONVNEXT = [
    *("stem_.*", "stage_0_block_0.*", "stage_1_.*", "stage_2_down.*|stage_2_block_0.*"),
    *("stage_2_block_1.*", "stage_3_.*", "head.*"),
]
RESNET18 = ["stem_.*", *(f"stage_{k}_block_{n}.*" for k in range(4) for n in range(2)), "head"]
VGG11 = [*(f"conv_{k}" for k in range(8)), "fc."]


def by_path(pairs, model):
    """The ratio of every weight, by its path; each must be in one pair, which can be saved."""
    catalog = describe_model(model)
    found = {}
    for selector, ratio in pairs:
        chosen = selector.resolve(catalog)
        assert eval(repr(selector), vars(selectors)) == selector
        assert Selector.from_config(selector.get_config()).resolve(catalog) == chosen
        for at in chosen:
            assert catalog[at].path not in found
            found[catalog[at].path] = ratio
    assert set(found) == set(catalog.paths)
    return found


def by_layer(pairs, model):
    """The ratio of every layer, by the first level of its path."""
    return {path.split("/")[0]: ratio for path, ratio in by_path(pairs, model).items()}


def levels(pairs, model):
    """The layers of each part, by their first level."""
    catalog = describe_model(model)
    return [
        " ".join(dict.fromkeys(catalog[at].path.split("/")[0] for at in sorted(s.resolve(catalog))))
        for s, _ in pairs
    ]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: models.vit(4), VIT),
        (lambda: models.vit(4, dense=True), VIT),
        (lambda: models.vit(4, flat=False), VIT),
        (models.convnext, CONVNEXT),
        (models.resnet, RESNET18),
        (models.vgg, VGG11),
    ],
)
def test_ratios_are_the_scales_of_timm(build, expected):
    model = build()
    for layer, ratio in by_layer(kgo.recipes.layerwise_decay(model), model).items():
        (depth,) = (at for at, names in enumerate(expected[::-1]) if re.fullmatch(names, layer))
        assert ratio == pytest.approx(0.75**depth, abs=1e-8), layer


# As above, with `mobilenetv2_035` and `efficientnet_b0`: stem, blocks, head; the last convolution
# has the scale of the last block.
APPLICATIONS = {
    "MobileNetV2": ("Conv1", 0.00563771, "block_1_expand", 0.0100226, "Conv_1", 18),
    "EfficientNetB0": ("stem_conv", 0.00751695, "block2a_dwconv", 0.01336346, "top_conv", 17),
    "ResNet50V2": ("conv1_conv", 0.00751695, "conv2_block1_2_conv", 0.0100226, "post_bn", 17),
    "VGG16": ("block1_conv1", 0.75**13, "block1_conv2", 0.75**12, "block5_conv3", 13),
}


@pytest.mark.backends("tensorflow", "torch", reason="JAX compiles an initializer for every shape")
@pytest.mark.parametrize("name", APPLICATIONS)
def test_ratios_of_an_application_are_the_scales_of_timm_bare_and_nested(name):
    stem, lowest, second, ratio, last, below = APPLICATIONS[name]
    build = getattr(keras.applications, name)
    model = build(weights=None, input_shape=(32, 32, 3), classes=3)
    pairs = kgo.recipes.layerwise_decay(model)
    found = by_layer(pairs, model)
    assert len(pairs) == below + 1
    assert found[stem] == pytest.approx(lowest, abs=1e-8)
    assert found[second] == pytest.approx(ratio, abs=1e-8)
    assert (found[last], found["predictions"]) == (0.75, 1.0)
    body = keras.Model(model.input, model.get_layer(last).output, name="body")
    pooled = [layers.GlobalAveragePooling2D(), layers.Dense(4), layers.Dense(2)]
    outer = keras.Sequential([keras.Input((32, 32, 3)), body, *pooled])
    inside = by_path(kgo.recipes.layerwise_decay(outer), outer)
    for path, value in inside.items():
        name_inside = path.removeprefix("body/").split("/")[0]
        assert value == (found[name_inside] if path.startswith("body/") else 1.0), path


def tied():
    tokens = keras.Input((6,), dtype="int32")
    embedding = layers.ReversibleEmbedding(10, 4, name="embedding")
    x = layers.Dense(4, name="b")(layers.Dense(4, name="a")(embedding(tokens)))
    return keras.Model(tokens, embedding(x, reverse=True))


def residual(*, heads: int = 0):
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(2, 3, padding="same", name="stem")(inputs)
    for name in ("a", "b"):
        x = x + layers.Conv2D(2, 3, padding="same", name=name)(layers.ReLU()(x))
    outputs = [layers.Conv2D(1, 1, name=f"head_{k}")(x) for k in range(heads)]
    return keras.Model(inputs, outputs or x)


def shared():
    inputs = keras.Input((4,))
    twice = layers.Dense(4, name="twice")
    x = layers.Dense(4, name="b")(twice(layers.Dense(4, name="a")(twice(inputs))))
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def with_auxiliary_head():
    inputs = keras.Input((8, 8, 3))
    first, *others = (layers.Conv2D(2, 3, padding="same", name=name) for name in "abc")
    middle = first(inputs)
    ends = {"head": others[1](others[0](middle)), "side": middle}
    outputs = [layers.Dense(2, name=n)(layers.GlobalAveragePooling2D()(x)) for n, x in ends.items()]
    return keras.Model(inputs, outputs)


def recurrent():
    hidden = [layers.LSTM(4, return_sequences=True, name="a"), layers.LSTM(4, name="b")]
    start = [keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, name="embedding")]
    return keras.Sequential([*start, *hidden, layers.Dense(2, name="head")])


BLOCK = "block_{0}_attention block_{0}_norm1 block_{0}_mlp block_{0}_norm2"
TEXT = ["embedding positions", BLOCK.format(0), BLOCK.format(1)]
STEM, RESIDUAL = (
    " ".join(f"{name}_{part}" for name in names for part in ("conv", "norm"))
    for names in (["stem"], ["stage_0_block_{0}_1", "stage_0_block_{0}_2"])
)
# A chain, weights used twice, no head, several heads, a head in the middle, towers that end level,
# norms before and after each branch, an output per token and one for all, a tied head.
STRUCTURES = [
    (lambda: models.chain("a b c"), ["a", "b", "c"]),
    (shared, ["twice", "a", "b", "head"]),
    (recurrent, ["embedding", "a", "b", "head"]),
    (residual, ["stem", "a", "b"]),
    (lambda: models.resnet(1, top=False), [STEM, RESIDUAL.format(0), RESIDUAL.format(1)]),
    (lambda: residual(heads=2), ["stem", "a", "b", "head_0 head_1"]),
    (with_auxiliary_head, ["a", "b", "c", "head side"]),
    (models.towers, ["conv_0", "conv_1", "conv_2 table", "fuse head"]),
    (models.text, [*TEXT, "head"]),
    (lambda: models.text(post_norm=True), [*TEXT, "head"]),
    (lambda: models.text(post_norm=True, two_outputs=True), [*TEXT, "head class"]),
    pytest.param(
        tied,
        ["embedding", "a", "b"],
        marks=pytest.mark.needs_keras("3.13", reason="no reversible embedding"),
    ),
]


@pytest.mark.parametrize(("build", "expected"), STRUCTURES)
def test_parts_follow_the_graph(build, expected):
    model = build()
    pairs = kgo.recipes.layerwise_decay(model, 0.5)
    assert by_path(pairs, model)
    assert [ratio for _, ratio in pairs] == [0.5**k for k in range(len(pairs))][::-1]
    found, named = ([set(level.split()) for level in of] for of in (levels(pairs, model), expected))
    assert found == named


@pytest.mark.parametrize("gate", [False, True])
def test_inverted_bottlenecks_without_a_shortcut_are_blocks(gate):
    model = models.inverted(gate=gate)
    for layer, ratio in by_layer(kgo.recipes.layerwise_decay(model, 0.5), model).items():
        block = re.match(r"block_(\d)", layer)
        below = {"stem": 5, "last": 1, "head": 0}.get(layer.split("_")[0])
        assert ratio == 0.5 ** (4 - int(block[1]) if block else below), layer


@pytest.mark.parametrize("nested", [False, True])
def test_weights_move_by_their_ratio(nested):
    body = models.resnet(2, 1, top=False)
    model = models.nested(body) if nested else models.vit(flat=False)
    start = model.get_weights()
    pairs = kgo.recipes.layerwise_decay(model, 0.5)
    moved = []
    for ratios in ((), pairs):
        model.set_weights(start)
        moved.append(
            models.moved(model, kgo.GroupedOptimizer(model=model, rule="sgd", ratios=ratios))
        )
    plain, scaled = moved
    ratios = by_path(pairs, model)
    trained = [info.path for info in describe_model(model) if info.trainable]
    assert sum(np.any(plain[path]) for path in trained) > len(trained) / 2
    for path in trained:
        np.testing.assert_allclose(
            scaled[path], plain[path] * ratios[path], rtol=2e-3, atol=2e-7, err_msg=path
        )


def test_frozen_layers_keep_their_place_and_shift_none():
    model = models.vit(3)
    free = by_path(kgo.recipes.layerwise_decay(model), model)
    for layer in model.layers[:12]:
        layer.trainable = False
    assert by_path(kgo.recipes.layerwise_decay(model), model) == free


@pytest.mark.parametrize("join", [lambda x, y: [x, y], lambda x, y: x - y], ids=["beside", "less"])
def test_a_frozen_copy_beside_what_is_trained_shifts_none(join):
    inputs = x = y = keras.Input((4,))
    for k in range(3):
        x = layers.Dense(4, name=f"student_{k}")(x)
        # It may be deeper.
        for name in (f"teacher_{k}a", f"teacher_{k}b"):
            y = layers.Dense(4, name=name, trainable=False)(y)
    for outputs in (x, join(x, y)):
        model = keras.Model(inputs, outputs)
        found = by_path(kgo.recipes.layerwise_decay(model, 0.5), model)
        assert [found[f"student_{k}/kernel"] for k in range(3)] == [0.25, 0.5, 1.0]


def test_weights_that_no_layer_of_the_graph_owns_have_the_smallest_ratio():
    class Owner(keras.Model):
        pass

    base = models.vit()
    model = Owner(base.input, base.output)
    model.stray = model.add_weight((3, 3), name="stray")
    found = by_path(kgo.recipes.layerwise_decay(model, 0.5), model)
    assert found["stray"] == found["tokens/class_token"] == 0.125


def test_the_head_can_be_given():
    model = models.vgg(2)
    pairs = kgo.recipes.layerwise_decay(model, 0.5, head="fc2")
    assert levels(pairs, model) == ["conv_0", "conv_1", "fc1", "fc2"]
    none = kgo.recipes.layerwise_decay(model, 0.5, head=())
    assert by_path(none, model)["fc2/kernel"] == 1.0
    assert len(none) == 4


def test_ratios_have_a_least_value():
    model = models.chain("a b c d")
    pairs = kgo.recipes.layerwise_decay(model, 0.5, min_ratio=0.3)
    assert [ratio for _, ratio in pairs] == [0.3, 0.3, 0.5, 1.0]


def test_blocks_give_an_order_where_there_is_none():
    model = models.subclassed()
    pairs = kgo.recipes.layerwise_decay(model, 0.5, blocks=[["second"]], head=model.last)
    assert [ratio for _, ratio in pairs] == [0.25, 0.5, 1.0]
    assert levels(pairs, model) == ["first", "second", "last"]
    unet = models.unet()
    down = kgo.path("down_*")
    pairs = kgo.recipes.layerwise_decay(unet, 0.5, blocks=[down, "up_*"], head="head")
    assert [ratio for _, ratio in pairs] == [0.25, 0.5, 1.0]


# Cuts of graphs --------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 8))
    return {
        n: draw(st.sets(st.integers(0, n - 1), max_size=2)) if n else set() for n in range(count)
    }


@given(graphs())
def test_a_cut_is_what_every_path_passes(before):
    nodes = list(before)
    paths = [[n] for n in nodes if not before[n]]
    whole = []
    while paths:
        trail = paths.pop()
        after = [n for n in nodes if trail[-1] in before[n]]
        paths += [[*trail, n] for n in after]
        whole += [] if after else [trail]
    expected = set(nodes).intersection(*whole)
    runs = cut(nodes, before)
    assert [node for run in runs for node in run.nodes] == nodes
    assert {node for run in runs if run.is_cut for node in run.nodes} == expected


@given(graphs())
def test_components_are_what_edges_join(before):
    found = components(list(before), before)
    place = {node: at for at, part in enumerate(found) for node in part}
    assert all(place[a] == place[b] for b in before for a in before[b])
    reach = {node: {node} | before[node] for node in before}
    for _ in before:
        for node in before:
            for other in list(before):
                if reach[node] & reach[other]:
                    reach[node] |= reach[other]
    assert len({frozenset(part) for part in reach.values()}) == len(found)


def test_an_output_of_a_nested_model_that_leads_nowhere_is_no_head():
    inputs = keras.Input((4,))
    x = layers.Dense(4, activation="relu", name="stem")(inputs)
    ends = [layers.Dense(4, activation="relu", name=name)(x) for name in ("top", "unused")]
    backbone = keras.Model(inputs, ends, name="backbone")
    outer = keras.Input((4,))
    model = keras.Model(outer, layers.Dense(2, name="head")(backbone(outer)[0]))
    found = by_path(kgo.recipes.layerwise_decay(model, 0.5), model)
    assert [found[f"backbone/{name}/kernel"] for name in ("stem", "top", "unused")] == [
        0.25,
        0.5,
        0.25,
    ]
    assert found["head/kernel"] == 1.0
