"""Rates assigned apart from rules: `GroupedOptimizer(ratios=[(selector, ratio), ...])`."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from cases import Jump, initial_weights, make_model, trained
from cases import make_optimizer as optimizer
from comparing import assert_same

import keras_groupopt as kgo


class Whole(keras.optimizers.SGD):
    """A rule that updates all variables in a way of its own."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(keras.ops.cast(learning_rate, variable.dtype) * gradient)


RULES = [
    *("sgd", "adam", "nadam", "lion", "lamb", "rmsprop", "radam", "adafactor"),
    keras.optimizers.Muon,
    kgo.rule("lookahead", rule="nadam", sync_period=2),
    kgo.rule("schedulefreeadamw", warmup_steps=2),
    Whole,
]
GROUPS = [
    kgo.Group("matrices", kgo.rank(2), rule=kgo.rule("sgd", momentum=0.5)),
    kgo.Group("a", kgo.rank(2) & kgo.path("backbone"), kgo.rule("sgd", momentum=0.5), 0.5),
    kgo.Group("b", kgo.rank(2) & kgo.path("head"), kgo.rule("sgd", momentum=0.5), 0.25),
    kgo.Group("c", kgo.rank(max=1) & kgo.path("backbone"), learning_rate_ratio=0.5),
    kgo.Group("d", kgo.rank(max=1) & kgo.path("head"), learning_rate_ratio=0.25),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_ratio_moves_variables_as_a_group_with_that_ratio_does(rule):
    one_group = optimizer(rule, ratios=[("backbone", 0.5), ("head/bias", 0.25)])
    groups = [
        kgo.Group("backbone", "backbone", learning_rate_ratio=0.5),
        kgo.Group("bias", "head/bias", learning_rate_ratio=0.25),
    ]
    assert_same(trained(one_group), trained(optimizer(rule, groups=groups)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            {
                "groups": [kgo.Group("backbone", "backbone", learning_rate_ratio=0.5)],
                "ratios": {"backbone/kernel": 0.25, "head": 0.5},
            },
            {
                "groups": [
                    kgo.Group("kernel", "backbone/kernel", learning_rate_ratio=0.125),
                    kgo.Group("rest", ["backbone/bias", "head"], learning_rate_ratio=0.5),
                ]
            },
            id="times that of its group",
        ),
        pytest.param(
            {"groups": GROUPS[:1], "ratios": [("backbone", 0.5), ("head", 0.25)]},
            {"groups": GROUPS[1:]},
            id="apart from rules",
        ),
        pytest.param({"ratios": [("head", 1.0)]}, {}, id="of one"),
        pytest.param({"ratios": [("**", 0.5)]}, {"learning_rate": 0.03125}, id="of all"),
        *(
            pytest.param(
                {"ratios": [("head", 0.5), ("head/kernel", 0.25)], "overlap": overlap},
                {"ratios": [("head/kernel", ratio), ("head/bias", 0.5), ("head/gain", 0.5)]},
                id=f"the {overlap} of two",
            )
            for overlap, ratio in (("first", 0.5), ("last", 0.25))
        ),
    ],
)
def test_two_ways_to_assign_ratios_train_to_the_same_weights(one, other):
    assert_same(trained(optimizer(**one)), trained(optimizer(**other)))


def test_a_schedule_as_ratio_counts_optimizer_steps():
    ratios = [("backbone", Jump(0.0, 1.0, at=2))]
    start = initial_weights()
    closed, opened = (trained(optimizer("sgd", ratios=ratios), range(n)) for n in (2, 4))
    assert np.array_equal(closed["backbone/kernel"], start["backbone/kernel"])
    assert not np.array_equal(closed["head/kernel"], start["head/kernel"])
    assert not np.array_equal(opened["backbone/kernel"], start["backbone/kernel"])


def test_a_plan_shows_the_ratio_of_each_variable():
    model = make_model()
    made = optimizer(ratios=[("backbone", 0.25), ("head/bias", Jump(0.0, 1.0, 1))], model=model)
    plan = made.plan.to_dict()["groups"][0]
    assert plan["learning_rate"] == "0.0625 × 0.25…1, Jump"
    ratios = {variable["path"]: variable["ratio"] for variable in plan["variables"]}
    assert ratios["backbone/kernel"] == 0.25
    assert ratios["head/bias"] == "Jump"
    assert ratios["head/kernel"] == 1.0
    lines: list[str] = []
    made.plan.summary(expand=True, print_fn=lines.append)
    assert any("Ratio" in line for line in lines)
    other = optimizer(ratios=[("backbone", 0.5)], model=model)
    assert "backbone/kernel: ratio 0.25 → 0.5" in str(made.plan.compare(other.plan))


def test_a_change_of_ratios_is_logged_where_state_is_loaded(tmp_path, caplog):
    def model_with(ratio):
        model = make_model()
        model.compile(optimizer=optimizer(ratios=[("head", ratio)], model=model), loss="mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model_with(0.5).save_weights(tmp_path / "a.weights.h5")
    for ratio, said in ((0.5, False), (0.25, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model_with(ratio).load_weights(tmp_path / "a.weights.h5")
        assert ("ratios: declared as" in caplog.text) == said
