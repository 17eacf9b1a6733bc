"""Rows of bad input: calls of an optimizer, most of them of one that is built."""

from __future__ import annotations

import pytest
from bad_input import CURVE, NO_NUMBER, NOT_FINITE, given, row

from keras_groupopt import GroupedOptimizer

CALLS = [
    row(
        "apply without variables before build",
        lambda world: GroupedOptimizer(model=world.model).apply(world.gradients),
        ValueError,
        "needs variables until the optimizer is built",
        r"optimizer\.build\(model\.trainable_variables\)",
    ),
    row(
        "too few gradients",
        lambda world: world.built.apply(world.gradients[:1], world.variables),
        ValueError,
        "one gradient per variable",
        "1 gradients for 6 variables",
    ),
    row(
        "gradients for another model",
        lambda world: world.built.apply(world.gradients, world.other.trainable_variables),
        ValueError,
        "must be one the optimizer was built with",
        "unknown backbone/dense/kernel",
        r"Call `optimizer\.rebuild\(model\)`",
    ),
    row(
        "build for another model",
        lambda world: world.built.build(world.other.trainable_variables),
        ValueError,
        "must be one the optimizer was built with",
        "another model",
    ),
    row(
        "bind to another model",
        lambda world: world.built.bind(world.other),
        ValueError,
        "must hold the variables that this optimizer was built with",
        "a new GroupedOptimizer for another model",
    ),
    row(
        "no gradient at all",
        lambda world: world.built.apply([None] * 6, world.variables),
        ValueError,
        "At least one gradient must be given",
        "None for every variable",
    ),
    *(
        row(
            f"{name} values of {what}",
            lambda world, of=of, by=by: world.stateless(of, by),
            ValueError,
            "must get one value per variable",
            r"trainable and \d+ optimizer values",
            marks=pytest.mark.backends("jax", "torch", reason="no stateless step on TensorFlow"),
        )
        for name, by in (("too few", -1), ("too many", 1))
        for what, of in (("the optimizer", "own"), ("the model", "weights"))
    ),
    *(
        row(
            f"learning_rate set to {value!r}",
            lambda world, value=value: setattr(world.built, "learning_rate", value),
            error,
            "`learning_rate` must be a finite number",
            f"learning_rate={given(value)}",
        )
        for value, error in (*NOT_FINITE, *NO_NUMBER, (None, TypeError))
    ),
    row(
        "learning_rate set to a schedule",
        lambda world: setattr(world.built, "learning_rate", CURVE),
        TypeError,
        "must be set to a number",
        "CosineDecay",
    ),
    row(
        "learning_rate set where it is a schedule",
        lambda world: setattr(world.scheduled, "learning_rate", 0.1),
        TypeError,
        "is a schedule or a function and cannot be set",
        r"learning_rate=0\.1",
    ),
    *(
        row(
            f"{name} set to {value!r}",
            lambda world, name=name, value=value: getattr(world.built, f"set_{name}")(
                "backbone", value
            ),
            error,
            f"`{name}` must be a finite number",
            f'{name}={given(value)} in group "backbone"',
        )
        for name in ("learning_rate_ratio", "weight_decay")
        for value, error in (*NOT_FINITE, *NO_NUMBER)
    ),
    *(
        row(
            f"{name} of {what}",
            lambda world, name=name, which=which, group=group: getattr(
                getattr(world, which), f"set_{name}"
            )(group, 0.1),
            error,
            *texts,
        )
        for name in ("learning_rate_ratio", "weight_decay")
        for what, which, group, error, *texts in (
            (
                "an unknown group",
                "built",
                "backbnoe",
                KeyError,
                'No group is called "backbnoe".*The groups are: backbone, frozen, default',
            ),
            ("a frozen group", "built", "frozen", ValueError, 'group "frozen" cannot be set'),
            (
                "a group whose own is a schedule",
                "scheduled",
                "backbone",
                TypeError,
                f'`{name}` of group "backbone" is a schedule and cannot be set',
                "CosineDecay",
            ),
        )
    ),
    row(
        "the decay of a group without one",
        lambda world: world.built.set_weight_decay("default", 0.1),
        ValueError,
        '`weight_decay` of group "default" cannot be set',
        "declared without it",
    ),
    *(
        row(
            f"{name} before build",
            lambda world, use=use: use(GroupedOptimizer(model=world.model)),
            ValueError,
            f"`{name}` needs a built optimizer",
            r"optimizer\.build\(model\.trainable_variables\)",
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
    *(
        row(
            f"{name} set",
            lambda world, name=name: setattr(world.built, name, 2),
            AttributeError,
            f"`{name}` is fixed at construction",
            f"{name}=2",
        )
        for name in (
            "clipnorm",
            "clipvalue",
            "ema_momentum",
            "global_clipnorm",
            "gradient_accumulation_steps",
            "use_ema",
            "weight_decay",
        )
    ),
    row(
        "weights of other shapes",
        lambda world: world.built.set_weights([1.0]),
        ValueError,
        "must have the shapes of `optimizer.variables`",
        r"1 values for \d+ variables",
    ),
    row(
        "a group of a plan",
        lambda world: world.built.plan["haed"],
        KeyError,
        'No group is called "haed"',
        "backbone, frozen, default",
    ),
    row(
        "exclude_from_weight_decay",
        lambda world: world.built.exclude_from_weight_decay(var_names=["bias"]),
        ValueError,
        "is not used by GroupedOptimizer",
        r"var_names=\['bias'\]",
        "exclude_from_decay=",
    ),
]
