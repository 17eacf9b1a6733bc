"""The references are right: they agree with Keras, and with torch and Optax where formulas meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import keras
import numpy as np
import pytest
import references as reference
from grouped_reference import ReferenceGroup, clipped, grouped_step, make_rules

KO = keras.optimizers

RATE = 0.0625
# Of the way moved. Keras computes 1 - 0.999 in float32 and is off by 5e-5 of it.
ROUNDING = 3e-5

# name: (Keras optimizer, our rule), both of the same arguments
RULES: dict[str, tuple[Callable[..., Any], Callable[..., reference.Rule], dict[str, Any]]] = {
    "sgd": (KO.SGD, reference.SGD, {}),
    "sgd with momentum": (KO.SGD, reference.SGD, {"momentum": 0.9}),
    "sgd with nesterov": (KO.SGD, reference.SGD, {"momentum": 0.8, "nesterov": True}),
    "adam": (KO.Adam, reference.Adam, {}),
    "adam, own betas": (KO.Adam, reference.Adam, {"beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-2}),
    "adamw": (KO.AdamW, reference.AdamW, {"weight_decay": 0.1}),
    "rmsprop": (KO.RMSprop, reference.RMSprop, {}),
    "rmsprop with momentum": (KO.RMSprop, reference.RMSprop, {"momentum": 0.5, "rho": 0.8}),
    "rmsprop, centered": (KO.RMSprop, reference.RMSprop, {"centered": True, "epsilon": 1e-3}),
    "adagrad": (KO.Adagrad, reference.Adagrad, {}),
    "adagrad from 1": (KO.Adagrad, reference.Adagrad, {"initial_accumulator_value": 1.0}),
    "adamax": (KO.Adamax, reference.Adamax, {"epsilon": 1e-3}),
    "nadam": (KO.Nadam, reference.Nadam, {}),
    "adadelta": (KO.Adadelta, reference.Adadelta, {"epsilon": 1e-2}),
    "lion": (KO.Lion, reference.Lion, {}),
    "lamb": (KO.Lamb, reference.LAMB, {}),
    "adafactor": (KO.Adafactor, reference.Adafactor, {}),
    "adafactor, own bounds": (
        KO.Adafactor,
        reference.Adafactor,
        {"beta_2_decay": -0.6, "epsilon_2": 0.5, "clip_threshold": 0.5},
    ),
    "ftrl": (KO.Ftrl, reference.Ftrl, {}),
    "ftrl with l1 and l2": (
        KO.Ftrl,
        reference.Ftrl,
        {"l1_regularization_strength": 0.3, "l2_regularization_strength": 0.1},
    ),
}
SHAPES = {"kernel": (3, 4), "bias": (4,), "filters": (2, 3, 2)}


def start_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def gradients(steps: int) -> list[dict[str, np.ndarray]]:
    """Gradients whose size changes from step to step, so that a wrong memory shows."""
    rng = np.random.default_rng(1)
    return [
        {
            name: np.float32(rng.normal(size=shape) * (1 + step % 3))
            for name, shape in SHAPES.items()
        }
        for step in range(steps)
    ]


def run_keras(
    optimizer: keras.optimizers.Optimizer, history: list[dict[str, Any]]
) -> dict[str, np.ndarray]:
    weights = start_weights()
    variables = {n: keras.Variable(w, name=n) for n, w in weights.items()}
    optimizer.build(list(variables.values()))
    for step in history:
        optimizer.apply([keras.ops.convert_to_tensor(step[n]) for n in variables])
    return {n: keras.ops.convert_to_numpy(v.value) for n, v in variables.items()}


def run_groups(
    groups: list[ReferenceGroup], history: list[dict[str, Any]], rate: Any = RATE, **options: Any
) -> dict[str, np.ndarray]:
    weights: Mapping[str, np.ndarray] = start_weights()
    rules = make_rules(groups)
    for step, present in enumerate(history):
        weights = grouped_step(weights, present, groups, rules, step, rate, **options)
    return dict(weights)


def assert_same_moves(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Compares how far each variable came, which is less than the weights and shows more."""
    start = start_weights()
    for name in expected:
        move = np.max(np.abs(expected[name] - start[name]))
        assert move > 0.01, f"{name} hardly moved: nothing would be compared"
        error = np.max(np.abs(actual[name] - expected[name]))
        assert error <= tolerance * move, f"{name}: off by {error / move:.1e} of the way"


@pytest.mark.parametrize("case", RULES)
def test_a_reference_moves_as_the_keras_optimizer(case: str) -> None:
    keras_class, rule, arguments = RULES[case]
    history = gradients(12)
    expected = run_keras(keras_class(RATE, **arguments), history)
    actual = run_groups([ReferenceGroup(list(SHAPES), lambda: rule(**arguments))], history)
    assert_same_moves(actual, expected, ROUNDING)


@pytest.mark.parametrize("case", ["sgd", "adam", "lamb", "adafactor", "ftrl"])
def test_decay_before_a_reference_is_the_weight_decay_of_keras(case: str) -> None:
    keras_class, rule, _ = RULES[case]
    history = gradients(12)
    expected = run_keras(keras_class(RATE, weight_decay=0.5), history)
    group = ReferenceGroup(list(SHAPES), rule, weight_decay=0.5)
    assert_same_moves(run_groups([group], history), expected, ROUNDING)


# name: (torch optimizer of parameters, our rule). An epsilon of 0 where the two put it at
# different places, a momentum_decay of 1 because Keras has no such argument.
TORCH: dict[str, tuple[str, dict[str, Any], reference.Rule]] = {
    "sgd": ("SGD", {"momentum": 0.9}, reference.SGD(0.9)),
    "sgd with nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, reference.SGD(0.9, True)),
    "adam": ("Adam", {"eps": 0.0}, reference.Adam(epsilon=0.0)),
    "adamw": (
        "AdamW",
        {"eps": 0.0, "weight_decay": 0.3},
        reference.AdamW(epsilon=0.0, weight_decay=0.3),
    ),
    "radam": ("RAdam", {"eps": 1e-3}, reference.RAdam(epsilon=1e-3)),
    "radam, own betas": (
        "RAdam",
        {"betas": (0.8, 0.95)},
        reference.RAdam(beta_1=0.8, beta_2=0.95),
    ),
    "nadam": ("NAdam", {"eps": 1e-3, "momentum_decay": 1.0}, reference.Nadam(epsilon=1e-3)),
    "adamax": ("Adamax", {"eps": 0.0}, reference.Adamax(epsilon=0.0)),
    "rmsprop": (
        "RMSprop",
        {"alpha": 0.9, "eps": 0.0, "momentum": 0.5, "centered": True},
        reference.RMSprop(0.9, 0.5, 0.0, True),
    ),
    "adagrad": (
        "Adagrad",
        {"initial_accumulator_value": 0.1, "eps": 0.0},
        reference.Adagrad(0.1, 0.0),
    ),
    "adadelta": ("Adadelta", {"rho": 0.95, "eps": 1e-2}, reference.Adadelta(0.95, 1e-2)),
    "adafactor": ("Adafactor", {"eps": (1e-30, 1e-3)}, reference.Adafactor()),
}


@pytest.mark.parametrize("case", TORCH)
@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_a_reference_moves_as_the_torch_optimizer(case: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    class_name, options, rule = TORCH[case]
    rule = deepcopy(rule)
    weights = start_weights()[name]
    parameter = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float64, device="cpu"))
    options = {"weight_decay": 0.0} | options
    optimizer = getattr(torch.optim, class_name)([parameter], lr=RATE, **options)
    for step in gradients(50):
        parameter.grad = torch.tensor(step[name], dtype=torch.float64, device="cpu")
        optimizer.step()
        weights = rule.step(weights, step[name], RATE)
    # torch keeps a product of NAdam in float32 whatever the parameter
    tolerance = 1e-7 if class_name == "NAdam" else 1e-10
    assert_same_moves({name: weights}, {name: parameter.detach().numpy()}, tolerance)


# name: (Optax transformation, arguments, our rule)
OPTAX: dict[str, tuple[str, dict[str, Any], reference.Rule]] = {
    "sgd": ("sgd", {"momentum": 0.9}, reference.SGD(0.9)),
    "sgd with nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}, reference.SGD(0.9, True)),
    "adam": ("adam", {"eps": 0.0}, reference.Adam(epsilon=0.0)),
    "radam": ("radam", {"eps": 0.0, "b2": 0.95}, reference.RAdam(beta_2=0.95, epsilon=0.0)),
    "adamax": ("adamax", {"eps": 0.0}, reference.Adamax(epsilon=0.0)),
    "lion": ("lion", {"weight_decay": 0.0}, reference.Lion()),
    "lamb": ("lamb", {"eps": 1e-3}, reference.LAMB(epsilon=1e-3)),
    "rmsprop": (
        "rmsprop",
        {"eps": 1e-3, "centered": True, "momentum": 0.5},
        reference.RMSprop(0.9, 0.5, 1e-3, True),
    ),
    "adagrad": ("adagrad", {"eps": 1e-3}, reference.Adagrad(epsilon=1e-3)),
    "adadelta": ("adadelta", {"rho": 0.95, "eps": 1e-2}, reference.Adadelta(0.95, 1e-2)),
}


@pytest.mark.parametrize("case", OPTAX)
def test_a_reference_moves_as_the_optax_transformation(case: str) -> None:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    function, options, rule = OPTAX[case]
    rule = deepcopy(rule)
    weights = start_weights()["kernel"]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        transformation = getattr(optax, function)(RATE, **options)
        update = jax.jit(transformation.update)
        theirs = jax.numpy.asarray(weights, "float64")
        state = transformation.init(theirs)
        for step in gradients(20):
            gradient = jax.numpy.asarray(step["kernel"], "float64")
            move, state = update(gradient, state, theirs)
            theirs = optax.apply_updates(theirs, move)
            weights = rule.step(weights, step["kernel"], RATE)
        expected = np.asarray(theirs)
    assert expected.dtype == "float64"
    assert_same_moves({"kernel": weights}, {"kernel": expected}, 1e-10)


@pytest.mark.parametrize(
    ("option", "limit"), [("clipnorm", 0.5), ("global_clipnorm", 0.7), ("clipvalue", 0.2)]
)
def test_clipping_in_a_group_is_clipping_in_a_keras_optimizer(option: str, limit: float) -> None:
    history = gradients(10)
    expected = run_keras(KO.SGD(RATE, momentum=0.5, **{option: limit}), history)
    group = ReferenceGroup(list(SHAPES), lambda: reference.SGD(0.5), **{option: limit})
    assert_same_moves(run_groups([group], history), expected, ROUNDING)


def test_one_norm_over_a_single_group_is_the_global_norm_of_a_keras_optimizer() -> None:
    history = gradients(10)
    expected = run_keras(KO.Adam(RATE, global_clipnorm=0.7, weight_decay=0.1), history)
    group = ReferenceGroup(list(SHAPES), reference.Adam, weight_decay=0.1)
    actual = run_groups([group], history, global_clipnorm=0.7)
    assert_same_moves(actual, expected, ROUNDING)


def test_a_scheduled_base_is_the_schedule_of_a_keras_optimizer() -> None:
    history = gradients(10)
    schedule = keras.optimizers.schedules.PolynomialDecay(2 * RATE, 5, end_learning_rate=0.01)
    expected = run_keras(KO.SGD(schedule, momentum=0.9, weight_decay=0.1), history)

    def base(step: int) -> float:
        return 0.01 + (2 * RATE - 0.01) * (1 - min(step, 5) / 5)

    group = ReferenceGroup(list(SHAPES), lambda: reference.SGD(0.9), weight_decay=0.1)
    assert_same_moves(run_groups([group], history, base), expected, ROUNDING)


def test_groups_at_their_own_rates_are_keras_optimizers_of_those_rates() -> None:
    history = gradients(10)
    whole = {"bias": run_keras(KO.Lion(RATE), history)}
    whole["kernel"] = run_keras(KO.SGD(RATE / 4, weight_decay=0.1), history)
    expected = {name: run[name] for name, run in whole.items()}
    groups = [
        ReferenceGroup(["bias", "filters"], reference.Lion),
        ReferenceGroup(["kernel"], reference.SGD, learning_rate_ratio=0.25, weight_decay=0.1),
    ]
    actual = run_groups(groups, history)
    assert_same_moves(actual, expected, ROUNDING)


def one_step(
    groups: list[ReferenceGroup], gradients: dict[str, Any], weight: float = 0.0, **options: Any
) -> dict[str, float]:
    """One step of scalar variables, all at `weight`, rate 1 if not said."""
    options = {"step": 0, "learning_rate": 1.0} | options
    weights = {name: np.full(1, weight) for name in gradients}
    present = {name: None if g is None else np.full(1, g) for name, g in gradients.items()}
    moved = grouped_step(weights, present, groups, make_rules(groups), **options)
    return {name: float(w[0]) for name, w in moved.items()}


def test_the_norm_is_taken_over_all_groups() -> None:
    groups = [ReferenceGroup(["a"]), ReferenceGroup(["b"])]
    moved = one_step(groups, {"a": 3.0, "b": 4.0}, global_clipnorm=1.0)
    assert moved == pytest.approx({"a": -0.6, "b": -0.8})


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_the_clipping_of_a_group_comes_before_the_norm_over_all(option: str) -> None:
    groups = [ReferenceGroup(["a"], **{option: 3.0}), ReferenceGroup(["b"])]
    moved = one_step(groups, {"a": 30.0, "b": 4.0}, global_clipnorm=1.0)
    assert moved == pytest.approx({"a": -0.6, "b": -0.8})


def test_frozen_and_missing_gradients_are_in_no_norm_and_nothing_happens_to_them() -> None:
    groups = [
        ReferenceGroup(["a", "missing"], weight_decay=0.5),
        ReferenceGroup(["b"], weight_decay=0.5),
        ReferenceGroup(["frozen"], weight_decay=0.5, frozen=True),
    ]
    gradients = {"a": 3.0, "missing": None, "b": 4.0, "frozen": 100.0}
    moved = one_step(groups, gradients, weight=1.0, learning_rate=0.1, global_clipnorm=1.0)
    expected = {"a": 0.95 - 0.06, "missing": 1.0, "b": 0.95 - 0.08, "frozen": 1.0}
    assert moved == pytest.approx(expected)


def test_a_missing_gradient_still_counts_as_a_step() -> None:
    group = ReferenceGroup(["a"], reference.Adam)
    rules = make_rules([group])
    weights = {"a": np.zeros(1)}
    weights = grouped_step(weights, {"a": None}, [group], rules, 0, RATE)
    weights = grouped_step(weights, {"a": np.ones(1)}, [group], rules, 1, RATE)
    # m / (1 - 0.9²) over √(v / (1 - 0.999²)), with m = 0.1 and v = 0.001
    expected = -RATE * (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5
    assert float(weights["a"][0]) == pytest.approx(expected, rel=1e-5)


def test_decay_pulls_toward_the_anchor_at_the_rate_of_the_group() -> None:
    groups = [
        ReferenceGroup(
            ["anchored", "plain", "excluded"],
            learning_rate_ratio=0.5,
            weight_decay=0.1,
            anchor={"anchored": np.full(1, 5.0), "excluded": np.full(1, 5.0)},
            decayed={"anchored", "plain"},
        )
    ]
    gradients = {"anchored": 1.0, "plain": 1.0, "excluded": 1.0}
    moved = one_step(groups, gradients, weight=1.0, learning_rate=0.2)
    assert moved == pytest.approx({"anchored": 1.04 - 0.1, "plain": 0.99 - 0.1, "excluded": 0.9})


def test_schedules_are_read_at_the_steps_made_so_far() -> None:
    groups = [
        ReferenceGroup(["a"], learning_rate_ratio=lambda step: float(step >= 3)),
        ReferenceGroup(["own"], learning_rate=lambda step: step * 10.0, learning_rate_ratio=0.5),
        ReferenceGroup(["decayed"], weight_decay=lambda step: step / 10),
    ]
    gradients = {"a": 1.0, "own": 1.0, "decayed": 0.0}

    def base(step: int) -> float:
        return 1.0 / (1 + step)

    before = one_step(groups, gradients, weight=8.0, step=2, learning_rate=base)
    after = one_step(groups, gradients, weight=8.0, step=3, learning_rate=base)
    assert before == pytest.approx({"a": 8.0, "own": -2.0, "decayed": 8 - 8 * 0.2 / 3})
    assert after == pytest.approx({"a": 7.75, "own": -7.0, "decayed": 8 - 8 * 0.3 / 4})


def test_a_constraint_has_the_last_word() -> None:
    groups = [ReferenceGroup(["a", "b"], weight_decay=1.0)]
    constraints = {"a": lambda w: np.maximum(w, 0.25)}
    moved = one_step(
        groups, {"a": 1.0, "b": 1.0}, weight=1.0, learning_rate=0.5, constraints=constraints
    )
    assert moved == pytest.approx({"a": 0.25, "b": 0.0})


def test_lamb_is_given_the_decayed_weights() -> None:
    groups = [ReferenceGroup(["a"], lambda: reference.LAMB(epsilon=0.0), weight_decay=0.5)]
    moved = one_step(groups, {"a": 1.0}, weight=4.0, learning_rate=0.5)
    # 4 decays to 3, and Adam's first direction, 1, is stretched to the length of 3
    assert moved == pytest.approx({"a": 3.0 - 0.5 * 3.0})


def test_short_gradients_are_not_lengthened_by_clipping() -> None:
    np.testing.assert_array_equal(clipped(10.0, np.array([3.0]), np.array([4.0])), [[3.0], [4.0]])
    np.testing.assert_array_equal(clipped(1.0, np.zeros(2)), [[0.0, 0.0]])
