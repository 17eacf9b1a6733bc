"""Rates apart from rules by `ratios=`, and schedules in place of any scalar: what drives what."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from cases import Jump, initial_weights, make_model, trained, weights_of
from cases import make_optimizer as optimizer
from comparing import assert_close, assert_same
from models import dense, fit

import keras_groupopt as kgo

# Ratios ----------------------------------------------------------------------------------------


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


# Schedules -------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="groupopt_tests")
def at_most(base):
    return keras.ops.minimum(base, 0.03125)


FIELDS = [
    ("adam", "beta_1", {}),
    ("adam", "beta_2", {}),
    ("radam", "beta_1", {}),
    ("nadam", "beta_1", {}),
    ("lion", "beta_2", {}),
    ("adamax", "beta_1", {}),
    ("rmsprop", "rho", {}),
    ("rmsprop", "momentum", {}),
    ("sgd", "momentum", {}),
    ("sgd", "momentum", {"nesterov": True}),
    ("adadelta", "rho", {}),
    ("lamb", "beta_1", {}),
    ("adafactor", "clip_threshold", {}),
    ("muon", "momentum", {}),
    ("adan", "beta_2", {}),
    ("lars", "momentum", {"trust_coefficient": 0.5}),
    ("nadamw", "momentum_decay", {}),
    ("lookahead", "slow_step_size", {"sync_period": 2}),
]
IDS = [f"{rule}.{field}" for rule, field, _ in FIELDS]


def with_field(rule, field, value, others):
    groups = [kgo.Group("matrices", kgo.rank(2), rule=kgo.rule(rule, **{field: value}, **others))]
    return optimizer("adam", groups=groups)


@pytest.mark.parametrize(("rule", "field", "others"), FIELDS, ids=IDS)
def test_an_argument_of_a_rule_may_be_a_schedule(rule, field, others):
    """A schedule equals the number that it is, until it changes."""
    after = {}
    for steps in (3, 6):
        number, schedule = (
            trained(with_field(rule, field, value, others), range(steps))
            for value in (0.5, Jump(0.5, 0.125))
        )
        after[steps] = schedule, number
    # A number may be taken in double precision where a tensor is not.
    assert_close(*after[3], 1e-6)
    schedule, number = after[6]
    assert np.max(np.abs(schedule["head/kernel"] - number["head/kernel"])) > 1e-5
    assert np.array_equal(schedule["head/bias"], number["head/bias"])


def test_schedules_of_a_rule_and_of_ratios_run_in_fit_and_are_saved(tmp_path):
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    model = make_model()
    ratios = [("backbone", 0.25), ("head/bias", Jump(0.0, 1.0))]
    rule = kgo.rule("adam", beta_1=Jump(0.9, 0.1))
    made = optimizer(rule, learning_rate=0.01, ratios=ratios, model=model)
    model.compile(optimizer=made, loss="mse")
    fit(model, x=x, y=0 * x, batch_size=16)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each, 2, x=x, y=0 * x, batch_size=16)
    assert_same(weights_of(model), weights_of(loaded))
    assert [str(binding) for binding in loaded.optimizer.plan.bindings()] == [
        "default: rule.beta_1 follows Jump",
        "default: ratios[1] follows Jump",
    ]
    shown, again = (each.optimizer.plan.to_dict()["groups"][0] for each in (model, loaded))
    assert again["learning_rate"] == shown["learning_rate"]


def test_an_instance_may_hold_a_schedule_too():
    instance = keras.optimizers.Adam(0.0625, beta_1=Jump(0.5, 0.5))
    group = kgo.Group("all", "**", rule=instance)
    number = optimizer("adam", groups=[kgo.Group("all", "**", kgo.rule("adam", beta_1=0.5))])
    made = kgo.GroupedOptimizer([group], learning_rate=0.0625, weight_decay=0.5, anchor="initial")
    assert_close(trained(made), trained(number), 1e-6)


def test_a_rate_from_the_base_follows_a_schedule_and_callbacks(tmp_path):
    def group(rate, ratio=None):
        return [kgo.Group("head", "head", learning_rate=rate, learning_rate_ratio=ratio)]

    base = Jump(0.0625, 0.015625, at=2)
    from_base = optimizer(groups=group(kgo.from_base(at_most), 0.5), learning_rate=base)
    by_hand = optimizer(groups=group(Jump(0.015625, 0.0078125, at=2)), learning_rate=base)
    assert_same(trained(from_base), trained(by_hand))

    model = make_model()
    made = optimizer(groups=group(kgo.from_base(at_most)), model=model)
    model.compile(optimizer=made, loss="mse")
    made.build(model.trainable_variables)
    for rate, own in ((0.25, 0.03125), (0.01, 0.01)):
        made.learning_rate = rate
        assert np.isclose(keras.ops.convert_to_numpy(made.learning_rates["head"]), own)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert np.isclose(keras.ops.convert_to_numpy(loaded.learning_rates["head"]), 0.01)
    assert "× 1" not in str(loaded.plan.to_dict()["groups"][0]["learning_rate"])


def test_bindings_name_each_schedule_with_what_it_drives():
    model = dense(a=3, b=2)
    made = kgo.GroupedOptimizer(
        [
            kgo.Group("a", "a", kgo.rule("adam", beta_1=Jump(0.9, 0.1))),
            kgo.Group("b", "b", learning_rate=kgo.from_base(at_most), weight_decay=Jump(0.0, 1.0)),
        ],
        learning_rate=Jump(0.5, 0.1),
        ratios=[("a/kernel", Jump(0.0, 1.0, 2)), ("b/bias", 0.5)],
        ema=kgo.EMA(Jump(0.5, 0.9)),
    )
    sharp = kgo.sharpness_aware(model, kgo.SAM(Jump(0.05, 0.1)))
    sharp.compile(optimizer=made, loss="mse")
    assert [str(binding) for binding in made.plan.bindings()] == [
        "a: learning_rate follows Jump",
        "a: rule.beta_1 follows Jump",
        "a: ratios[0] follows Jump",
        "b: learning_rate follows Jump",
        "b: weight_decay follows Jump",
        "all groups: ema.momentum follows Jump",
        "all groups: SAM.rho follows Jump",
    ]
