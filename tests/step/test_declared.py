"""What of a step is declared: how it is refused, shown in a plan, and kept by a config."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cases import Jump, make_model
from models import compiled, dense
from test_averages import TRANSCRIPTS

import keras_groupopt as kgo
from keras_groupopt import EMA, SWA, Group, LossScaleOptimizer, from_base, rule
from keras_groupopt import GroupedOptimizer as Optimizer

pytestmark = pytest.mark.once

NAN = float("nan")


class Forgetful(keras.optimizers.SGD):
    """Reads its momentum when it is made, and never again."""

    def __init__(self, learning_rate=0.01, speed=0.5, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.speed = speed
        self._kept = 1.0 - speed

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(learning_rate * self._kept * gradient)


def made(*groups: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Optimizer(groups, **options)


def plan(*groups: Any, **options: Any) -> Callable[[], Any]:
    """Makes a plan of the towers."""
    return lambda: Optimizer(groups, **{"model": make_model(), **options}).plan


def scaled(inner: dict[str, Any] | None = None, **options: Any) -> Callable[[], Any]:
    return lambda: LossScaleOptimizer(Optimizer(**(inner or {})), **options)


def averages_of_built() -> Any:
    optimizer = Optimizer()
    optimizer.build(make_model().trainable_variables)
    return optimizer._average_pairs()


Row = tuple[Callable[[], Any], str]
STEPS = "`gradient_accumulation_steps` must be an integer >= 1. Received: gradient_acc … steps="
POSITIVE = "`initial_scale` must be a positive finite number"
GROWTH = "`dynamic_growth_steps` must be an integer >= 1"
TWO = "Only one of `clipnorm` … Received: clipnorm=1.0, global_clipnorm=1.0 in "
WRONG_VALUES: list[Row] = [
    *((made(gradient_accumulation_steps=value), f"{STEPS}{value}") for value in (0, -2)),
    (lambda: Optimizer(gradient_accumulation_steps=2).flush(), "`flush` needs a built optimizer"),
    # Averages.
    (lambda: EMA(1.0), "`momentum` must be a number in [0, 1) or a schedule"),
    (lambda: EMA(-0.1), "`momentum` … momentum=-0.1 in EMA"),
    (lambda: EMA(None), "`momentum`"),
    (lambda: EMA(0.9, every=0), "`every` must be an integer >= 1 … every=0"),
    (lambda: EMA(0.9, start=-1), "`start` must be an integer >= 0 … start=-1"),
    (made(ema=EMA(), use_ema=True), "Only one of `use_ema` and `ema`"),
    (made(ema_overwrite_frequency=2), "must come with `use_ema=True`"),
    (made(use_ema=True, ema_overwrite_frequency=0), "an integer >= 1"),
    (made(use_ema=True, ema_momentum=1.5), "`ema_momentum` must be … 1.5"),
    (lambda: Optimizer()._average_pairs(), "needs a built optimizer"),
    (averages_of_built, "needs an optimizer with averages"),
    # Of the whole.
    (made(clipnorm=1.0, global_clipnorm=1.0), f"{TWO}GroupedOptimizer"),
    (lambda: Group("a", "a", clipnorm=1.0, global_clipnorm=1.0), f'{TWO}group "a"'),
    *(
        (made(on_nonfinite=value), 'one of "skip", "propagate", "raise". Received: on_n')
        for value in ("ignore", "Skip", None, True)
    ),
    (
        made(Group("a", "a"), Group("b", "b"), learning_rate=[1, 2, 3]),
        "3 rates for 2 groups (a, b)",
    ),
    (scaled({"loss_scale_factor": 8.0}), "Received: loss_scale_factor=8.0. Leave it out"),
    (scaled(initial_scale=0), POSITIVE),
    (scaled(dynamic_growth_steps=0), GROWTH),
    # As the optimizer's own state, which is left out of the check of a file's layout.
    *((lambda n=n: Group(n, "enc"), "must not start with `@`") for n in ("@x", "@weight_decay")),
    # Ratios.
    (plan(ratios=[("bakbone", 0.5)]), "backbone"),
    (plan(ratios=[("head", 0.5), ("head/bias", 0.1)]), "Ratios must not overlap"),
    (plan(ratios=[("head", -0.5)]), "finite number >= 0"),
    (plan(ratios=[("head", NAN)]), "finite number >= 0"),
    # A schedule that drives nothing.
    (plan(rule=rule(Forgetful, speed=Jump(0.5, 0.1))), "does not read `speed`"),
    (plan(rule=rule("adagrad", initial_accumulator_value=Jump(0.5, 0.1))), "does not read `init"),
    (plan(rule=rule("adam", beta_3=Jump(0.5, 0.1))), "did you mean `beta_2`"),
    (plan(rule=rule("radam", beta_1=Jump(1.5, 0.1))), "beta_1"),
    (
        plan(Group("all", "**", learning_rate=Jump(0.25, 0.1)), learning_rate=Jump(0.5, 0.1)),
        "every group has its own rate",
    ),
    (plan(weight_decay=Jump(0.5, 0.1), exclude_from_decay="**"), "`weight_decay` of GroupedOptimi"),
    (
        plan(Group("all", "**", rule="sgd"), rule=rule("adam", beta_1=Jump(0.9, 0.1))),
        "every group has its own rule",
    ),
    (
        plan(Group("h", "head", frozen=True), ratios=[("head", Jump(0.0, 1.0))]),
        "all its variables are frozen",
    ),
    (plan(Group("h", "head", learning_rate=from_base(lambda base: -base))), "finite number >= 0"),
]
WRONG_TYPES: list[Row] = [
    *((made(gradient_accumulation_steps=v), f"{STEPS}{v!r}") for v in (2.5, "4", True, [2])),
    # Averages.
    (lambda: EMA("0.9"), "`momentum`"),
    (lambda: EMA(lambda step: 0.9), "a schedule over optimizer steps"),
    (lambda: EMA(0.9, warmup=100), "`warmup` must be True or False"),
    (lambda: SWA(every=2.0), "`every` must be an integer >= 1 … every=2.0 in SWA"),
    (lambda: SWA(start=True), "`start` must be an integer"),
    (made(ema=0.9), "`ema` must be `kgo.EMA … Write `ema=kgo.EMA(0.9)`"),
    (made(ema=EMA), "`ema` must be `kgo.EMA"),
    (made(use_ema=0.999), "use_ema=0.999. Pass the momentum as `ema_momentum=`"),
    # Of the whole.
    (made(fused=1), "`fused` must be True or False. Received: fused=1"),
    (
        lambda: LossScaleOptimizer(keras.optimizers.SGD()),
        "`inner_optimizer` must be a GroupedOptimizer. Received: <keras",
    ),
    (lambda: LossScaleOptimizer(scaled()()), "of type LossScaleOptimizer"),
    (scaled(initial_scale="2"), POSITIVE),
    (scaled(dynamic_growth_steps=2.5), GROWTH),
    # Ratios.
    (plan(ratios=[("head", None)]), "A ratio must be"),
    (plan(ratios=[("head", lambda step: 1.0)]), "schedule"),
    (plan(ratios=0.5), "list of pairs"),
    (plan(ratios=[("head", 0.5, 1)]), "pairs"),
    (plan(ratios=[(0.5, "head")]), "ratios[0]"),
    # Schedules.
    (plan(rule=rule("adam", amsgrad=Jump(0.5, 0.1))), "`amsgrad` must be a number"),
    *(
        (lambda value=value: from_base(value), "`function` must")
        for value in (3.0, Jump(0.1, 0.1), lambda: 1.0, lambda base, step: base, float)
    ),
    *(
        (lambda n=name: Group("h", "h", **{n: from_base(lambda base: base)}), f"`{name}` must be")
        for name in ("learning_rate_ratio", "weight_decay")
    ),
]
REFUSED = [
    pytest.param(make, error, text, id=text)
    for error, rows in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES))
    for make, text in rows
]


@pytest.mark.parametrize(("make", "error", "text"), REFUSED)
def test_a_bad_declaration_is_refused(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert re.search(".*".join(map(re.escape, text.split(" … "))), str(caught.value), re.DOTALL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: Group("enc", model.get_weights()), r"selector=array.*of type ndarray"),
        (
            lambda model: Optimizer([{"params": model.weights}]),
            r"`groups` must hold `kgo.Group` objects",
        ),
    ],
)
def test_an_error_never_prints_weights(make, message):
    with pytest.raises(TypeError, match=message) as caught:
        make(dense())
    assert len(str(caught.value)) < 400


def test_an_unregistered_function_of_the_base_warns_before_it_is_too_late():
    group = Group("head", "head", learning_rate=from_base(lambda base: base / 2))
    with pytest.warns(UserWarning, match='`learning_rate` of group "head" is from_base'):
        Optimizer([group])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": np.int64(4)},
        {"on_nonfinite": "raise"},
        *(options for options, _ in TRANSCRIPTS.values()),
    ],
    ids=str,
)
def test_a_config_keeps_what_is_declared(options):
    config = Optimizer(**options).get_config()
    again = Optimizer.from_config(config)
    assert again.get_config() == config
    assert (config["ema"] is None) == ("ema" not in options)
    for name, value in options.items():
        assert name == "ema" or config[name] == getattr(again, name) == value


def test_a_config_shares_nothing_with_its_optimizer():
    model = compiled(dense())
    model.optimizer.build(model.trainable_variables)
    config = model.optimizer.get_config()
    optimizer = Optimizer.from_config(config)
    records = [dict(record) for record in config["plan"]]
    config["plan"].pop()
    optimizer.get_config()["plan"][0]["group"] = "another"
    assert optimizer.get_config()["plan"] == records


# Shown in a plan ------------------------------------------------------------------------------


def summary(optimizer: kgo.GroupedOptimizer, **options: Any) -> str:
    lines: list[str] = []
    optimizer.plan.summary(print_fn=lines.append, line_length=100, **options)
    return "\n".join(lines)


def test_the_plan_says_how_weights_are_averaged():
    model = make_model()
    says = {
        "ema": "EMA(momentum=0.9)",
        "ema now and then": "EMA(momentum=0.9, warmup=True, every=3, start=4)",
        "ema on a schedule": "EMA(momentum=PiecewiseConstantDecay)",
        "swa now and then": "SWA(every=4, start=5)",
        "use_ema": "use_ema(momentum=0.75)",
    }
    for name, said in says.items():
        optimizer = Optimizer(model=model, **TRANSCRIPTS[name][0])
        assert optimizer.plan.to_dict()["options"]["ema"] == said
        assert f"Average of the weights: {said}" in summary(optimizer)
    text = summary(Optimizer(model=model, gradient_accumulation_steps=4, on_nonfinite="raise"))
    assert "Micro-batches per step: 4" in text
    assert "Gradients not finite: raise" in text
    plain = summary(Optimizer(model=model))
    assert not [word for word in ("Average", "Micro", "finite") if word in plain]


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([Group("enc", "enc", frozen=True)], {}),
        ([Group("enc", "enc"), Group("default", frozen=True)], {}),
        ([Group("enc", "enc")], {"unclaimed": "freeze"}),
    ],
)
def test_a_plan_with_frozen_groups_is_shown_before_and_after_build(groups, options):
    model = dense()
    optimizer = Optimizer(groups, model=model, **options)
    for _ in range(2):
        assert "frozen" in summary(optimizer, expand=True)
        assert "frozen" in optimizer.plan._repr_html_()
        optimizer.build(model.trainable_variables)
