"""Any scalar may be a schedule: arguments of rules, rates from the base, and what drives what."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from cases import Jump, make_model, trained, weights_of
from cases import make_optimizer as optimizer
from comparing import assert_close, assert_same
from models import fit

import keras_groupopt as kgo


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
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
    )
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
