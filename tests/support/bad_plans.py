"""Rows of bad input: anchors, and groups that do not fit the model."""

from __future__ import annotations

import keras
import numpy as np
from bad_input import NAN, head, rows, with_head

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer

NO_DECAY = "`anchor` must come with a `weight_decay` > 0"
TWO = (3, 2)
ANCHORS = rows(
    ValueError,
    *(
        (
            lambda _, make=make, value=value: make(weight_decay=0.1, anchor=value),
            f'`anchor` must be "zero", "initial", arrays … anchor={value!r} in {where}',
        )
        for make, where in ((head, 'group "head"'), (GroupedOptimizer, "GroupedOptimizer"))
        for value in ("intial", 5, 0.5, True, "weights.h5", len)
    ),
    (
        lambda _: with_head(anchor="initial"),
        f'{NO_DECAY} … anchor in group "head" with weight_decay=None',
    ),
    (lambda _: with_head(anchor="initial", weight_decay=0.0), NO_DECAY),
    (lambda _: GroupedOptimizer(anchor="initial"), f'{NO_DECAY} … anchor="initial" without decay'),
    *(
        (lambda world, anchor=anchor: world.anchored(anchor), text)
        for anchor, text in (
            (
                [np.zeros(TWO)] * 3,
                'one array per variable … 3 arrays in group "head", which has 2 variables, 1 of th',
            ),
            ([], "one array per variable … 0 arrays"),
            ([np.zeros((2, 3))], '[2, 3] for head/kernel of shape [3, 2] in group "head"'),
            (
                {"head/kernal": np.zeros(TWO)},
                'none for head/kernel in group "head" … nearest names are: head/kernal',
            ),
            (
                {"head/kernel": np.zeros(TWO), "backbone/dense/kernel": np.zeros((3, 3))},
                "of its group … 'backbone/dense/kernel' in group \"head\" … head/kernel",
            ),
            ({"head/kernel": np.zeros((3, 1))}, "the shape of its … [3, 1] for head/kernel"),
            ({"head/kernel": np.full(TWO, NAN)}, 'must be finite … head/kernel in group "head"'),
            ("wide.keras", "[3, 5] for head/kernel of shape [3, 2]"),
            ("other.weights.h5", 'a file … other.weights.h5 … in group "head"'),
            ("text.keras", 'a file that Keras can load … text.keras … in group "head"'),
        )
    ),
    (
        lambda world: world.anchored("other.weights.h5", model=None, selector="**/head"),
        'needs the model … other.weights.h5 … in group "head", without … (model=...)',
    ),
) + rows(
    FileNotFoundError,
    (lambda world: world.anchored("none.keras"), 'existing file … none.keras … in group "head"'),
)

PLANS = rows(
    ValueError,
    (
        lambda _: GroupedOptimizer().build([keras.Variable(np.ones(2), dtype="complex64")]),
        "real numbers … variable of dtype complex64 in group \"default\", whose rule is 'radam'",
    ),
    (
        lambda world: world.build({"head": "haed"}),
        'In group "head": Selector `path("haed")` … none of 8 … Nearest paths: \'head\'',
    ),
    (
        lambda world: world.build({"head": "**/haed"}, model=None),
        'In group "head" … pass `model=`',
    ),
    (
        lambda world: world.build({"head": kgo.layer_type("Dense")}, model=None),
        "reads the layers above each variable … without a model … Pass `model=`",
    ),
    (
        lambda world: world.build({"head": world.other.get_layer("head")}),
        "In group \"head\": `layer` must … layer='head', which has none of its 8 … Was it copied",
    ),
    (
        lambda world: world.build({"head": keras.layers.Dense(2, name="new")}),
        "In group \"head\": `layer` must … layer='new' … build it first",
    ),
    (
        lambda world: world.build({"head": kgo.variables(world.other.get_layer("head").kernel)}),
        'In group "head": `variables` must … head/kernel\', which is none of its 8',
    ),
    (
        lambda world: world.build({"means": kgo.variable_name("moving_mean")}),
        'trainable … group "means" … backbone/norm/moving_mean … Set `trainable = True`',
    ),
    (
        lambda world: world.build({"none": kgo.path("head") & "backbone"}),
        'at least one variable … group "none" (path("head") & path("backbone")), which … none',
    ),
    (
        lambda world: world.build({"all": "**", "head": "head"}),
        'not overlap … group "all" … group "head" … both claim head/kernel, head/bias'
        ' … as in `path … - path … `, or … overlap="first"',
    ),
    (
        lambda world: world.build({"all": "**", "head": "head"}, overlap="first"),
        'must not be empty … group "head" (path("head")) … overlap="first" … leave it out',
    ),
    (
        lambda world: world.build([Group("all", "**"), Group("default", learning_rate_ratio=0.1)]),
        'must not be empty … group "default" … Leave it out',
    ),
    (
        lambda world: world.build([Group("default", "head")]),
        'group "default" must have no selector … no group for backbone/dense/kernel',
    ),
    (
        lambda world: world.build({"head": "head"}, unclaimed="error"),
        'unclaimed="error" … no group for backbone/dense/kernel, … backbone/norm/beta',
    ),
    (
        lambda world: world.build([Group("all", "**", frozen=True)]),
        "At least one group must not be frozen … (all)",
    ),
    (
        lambda world: world.build([Group("biases", "**/bias", weight_decay=0.1)]),
        'a variable that decays … weight_decay=0.1 in group "biases" … `exclude_from_decay=()`',
    ),
    (
        lambda world: world.build([head(weight_decay=0.1, exclude_from_decay="haed")]),
        "In `exclude_from_decay` of group \"head\" … Nearest paths: 'head'",
    ),
    (
        lambda world: world.build({"head": kgo.xpath("//Dense[@name='haed']")}),
        "In group \"head\" … matches none … Nearest paths: 'head'",
    ),
    (
        lambda world: world.build(exclude_from_decay=kgo.xpath("//Dense/@name"), weight_decay=0.1),
        "must find layers or variables … 'dense'",
    ),
    (
        lambda world: GroupedOptimizer(model=world.model).build(world.other.trainable_variables),
        'must be built with variables of its model … not in the model " … " given as `model=`',
    ),
    (
        lambda _: GroupedOptimizer(model=keras.Sequential([keras.layers.Dense(2)])).plan,
        "must be built before … `model.build(input_shape)`",
    ),
    (
        lambda _: GroupedOptimizer().plan,
        "`plan` needs a model before the optimizer is built … GroupedOptimizer(model=...)",
    ),
    *(
        (
            lambda world, use=use: use(world.without_model(), world),
            "a model that was deleted … `optimizer.bind(model)`",
        )
        for use in (
            lambda optimizer, _: optimizer.plan,
            lambda optimizer, world: optimizer.build(world.variables),
            lambda optimizer, world: optimizer.apply(world.gradients, world.variables),
        )
    ),
)
