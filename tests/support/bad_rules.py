"""Rows of bad input: rules, and optimizers given as rules."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from bad_input import CURVE, SGD, World, given, head, row, with_head

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer


class FromAnotherKeras:
    """As much of an optimizer of `tf_keras` as tells it apart."""

    def apply_gradients(self, grads_and_vars: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}


FromAnotherKeras.__module__ = "tf_keras.src.optimizers.adam"


def wrapper(name: str) -> Any:
    """`LossScaleOptimizer` or `MultiOptimizer` around SGD."""
    cls = getattr(keras.optimizers, name, None)
    if cls is None:
        pytest.skip(f"this Keras has no {name}")
    inner = SGD(0.1)
    return cls(inner if name == "LossScaleOptimizer" else keras.optimizers.OptimizerMap(inner))


def excluding() -> Any:
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def torch_rule(build: bool) -> Any:
    torch = pytest.importorskip("torch")
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) if build else torch.optim.SGD


def built(optimizer: Any, world: World) -> Any:
    optimizer.build(world.variables)
    return optimizer


def in_two_models(instance: Any, world: World) -> None:
    first = GroupedOptimizer([head(rule=instance)], model=world.model)
    first.build(world.variables)
    second = GroupedOptimizer([head(rule=instance)], model=world.other)
    second.build(world.other.trainable_variables)


ONLY_TORCH = pytest.mark.backends("torch", reason="torch is imported only where it is in use")
ONLY_JAX = pytest.mark.backends("jax", reason="optax is imported only beside JAX")
FOREIGN = "optimizer of torch, optax or another Keras"

RULES = [
    row(
        "unknown rule",
        lambda _: GroupedOptimizer(rule="adamm"),
        ValueError,
        "`rule` must be the name of an optimizer",
        "Received: rule='adamm' in GroupedOptimizer",
        "Did you mean 'adam'",
        "The names are: .*radam",
    ),
    row(
        "unknown rule of a group",
        lambda _: with_head(rule="ladam"),
        ValueError,
        "Received: rule='ladam' in group \"head\"",
        "Did you mean .*'adam'",
    ),
    row(
        "a mean without an end",
        lambda _: with_head(rule=kgo.rule("adam", beta_1=1.5)),
        ValueError,
        "`beta_1` must be a number of at least 0 and less than 1",
        'beta_1=1.5 in group "head"',
    ),
    row(
        "a negative mean of an instance",
        lambda _: with_head(rule=keras.optimizers.RMSprop(0.1, rho=-0.5)),
        ValueError,
        "`rho` must be a number of at least 0",
        'rho=-0.5 in group "head"',
    ),
    row(
        "a number of a rule that is not finite",
        lambda _: GroupedOptimizer(rule=kgo.rule("adam", beta_2=float("nan"))),
        ValueError,
        "`beta_2` must be a number",
        "beta_2=nan in GroupedOptimizer",
    ),
    row(
        "a negative epsilon",
        lambda _: GroupedOptimizer(rule=kgo.rule("adagrad", epsilon=-1.0)),
        ValueError,
        "`epsilon` must be a number of at least 0",
        "epsilon=-1.0",
    ),
    row(
        "a text as a number of a rule",
        lambda _: GroupedOptimizer(rule=kgo.rule("adam", beta_1="fast")),
        ValueError,
        "`beta_1` must be a number",
        "beta_1='fast'",
    ),
    row(
        "a schedule that begins out of range",
        lambda _: GroupedOptimizer(rule=kgo.rule("adam", beta_1=kgo.constant(2.0))),
        ValueError,
        "`beta_1` must be a number",
        "beta_1=2.0",
    ),
    row(
        "a schedule that leaves its range later",
        lambda _: with_head(rule=kgo.rule("adam", beta_1=kgo.schedules.Linear(0.5, 10, 1.0))),
        ValueError,
        "must stay in the range",
        'beta_1 in group "head", at 100% of its length',
        "less than 1",
    ),
    row(
        "a schedule that ends with the run, out of range",
        lambda _: with_head(rule=kgo.rule("radam", beta_1=kgo.schedules.Linear(0.5, "fit", 1.5))),
        ValueError,
        "must stay in the range",
        "at 50% of its length",
    ),
    row("no rule", lambda _: GroupedOptimizer(rule=None), TypeError, "must be given", "rule=None"),
    row(
        "a number as rule",
        lambda _: with_head(rule=5),
        TypeError,
        "`rule` must be the name of an optimizer, an optimizer class",
        'rule=5 in group "head"',
    ),
    row("a function as rule", lambda _: with_head(rule=len), TypeError, "`rule` must be", "len"),
    row(
        "a layer class as rule",
        lambda _: with_head(rule=keras.layers.Dense),
        TypeError,
        "must be a `keras.optimizers.Optimizer`",
        r"Dense in group \"head\"",
    ),
    row(
        "an optimizer of another Keras as rule",
        lambda _: with_head(rule=FromAnotherKeras()),
        TypeError,
        "`rule` must be",
        r"of type tf_keras\.src\.optimizers\.adam\.FromAnotherKeras in group \"head\"",
        FOREIGN,
    ),
    row(
        "an optimizer class of another Keras as rule",
        lambda _: with_head(rule=FromAnotherKeras),
        TypeError,
        "must be a `keras.optimizers.Optimizer`",
        r"tf_keras\.src",
        FOREIGN,
    ),
    row(
        "a class of torch as rule",
        lambda _: with_head(rule=torch_rule(build=False)),
        TypeError,
        r"Received: torch\.optim\.sgd\.SGD in group \"head\"",
        FOREIGN,
        marks=ONLY_TORCH,
    ),
    row(
        "an optimizer of torch as rule",
        lambda _: with_head(rule=torch_rule(build=True)),
        TypeError,
        r"of type torch\.optim\.sgd\.SGD in group \"head\"",
        FOREIGN,
        marks=ONLY_TORCH,
    ),
    row(
        "a transformation of optax as rule",
        lambda _: with_head(rule=pytest.importorskip("optax").adam(0.1)),
        TypeError,
        r"of type optax\..*GradientTransformation.* in group \"head\"",
        FOREIGN,
        marks=ONLY_JAX,
    ),
    row(
        "the base class as rule",
        lambda _: GroupedOptimizer(rule=keras.optimizers.Optimizer),
        ValueError,
        "must be an optimizer that has an algorithm",
        "The names are: .*sgd",
    ),
    *(
        row(
            f"a {name} as rule",
            lambda _, name=name: with_head(rule=wrapper(name)),
            ValueError,
            "must not itself wrap optimizers",
            f'Received: {name} in group "head"',
            "groups of one GroupedOptimizer",
        )
        for name in ("LossScaleOptimizer", "MultiOptimizer")
    ),
    row(
        "a GroupedOptimizer as rule",
        lambda _: with_head(rule=GroupedOptimizer()),
        ValueError,
        "must not itself wrap optimizers",
        'Received: GroupedOptimizer in group "head"',
    ),
    row(
        "the class GroupedOptimizer as rule",
        lambda _: GroupedOptimizer(rule=GroupedOptimizer),
        ValueError,
        "must not itself wrap optimizers",
        "GroupedOptimizer in GroupedOptimizer",
    ),
    row(
        "the name of a wrapper as rule",
        lambda _: GroupedOptimizer(rule="LossScaleOptimizer"),
        ValueError,
        "must be the name of an optimizer",
        "rule='LossScaleOptimizer'",
    ),
    row(
        "an instance as default rule",
        lambda _: GroupedOptimizer(rule=SGD(0.1)),
        ValueError,
        "must not be an instance",
        "Received: sgd",
        r'rule=kgo\.rule\("sgd"',
    ),
    row(
        "an instance in kgo.rule",
        lambda _: kgo.rule(SGD(0.1)),
        TypeError,
        "`target` must be the name",
        r"goes into `Group\(rule=\.\.\.\)` as it is",
    ),
    row(
        "a rate on a rule",
        lambda _: kgo.rule("adam", learning_rate=0.1),
        ValueError,
        "must not have a learning rate",
        r"learning_rate=0\.1 in rule\('adam'\)",
        "learning_rate_ratio",
    ),
    row(
        "a name on a rule",
        lambda _: kgo.rule("adam", name="mine"),
        ValueError,
        "must not have a name",
        "name='mine'",
    ),
    row(
        "an unknown argument of a rule",
        lambda _: with_head(rule=kgo.rule("adam", beta1=0.9)),
        ValueError,
        "arguments that Adam takes",
        r"rule\('adam', beta1=0\.9\) in group \"head\"",
        "did you mean `beta_1`",
    ),
    row(
        "a bad argument of the default rule",
        lambda _: GroupedOptimizer(rule=kgo.rule("sgd", momentum=7)),
        ValueError,
        "arguments that SGD takes",
        r"momentum=7\) in GroupedOptimizer",
    ),
    row(
        "a decay on the default rule",
        lambda _: GroupedOptimizer(rule=kgo.rule("adamw", weight_decay=0.1)),
        ValueError,
        "`weight_decay` must be given to GroupedOptimizer itself",
        r"GroupedOptimizer\(weight_decay=\.\.\.\)",
    ),
]

WHOLE = {
    "global_clipnorm": (1.0, r"GroupedOptimizer\(global_clipnorm=\.\.\.\).*Group\("),
    "use_ema": (True, "GroupedOptimizer, which owns averages"),
    "gradient_accumulation_steps": (2, "GroupedOptimizer, which owns accumulation"),
    "loss_scale_factor": (2.0, r"GroupedOptimizer\(loss_scale_factor=\.\.\.\)"),
}

INSTANCES = [
    *(
        row(
            f"{name} on an instance",
            lambda _, name=name, value=value: with_head(rule=SGD(0.1, **{name: value})),
            ValueError,
            f"`{name}` must not be set on an optimizer given as rule",
            f'{name}={given(value)} on sgd in group "head"',
            f"Set it on {place}",
        )
        for name, (value, place) in WHOLE.items()
    ),
    *(
        row(
            f"{name} on a rule",
            lambda _, name=name, value=value: kgo.rule("sgd", **{name: value}),
            ValueError,
            f"`{name}` must not be set on a rule",
            rf"{name}={given(value)} in rule\('sgd'\)",
            f"Set it on {place}",
        )
        for name, (value, place) in WHOLE.items()
    ),
    row(
        "an instance with state",
        lambda world: with_head(rule=built(SGD(0.1), world)),
        ValueError,
        "must be new",
        'state of its own, sgd, in group "head"',
        r'kgo\.rule\("sgd"',
    ),
    row(
        "an instance with an exclusion",
        lambda _: with_head(rule=excluding()),
        ValueError,
        "`exclude_from_weight_decay` must not be called",
        'adamw in group "head"',
        r"Group\(exclude_from_decay=\.\.\.\)",
    ),
    *(
        row(
            f"{name} beside an instance's rate",
            lambda _, name=name: with_head(rule=SGD(0.1), **{name: 0.5}),
            ValueError,
            "rate of a group must be given once",
            'instance sgd in group "head"',
            r'kgo\.rule\("sgd"',
        )
        for name in ("learning_rate", "learning_rate_ratio")
    ),
    row(
        "a decay beside an instance's decay",
        lambda _: with_head(rule=keras.optimizers.AdamW(0.1, weight_decay=0.2), weight_decay=0.5),
        ValueError,
        "`weight_decay` must be given once",
        r"weight_decay=0\.5 on group \"head\" and weight_decay=0\.2 on its rule",
        "Leave one out",
    ),
    row(
        "a decay beside a rule's decay",
        lambda _: with_head(rule=kgo.rule("adamw", weight_decay=0.2), weight_decay=0.5),
        ValueError,
        "`weight_decay` must be given once",
        r"0\.5 on group \"head\" and weight_decay=0\.2",
    ),
    row(
        "clipping beside an instance's clipping",
        lambda _: with_head(rule=SGD(0.1, clipnorm=1.0), clipnorm=0.5),
        ValueError,
        "`clipnorm` must be given once",
        'on group "head"',
    ),
    row(
        "another kind of clipping beside an instance's",
        lambda _: with_head(rule=SGD(0.1, clipnorm=1.0), clipvalue=0.5),
        ValueError,
        "Only one of `clipnorm`",
        r'clipnorm=1\.0, clipvalue=0\.5 in group "head"',
    ),
    row(
        "one instance in two groups",
        lambda _: GroupedOptimizer(
            [Group(name, name, rule=rule) for rule in [SGD(0.1)] for name in ("head", "backbone")]
        ),
        ValueError,
        "must be the rule of one group",
        'one sgd in the groups "head" and "backbone"',
        "Give each its own",
    ),
    row(
        "one instance in two optimizers",
        lambda world: in_two_models(SGD(0.1), world),
        ValueError,
        "one group of one optimizer",
        'sgd in group "head", already used by another GroupedOptimizer',
        "Give each its own",
    ),
    row(
        "an instance's rate beside a scheduled base",
        lambda _: GroupedOptimizer([head(rule=SGD(0.1))], learning_rate=CURVE),
        ValueError,
        "must not be a number beside a base rate that is a schedule",
        r'learning_rate=0\.1 in group "head"',
        r"kgo\.constant\(0\.1\)",
        r'kgo\.rule\("sgd"',
    ),
    row(
        "an instance with a negative rate",
        lambda _: with_head(rule=SGD(-0.1)),
        ValueError,
        "`learning_rate` must be a finite number >= 0",
        r'learning_rate=-0\.1 in group "head"',
    ),
]
