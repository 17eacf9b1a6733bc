"""Rates assigned apart from rules: `GroupedOptimizer(ratios=[(selector, ratio), ...])`."""

from __future__ import annotations

import logging

import cases
import keras
import numpy as np
import pytest

import keras_groupopt as kgo

RULES = {name: name for name in ("sgd", "adam", "nadam", "lion", "lamb", "rmsprop", "radam")} | {
    "adafactor": "adafactor",
    "muon of Keras": keras.optimizers.Muon,
    "lookahead": kgo.rule("lookahead", rule="nadam", sync_period=2),
    "schedule-free": kgo.rule("schedulefreeadamw", warmup_steps=2),
}
STEPS = 4


def trained(optimizer, steps=range(STEPS)):
    """The weights after some steps with the gradients of the case table."""
    model = cases.make_model()
    variables = cases.by_path(model)
    optimizer.bind(model)
    for step in steps:
        optimizer.apply(cases.tensors_of(cases.gradients(step), variables), variables.values())
    return cases.weights_of(model)


def worst(one, other):
    return max(np.max(np.abs(one[path] - other[path])) for path in one)


def moved(before, after):
    return {path: np.max(np.abs(after[path] - before[path])) for path in before}


def optimizer(rule="adam", **options):
    options = {"learning_rate": 0.0625, "weight_decay": 0.5, "anchor": "initial"} | options
    return kgo.GroupedOptimizer(rule=rule, **options)


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Opening(keras.optimizers.schedules.LearningRateSchedule):
    """0 before step `at`, then 1."""

    def __init__(self, at):
        self.at = at

    def __call__(self, step):
        return keras.ops.cast(keras.ops.convert_to_tensor(step) >= self.at, "float32")

    def get_config(self):
        return {"at": self.at}


@pytest.mark.parametrize("rule", RULES)
def test_a_ratio_moves_variables_as_a_group_with_that_ratio_does(rule):
    rule = RULES[rule]
    one_group = optimizer(rule, ratios=[("backbone", 0.5), ("head/bias", 0.25)])
    groups = [
        kgo.Group("backbone", "backbone", learning_rate_ratio=0.5),
        kgo.Group("bias", "head/bias", learning_rate_ratio=0.25),
    ]
    assert worst(trained(one_group), trained(optimizer(rule, groups=groups))) == 0.0


def test_the_ratio_of_a_variable_is_times_that_of_its_group():
    both = optimizer(
        groups=[kgo.Group("backbone", "backbone", learning_rate_ratio=0.5)],
        ratios={"backbone/kernel": 0.25, "head": 0.5},
    )
    groups = [
        kgo.Group("kernel", "backbone/kernel", learning_rate_ratio=0.125),
        kgo.Group("rest", ["backbone/bias", "head"], learning_rate_ratio=0.5),
    ]
    assert worst(trained(both), trained(optimizer(groups=groups))) == 0.0


def test_rules_and_rates_are_assigned_apart():
    groups = [kgo.Group("matrices", kgo.rank(2), rule=kgo.rule("sgd", momentum=0.5))]
    ratios = [("backbone", 0.5), ("head", 0.25)]
    by_hand = [
        kgo.Group("a", kgo.rank(2) & kgo.path("backbone"), groups[0].rule, 0.5),
        kgo.Group("b", kgo.rank(2) & kgo.path("head"), groups[0].rule, 0.25),
        kgo.Group("c", kgo.rank(max=1) & kgo.path("backbone"), learning_rate_ratio=0.5),
        kgo.Group("d", kgo.rank(max=1) & kgo.path("head"), learning_rate_ratio=0.25),
    ]
    apart = trained(optimizer(groups=groups, ratios=ratios))
    assert worst(apart, trained(optimizer(groups=by_hand))) == 0.0


def test_a_schedule_as_ratio_counts_optimizer_steps():
    scheduled = optimizer("sgd", ratios=[("backbone", Opening(2))])
    closed, open_ = (
        trained(scheduled, range(2)),
        trained(optimizer("sgd", ratios=[("backbone", Opening(2))])),
    )
    start = cases.initial_weights()
    assert moved(start, closed)["backbone/kernel"] == 0.0 < moved(start, closed)["head/kernel"]
    assert moved(start, open_)["backbone/kernel"] > 0.0


def test_a_ratio_of_one_or_for_all_variables_needs_no_rates_of_their_own():
    plain = trained(optimizer())
    assert worst(trained(optimizer(ratios=[("head", 1.0)])), plain) == 0.0
    halved = trained(optimizer(ratios=[("**", 0.5)]))
    assert worst(halved, trained(optimizer(learning_rate=0.03125))) == 0.0


@pytest.mark.parametrize(("overlap", "ratio"), [("first", 0.5), ("last", 0.25)])
def test_overlap_says_which_of_two_ratios_counts(overlap, ratio):
    two = optimizer(ratios=[("head", 0.5), ("head/kernel", 0.25)], overlap=overlap)
    one = optimizer(ratios=[("head/kernel", ratio), ("head/bias", 0.5), ("head/gain", 0.5)])
    assert worst(trained(two), trained(one)) == 0.0


def test_a_plan_shows_the_ratio_of_each_variable():
    model = cases.make_model()
    made = optimizer(ratios=[("backbone", 0.25), ("head/bias", Opening(1))], model=model)
    plan = made.plan.to_dict()["groups"][0]
    assert plan["learning_rate"] == "0.0625 × 0.25…1, Opening"
    ratios = {variable["path"]: variable["ratio"] for variable in plan["variables"]}
    assert ratios["backbone/kernel"] == 0.25
    assert ratios["head/bias"] == "Opening"
    assert ratios["head/kernel"] == 1.0
    lines: list[str] = []
    made.plan.summary(expand=True, print_fn=lines.append)
    assert any("Ratio" in line for line in lines)
    other = optimizer(ratios=[("backbone", 0.5)], model=model)
    assert "backbone/kernel: ratio 0.25 → 0.5" in str(made.plan.compare(other.plan))


def test_ratios_are_saved_with_the_optimizer(tmp_path):
    x, y = np.ones((8, 3), "float32"), np.zeros((8, 3), "float32")
    model = cases.make_model()
    ratios = [("backbone", 0.25), ("head/bias", Opening(3))]
    model.compile(optimizer=optimizer(ratios=ratios, model=model), loss="mse")
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    assert worst(cases.weights_of(model), cases.weights_of(loaded)) == 0.0
    again = loaded.optimizer.plan.to_dict()["groups"][0]
    assert again["learning_rate"] == model.optimizer.plan.to_dict()["groups"][0]["learning_rate"]


def test_a_change_of_ratios_is_logged_where_state_is_loaded(tmp_path, caplog):
    def model_with(ratio):
        model = cases.make_model()
        model.compile(optimizer=optimizer(ratios=[("head", ratio)], model=model), loss="mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model_with(0.5).save_weights(tmp_path / "a.weights.h5")
    for ratio, said in ((0.5, False), (0.25, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model_with(ratio).load_weights(tmp_path / "a.weights.h5")
        assert ("ratios: declared as" in caplog.text) == said


class Whole(keras.optimizers.SGD):
    """A rule that updates all variables in a way of its own."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(keras.ops.cast(learning_rate, variable.dtype) * gradient)


BAD = {
    "a ratio that matches nothing": ([("bakbone", 0.5)], ValueError, "backbone"),
    "two ratios for one variable": (
        [("head", 0.5), ("head/bias", 0.1)],
        ValueError,
        "Ratios must not overlap",
    ),
    "a negative ratio": ([("head", -0.5)], ValueError, "finite number >= 0"),
    "a ratio that is not finite": ([("head", float("nan"))], ValueError, "finite number >= 0"),
    "no ratio": ([("head", None)], TypeError, "A ratio must be"),
    "a function as ratio": ([("head", lambda step: 1.0)], TypeError, "schedule"),
    "a number": (0.5, TypeError, "list of pairs"),
    "no pair": ([("head", 0.5, 1)], TypeError, "pairs"),
    "no selector": ([(0.5, "head")], TypeError, "ratios[0]"),
}


@pytest.mark.parametrize(("ratios", "error", "said"), BAD.values(), ids=BAD)
def test_bad_ratios_are_refused(ratios, error, said):
    model = cases.make_model()
    with pytest.raises(error) as caught:
        _ = kgo.GroupedOptimizer(ratios=ratios, model=model).plan
    assert said in str(caught.value)


def test_a_rule_that_cannot_have_several_rates_is_refused():
    with pytest.raises(ValueError, match="must update its variables in `update_step`"):
        trained(optimizer(Whole, ratios=[("head", 0.5)]))


def test_ratios_cannot_be_set_later():
    with pytest.raises(AttributeError, match="fixed at construction"):
        optimizer().ratios = [("head", 0.5)]
