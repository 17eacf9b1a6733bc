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
    """The ratio of every weight, by its path; each must be in exactly one pair."""
    catalog = describe_model(model)
    found = {}
    for selector, ratio in pairs:
        for at in selector.resolve(catalog):
            assert catalog[at].path not in found
            found[catalog[at].path] = ratio
    assert set(found) == set(catalog.paths)
    return found


def levels(pairs, model):
    """The layers of each part, by their first level."""
    catalog = describe_model(model)
    return [
        " ".join(dict.fromkeys(catalog[at].path.split("/")[0] for at in sorted(s.resolve(catalog))))
        for s, _ in pairs
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: models.vit(4), VIT),
        (lambda: models.vit(4, dense=True), VIT),
        (lambda: models.vit(4, flat=False), VIT),
        (models.convnext, CONVNEXT),
        (models.resnet, RESNET18),
        (models.vgg, VGG11),
    ],
    ids=["vit", "vit of dense layers", "vit of blocks", "convnext", "resnet", "vgg"],
)
def test_ratios_are_the_scales_of_timm(model, expected):
    model = model()
    for path, ratio in by_path(kgo.recipes.layerwise_decay(model), model).items():
        layer = path.split("/")[0]
        (depth,) = (at for at, names in enumerate(expected[::-1]) if re.fullmatch(names, layer))
        assert ratio == pytest.approx(0.75**depth, abs=1e-8), path


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
    found = {path.split("/")[0]: value for path, value in by_path(pairs, model).items()}
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
    x = layers.Conv2D(2, 3, padding="same", name="a")(inputs)
    side = layers.Dense(2, name="side")(layers.GlobalAveragePooling2D()(x))
    x = layers.Conv2D(2, 3, padding="same", name="b")(x)
    x = layers.Conv2D(2, 3, padding="same", name="c")(x)
    return keras.Model(
        inputs, [layers.Dense(2, name="head")(layers.GlobalAveragePooling2D()(x)), side]
    )


def recurrent():
    hidden = [layers.LSTM(4, return_sequences=True, name="a"), layers.LSTM(4, name="b")]
    start = [keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, name="embedding")]
    return keras.Sequential([*start, *hidden, layers.Dense(2, name="head")])


INVERTED = [
    "stem_conv stem_norm",
    "block_0_depthwise block_0_norm block_0_project_conv block_0_project_norm",
]
BLOCK = "block_{0}_attention block_{0}_norm1 block_{0}_mlp block_{0}_norm2"
STRUCTURES = [
    ("a chain", lambda: models.chain("a b c"), ["a", "b", "c"]),
    ("a nested chain", lambda: outer(models.chain("a b")), ["body/a", "body/b", "head"]),
    ("weights used twice count low", shared, ["twice", "a", "b", "head"]),
    ("a recurrent net", recurrent, ["embedding", "a", "b", "head"]),
    ("no head", residual, ["stem", "a", "b"]),
    ("no head, deep", lambda: models.resnet(1, top=False), None),
    ("two heads", lambda: residual(heads=2), ["stem", "a", "b", "head_0 head_1"]),
    ("a head in the middle", with_auxiliary_head, ["a", "b", "c", "head side"]),
    ("towers end level", models.towers, ["conv_0", "conv_1", "conv_2 table", "fuse head"]),
    (
        "norms after each branch",
        lambda: models.text(post_norm=True),
        ["embedding positions", BLOCK.format(0), BLOCK.format(1), "head"],
    ),
    (
        "an output per token and one for all",
        lambda: models.text(post_norm=True, two_outputs=True),
        ["embedding positions", BLOCK.format(0), BLOCK.format(1), "head class"],
    ),
]


def outer(body):
    inner = keras.Model(body.input, body.output, name="body")
    return keras.Sequential([keras.Input((4,)), inner, layers.Dense(2, name="head")])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        *(pytest.param(build, expected, id=name) for name, build, expected in STRUCTURES),
        pytest.param(
            tied,
            ["embedding", "a", "b"],
            id="a tied head counts low",
            marks=pytest.mark.needs_keras("3.13", reason="no reversible embedding"),
        ),
    ],
)
def test_parts_follow_the_graph(build, expected):
    model = build()
    pairs = kgo.recipes.layerwise_decay(model, 0.5)
    found = by_path(pairs, model)
    ratios = [ratio for _, ratio in pairs]
    assert ratios == [0.5**k for k in range(len(pairs))][::-1]
    if expected is None:
        assert len(pairs) == 3
    elif "/" in expected[0]:
        assert [
            next(p for p in found if found[p] == r).rsplit("/", 1)[0] for r in ratios
        ] == expected
    else:
        assert [set(level.split()) for level in levels(pairs, model)] == [
            set(level.split()) for level in expected
        ]


@pytest.mark.parametrize("gate", [False, True])
def test_inverted_bottlenecks_without_a_shortcut_are_blocks(gate):
    model = models.inverted(gate=gate)
    found = {
        path.split("/")[0]: ratio
        for path, ratio in by_path(kgo.recipes.layerwise_decay(model, 0.5), model).items()
    }
    for layer, ratio in found.items():
        block = re.match(r"block_(\d)", layer)
        below = {"stem": 5, "last": 1, "head": 0}.get(layer.split("_")[0])
        assert ratio == 0.5 ** (4 - int(block[1]) if block else below), layer


MODELS = {
    "vit": models.vit,
    "vit of blocks": lambda: models.vit(flat=False),
    "convnext": models.convnext,
    "resnet": lambda: models.resnet(2, 1),
    "nested": lambda: models.nested(models.resnet(2, 1, top=False)),
    "text": models.text,
    "towers": models.towers,
    "shared": shared,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_in_one_pair_which_prints_and_serialises(name):
    model = MODELS[name]()
    pairs = kgo.recipes.layerwise_decay(model)
    assert by_path(pairs, model)
    catalog = describe_model(model)
    for selector, _ in pairs:
        assert eval(repr(selector), vars(selectors)) == selector
        assert Selector.from_config(selector.get_config()).resolve(catalog) == selector.resolve(
            catalog
        )


@pytest.mark.parametrize("name", ["vit of blocks", "nested"])
def test_weights_move_by_their_ratio(name):
    model = MODELS[name]()
    start = [np.array(keras.ops.convert_to_numpy(v)) for v in model.weights]
    pairs = kgo.recipes.layerwise_decay(model, 0.5)
    moved = []
    for ratios in ((), pairs):
        model.set_weights(start)
        before = models.values(model)
        models.fit(model, kgo.GroupedOptimizer(model=model, rule="sgd", ratios=ratios))
        after = models.values(model)
        moved.append({path: after[path] - before[path] for path in before})
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
        teacher = layers.Dense(4, name=f"teacher_{k}")
        teacher.trainable = False
        y = teacher(y)
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
    pairs = kgo.recipes.layerwise_decay(model, 0.5, blocks=[["second"]], head="last")
    assert [ratio for _, ratio in pairs] == [0.25, 0.5, 1.0]
    assert levels(pairs, model) == ["first", "second", "last"]
    unet = models.unet()
    down = kgo.path("down_*")
    pairs = kgo.recipes.layerwise_decay(unet, 0.5, blocks=[down, "up_*"], head="head")
    assert [ratio for _, ratio in pairs] == [0.25, 0.5, 1.0]
    before = models.values(model)
    ratios = kgo.recipes.layerwise_decay(model, blocks=["first", "second"], head=model.last)
    models.fit(model, kgo.GroupedOptimizer(model=model, rule="sgd", ratios=ratios))
    assert not np.array_equal(models.values(model)["first/kernel"], before["first/kernel"])


BAD = [
    (models.subclassed, {}, ValueError, "have an order of layers.*'first', 'second', 'last'.*bloc"),
    (models.subclassed, {"blocks": ["first"]}, ValueError, "`head` must be given.*head="),
    (models.unet, {}, ValueError, "have an order of blocks.*from 'down_1a' to 'up_1b'.*blocks="),
    (models.unet, {"blocks": ["down_*"]}, ValueError, "`head` must be given.*Candidates are"),
    (models.vgg, {"blocks": "conv_0"}, TypeError, "`blocks` must be a list.*'conv_0'"),
    (models.vgg, {"blocks": []}, TypeError, "`blocks` must be a list"),
    (models.vgg, {"blocks": ["conv_9"]}, ValueError, r"In `blocks\[0\]`.*Nearest paths: 'conv_"),
    (models.vgg, {"blocks": ["conv_1", "conv_*"]}, ValueError, "not overlap.*conv_1/kernel"),
    (models.vgg, {"blocks": ["fc1"]}, ValueError, "not have variables of the head.*fc1/kernel"),
    (models.vgg, {"head": "haed"}, ValueError, "In `head`: Selector"),
    (models.vgg, {"decay": 0}, ValueError, r"`decay` must be a number in \(0, 1\].*decay=0"),
    (models.vgg, {"decay": 1.5}, ValueError, "decay=1.5"),
    (models.vgg, {"decay": float("nan")}, ValueError, "decay=nan"),
    (models.vgg, {"decay": "0.75"}, TypeError, "decay='0.75'"),
    (models.vgg, {"min_ratio": -1}, ValueError, "min_ratio=-1"),
    (lambda: 3, {}, TypeError, "`model` must be a Keras model"),
    (lambda: keras.Sequential([layers.Dense(2)]), {}, ValueError, "`model` must be built"),
]


@pytest.mark.parametrize(("build", "options", "error", "message"), BAD)
def test_what_shows_no_order_is_refused_with_a_way_out(build, options, error, message):
    model = build()
    with pytest.raises(error, match=f"(?s){message}"):
        kgo.recipes.layerwise_decay(model, **options)


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
    x = keras.layers.Dense(4, activation="relu", name="stem")(inputs)
    ends = [keras.layers.Dense(4, activation="relu", name=name)(x) for name in ("top", "unused")]
    backbone = keras.Model(inputs, ends, name="backbone")
    outer = keras.Input((4,))
    model = keras.Model(outer, keras.layers.Dense(2, name="head")(backbone(outer)[0]))
    found = by_path(kgo.recipes.layerwise_decay(model, 0.5), model)
    assert {path: ratio for path, ratio in found.items() if path.endswith("kernel")} == {
        "backbone/stem/kernel": 0.25,
        "backbone/top/kernel": 0.5,
        "backbone/unused/kernel": 0.25,
        "head/kernel": 1.0,
    }
