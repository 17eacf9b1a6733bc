"""Any scalar may be a schedule: arguments of rules, rates from the base, and what drives what."""

from __future__ import annotations

import cases
import keras
import numpy as np
import pytest
from test_ratios import Opening, moved, optimizer, trained, worst

import keras_groupopt as kgo

STEPS = 6


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """`first` before step `at`, then `then`."""

    def __init__(self, first, then, at=3):
        self.first, self.then, self.at = first, then, at

    def __call__(self, step):
        step = keras.ops.convert_to_tensor(step)
        return keras.ops.where(step < self.at, self.first, self.then)

    def get_config(self):
        return {"first": self.first, "then": self.then, "at": self.at}


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
    """A schedule that stays equals the number; one that changes equals it until then."""
    steps = range(STEPS)
    number = trained(with_field(rule, field, 0.5, others), steps)
    same = trained(with_field(rule, field, Falling(0.5, 0.5), others), steps)
    # A number may be taken in double precision where a tensor is not.
    assert worst(number, same) <= 1e-6
    before = trained(with_field(rule, field, Falling(0.5, 0.125), others), range(3))
    assert worst(before, trained(with_field(rule, field, 0.5, others), range(3))) <= 1e-6
    after = trained(with_field(rule, field, Falling(0.5, 0.125), others), steps)
    assert moved(number, after)["head/kernel"] > 1e-5
    assert moved(number, after)["head/bias"] == 0.0


def test_a_schedule_of_a_rule_runs_in_fit_and_is_saved(tmp_path):
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    y = np.zeros((32, 3), "float32")
    model = cases.make_model()
    made = optimizer(kgo.rule("adam", beta_1=Falling(0.9, 0.1)), learning_rate=0.01, model=model)
    model.compile(optimizer=made, loss="mse")
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    assert worst(cases.weights_of(model), cases.weights_of(loaded)) == 0.0
    assert [str(binding) for binding in loaded.optimizer.plan.bindings()] == [
        "default: rule.beta_1 follows Falling"
    ]


def test_an_instance_may_hold_a_schedule_too():
    instance = keras.optimizers.Adam(0.0625, beta_1=Falling(0.5, 0.5))
    group = kgo.Group("all", "**", rule=instance)
    number = optimizer("adam", groups=[kgo.Group("all", "**", kgo.rule("adam", beta_1=0.5))])
    made = kgo.GroupedOptimizer([group], learning_rate=0.0625, weight_decay=0.5, anchor="initial")
    assert worst(trained(made), trained(number)) <= 1e-6


class Forgetful(keras.optimizers.SGD):
    """Reads its momentum when it is made, and never again."""

    def __init__(self, learning_rate=0.01, speed=0.5, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.speed = speed
        self._kept = 1.0 - speed

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(learning_rate * self._kept * gradient)


BAD = {
    "a schedule that the rule does not read": (
        {"rule": kgo.rule(Forgetful, speed=Falling(0.5, 0.1))},
        ValueError,
        "does not read `speed`",
    ),
    "a schedule that is read only at the start": (
        {"rule": kgo.rule("adagrad", initial_accumulator_value=Falling(0.5, 0.1))},
        ValueError,
        "does not read `initial_accumulator_value`",
    ),
    "a schedule for a choice": (
        {"rule": kgo.rule("adam", amsgrad=Falling(0.5, 0.1))},
        TypeError,
        "`amsgrad` must be a number",
    ),
    "a schedule for no argument": (
        {"rule": kgo.rule("adam", beta_3=Falling(0.5, 0.1))},
        ValueError,
        "did you mean `beta_2`",
    ),
    "a schedule whose first value is out of range": (
        {"rule": kgo.rule("radam", beta_1=Falling(1.5, 0.1))},
        ValueError,
        "beta_1",
    ),
    "a base schedule that no group follows": (
        {
            "learning_rate": Falling(0.5, 0.1),
            "groups": [kgo.Group("all", "**", learning_rate=Falling(0.25, 0.1))],
        },
        ValueError,
        "every group has a rate of its own",
    ),
    "a decay schedule where nothing decays": (
        {"weight_decay": Falling(0.5, 0.1), "exclude_from_decay": "**"},
        ValueError,
        "`weight_decay` of GroupedOptimizer",
    ),
    "a schedule of the default rule that no group has": (
        {
            "rule": kgo.rule("adam", beta_1=Falling(0.9, 0.1)),
            "groups": [kgo.Group("all", "**", rule="sgd")],
        },
        ValueError,
        "every group has a rule of its own",
    ),
    "a ratio schedule of what is frozen": (
        {"ratios": [("head", Opening(2))], "groups": [kgo.Group("h", "head", frozen=True)]},
        ValueError,
        "all that it claims is frozen",
    ),
    "a base rate whose function is negative": (
        {"groups": [kgo.Group("h", "head", learning_rate=kgo.from_base(lambda base: -base))]},
        ValueError,
        "finite number >= 0",
    ),
}


@pytest.mark.parametrize(("options", "error", "said"), BAD.values(), ids=BAD)
def test_a_schedule_that_drives_nothing_is_refused(options, error, said):
    with pytest.raises(error) as caught:
        _ = kgo.GroupedOptimizer(model=cases.make_model(), **options).plan
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "function", [3.0, Falling(0.1, 0.1), lambda: 1.0, lambda base, step: base, float]
)
def test_a_rate_from_the_base_must_be_a_function_of_it(function):
    with pytest.raises(TypeError, match="`function` must"):
        kgo.from_base(function)


def test_a_function_of_the_base_has_no_place_but_as_rate_of_a_group():
    for name in ("learning_rate_ratio", "weight_decay"):
        with pytest.raises(TypeError, match=f"`{name}` must be"):
            kgo.Group("head", "head", **{name: kgo.from_base(at_most)})


def test_a_rate_from_the_base_follows_a_schedule_and_callbacks(tmp_path):
    def group(rate, ratio=None):
        return [kgo.Group("head", "head", learning_rate=rate, learning_rate_ratio=ratio)]

    base = Falling(0.0625, 0.015625, at=2)
    from_base = optimizer(groups=group(kgo.from_base(at_most), 0.5), learning_rate=base)
    by_hand = optimizer(groups=group(Falling(0.015625, 0.0078125, at=2)), learning_rate=base)
    assert worst(trained(from_base), trained(by_hand)) == 0.0

    model = cases.make_model()
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


def test_an_unregistered_function_of_the_base_warns_before_it_is_too_late():
    group = kgo.Group("head", "head", learning_rate=kgo.from_base(lambda base: base / 2))
    with pytest.warns(UserWarning, match='`learning_rate` of group "head" is from_base'):
        kgo.GroupedOptimizer([group])


def test_bindings_name_each_schedule_with_what_it_drives():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
    )
    made = kgo.GroupedOptimizer(
        [
            kgo.Group("a", "a", kgo.rule("adam", beta_1=Falling(0.9, 0.1))),
            kgo.Group("b", "b", learning_rate=kgo.from_base(at_most), weight_decay=Opening(4)),
        ],
        learning_rate=Falling(0.5, 0.1),
        ratios=[("a/kernel", Opening(2)), ("b/bias", 0.5)],
        ema=kgo.EMA(Falling(0.5, 0.9)),
    )
    sharp = kgo.sharpness_aware(model, kgo.SAM(Falling(0.05, 0.1)))
    sharp.compile(optimizer=made, loss="mse")
    assert [str(binding) for binding in made.plan.bindings()] == [
        "a: learning_rate follows Falling",
        "a: rule.beta_1 follows Falling",
        "a: ratios[0] follows Opening",
        "b: learning_rate follows Falling",
        "b: weight_decay follows Opening",
        "all groups: ema.momentum follows Falling",
        "all groups: SAM.rho follows Falling",
    ]
