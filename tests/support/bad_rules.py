"""Rows of bad input: rules, and optimizers given as rules."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from bad_input import CURVE, ONLY_JAX, ONLY_TORCH, SGD, World, head, rows, with_head

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer
from keras_groupopt.schedules import Linear

AdamW = keras.optimizers.AdamW


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
    optimizer = AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def torch_rule(build: bool) -> Any:
    torch = pytest.importorskip("torch")
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) if build else torch.optim.SGD


def adam(**arguments: Any) -> GroupedOptimizer:
    return with_head(rule=kgo.rule("adam", **arguments))


def built(optimizer: Any, world: World) -> Any:
    optimizer.build(world.variables)
    return optimizer


def in_two_groups(instance: Any) -> None:
    GroupedOptimizer([Group(name, name, rule=instance) for name in ("head", "backbone")])


def in_two_models(instance: Any, world: World) -> None:
    made = []
    for model in (world.model, world.other):
        made.append(GroupedOptimizer([head(rule=instance)], model=model))
        made[-1].build(model.trainable_variables)


NO_RULE = rows(
    ValueError,
    (
        lambda _: GroupedOptimizer(rule="adamm"),
        "`rule` must be the name … rule='adamm' in GroupedOptimizer … mean 'adam' … radam",
    ),
    (lambda _: with_head(rule="ladam"), "rule='ladam' in group \"head\" … 'adam'"),
    (lambda _: GroupedOptimizer(rule="LossScaleOptimizer"), "rule='LossScaleOptimizer'"),
    (lambda _: GroupedOptimizer(rule=keras.optimizers.Optimizer), "an algorithm … sgd"),
    *(
        (
            lambda _, name=name: with_head(rule=wrapper(name)),
            f'not itself wrap optimizers … {name} in group "head" … groups of one GroupedOptimizer',
        )
        for name in ("LossScaleOptimizer", "MultiOptimizer")
    ),
    (lambda _: with_head(rule=GroupedOptimizer()), 'wrap … GroupedOptimizer in group "head"'),
    (lambda _: GroupedOptimizer(rule=GroupedOptimizer), "wrap … GroupedOptimizer in Grouped"),
    (lambda _: GroupedOptimizer(rule=SGD(0.1)), 'an instance … sgd … rule=kgo.rule("sgd"'),
)
NO_RULE_AT_ALL = rows(
    TypeError,
    (lambda _: GroupedOptimizer(rule=None), "must be given … rule=None"),
    (lambda _: with_head(rule=5), 'an optimizer class … rule=5 in group "head"'),
    (lambda _: with_head(rule=len), "`rule` must be … len"),
    (lambda _: with_head(rule=keras.layers.Dense), 'keras.optimizers.Optimizer … Dense in group "'),
    (
        lambda _: with_head(rule=FromAnotherKeras()),
        'tf_keras.src.optimizers.adam.FromAnotherKeras in group "head" … optimizer of torch',
    ),
    (lambda _: with_head(rule=FromAnotherKeras), "tf_keras.src … optimizer of torch, optax or an"),
    (lambda _: kgo.rule(SGD(0.1)), "`target` must be the name … `Group(rule=instance)`"),
)
OF_TORCH = rows(
    TypeError,
    *(
        (
            lambda _, build=build: with_head(rule=torch_rule(build)),
            'torch.optim.sgd.SGD in group "head" … optimizer of torch, optax or another Keras',
        )
        for build in (False, True)
    ),
    marks=ONLY_TORCH,
)
OF_OPTAX = rows(
    TypeError,
    (
        lambda _: with_head(rule=pytest.importorskip("optax").adam(0.1)),
        'of type optax. … GradientTransformation … in group "head" … optimizer of torch, optax or',
    ),
    marks=ONLY_JAX,
)
NO_NUMBER = rows(
    TypeError,
    (lambda _: adam(beta_1="fast"), "`beta_1` must be a number … beta_1='fast' in group"),
    (lambda _: with_head(rule=kgo.rule("radam", beta_1="fast")), "RAdam takes … beta_1='fast'"),
)
ARGUMENTS = rows(
    ValueError,
    (lambda _: adam(beta_1=1.5), '`beta_1` must be a number in [0, 1) … beta_1=1.5 in group "h'),
    (lambda _: with_head(rule=keras.optimizers.RMSprop(0.1, rho=-0.5)), 'rho=-0.5 in group "head"'),
    (lambda _: adam(beta_2=float("nan")), "`beta_2` must be a number … beta_2=nan in group"),
    (lambda _: GroupedOptimizer(rule=kgo.rule("adagrad", epsilon=-1.0)), "0 … epsilon=-1.0 in Gr"),
    (lambda _: adam(beta_1=kgo.constant(2.0)), "`beta_1` must be a number … beta_1=2.0"),
    (
        lambda _: adam(beta_1=Linear(0.5, 10, 1.0)),
        'must stay in the range … beta_1 in group "head", at 100% of its length … in [0, 1)',
    ),
    (lambda _: adam(beta_1=Linear(0.5, "fit", 1.5)), "must stay … at 50% of its length"),
    (lambda _: adam(beta1=0.9), 'Adam takes … beta1=0.9) in group "head" … mean `beta_1`'),
    (lambda _: GroupedOptimizer(rule=kgo.rule("sgd", momentum=7)), "SGD takes … momentum=7) in Gr"),
    (
        lambda _: GroupedOptimizer(rule=kgo.rule("adamw", weight_decay=0.1)),
        "`weight_decay` must be given to GroupedOptimizer itself … (weight_decay=...)",
    ),
    (
        lambda _: kgo.rule("adam", learning_rate=0.1),
        "`learning_rate` must not be set on a rule … =0.1 in rule('adam') … learning_rate_ratio",
    ),
    (lambda _: kgo.rule("adam", name="mine"), "`name` must not be set on a rule … name='mine'"),
)
# What holds for the whole optimizer, and where it is set.
WHOLE = {
    "global_clipnorm": (1.0, "GroupedOptimizer(global_clipnorm=...) … Group("),
    "use_ema": (True, "GroupedOptimizer, which owns averages"),
    "gradient_accumulation_steps": (2, "GroupedOptimizer, which owns accumulation"),
    "loss_scale_factor": (2.0, "GroupedOptimizer(loss_scale_factor=...)"),
}
INSTANCES = rows(
    ValueError,
    *(
        (
            lambda _, name=name, value=value: with_head(rule=SGD(0.1, **{name: value})),
            f'`{name}` must not be … {name}={value} on sgd in group "head" … Set it on {place}',
        )
        for name, (value, place) in WHOLE.items()
    ),
    *(
        (
            lambda _, name=name, value=value: kgo.rule("sgd", **{name: value}),
            f"`{name}` must not be … {name}={value} in rule('sgd') … Set it on {place}",
        )
        for name, (value, place) in WHOLE.items()
    ),
    *(
        (
            lambda _, name=name: with_head(rule=SGD(0.1), **{name: 0.5}),
            'must be given once … instance sgd in group "head" … kgo.rule("sgd"',
        )
        for name in ("learning_rate", "learning_rate_ratio")
    ),
    (
        lambda world: with_head(rule=built(SGD(0.1), world)),
        'must be new … state of its own, sgd, in group "head" … kgo.rule("sgd"',
    ),
    (
        lambda _: with_head(rule=excluding()),
        '`exclude_from_weight_decay` must not … adamw in group "head" … Group(exclude_from_decay=',
    ),
    *(
        (
            lambda _, rule=rule: with_head(rule=rule, weight_decay=0.5),
            'given once … weight_decay=0.5 on group "head" and weight_decay=0.2 on its … Leave one',
        )
        for rule in (AdamW(0.1, weight_decay=0.2), kgo.rule("adamw", weight_decay=0.2))
    ),
    (
        lambda _: with_head(rule=SGD(0.1, clipnorm=1.0), clipnorm=0.5),
        '`clipnorm` must be given once … on group "head"',
    ),
    (
        lambda _: with_head(rule=SGD(0.1, clipnorm=1.0), clipvalue=0.5),
        'Only one of `clipnorm` … clipnorm=1.0, clipvalue=0.5 in group "head"',
    ),
    (
        lambda _: in_two_groups(SGD(0.1)),
        'the rule of one group … one sgd in the groups "head" and "backbone" … Give each its own',
    ),
    (
        lambda world: in_two_models(SGD(0.1), world),
        'of one optimizer … sgd in group "head", already used by another … Give each its own',
    ),
    (
        lambda _: GroupedOptimizer([head(rule=SGD(0.1))], learning_rate=CURVE),
        'a schedule … learning_rate=0.1 in group "head" … kgo.constant(0.1) … kgo.rule("sgd"',
    ),
    (lambda _: with_head(rule=SGD(-0.1)), 'number >= 0 … learning_rate=-0.1 in group "head"'),
)
RULES = [*NO_RULE, *NO_RULE_AT_ALL, *OF_TORCH, *OF_OPTAX, *NO_NUMBER, *ARGUMENTS, *INSTANCES]
