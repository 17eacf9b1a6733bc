"""Bad input, before anything is trained: what is wrong, where, what was received, what to do.

A row is a call, the type of its error, and texts that stand in the message in that order.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer

SGD = keras.optimizers.SGD
CURVE = keras.optimizers.schedules.CosineDecay(0.1, 10)
NAN = float("nan")


def backbone_and_head(width: int = 2) -> keras.Model:
    backbone = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3, name="dense"),
            keras.layers.BatchNormalization(name="norm"),
        ],
        name="backbone",
    )
    head = keras.layers.Dense(width, name="head")
    return keras.Sequential([keras.Input((3,)), backbone, head])


def value_of(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))


class World:
    """A model, another one with the same layers, files, and optimizers that were built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.other = backbone_and_head(), backbone_and_head()
        self.variables = self.model.trainable_variables
        self.gradients = [keras.ops.ones(v.shape) for v in self.variables]
        self.built = GroupedOptimizer(
            [
                Group("backbone", "backbone", weight_decay=0.1, anchor="initial"),
                Group("frozen", "head/bias", frozen=True),
            ],
            model=self.model,
            rule=kgo.rule("sgd", momentum=0.9),
        )
        self.scheduled = GroupedOptimizer(
            [Group("backbone", "backbone", learning_rate_ratio=CURVE, weight_decay=CURVE)],
            model=self.model,
            rule="sgd",
            learning_rate=CURVE,
        )
        for optimizer in (self.built, self.scheduled):
            optimizer.build(self.variables)
        backbone_and_head(width=5).save(folder / "wide.keras")
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(7)]).save_weights(
            folder / "other.weights.h5"
        )
        (folder / "text.keras").write_text("not a model")

    def build(self, groups: Any = (), **options: Any) -> None:
        """Builds a new optimizer for the model, which must leave no variables where it fails."""
        optimizer = GroupedOptimizer(groups, **{"model": self.model} | options)
        before = len(optimizer.variables)
        try:
            optimizer.build(self.variables)
        finally:
            assert len(optimizer.variables) == before or optimizer.built

    def anchored(self, anchor: Any, **options: Any) -> None:
        """Builds with a given anchor for the head, whose kernel has shape (3, 2)."""
        if isinstance(anchor, str):
            anchor = str(self.folder / anchor)
        selector = options.pop("selector", "head")
        self.build([Group("head", selector, weight_decay=0.1, anchor=anchor)], **options)

    def without_model(self) -> GroupedOptimizer:
        """An optimizer whose model no longer exists."""
        optimizer = GroupedOptimizer(model=backbone_and_head())
        gc.collect()
        return optimizer

    def state(self) -> list[np.ndarray]:
        """Everything that a refused call must leave as it was."""
        held = [*self.model.variables, *self.other.variables]
        return [value_of(v) for v in (*held, *self.built.variables, *self.scheduled.variables)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("files"))


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


def head(**options: Any) -> Group:
    return Group("head", "head", **options)


def with_head(**options: Any) -> GroupedOptimizer:
    return GroupedOptimizer([head(**options)])


def given(value: Any) -> str:
    """The value, as a pattern for `match`."""
    return re.escape(repr(value))


def row(name: str, call: Callable[[World], Any], error: type[Exception], *texts: str, marks=()):
    return pytest.param(call, error, texts, id=name, marks=marks)


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
        lambda world: with_head(rule=_built(SGD(0.1), world)),
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
        lambda world: _in_two_models(SGD(0.1), world),
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


def _built(optimizer: Any, world: World) -> Any:
    optimizer.build(world.variables)
    return optimizer


def _in_two_models(instance: Any, world: World) -> None:
    first = GroupedOptimizer([head(rule=instance)], model=world.model)
    first.build(world.variables)
    second = GroupedOptimizer([head(rule=instance)], model=world.other)
    second.build(world.other.trainable_variables)


NOT_FINITE = [(-1, ValueError), (NAN, ValueError), (float("inf"), ValueError)]
NO_NUMBER = [("0.1", TypeError), (True, TypeError), (1j, TypeError)]

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
    row("path | 5", lambda _: kgo.path("head") | 5, TypeError, "must be a layer path", "5"),
]

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
        'with `-`, or .*overlap="first"',
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
        r"a new GroupedOptimizer\(model=\.\.\.\)",
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


def _stateless(self: World, of: str, by: int) -> None:
    values = {
        "own": [value_of(v) for v in self.built.variables],
        "weights": [value_of(v) for v in self.variables],
    }
    values[of] = values[of][:by] if by < 0 else values[of] + values[of][:by]
    tensors = {k: [keras.ops.convert_to_tensor(v) for v in vs] for k, vs in values.items()}
    self.built.stateless_apply(tensors["own"], self.gradients, tensors["weights"])


World.stateless = _stateless


@pytest.mark.parametrize(
    ("call", "error", "texts"),
    [*RULES, *INSTANCES, *NUMBERS, *GROUPS, *SELECTORS, *ANCHORS, *PLANS, *CALLS],
)
def test_bad_input_is_refused_with_a_reason_and_changes_nothing(world, call, error, texts):
    before = world.state()
    with pytest.raises(error) as caught:
        call(world)
    assert type(caught.value) is error
    assert re.search(".*".join(texts), str(caught.value), re.DOTALL), str(caught.value)
    for old, new in zip(before, world.state(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_after_all_that_the_optimizers_still_train(world):
    for optimizer in (world.built, world.scheduled):
        before = [value_of(v) for v in world.variables]
        optimizer.apply(world.gradients, world.variables)
        moved = [
            not np.array_equal(a, value_of(v)) for a, v in zip(before, world.variables, strict=True)
        ]
        # The bias of the head is frozen in the first.
        assert moved == [True] * 5 + [optimizer is world.scheduled]


# Repairs ---------------------------------------------------------------------------------------


def test_a_build_that_failed_can_be_done_again_when_the_reason_is_gone(world, tmp_path):
    path = tmp_path / "late.keras"
    optimizer = GroupedOptimizer(
        [Group("head", "head", weight_decay=0.5, anchor=path)],
        model=world.model,
        rule="sgd",
        learning_rate=1.0,
    )
    with pytest.raises(FileNotFoundError, match=r"late\.keras"):
        optimizer.build(world.variables)
    world.model.save(path)
    optimizer.build(world.variables)
    new = GroupedOptimizer(
        [Group("head", "head", weight_decay=0.5, anchor="initial")], model=world.model, rule="sgd"
    )
    new.build(world.variables)
    assert len(optimizer.variables) == len(new.variables)
    assert float(optimizer.anchor_drift()["head"]) == 0.0


def test_an_instance_refused_in_one_optimizer_serves_another():
    model = backbone_and_head()
    instance = SGD(0.1)
    failing = GroupedOptimizer(
        [Group("head", "head", rule=instance, weight_decay=0.1, anchor=[])], model=model
    )
    with pytest.raises(ValueError, match="one array per variable"):
        failing.build(model.trainable_variables)
    GroupedOptimizer([Group("head", "head", rule=instance)], model=model).build(
        model.trainable_variables
    )


def test_an_optimizer_whose_model_was_deleted_can_be_bound_to_the_one_that_is_trained():
    optimizer = GroupedOptimizer({"head": "head"}, model=backbone_and_head())
    gc.collect()
    model = backbone_and_head()
    optimizer.bind(model)
    optimizer.build(model.trainable_variables)
    assert [group.name for group in optimizer.plan.groups] == ["head", "default"]


def test_a_built_optimizer_outlives_its_model():
    model = backbone_and_head()
    optimizer = GroupedOptimizer({"head": "head"}, model=model, rule="sgd", learning_rate=1.0)
    variables = model.trainable_variables
    optimizer.build(variables)
    del model
    gc.collect()
    before = value_of(variables[-1])
    optimizer.apply([keras.ops.ones(v.shape) for v in variables], variables)
    np.testing.assert_allclose(value_of(variables[-1]), before - 1.0)
    assert optimizer.get_config()["plan"][-1]["path"] == "head/bias"
    assert [group.name for group in optimizer.plan.groups] == ["head", "default"]


# Anchors that a config does not hold -----------------------------------------------------------


def anchored_model() -> tuple[keras.Model, GroupedOptimizer]:
    model = backbone_and_head()
    optimizer = GroupedOptimizer(
        [Group("head", "head", weight_decay=0.5, anchor={"head/kernel": np.ones((3, 2))})],
        model=model,
        rule="sgd",
        learning_rate=1.0,
    )
    optimizer.build(model.trainable_variables)
    return model, optimizer


def test_given_anchors_are_unknown_after_from_config_until_they_are_given_or_loaded():
    model, optimizer = anchored_model()
    copy = GroupedOptimizer.from_config(optimizer.get_config())
    variables = model.trainable_variables
    copy.build(variables)
    zeros = [keras.ops.zeros(v.shape) for v in variables]
    before = [value_of(v) for v in variables]
    message = r'anchors of group "head" are not known.*load the saved state, or pass `anchor=`'
    with pytest.raises(ValueError, match=message):
        copy.apply(zeros, variables)
    for old, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value_of(variable), old)
    assert int(copy.iterations) == 0
    copy.set_weights([value_of(v) for v in optimizer.variables])
    copy.apply(zeros, variables)
    kernel = model.get_layer("head").kernel
    np.testing.assert_allclose(value_of(kernel), (before[4] + 1.0) / 2, rtol=1e-6)


# Through fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "options", "text"),
    [
        ({"a": "haed"}, {}, "Nearest paths: 'head'"),
        ({"a": "**", "b": "head"}, {}, "must not overlap"),
        ({"a": "head"}, {"unclaimed": "error"}, "no group for backbone/dense/kernel"),
        ([Group("a", "head", weight_decay=0.1, anchor=[])], {}, "0 arrays"),
    ],
    ids=["no match", "overlap", "unclaimed", "anchor"],
)
def test_fit_fails_before_its_first_step_and_the_model_can_be_compiled_again(groups, options, text):
    model = backbone_and_head()
    before = model.get_weights()
    x, y = np.eye(4, 3, dtype="float32"), np.ones((4, 2), "float32")
    model.compile(optimizer=GroupedOptimizer(groups, model=model, **options), loss="mse")
    with pytest.raises(ValueError, match=text):
        model.fit(x, y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    model.compile(optimizer=GroupedOptimizer({"head": "head"}, model=model), loss="mse")
    model.fit(x, y, verbose=0)
    assert not np.array_equal(model.get_weights()[-1], before[-1])


# What is accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [1, np.int32(1), np.float32(1), np.float64(1), np.array(1.0), np.array(1)], ids=repr
)
def test_whole_numbers_and_numpy_scalars_are_numbers(number):
    group = Group("head", "head", learning_rate_ratio=number, weight_decay=number, clipnorm=number)
    optimizer = GroupedOptimizer(
        [group], learning_rate=number, weight_decay=number, global_clipnorm=number
    )
    assert float(optimizer.learning_rate) == 1.0
    for value in (group.learning_rate_ratio, group.weight_decay, group.clipnorm):
        assert type(value) is float
        assert value == 1.0


def test_groups_may_be_missing_empty_or_a_single_one():
    for groups in (None, (), [], {}, head(), [head()], {"head": head()}, {"head": "head"}):
        GroupedOptimizer(groups)
