"""Rows of bad input: numbers, groups and selectors."""

from __future__ import annotations

import keras
import numpy as np
from bad_input import CURVE, NO_NUMBER, NOT_FINITE, given, head, row

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer

NUMBERS = [
    *(
        row(
            f"{name}={value!r}",
            lambda _, make=make, name=name, value=value: make(**{name: value}),
            error,
            f"`{name}` must be a {rule}",
            f"Received: {name}={given(value)} in {where}",
        )
        for make, where, names, rule in (
            (GroupedOptimizer, "GroupedOptimizer", ("learning_rate", "weight_decay"), "finite"),
            (
                head,
                'group "head"',
                ("learning_rate_ratio", "learning_rate", "weight_decay"),
                "finite",
            ),
            (
                GroupedOptimizer,
                "GroupedOptimizer",
                ("global_clipnorm", "clipnorm", "clipvalue", "loss_scale_factor"),
                "positive",
            ),
            (head, 'group "head"', ("global_clipnorm", "clipnorm", "clipvalue"), "positive"),
        )
        for name in names
        for value, error in (
            *NOT_FINITE,
            *NO_NUMBER,
            *([(0, ValueError)] if rule == "positive" else []),
        )
    ),
    row("no base rate", lambda _: GroupedOptimizer(learning_rate=None), TypeError, "rate=None"),
    row(
        "a constant below zero", lambda _: kgo.constant(-1), ValueError, "finite number", "rate=-1"
    ),
    *(
        row(
            f"{type(rates).__name__} of rates",
            lambda _, rates=rates: GroupedOptimizer(
                [head(), Group("backbone", "backbone")], learning_rate=rates
            ),
            ValueError,
            "must be one base rate",
            r"3 rates for 2 groups \(head, backbone\)",
            r"Group\(learning_rate_ratio=\.\.\.\)",
        )
        for rates in ([1, 2, 3], (1, 2, 3), {"a": 1, "b": 2, "c": 3}, np.ones(3))
    ),
    row(
        "a schedule's class",
        lambda _: GroupedOptimizer(learning_rate=type(CURVE)),
        TypeError,
        "`learning_rate` must be",
        "the class CosineDecay",
        r"`CosineDecay\(\.\.\.\)`",
    ),
    row(
        "a rate that wants the step",
        lambda _: GroupedOptimizer(learning_rate=lambda step: 0.1),
        TypeError,
        "must take no arguments",
        "'step'",
        "LearningRateSchedule",
    ),
    *(
        row(
            f"a function as {name}",
            lambda _, name=name: head(**{name: lambda: 0.1}),
            TypeError,
            f"`{name}` must be a number or a schedule over optimizer steps",
            'in group "head"',
            "LearningRateSchedule",
        )
        for name in ("learning_rate_ratio", "learning_rate", "weight_decay")
    ),
    row(
        "a rate beside a ratio",
        lambda _: head(learning_rate=0.1, learning_rate_ratio=0.1),
        ValueError,
        "Only one of `learning_rate` and `learning_rate_ratio`",
        r'learning_rate=0\.1 and learning_rate_ratio=0\.1 in group "head"',
    ),
    *(
        row(
            f"a rate beside {name}",
            lambda _, base=base: GroupedOptimizer([head(learning_rate=0.1)], learning_rate=base),
            ValueError,
            "must not be a number beside a base rate that is a schedule or a function",
            rf'learning_rate=0\.1 in group "head", base {text}',
            "learning_rate_ratio=",
            r"kgo\.constant\(0\.1\)",
        )
        for name, base, text in (
            ("a schedule", CURVE, "CosineDecay"),
            ("a function", lambda: 0.1, "<lambda>"),
        )
    ),
    row(
        "a rate beside a base of zero",
        lambda _: GroupedOptimizer([head(learning_rate=0.1)], learning_rate=0),
        ValueError,
        "base `learning_rate` must be > 0",
        r'learning_rate=0 with learning_rate=0\.1 in group "head"',
    ),
    row(
        "two kinds of clipping",
        lambda _: head(clipnorm=1.0, clipvalue=1.0),
        ValueError,
        "Only one of `clipnorm`",
        r'clipnorm=1\.0, clipvalue=1\.0 in group "head"',
    ),
]

GROUPS = [
    row(
        "two groups of one name",
        lambda _: GroupedOptimizer([head(), head()]),
        ValueError,
        "names must be unique",
        'two groups called "head"',
        "join their selectors",
    ),
    row(
        "a key that is not the name",
        lambda _: GroupedOptimizer({"body": head()}),
        ValueError,
        "key of a group must be its name",
        "key 'body' for group \"head\"",
    ),
    *(
        row(
            f"the name {name!r}",
            lambda _, name=name: Group(name, "head"),
            ValueError,
            "must be a non-empty string without `/`",
            f"name={given(name)}",
        )
        for name in ("", " ", "a/b", None, 5)
    ),
    row(
        "no selector",
        lambda _: Group("head"),
        ValueError,
        "`selector` must be given",
        'group "head" without',
        'Only the group "default"',
    ),
    *(
        row(f"groups={groups!r}", lambda _, groups=groups: GroupedOptimizer(groups), error, *texts)
        for groups, error, *texts in (
            (5, TypeError, "must be a list of `kgo.Group` or a dict", "groups=5"),
            ("adam", TypeError, "groups='adam'", r"`rule='adam'`.*kgo\.Group\(name, 'adam'\)"),
            ({1, 2}, TypeError, "must be a list", r"groups=\{1, 2\}"),
            (["head"], TypeError, "must hold `kgo.Group`", "'head' of type str", "kgo.Group"),
            ({"head": 5}, TypeError, 'In group "head": `selector` must be', "selector=5"),
            ({"head": None}, ValueError, "`selector` must be given", 'group "head"'),
        )
    ),
    row(
        "the model as groups",
        lambda world: GroupedOptimizer(world.model),
        TypeError,
        "`groups` must be",
        "as `model=`",
    ),
    row(
        "a number as model",
        lambda _: GroupedOptimizer(model=5),
        TypeError,
        "must be a Keras model",
        "model=5 of type int",
    ),
    row(
        "unclaimed='frezee'",
        lambda _: GroupedOptimizer(unclaimed="frezee"),
        ValueError,
        '`unclaimed` must be one of "default", "freeze", "error"',
        "unclaimed='frezee'",
    ),
    row(
        "overlap=None",
        lambda _: GroupedOptimizer(overlap=None),
        ValueError,
        '`overlap` must be one of "error", "first", "last"',
        "overlap=None",
    ),
    *(
        row(
            f"{name} on a frozen group",
            lambda _, name=name, value=value: head(frozen=True, **{name: value}),
            ValueError,
            f"`{name}` must not be set on a frozen group",
            'group "head" with frozen=True',
        )
        for name, value in {
            "rule": "sgd",
            "learning_rate_ratio": 0.1,
            "learning_rate": 0.1,
            "weight_decay": 0.1,
            "anchor": "initial",
            "exclude_from_decay": "head/bias",
            "clipnorm": 1.0,
            "global_clipnorm": 1.0,
            "clipvalue": 1.0,
        }.items()
    ),
    row(
        "frozen='yes'",
        lambda _: head(frozen="yes"),
        TypeError,
        "`frozen` must be True or False",
        "frozen='yes' in group \"head\"",
    ),
]

SELECTORS = [
    *(
        row(
            f"{argument}={value!r}",
            lambda _, argument=argument, value=value: Group(
                "head", **{"selector": "head", argument: value}
            ),
            error,
            'In group "head"',
            *texts,
        )
        for argument in ("selector", "exclude_from_decay")
        for value, error, *texts in (
            (5, TypeError, "must be a layer path, a layer, a selector", "=5 .of type int"),
            (len, TypeError, "must be a layer path", r"use `where\(function\)`"),
            ({"a": 1}, TypeError, "must be a layer path", "of type dict"),
            (["head", None], TypeError, "must be a layer path", "None .of type NoneType"),
            (keras.layers.Dense, TypeError, "must be a layer path", r'layer_type\("Dense"\)'),
            ("", ValueError, "`pattern` must not be empty", "everything"),
            ("a//b", ValueError, "must have a name between slashes", "'a//b'", "Use 'a/b'"),
            ("/a", ValueError, "must have a name between slashes", "Use 'a'"),
            ("a/**b", ValueError, r"`\*\*` only as a level of its own", r"'a/\*\*b'"),
            ("[ab", ValueError, r"close every `\[`", r"'\[ab'"),
            ("[z-a]", ValueError, "valid glob", "bad character range"),
        )
    ),
    row(
        "an empty list as selector",
        lambda _: Group("head", []),
        ValueError,
        'In group "head": `selector` must not be empty',
    ),
    row(
        "a variable as selector",
        lambda world: Group("head", world.variables[0]),
        TypeError,
        'In group "head"',
        r"use `variables\(v, \.\.\.\)`",
    ),
    row("regex('(')", lambda _: kgo.regex("("), ValueError, "regular expression", r"pattern='\('"),
    row("rank(-1)", lambda _: kgo.rank(-1), ValueError, "whole number >= 0", "rank=-1"),
    row("rank()", lambda _: kgo.rank(), ValueError, "one number, or `min`, `max`", "nothing"),
    row("layer(5)", lambda _: kgo.layer(5), TypeError, "must be a Keras layer", "layer=5"),
    row("variables()", lambda _: kgo.variables(), ValueError, "at least one variable"),
    row("variable_name(5)", lambda _: kgo.variable_name(5), TypeError, "last names", "5"),
    row("layer_type(5)", lambda _: kgo.layer_type(5), TypeError, "class names", "5"),
    row("where(5)", lambda _: kgo.where(5), TypeError, "must take a VariableInfo", "=5"),
    row(
        "xpath('//Dense[')",
        lambda _: kgo.xpath("//Dense["),
        ValueError,
        "`query` must be an XPath",
        r"query='//Dense\['",
        "line 1, column 8",
    ),
    row(
        "a query that finds nothing",
        lambda world: world.build([Group("head", kgo.xpath("//Dense[@name='haed']"))]),
        ValueError,
        'In group "head"',
        "matches none",
        "Nearest paths: 'head'",
    ),
    row(
        "a query that finds an attribute",
        lambda world: world.build(exclude_from_decay=kgo.xpath("//Dense/@name"), weight_decay=0.1),
        ValueError,
        "must find layers or variables",
        "'dense'",
    ),
    row("path | 5", lambda _: kgo.path("head") | 5, TypeError, "must be a layer path", "5"),
]
