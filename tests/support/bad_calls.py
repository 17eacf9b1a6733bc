"""Rows of bad input: calls of an optimizer, most of them of one that is built."""

from __future__ import annotations

import pytest
from bad_input import CURVE, NO_NUMBER, NOT_FINITE, World, rows

from keras_groupopt import GroupedOptimizer

RATES = ("learning_rate_ratio", "weight_decay")


def set_in(world: World, which: str, name: str, group: str, value: object) -> None:
    getattr(getattr(world, which), f"set_{name}")(group, value)


CALLS = rows(
    ValueError,
    (
        lambda world: GroupedOptimizer(model=world.model).apply(world.gradients),
        "variables until the optimizer is built … optimizer.build(model.trainable_variables)",
    ),
    (
        lambda world: world.built.apply(world.gradients[:1], world.variables),
        "one gradient per variable … 1 gradients for 6 variables",
    ),
    (
        lambda world: world.built.apply(world.gradients[:1] * 2, world.variables[:1] * 2),
        "hold each variable once … backbone/dense/kernel more than once",
    ),
    (
        lambda world: world.built.apply(
            [world.gradients[0][:1], *world.gradients[1:]], world.variables
        ),
        "the shape of its variable … gradient of shape (1, 3) for backbone/dense/kernel of shape",
    ),
    (
        lambda world: world.built.apply(world.gradients, world.other.trainable_variables),
        "was built with … unknown backbone/dense/kernel … Call `optimizer.rebuild(model)`",
    ),
    (
        lambda world: world.built.build(world.other.trainable_variables),
        "must be one the optimizer was built with … another model",
    ),
    (
        lambda world: world.built.bind(world.other),
        "variables that this optimizer was built with … a new GroupedOptimizer for another model",
    ),
    (
        lambda world: world.built.apply([None] * 6, world.variables),
        "At least one gradient must be given … None for every variable",
    ),
    *(
        (
            lambda world, name=name: set_in(world, "built", name, "frozen", 0.1),
            'group "frozen" cannot be set',
        )
        for name in RATES
    ),
    (
        lambda world: world.built.set_weight_decay("default", 0.1),
        '`weight_decay` of group "default" cannot be set … declared without it',
    ),
    *(
        (
            lambda world, use=use: use(GroupedOptimizer(model=world.model)),
            f"`{name}` needs a built optimizer … optimizer.build(model.trainable_variables)",
        )
        for name, use in (
            ("learning_rates", lambda optimizer: optimizer.learning_rates),
            ("anchor_drift", lambda optimizer: optimizer.anchor_drift()),
            ("capture_anchors", lambda optimizer: optimizer.capture_anchors()),
            (
                "set_learning_rate_ratio",
                lambda optimizer: optimizer.set_learning_rate_ratio("default", 0.1),
            ),
            ("set_weight_decay", lambda optimizer: optimizer.set_weight_decay("default", 0.1)),
        )
    ),
    (
        lambda world: world.built.set_weights([1.0]),
        "must have the shapes of `optimizer.variables` … 1 values for … variables",
    ),
    (
        lambda world: world.built.exclude_from_weight_decay(var_names=["bias"]),
        "is not used by GroupedOptimizer … var_names=['bias'] … exclude_from_decay=",
    ),
)
STATELESS = rows(
    ValueError,
    *(
        (
            lambda world, of=of, by=by: world.stateless(of, by),
            "must get one value per variable … trainable and … optimizer values",
        )
        for by in (-1, 1)
        for of in ("own", "weights")
    ),
    marks=pytest.mark.backends("jax", "torch", reason="no stateless step on TensorFlow"),
)
NUMBERS_SET = [
    row
    for value, error in (*NOT_FINITE, *NO_NUMBER, (None, TypeError))
    for row in rows(
        error,
        (
            lambda world, value=value: setattr(world.built, "learning_rate", value),
            f"`learning_rate` must be a finite number … learning_rate={value!r}",
        ),
        *(
            (
                lambda world, name=name, value=value: set_in(
                    world, "built", name, "backbone", value
                ),
                f'`{name}` must be a finite number … {name}={value!r} in group "backbone"',
            )
            for name in RATES
            if value is not None
        ),
    )
]
SCHEDULES_SET = rows(
    TypeError,
    (
        lambda world: setattr(world.built, "learning_rate", CURVE),
        "must be set to a number … CosineDecay",
    ),
    (
        lambda world: setattr(world.scheduled, "learning_rate", 0.1),
        "is a schedule or a function and cannot be set … learning_rate=0.1",
    ),
    *(
        (
            lambda world, name=name: set_in(world, "scheduled", name, "backbone", 0.1),
            f'`{name}` of group "backbone" is a schedule and cannot be set … CosineDecay',
        )
        for name in RATES
    ),
)
GROUPS_ASKED = rows(
    KeyError,
    *(
        (
            lambda world, name=name: set_in(world, "built", name, "backbnoe", 0.1),
            'No group is called "backbnoe" … The groups are: backbone, frozen, default',
        )
        for name in RATES
    ),
    (lambda world: world.built.plan["haed"], '"haed" … backbone, frozen, default'),
)
FIXED = rows(
    AttributeError,
    *(
        (
            lambda world, name=name: setattr(world.built, name, 2),
            f"`{name}` is fixed at construction … {name}=2",
        )
        for name in (
            *("clipnorm", "clipvalue", "ema_momentum", "global_clipnorm"),
            *("gradient_accumulation_steps", "use_ema", "weight_decay", "on_nonfinite"),
            *("ema", "ratios", "fused", "loss_scale_factor"),
        )
    ),
)
ALL_CALLS = [*CALLS, *STATELESS, *NUMBERS_SET, *SCHEDULES_SET, *GROUPS_ASKED, *FIXED]
