"""Rows of bad input: anchors, and groups that do not fit the model."""

from __future__ import annotations

import keras
import numpy as np
from bad_input import NAN, given, head, row, with_head

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer

ANCHORS = [
    *(
        row(
            f"anchor={value!r}",
            lambda _, make=make, value=value: make(weight_decay=0.1, anchor=value),
            ValueError,
            '`anchor` must be "zero", "initial", arrays',
            f"anchor={given(value)} in {where}",
        )
        for make, where in ((head, 'group "head"'), (GroupedOptimizer, "GroupedOptimizer"))
        for value in ("intial", 5, 0.5, True, "weights.h5", len)
    ),
    row(
        "an anchor without decay",
        lambda _: with_head(anchor="initial"),
        ValueError,
        "`anchor` must come with a `weight_decay` > 0",
        'anchor in group "head" with weight_decay=None',
    ),
    row(
        "an anchor beside a decay of zero",
        lambda _: with_head(anchor="initial", weight_decay=0.0),
        ValueError,
        "`anchor` must come with a `weight_decay` > 0",
    ),
    row(
        "an anchor for all without decay",
        lambda _: GroupedOptimizer(anchor="initial"),
        ValueError,
        "`anchor` must come with a `weight_decay` > 0",
        'anchor="initial" without decay',
    ),
    *(
        row(name, lambda world, anchor=anchor: world.anchored(anchor), error, *texts)
        for name, anchor, error, *texts in (
            (
                "a list of the wrong length",
                [np.zeros((3, 2))] * 3,
                ValueError,
                "one array per variable of its group",
                '3 arrays in group "head", which has 2 variables, 1 of them decayed',
            ),
            ("an empty list", [], ValueError, "one array per variable", "0 arrays"),
            (
                "an array of another shape",
                [np.zeros((2, 3))],
                ValueError,
                "must have the shape of its variable",
                r"\[2, 3\] for head/kernel of shape \[3, 2\] in group \"head\"",
            ),
            (
                "a dict with a misspelt path",
                {"head/kernal": np.zeros((3, 2))},
                ValueError,
                "must have a value for each decayed variable",
                'none for head/kernel in group "head"',
                "nearest names are: head/kernal",
            ),
            (
                "a dict with a path of another group",
                {"head/kernel": np.zeros((3, 2)), "backbone/dense/kernel": np.zeros((3, 3))},
                ValueError,
                "must name variables of its group",
                "'backbone/dense/kernel' in group \"head\"",
                "head/kernel",
            ),
            (
                "a dict with another shape",
                {"head/kernel": np.zeros((3, 1))},
                ValueError,
                "must have the shape of its variable",
                r"\[3, 1\] for head/kernel",
            ),
            (
                "an anchor that is not finite",
                {"head/kernel": np.full((3, 2), NAN)},
                ValueError,
                "must be finite",
                'head/kernel in group "head"',
            ),
            (
                "a file that is not there",
                "none.keras",
                FileNotFoundError,
                "must be an existing file",
                r'none\.keras.* in group "head"',
            ),
            (
                "a file with other shapes",
                "wide.keras",
                ValueError,
                "must have the shape of its variable",
                r"\[3, 5\] for head/kernel of shape \[3, 2\]",
            ),
            (
                "a file of another model",
                "other.weights.h5",
                ValueError,
                "a file that Keras can load into a model like this one",
                r'other\.weights\.h5.* in group "head"',
            ),
            (
                "a file that is no model",
                "text.keras",
                ValueError,
                "a file that Keras can load",
                r'text\.keras.* in group "head"',
            ),
        )
    ),
    row(
        "a weights file without the model",
        lambda world: world.anchored("other.weights.h5", model=None, selector="**/head"),
        ValueError,
        "needs the model",
        r'other\.weights\.h5.* in group "head", without `model=`',
        r"GroupedOptimizer\(model=\.\.\.\)",
    ),
]

PLANS = [
    row(
        "a misspelt path",
        lambda world: world.build({"head": "haed"}),
        ValueError,
        r'In group "head": Selector `path\("haed"\)` must match at least one variable',
        "matches none of 8",
        "Nearest paths: 'head'",
    ),
    row(
        "a misspelt path without the model",
        lambda world: world.build({"head": "**/haed"}, model=None),
        ValueError,
        'In group "head"',
        "pass `model=`",
    ),
    row(
        "a type of layer without the model",
        lambda world: world.build({"head": kgo.layer_type("Dense")}, model=None),
        ValueError,
        "must know the layers above each variable",
        "without a model",
        "Pass `model=`",
    ),
    row(
        "a layer of another model",
        lambda world: world.build({"head": world.other.get_layer("head")}),
        ValueError,
        'In group "head": `layer` must be a layer of the model, with weights',
        "layer='head', which has none of its 8 variables",
        "Was it copied",
    ),
    row(
        "a layer that is not built",
        lambda world: world.build({"head": keras.layers.Dense(2, name="new")}),
        ValueError,
        'In group "head": `layer` must be a layer of the model, with weights',
        "layer='new'",
        "build it first",
    ),
    row(
        "a variable of another model",
        lambda world: world.build({"head": kgo.variables(world.other.get_layer("head").kernel)}),
        ValueError,
        'In group "head": `variables` must be given variables of the model',
        "head/kernel', which is none of its 8",
    ),
    row(
        "variables that are not trainable",
        lambda world: world.build({"means": kgo.variable_name("moving_mean")}),
        ValueError,
        "at least one trainable variable",
        'group "means"',
        "backbone/norm/moving_mean",
        "Set `trainable = True`",
    ),
    row(
        "an intersection of nothing",
        lambda world: world.build({"none": kgo.path("head") & "backbone"}),
        ValueError,
        "at least one trainable variable",
        r'group "none", path\("head"\) & path\("backbone"\)',
    ),
    row(
        "two groups that overlap",
        lambda world: world.build({"all": "**", "head": "head"}),
        ValueError,
        "must not overlap",
        'group "all".*group "head".*both claim head/kernel, head/bias',
        'as in `path.* - path.*`, or .*overlap="first"',
    ),
    row(
        "a group that lost all it claims",
        lambda world: world.build({"all": "**", "head": "head"}, overlap="first"),
        ValueError,
        "must not be empty",
        r'group "head" \(path\("head"\)\)',
        'overlap="first"',
        "leave it out",
    ),
    row(
        "a default group with nothing left",
        lambda world: world.build([Group("all", "**"), Group("default", learning_rate_ratio=0.1)]),
        ValueError,
        "must not be empty",
        'group "default"',
        "Leave it out",
    ),
    row(
        "a default group with a selector",
        lambda world: world.build([Group("default", "head")]),
        ValueError,
        'group "default" must have no selector',
        "no group for backbone/dense/kernel",
    ),
    row(
        "variables in no group",
        lambda world: world.build({"head": "head"}, unclaimed="error"),
        ValueError,
        'with unclaimed="error"',
        "no group for backbone/dense/kernel, .*backbone/norm/beta",
    ),
    row(
        "nothing but frozen groups",
        lambda world: world.build([Group("all", "**", frozen=True)]),
        ValueError,
        "At least one group must not be frozen",
        r"\(all\)",
    ),
    row(
        "a decay that reaches nothing",
        lambda world: world.build([Group("biases", "**/bias", weight_decay=0.1)]),
        ValueError,
        "must have a variable that decays",
        r'weight_decay=0\.1 in group "biases"',
        r"`exclude_from_decay=\(\)`",
    ),
    row(
        "an exclusion that matches nothing",
        lambda world: world.build(
            [Group("head", "head", weight_decay=0.1, exclude_from_decay="haed")]
        ),
        ValueError,
        'In `exclude_from_decay` of group "head"',
        "Nearest paths: 'head'",
    ),
    row(
        "variables of another model",
        lambda world: GroupedOptimizer(model=world.model).build(world.other.trainable_variables),
        ValueError,
        "must be built with variables of its model",
        'not in the model ".*" given as `model=`',
    ),
    row(
        "a model that is not built",
        lambda _: GroupedOptimizer(model=keras.Sequential([keras.layers.Dense(2)])).plan,
        ValueError,
        "must be built before",
        r"`model\.build\(input_shape\)`",
    ),
    row(
        "a plan without a model",
        lambda _: GroupedOptimizer().plan,
        ValueError,
        "`plan` needs a model before the optimizer is built",
        r"GroupedOptimizer\(model=\.\.\.\)",
    ),
    *(
        row(
            f"{name} for a model that was deleted",
            lambda world, use=use: use(world.without_model(), world),
            ValueError,
            "must exist until the optimizer is built",
            "a model that was deleted",
            r"`optimizer\.bind\(model\)`",
        )
        for name, use in (
            ("plan", lambda optimizer, _: optimizer.plan),
            ("build", lambda optimizer, world: optimizer.build(world.variables)),
            ("apply", lambda optimizer, world: optimizer.apply(world.gradients, world.variables)),
        )
    ),
]
