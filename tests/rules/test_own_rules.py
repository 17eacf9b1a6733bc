"""The rules of this package, alone in `model.compile`: learning, saving, precision, bad input."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from comparing import assert_close, assert_same, compiled_step

import keras_groupopt as kgo
from keras_groupopt.rules.registry import own_rules, rule_names

OWN_RULES = own_rules()
# Each rule of ours with a rate it learns at, and arguments that are not its defaults.
RULES: dict[str, tuple[float, dict[str, Any]]] = {
    "adabelief": (0.02, {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-8, "amsgrad": True}),
    "adafactor": (0.1, {"scale_parameter": False, "relative_limit": 0.5, "beta_2_decay": -0.5}),
    "adan": (0.02, {"beta_1": 0.9, "beta_2": 0.8, "beta_3": 0.95, "no_prox": True}),
    "lars": (1.0, {"momentum": 0.8, "trust_coefficient": 0.02, "epsilon": 1e-3, "nesterov": True}),
    "lookahead": (0.05, {"rule": kgo.rule("adam", beta_1=0.8), "sync_period": 3}),
    "muon": (0.05, {"momentum": 0.8, "ns_steps": 3, "rms_rate": None, "nesterov": False}),
    "nadamw": (0.02, {"beta_2": 0.95, "momentum_decay": 0.1, "weight_decay": 0.01}),
    "radam": (0.02, {"beta_2": 0.95}),
    "schedulefreeadamw": (0.02, {"beta_1": 0.8, "warmup_steps": 4, "r": 0.5}),
}
every_rule = pytest.mark.parametrize("name", RULES)


def test_every_rule_of_ours_has_a_row() -> None:
    assert set(OWN_RULES) == set(RULES)


def make(which: str, **options: Any) -> Any:
    rate, arguments = RULES[which]
    return OWN_RULES[which](rate, **{**arguments, **options})


def make_model(optimizer: Any = None, dtype: str | None = None) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = layers.Dense(8, activation="tanh", use_bias=False, dtype=dtype)
    last = layers.Dense(2, use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input((4,)), hidden, last])
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.float32(np.random.default_rng(5).normal(size=(32, 4)))
    return x, np.tanh(x[:, :2] - x[:, 1:3])


def arrays(variables: Any) -> dict[str, np.ndarray]:
    return {str(i): np.array(keras.ops.convert_to_numpy(v)) for i, v in enumerate(variables)}


@every_rule
def test_fit_learns_and_the_next_step_after_loading_is_the_same(name: str, tmp_path: Any) -> None:
    x, y = data()
    model = make_model(make(name))
    losses = model.fit(x, y, batch_size=8, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.85 * losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is OWN_RULES[name]
    assert_same(arrays(loaded.optimizer.variables), arrays(model.optimizer.variables))
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert_same(arrays(loaded.variables), arrays(model.variables))


@every_rule
def test_a_config_is_complete_and_plain(name: str) -> None:
    options = {"name": "mine", "weight_decay": 0.25, "global_clipnorm": 2.0}
    optimizer = make(name, **options)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    assert config["config"].items() >= options.items()
    again = keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    defaults = OWN_RULES[name]().get_config()
    changed = {n for n, value in make(name).get_config().items() if defaults[n] != value}
    assert changed >= set(RULES[name][1])


@every_rule
def test_a_plan_tells_the_memory_before_the_state_is_made(name: str) -> None:
    model = make_model()
    optimizer = kgo.GroupedOptimizer(rule=kgo.rule(name), model=model)
    expected = [variable.state_bytes for variable in optimizer.plan.variables]
    optimizer.build(model.trainable_variables)
    assert [variable.state_bytes for variable in optimizer.plan.variables] == expected
    # The base rate, its ratio, counters and the digest are of the whole.
    state = optimizer.state_dict()["groups"]["default"]
    assert all(sum(v.nbytes for v in state[v_.path].values()) == v_.state_bytes
               for v_ in optimizer.plan.variables)  # fmt: skip


@every_rule
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_step_of_low_precision_is_nan(name: str, dtype: str) -> None:
    sizes = (0.0, 1e-3, 100.0)
    weights = [keras.Variable([[0.5, -0.5], [1.0, 2.0]], dtype=dtype) for _ in sizes]
    optimizer = OWN_RULES[name](0.01)
    gradient = np.array([[1.0, -1.0], [-1.0, 0.0]])
    gradients = [keras.ops.convert_to_tensor(gradient * size, dtype) for size in sizes]
    for _ in range(12):
        optimizer.apply(gradients, weights)
    values = arrays([keras.ops.cast(v, "float32") for v in [*weights, *optimizer.variables]])
    assert all(np.isfinite(value).all() for value in values.values())
    slots = [v for v in optimizer.variables if len(v.shape) == 2]
    assert {keras.backend.standardize_dtype(v.dtype) for v in slots} <= {dtype}


@pytest.mark.parametrize("name", ["adan", "lookahead", "muon", "schedulefreeadamw"])
def test_mixed_precision_trains_float32_weights(name: str) -> None:
    x, y = data()
    optimizer = keras.optimizers.LossScaleOptimizer(make(name), initial_scale=2.0**7)
    model = make_model(optimizer, dtype="mixed_float16")
    losses = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert {keras.backend.standardize_dtype(v.dtype) for v in model.variables} == {"float32"}


@pytest.mark.parametrize("name", ["adan", "lookahead", "schedulefreeadamw"])
def test_accumulated_gradients_of_keras_are_one_batch(name: str) -> None:
    x, y = data()
    whole = make_model(make(name))
    whole.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
    parts = make_model(make(name, gradient_accumulation_steps=2))
    parts.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    assert_close(arrays(parts.variables), arrays(whole.variables), 2e-4)


# Hyperparameters that a schedule may drive: during a step they are scalars of the compiled step.
SCALARS: dict[str, list[str]] = {
    "adabelief": ["beta_1", "beta_2", "epsilon"],
    "adafactor": ["beta_2_decay", "epsilon_1", "epsilon_2", "clip_threshold", "relative_limit"],
    "adan": ["beta_1", "beta_2", "beta_3", "epsilon"],
    "lars": ["momentum", "trust_coefficient", "epsilon"],
    "lookahead": ["slow_step_size"],
    "muon": ["momentum", "muon_a", "muon_b", "muon_c", "epsilon"],
    "nadamw": ["beta_1", "beta_2", "epsilon", "momentum_decay"],
    "radam": ["beta_1", "beta_2", "epsilon"],
    "schedulefreeadamw": ["beta_1", "beta_2", "epsilon", "r", "weight_lr_power"],
}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in RULES), ("adabelief", {"rectify": True, "beta_2": 0.9})],
)
def test_a_hyperparameter_may_be_a_tensor(name: str, options: dict[str, Any]) -> None:
    numbers, driven = make(name, **options), make(name, **options)
    random = np.random.default_rng(2)
    start = np.float32(random.normal(size=(3, 4)))
    weights = [keras.Variable(start, name="w"), keras.Variable(start, name="w")]
    for optimizer, weight in zip((numbers, driven), weights, strict=True):
        optimizer.build([weight])
    drive(driven, SCALARS[name])
    step, traces = compiled_step(driven, weights[1:])
    for _ in range(8):
        gradient = keras.ops.convert_to_tensor(random.normal(size=(3, 4)), "float32")
        numbers.apply([gradient], [weights[0]])
        step([gradient])
    assert traces() == 1
    # 1 - β of a float32 β is off by 3e-5 of itself.
    assert_close(arrays(weights[1:]), arrays(weights[:1]), 2e-5)
    assert np.abs(arrays(weights)["0"] - start).max() > 0.01


def drive(optimizer: Any, names: list[str]) -> None:
    """Lets attributes be scalars of the step while a step is taken, as schedules do."""
    apply, values = optimizer.apply, {name: getattr(optimizer, name) for name in names}

    def driven(*arguments: Any) -> None:
        nothing = keras.ops.cast(optimizer.iterations, "float32") * 0.0
        for name, value in values.items():
            setattr(optimizer, name, nothing + value)
        try:
            apply(*arguments)
        finally:
            for name, value in values.items():
                setattr(optimizer, name, value)

    optimizer.apply = driven


# Bad input ------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
FRACTION, AMOUNT, POSITIVE = [-0.1, 1.0, NAN, "0.9", None], [-0.1, INF, NAN, "0"], [0.0, -1.0, INF]
SWITCH = [1, "yes", None]
BAD: dict[str, dict[str, list[Any]]] = {
    "adabelief": {
        "beta_1": FRACTION,
        "beta_2": FRACTION,
        "epsilon": AMOUNT,
        "rectify": SWITCH,
        "amsgrad": SWITCH,
    },
    "adafactor": {
        "beta_2_decay": [0.0, 0.8, -INF, NAN, None],
        "epsilon_1": AMOUNT,
        "epsilon_2": AMOUNT,
        "clip_threshold": POSITIVE,
        "relative_limit": POSITIVE,
        "relative_step": SWITCH,
        "scale_parameter": SWITCH,
    },
    "adan": {
        "beta_1": FRACTION,
        "beta_2": FRACTION,
        "beta_3": FRACTION,
        "epsilon": AMOUNT,
        "no_prox": SWITCH,
    },
    "lars": {
        "momentum": FRACTION,
        "trust_coefficient": POSITIVE,
        "epsilon": AMOUNT,
        "nesterov": SWITCH,
    },
    "lookahead": {"sync_period": [0, -1, 2.5, True, None], "slow_step_size": [-0.1, 1.5, NAN]},
    "muon": {
        "momentum": FRACTION,
        "nesterov": SWITCH,
        "ns_steps": [0, 1.5, None],
        "muon_a": [NAN, INF, "3"],
        "rms_rate": POSITIVE,
        "epsilon": AMOUNT,
    },
    "nadamw": {"beta_1": FRACTION, "beta_2": FRACTION, "epsilon": AMOUNT, "momentum_decay": AMOUNT},
    "radam": {"beta_1": FRACTION, "beta_2": FRACTION, "epsilon": AMOUNT},
    "schedulefreeadamw": {
        "beta_1": FRACTION,
        "beta_2": FRACTION,
        "epsilon": AMOUNT,
        "warmup_steps": [-1, 0.5],
        "r": AMOUNT,
        "weight_lr_power": AMOUNT,
    },
}
OF_ALL = {
    "learning_rate": [-0.1, NAN, INF],
    "weight_decay": AMOUNT,
    "clipnorm": POSITIVE,
    "global_clipnorm": POSITIVE,
    "clipvalue": POSITIVE,
}


def error_of(value: Any, default: Any) -> type[Exception]:
    """A TypeError for a value of another type than the default, which counts as a float if None."""
    wanted = type(default) if isinstance(default, int) else (int, float)
    is_right = isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool)
    return ValueError if is_right else TypeError


@every_rule
def test_a_bad_argument_is_refused_by_its_name(name: str) -> None:
    cls = OWN_RULES[name]
    defaults = {k: p.default for k, p in inspect.signature(cls.__init__).parameters.items()}
    for argument, values in {**BAD[name], **OF_ALL}.items():
        message = rf"`{argument}` must be .*\. Received: {argument}=.* in {cls.__name__}"
        for value in values:
            with pytest.raises(error_of(value, defaults.get(argument)), match=message):
                cls(**{argument: value})


# As the rule of a group -----------------------------------------------------------------------


LAYERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "lamb": ("lamb", {}),
    "lars": ("lars", {"trust_coefficient": 0.5}),
    "muon": ("muon", {}),
    "adafactor": ("adafactor", {}),
    "adafactor, relative": ("adafactor", {"relative_limit": 0.5}),
}


@pytest.mark.parametrize("row", LAYERWISE)
def test_a_group_that_is_split_moves_as_before(row: str) -> None:
    name, arguments = LAYERWISE[row]
    random = np.random.default_rng(3)
    models = [make_model(), make_model()]
    splits: list[Any] = [(), [kgo.Group("a", "dense"), kgo.Group("b", "dense_1")]]
    optimizers = [
        kgo.GroupedOptimizer(
            groups, model=m, rule=kgo.rule(name, **arguments), weight_decay=0.1, learning_rate=0.05
        )
        for m, groups in zip(models, splits, strict=True)
    ]
    for _ in range(4):
        gradients = [random.normal(size=v.shape) for v in models[0].trainable_variables]
        for model, optimizer in zip(models, optimizers, strict=True):
            tensors = [keras.ops.convert_to_tensor(g, "float32") for g in gradients]
            optimizer.apply(tensors, model.trainable_variables)
    assert_same(arrays(models[1].variables[:2]), arrays(models[0].variables[:2]))


@pytest.mark.parametrize("relative", [True, False])
def test_a_ratio_multiplies_every_step_of_adafactor(relative: bool) -> None:
    """Where 1/√t is the bound of the rate itself, all groups come to move alike."""
    moved = []
    rule = kgo.rule("adafactor", relative_step=relative, relative_limit=0.5, scale_parameter=False)
    for ratio in (1.0, 0.25):
        model = make_model()
        group = kgo.Group("all", "**", learning_rate_ratio=ratio)
        optimizer = kgo.GroupedOptimizer([group], model=model, rule=rule, learning_rate=0.5)
        gradients = [np.ones(v.shape) for v in model.trainable_variables]
        for _ in range(30):
            before = arrays(model.variables)["0"]
            tensors = [keras.ops.convert_to_tensor(g, "float32") for g in gradients]
            optimizer.apply(tensors, model.trainable_variables)
        moved.append(before - arrays(model.variables)["0"])
    np.testing.assert_allclose(moved[1], moved[0] / 4, rtol=1e-4)
    # At the thirtieth step: min(0.5, 1/√30), or 0.5.
    np.testing.assert_allclose(moved[0], 30**-0.5 if relative else 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["lookahead", "schedulefreeadamw"])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
def test_weights_loaded_after_the_build_and_before_the_first_step_are_where_it_starts(
    name: str, grouped: bool
) -> None:
    arguments = {"sync_period": 2} if name == "lookahead" else {}
    variables = [[keras.Variable([[1.0, 2.0]])], [keras.Variable([[1.0, 2.0]])]]
    for late, own in zip((False, True), variables, strict=True):
        if grouped:
            optimizer: Any = kgo.GroupedOptimizer(
                rule=kgo.rule(name, **arguments), learning_rate=0.1
            )
        else:
            optimizer = OWN_RULES[name](0.1, **arguments)
        if late:
            own[0].assign([[50.0, 60.0]])
            optimizer.build(own)
            own[0].assign([[1.0, 2.0]])
        for _ in range(4):
            optimizer.apply([keras.ops.convert_to_tensor([[1.0, -1.0]])], own)
    assert_same(arrays(variables[1]), arrays(variables[0]))


# Lookahead ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(rule_names()) - {"lookahead"}))
def test_lookahead_goes_around_any_rule(name: str) -> None:
    """Between two syncs it is that rule, and at a size of 1 all the time."""
    known, random = rule_names(), np.random.default_rng(4)
    start = np.float32(random.normal(size=(3, 4)))
    weights = [keras.Variable(start, name="w") for _ in range(3)]
    plain = [known[name](0.1), kgo.Lookahead(0.1, known[name], sync_period=2, slow_step_size=1.0)]
    half = kgo.Lookahead(0.1, name, sync_period=4, slow_step_size=0.0)
    for optimizer in (plain[0],):
        for option in ("weight_decay", "adam_weight_decay"):
            if hasattr(optimizer, option):
                setattr(optimizer, option, None)
    for step in range(4):
        gradient = keras.ops.convert_to_tensor(random.normal(size=(3, 4)), "float32")
        for optimizer, weight in zip([*plain, half], weights, strict=True):
            optimizer.apply([gradient], [weight])
        values = arrays(weights)
        assert_close({"": values["1"]}, {"": values["0"]})
        if step < 3:
            assert_same({"": values["2"]}, {"": values["0"]})
    assert_same({"": values["2"]}, {"": start})


def test_the_state_within_lookahead_is_its_own_and_saved_once() -> None:
    weights = [keras.Variable([1.0, 2.0], name="a"), keras.Variable([[3.0]], name="b")]
    optimizer = kgo.Lookahead(0.1, "nadam")
    optimizer.build(weights)
    # Counter, rate, Nadam's product, and two moments and slow weights of each variable.
    assert len(optimizer.variables) == 2 + 1 + 3 * 2
    assert len({id(variable) for variable in optimizer.variables}) == len(optimizer.variables)
    assert not hasattr(optimizer, "inner_optimizer")
    assert not hasattr(optimizer, "optimizers")


WRONG_RULES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an unknown name": (lambda: "adamm", ValueError, "Did you mean 'adam'"),
    "an instance": (lambda: keras.optimizers.Adam(), TypeError, "rate of its own"),
    "nothing": (lambda: None, TypeError, "`rule` of Lookahead must be"),
    "a number": (lambda: 3, TypeError, "rule=3"),
    "itself": (lambda: kgo.Lookahead, ValueError, "must not itself wrap"),
    "a grouped optimizer": (lambda: kgo.GroupedOptimizer, ValueError, "must not itself wrap"),
    "an unknown argument": (lambda: kgo.rule("adam", beta1=0.9), ValueError, "mean `beta_1`"),
    "a bad argument": (lambda: kgo.rule("radam", beta_1=2.0), ValueError, "beta_1=2.0"),
    "a decay": (lambda: kgo.rule("adamw", weight_decay=0.1), ValueError, "`weight_decay` must not"),
    "a clipping": (lambda: kgo.rule("adam", clipnorm=1.0), ValueError, "`clipnorm` must not"),
    "a schedule": (
        lambda: kgo.rule("adam", beta_1=keras.optimizers.schedules.CosineDecay(0.9, 10)),
        ValueError,
        "must be a number",
    ),
}


@pytest.mark.parametrize("case", WRONG_RULES)
def test_a_rule_that_lookahead_cannot_take_is_refused(case: str) -> None:
    make_rule, error, message = WRONG_RULES[case]
    with pytest.raises(error, match=message):
        kgo.Lookahead(rule=make_rule())


def test_a_group_of_lookahead_survives_a_config_with_the_rule_within() -> None:
    inner = kgo.rule("lion", beta_1=0.5)
    rule = kgo.rule("lookahead", rule=inner, sync_period=2)
    model, other = make_model(), make_model()
    optimizer = kgo.GroupedOptimizer(rule=rule, model=model)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = kgo.GroupedOptimizer.from_config(config)
    assert again.get_config() == config
    for each, its in ((optimizer, model), (again, other)):
        for _ in range(3):
            tensors = [keras.ops.ones(v.shape) for v in its.trainable_variables]
            each.apply(tensors, its.trainable_variables)
    assert_same(arrays(other.variables), arrays(model.variables))


# Muon -----------------------------------------------------------------------------------------


def make_network() -> Any:
    layers = keras.layers
    hidden = layers.Conv2D(3, 2, name="filters")
    return keras.Sequential([keras.Input((4, 4, 1)), hidden, layers.Flatten(), layers.Dense(2)])


@pytest.mark.parametrize("when", ["plan", "build"])
def test_what_is_no_matrix_is_refused_in_a_group_of_muon(when: str) -> None:
    model = make_network()
    optimizer = kgo.GroupedOptimizer([kgo.Group("all", "**", rule="muon")], model=model)
    message = (
        r"must be matrices\. Received: filters/kernel of shape \(2, 2, 1, 3\), filters/bias of "
        r"shape \(3,\), dense/bias of shape \(2,\) in group \"all\"\. .*muon_with_adamw"
    )
    with pytest.raises(ValueError, match=message):
        _ = optimizer.plan if when == "plan" else optimizer.build(model.trainable_variables)
    assert not optimizer.built


def test_what_is_no_matrix_is_refused_by_muon_alone() -> None:
    model = make_network()
    with pytest.raises(ValueError, match=r'filters/bias of .* in optimizer "muon'):
        kgo.Muon().build(model.trainable_variables)


def test_keras_own_muon_given_as_a_class_keeps_its_meaning() -> None:
    model = make_network()
    group = kgo.Group("all", "**", rule=keras.optimizers.Muon)
    optimizer = kgo.GroupedOptimizer([group], model=model)
    optimizer.build(model.trainable_variables)
    assert optimizer.plan["all"].group.rule.target is keras.optimizers.Muon


# Keras' own in bfloat16 -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_a_rule_of_keras_that_rests_in_bfloat16_is_named(name: str) -> None:
    for rule, rests in ((name, True), (kgo.rule(name, beta_2=0.99), False), ("radam", False)):
        weight = keras.Variable([1.0, 2.0], dtype="bfloat16", name="w")
        optimizer = kgo.GroupedOptimizer(rule=rule, learning_rate=0.1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.build([weight])
        assert (
            any("leaves these weights where they are: w" in str(w.message) for w in said) == rests
        )
        for _ in range(3):
            optimizer.apply([keras.ops.ones((2,), "bfloat16")], [weight])
        assert (
            float(keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32"))[0]) == 1
        ) == rests
