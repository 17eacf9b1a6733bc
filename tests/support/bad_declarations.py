"""Rows of bad input: numbers, groups and selectors."""

from __future__ import annotations

import numpy as np
from bad_input import CURVE, NO_NUMBER, NOT_FINITE, head, rows

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer

OWN = ("learning_rate_ratio", "learning_rate", "weight_decay")
CLIPS = ("global_clipnorm", "clipnorm", "clipvalue")
NUMBERS = [
    row
    for make, where, names, rule in (
        (GroupedOptimizer, "GroupedOptimizer", ("learning_rate", "weight_decay"), "finite"),
        (head, 'group "head"', OWN, "finite"),
        (GroupedOptimizer, "GroupedOptimizer", (*CLIPS, "loss_scale_factor"), "positive"),
        (head, 'group "head"', CLIPS, "positive"),
    )
    for name in names
    for value, error in (*NOT_FINITE, *NO_NUMBER, *([(0, ValueError)] * (rule == "positive")))
    for row in rows(
        error,
        (
            lambda _, make=make, name=name, value=value: make(**{name: value}),
            f"`{name}` must be a {rule} … Received: {name}={value!r} in {where}",
        ),
    )
]
RATES = rows(
    ValueError,
    (lambda _: kgo.constant(-1), "finite number … rate=-1"),
    *(
        (
            lambda _, rates=rates: GroupedOptimizer(
                [head(), Group("backbone", "backbone")], learning_rate=rates
            ),
            "one base rate … 3 rates for 2 groups (head, backbone) … (learning_rate_ratio=...)",
        )
        for rates in ([1, 2, 3], (1, 2, 3), {"a": 1, "b": 2, "c": 3}, np.ones(3))
    ),
    (
        lambda _: head(learning_rate=0.1, learning_rate_ratio=0.1),
        'Only one of … learning_rate=0.1 and learning_rate_ratio=0.1 in group "head"',
    ),
    *(
        (
            lambda _, base=base: GroupedOptimizer([head(learning_rate=0.1)], learning_rate=base),
            f'a schedule or a function … learning_rate=0.1 in group "head", base … {text}'
            " … learning_rate_ratio= … kgo.constant(0.1)",
        )
        for base, text in ((CURVE, "CosineDecay"), (lambda: 0.1, "<lambda>"))
    ),
    (
        lambda _: GroupedOptimizer([head(learning_rate=0.1)], learning_rate=0),
        'must be > 0 … learning_rate=0 with learning_rate=0.1 in group "head"',
    ),
    (
        lambda _: head(clipnorm=1.0, clipvalue=1.0),
        'Only one of `clipnorm` … clipnorm=1.0, clipvalue=1.0 in group "head"',
    ),
) + rows(
    TypeError,
    (lambda _: GroupedOptimizer(learning_rate=None), "rate=None"),
    (
        lambda _: GroupedOptimizer(learning_rate=type(CURVE)),
        "`learning_rate` must be … the class CosineDecay … `CosineDecay(...)`",
    ),
    (
        lambda _: GroupedOptimizer(learning_rate=lambda step: 0.1),
        "must take no arguments … 'step' … LearningRateSchedule",
    ),
    *(
        (
            lambda _, name=name: head(**{name: lambda: 0.1}),
            f'`{name}` must be a number or a schedule … in group "head" … LearningRateSchedule',
        )
        for name in OWN
    ),
)

# What a frozen group cannot have.
MOVES = {
    **dict.fromkeys(OWN, 0.1),
    **dict.fromkeys(CLIPS, 1.0),
    **{"rule": "sgd", "anchor": "initial", "exclude_from_decay": "head/bias"},
}
GROUPS = rows(
    ValueError,
    (
        lambda _: GroupedOptimizer([head(), head()]),
        'names must be unique … two groups called "head" … join their selectors',
    ),
    (lambda _: GroupedOptimizer({"body": head()}), "key 'body' for group \"head\""),
    *(
        (
            lambda _, name=name: Group(name, "head"),
            f"must be a non-empty string without `/` … name={name!r}",
        )
        for name in ("", " ", "a/b", None, 5)
    ),
    (
        lambda _: Group("head"),
        '`selector` must be given … group "head" without … Only the group "default"',
    ),
    (lambda _: GroupedOptimizer({"head": None}), '`selector` must be given … group "head"'),
    (
        lambda _: GroupedOptimizer(unclaimed="frezee"),
        '`unclaimed` must be one of "default", "freeze", "error" … unclaimed=\'frezee\'',
    ),
    (
        lambda _: GroupedOptimizer(overlap=None),
        '`overlap` must be one of "error", "first", "last" … overlap=None',
    ),
    *(
        (
            lambda _, name=name, value=value: head(frozen=True, **{name: value}),
            f'`{name}` must not be set on a frozen group … group "head" with frozen=True',
        )
        for name, value in MOVES.items()
    ),
) + rows(
    TypeError,
    (lambda _: GroupedOptimizer(5), "must be a list of `kgo.Group` or a dict … groups=5"),
    (
        lambda _: GroupedOptimizer("adam"),
        "groups='adam' … `rule='adam'` … kgo.Group(name, 'adam')",
    ),
    (lambda _: GroupedOptimizer({1, 2}), "must be a list … groups={1, 2}"),
    (lambda _: GroupedOptimizer(["head"]), "must hold `kgo.Group` … 'head' of type str"),
    (lambda _: GroupedOptimizer({"head": 5}), 'In group "head": `selector` must be … selector=5'),
    (lambda world: GroupedOptimizer(world.model), "`groups` must be … as `model=`"),
    (lambda _: GroupedOptimizer(model=5), "must be a Keras model … model=5 of type int"),
    (
        lambda _: head(lr=0.1),
        "`Group` has no argument `lr` … lr=0.1. Use `learning_rate`.",
    ),
    (lambda _: head(lr_scale=0.1), "no argument `lr_scale` … Use `learning_rate_ratio`"),
    (lambda _: head(weigth_decay=0.1), "no argument `weigth_decay` … Use `weight_decay`"),
    (
        lambda _: head(xyz=1),
        "no argument `xyz` … The arguments are: name, selector, rule",
    ),
    (lambda _: GroupedOptimizer(lr=1.0), "`GroupedOptimizer` has no … lr=1.0. Use `learning_rate`"),
    (lambda _: GroupedOptimizer(param_groups=[]), "no argument `param_groups` … Use `groups`"),
    (lambda world: world.built.freeze_to("head"), "an integer: `freeze_to(-1)` … n='head'"),
    (lambda _: head(frozen="yes"), "True or False … frozen='yes' in group \"head\""),
)

SELECTORS = [
    row
    for argument in ("selector", "exclude_from_decay")
    for value, error, text in (
        (5, TypeError, "must be a layer path, a layer, a selector … =5 … of type int"),
        ("a//b", ValueError, "must have a name between slashes … 'a//b' … Use 'a/b'"),
    )
    for row in rows(
        error,
        (
            lambda _, argument=argument, value=value: Group(
                "head", **{"selector": "head", argument: value}
            ),
            f'In group "head" … {text}',
        ),
    )
]
