"""RAdam alone: its numbers, its state, and its use in `model.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import references as reference

from keras_groupopt import RAdam
from keras_groupopt.rules.scalars import rectification

BACKEND = keras.backend.backend()
SHAPES = {"kernel": (3, 4), "bias": (4,)}
NAMES = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}

# Arguments of RAdam that change when and how the rectification sets in
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "early rectification": {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-4},
    "late rectification": {"beta_2": 0.9999, "epsilon": 1e-3},
    "decoupled decay": {"weight_decay": 0.3, "epsilon": 1e-4},
    "never rectified": {"beta_2": 0.6},
    "no memory": {"beta_1": 0.0, "beta_2": 0.0},
}


def start_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def gradients(steps: int) -> list[dict[str, np.ndarray]]:
    """Gradients over four orders of magnitude, so that the second moment matters."""
    rng = np.random.default_rng(1)
    return [
        {n: np.float32(rng.normal(size=s) * 10.0 ** rng.integers(-3, 1)) for n, s in SHAPES.items()}
        for _ in range(steps)
    ]


def make_variables(dtype: str = "float32") -> dict[str, keras.Variable]:
    return {n: keras.Variable(w, dtype=dtype, name=n) for n, w in start_weights().items()}


def numpy(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable), "float64")


def tensors(step: dict[str, np.ndarray], dtype: str = "float32") -> list[Any]:
    return [keras.ops.convert_to_tensor(g, dtype) for g in step.values()]


def assert_same_moves(actual: np.ndarray, expected: np.ndarray, start: Any, rtol: float) -> None:
    """Equal by how far the weights came, stricter than by their size, which rounds them too."""
    move = np.max(np.abs(expected - start))
    assert move > 0
    rounding = 4e-7 * np.max(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * move + rounding)


@pytest.mark.parametrize("case", OPTIONS)
def test_a_hundred_steps_are_those_of_torch(case: str) -> None:
    torch = pytest.importorskip("torch")
    options = NAMES | OPTIONS[case]
    variables, history = make_variables(), gradients(100)
    optimizer = RAdam(0.02, **OPTIONS[case])
    optimizer.build(list(variables.values()))
    parameters = {
        n: torch.nn.Parameter(torch.tensor(w, dtype=torch.float64, device="cpu"))
        for n, w in start_weights().items()
    }
    theirs = torch.optim.RAdam(
        parameters.values(),
        lr=0.02,
        betas=(options["beta_1"], options["beta_2"]),
        eps=options["epsilon"],
        weight_decay=options.get("weight_decay", 0.0),
        decoupled_weight_decay=True,
    )
    for step in history:
        optimizer.apply(tensors(step))
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(step[name], dtype=torch.float64, device="cpu")
        theirs.step()
        for name, start in start_weights().items():
            expected = parameters[name].detach().numpy()
            assert_same_moves(numpy(variables[name].value), expected, start, 1e-5)


@pytest.mark.parametrize("case", OPTIONS)
def test_the_steps_are_those_of_the_formula(case: str) -> None:
    options = dict(OPTIONS[case])
    weight_decay = options.pop("weight_decay", 0.0)
    variables, weights = make_variables(), start_weights()
    rules = {name: reference.RAdam(**options) for name in SHAPES}
    optimizer = RAdam(0.02, **OPTIONS[case])
    optimizer.build(list(variables.values()))
    for step in gradients(30):
        optimizer.apply(tensors(step))
        for name, rule in rules.items():
            w = reference.decayed(weights[name], 0.02, weight_decay)
            weights[name] = rule.step(w, step[name], 0.02)
    for name, start in start_weights().items():
        assert_same_moves(numpy(variables[name].value), weights[name], start, 1e-5)


@pytest.mark.parametrize("beta_2", [0.999, 0.9999, 0.99999])
def test_the_switch_falls_at_the_sixth_step_however_long_the_memory(beta_2: float) -> None:
    """There ρ is 5 within 1e-3, a difference of numbers up to 200,000 in its formula."""
    weight = keras.Variable([0.0, 0.0])
    optimizer = RAdam(1.0, beta_1=0.0, beta_2=beta_2, epsilon=0.0)
    gradient = np.array([1.0, 4.0])
    rule = reference.RAdam(0.0, beta_2, 0.0)
    for step in range(1, 9):
        weight.assign([0.0, 0.0])
        optimizer.apply([keras.ops.convert_to_tensor(gradient, "float32")], [weight])
        moved = numpy(weight.value)
        np.testing.assert_allclose(moved, rule.step(np.zeros(2), gradient, 1.0), rtol=1e-5)
        is_adaptive = moved[1] == pytest.approx(moved[0], rel=1e-4)
        assert is_adaptive == (step > 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("beta_2", [0.999, 0.95, 0.6])
@pytest.mark.parametrize("size", [0.0, 1e-3, 100.0])
def test_no_step_is_nan(dtype: str, beta_2: float, size: float) -> None:
    weight = keras.Variable([0.0, 0.0], dtype=dtype)
    optimizer = RAdam(0.01, beta_2=beta_2)
    for _ in range(10):
        optimizer.apply([keras.ops.convert_to_tensor([size, -size], dtype)], [weight])
    values = [numpy(variable.value) for variable in [weight, *optimizer.variables]]
    assert all(np.isfinite(value).all() for value in values)
    assert (np.sign(numpy(weight.value)) == np.sign([-size, size])).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_low_precision_is_kept_and_costs_only_rounding(dtype: str, tolerance: float) -> None:
    variables = make_variables(dtype)
    optimizer = RAdam(0.5, beta_2=0.99)
    optimizer.build(list(variables.values()))
    weights = {name: numpy(v.value) for name, v in variables.items()}
    start = dict(weights)
    rules = {name: reference.RAdam(beta_2=0.99) for name in SHAPES}
    rng = np.random.default_rng(3)
    for _ in range(20):
        step = {n: np.round(rng.normal(size=s) * 16 + 8) / 16 for n, s in SHAPES.items()}
        optimizer.apply(tensors(step, dtype))
        weights = {n: rules[n].step(w, step[n], 0.5) for n, w in weights.items()}
    slots = [v for v in optimizer.variables if "momentum" in v.name or "velocity" in v.name]
    assert len(slots) == 4
    assert {keras.backend.standardize_dtype(v.dtype) for v in slots} == {dtype}
    for name, variable in variables.items():
        assert_same_moves(numpy(variable.value), weights[name], start[name], tolerance)


def test_the_first_step_in_bfloat16_is_not_divided_by_a_rounded_correction() -> None:
    """In bfloat16 0.999 is 1, so that 1 - β₂ᵗ would be 0."""
    weight = keras.Variable([1.0], dtype="bfloat16")
    optimizer = RAdam(0.5, beta_1=0.999)
    optimizer.apply([keras.ops.convert_to_tensor([0.5], "bfloat16")], [weight])
    assert numpy(weight.value) == pytest.approx(0.75)


def test_the_rate_may_be_a_callable_that_returns_a_tensor() -> None:
    rate = keras.Variable(0.2, trainable=False)
    variables, expected = make_variables(), make_variables()
    called = RAdam(lambda: keras.ops.multiply(rate, 0.5))
    plain = RAdam(0.1)
    for step, value in zip(gradients(8), [0.2, 0.2, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4], strict=True):
        rate.assign(value)
        called.apply(tensors(step), list(variables.values()))
        plain.learning_rate = value / 2
        plain.apply(tensors(step), list(expected.values()))
    for name in SHAPES:
        np.testing.assert_allclose(
            numpy(variables[name].value), numpy(expected[name].value), rtol=1e-6
        )


@pytest.mark.parametrize("rate", [1, np.float32(0.5), np.int64(1)])
def test_the_rate_may_be_an_integer_or_a_numpy_scalar(rate: Any) -> None:
    assert float(RAdam(rate).learning_rate) == float(rate)


def test_update_step_alone_after_apply_is_the_second_step() -> None:
    """Nothing of the first step is left over, such as its bias correction."""
    weights = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    gradients = [keras.ops.convert_to_tensor(g) for g in ([0.5, -1.0], [2.0, 0.25])]
    optimizers = RAdam(0.1), RAdam(0.1)
    for optimizer, weight in zip(optimizers, weights, strict=True):
        optimizer.apply([gradients[0]], [weight])
    optimizers[0].apply([gradients[1]])
    native = weights[1].value if BACKEND == "tensorflow" else weights[1]
    optimizers[1].update_step(gradients[1], native, keras.ops.convert_to_tensor(0.1))
    np.testing.assert_allclose(numpy(weights[1].value), numpy(weights[0].value), rtol=1e-6)


@pytest.mark.parametrize("beta_2", [0.999, 0.95, 0.7])
def test_the_side_that_is_not_used_is_finite(beta_2: float) -> None:
    """The root would be of a negative number at ρ between 2 and 4."""
    steps = keras.ops.arange(1, 6, dtype="float32")
    trusted, factor = rectification(beta_2, steps)
    assert not keras.ops.convert_to_numpy(trusted).any()
    assert np.isfinite(keras.ops.convert_to_numpy(factor)).all()


def test_a_variable_without_gradient_stays_and_the_step_counts() -> None:
    variables = make_variables()
    optimizer = RAdam(0.1, weight_decay=0.5)
    optimizer.build(list(variables.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer.apply([tensors(gradients(1)[0])[0], None])
    np.testing.assert_array_equal(numpy(variables["bias"].value), start_weights()["bias"])
    assert not np.allclose(numpy(variables["kernel"].value), start_weights()["kernel"])
    step = gradients(2)[1]
    optimizer.apply(tensors(step))
    rule = reference.RAdam()
    rule.step(start_weights()["bias"], None, 0.1)
    w = reference.decayed(start_weights()["bias"], 0.1, 0.5)
    expected = rule.step(w, step["bias"], 0.1)
    np.testing.assert_allclose(numpy(variables["bias"].value), expected, rtol=1e-5)


def test_a_variable_that_takes_its_gradient_has_no_moments() -> None:
    weight = keras.Variable([1.0])
    scale = keras.Variable([1.0])
    scale.overwrite_with_gradient = True
    optimizer = RAdam(0.1)
    optimizer.build([scale, weight])
    assert len(optimizer.variables) == 2 + 2
    optimizer.apply([keras.ops.convert_to_tensor([g]) for g in (7.0, 1.0)])
    assert numpy(scale.value) == pytest.approx(7.0)
    assert numpy(weight.value) == pytest.approx(0.9)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="sparse gradients are TensorFlow's")
def test_repeated_rows_of_a_sparse_gradient_are_summed_before_they_are_squared() -> None:
    import tensorflow as tf

    rows, table = [1, 3, 1], np.zeros((4, 2), "float32")
    sparse, dense = (keras.Variable(table) for _ in range(2))
    optimizers = RAdam(0.1, beta_2=0.9), RAdam(0.1, beta_2=0.9)
    for step in range(1, 9):
        values = np.float32([[1, -2], [3, 4], [5, 6]]) / step
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, 2]))
        summed = table.copy()
        np.add.at(summed, rows, values)
        optimizers[0].apply([slices], [sparse])
        optimizers[1].apply([tf.constant(summed)], [dense])
    np.testing.assert_allclose(numpy(sparse.value), numpy(dense.value), rtol=1e-6)
    assert (numpy(sparse.value)[[0, 2]] == 0).all()
    assert (numpy(sparse.value)[[1, 3]] != 0).all()


@pytest.mark.skipif(BACKEND == "torch", reason="torch runs eagerly: there is no trace to count")
def test_repeated_steps_are_traced_once_and_are_right_before_and_after_the_switch() -> None:
    variables, history = make_variables(), gradients(12)
    optimizer = RAdam(0.02)
    optimizer.build(list(variables.values()))
    run, traces = _compiled(optimizer, variables)
    rules = {name: reference.RAdam() for name in SHAPES}
    weights: dict[str, np.ndarray] = dict(start_weights())
    for count, step in enumerate(history):
        rate = 0.02 if count < 8 else 0.05
        optimizer.learning_rate = rate
        run(tensors(step))
        weights = {n: rules[n].step(w, step[n], rate) for n, w in weights.items()}
    assert traces() == 1
    for name, start in start_weights().items():
        assert_same_moves(numpy(variables[name].value), weights[name], start, 1e-5)


def _compiled(
    optimizer: RAdam, variables: dict[str, keras.Variable]
) -> tuple[Callable[[list[Any]], None], Callable[[], int]]:
    """A compiled step on gradients, and how often it has been traced."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        function = tf.function(lambda grads: optimizer.apply(grads))
        return function, lambda: function.experimental_get_tracing_count()

    import jax

    traced = []

    @jax.jit
    def step(state: Any, grads: Any, weights: Any) -> Any:
        traced.append(1)
        return optimizer.stateless_apply(state, grads, weights)

    def run(grads: list[Any]) -> None:
        state = [v.value for v in optimizer.variables]
        weights, state = step(state, grads, [v.value for v in variables.values()])
        for variable, value in zip(optimizer.variables, state, strict=True):
            variable.assign(value)
        for variable, value in zip(variables.values(), weights, strict=True):
            variable.assign(value)

    return run, lambda: len(traced)


def make_model(optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def make_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = np.float32(rng.normal(size=(32, 4)))
    return x, np.tanh(x[:, :1] - x[:, 1:2])


COMPILED: dict[str, dict[str, Any]] = {"as compile chooses": {}}
if BACKEND != "torch":
    COMPILED["several steps per call"] = {"steps_per_execution": 2}
if BACKEND == "tensorflow":
    COMPILED["without XLA"] = {"jit_compile": False}
    COMPILED["eagerly"] = {"run_eagerly": True}


@pytest.mark.parametrize("how", COMPILED)
def test_fit_learns_and_counts_its_steps(how: str) -> None:
    model = make_model(RAdam(0.02, clipnorm=10.0), **COMPILED[how])
    losses = model.fit(*make_data(), batch_size=8, epochs=6, verbose=0).history["loss"]
    assert int(model.optimizer.iterations) == 24
    assert losses[-1] < 0.7 * losses[0]


def test_accumulated_gradients_and_averages_of_keras_work() -> None:
    x, y = make_data()
    whole = make_model(RAdam(0.05))
    whole.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
    parts = make_model(RAdam(0.05, gradient_accumulation_steps=2))
    parts.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    for expected, actual in zip(whole.get_weights(), parts.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    averaged = make_model(RAdam(0.05, use_ema=True))
    averaged.fit(x, y, batch_size=16, verbose=0)
    assert all(np.isfinite(w).all() for w in averaged.get_weights())


def test_the_next_step_after_loading_is_the_same(tmp_path: Any) -> None:
    x, y = make_data()
    model = make_model(RAdam(0.02, beta_2=0.95, weight_decay=0.01))
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is RAdam
    assert int(loaded.optimizer.iterations) == 8
    for each in (model, loaded):
        each.train_on_batch(x, y)
    for expected, actual in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_config_is_complete_and_makes_an_equal_optimizer() -> None:
    arguments = {
        "learning_rate": 0.25,
        "beta_1": 0.8,
        "beta_2": 0.95,
        "epsilon": 1e-4,
        "weight_decay": 0.01,
        "global_clipnorm": 2.0,
        "gradient_accumulation_steps": 3,
        "name": "mine",
    }
    config = RAdam(**arguments).get_config()
    assert config.items() >= arguments.items()
    assert RAdam.from_config(dict(config)).get_config() == config
    wrapped = keras.optimizers.serialize(RAdam(**arguments))
    assert wrapped["registered_name"] == "keras_groupopt>RAdam"
    assert keras.optimizers.deserialize(wrapped).get_config() == config


def test_a_schedule_survives_the_config() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    copy = RAdam.from_config(RAdam(schedule).get_config())
    copy.iterations.assign(20)
    assert float(copy.learning_rate) == pytest.approx(0.025)


@pytest.mark.parametrize("name", ["beta_1", "beta_2"])
@pytest.mark.parametrize("value", [1.0, -0.1, float("nan"), "0.9", None])
def test_a_decay_rate_outside_of_0_to_1_is_refused(name: str, value: Any) -> None:
    error = ValueError if isinstance(value, float) else TypeError
    with pytest.raises(error, match=rf"`{name}` must be a number in \[0, 1\)\. Received: {name}="):
        RAdam(**{name: value})


@pytest.mark.parametrize("value", [-1e-8, float("nan"), float("inf"), "small", None])
def test_an_epsilon_that_is_negative_or_not_finite_is_refused(value: Any) -> None:
    error = ValueError if isinstance(value, float) else TypeError
    with pytest.raises(error, match=r"`epsilon` must be a finite number >= 0\. Received: epsilon="):
        RAdam(epsilon=value)


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="momentum"):
        RAdam(momentum=0.9)
