"""Models with a gradient rule: what each rule must do, and what no rule may do.

`RULES` in `sharpness_cases.py` is the table of rules; a test below is a contract that each of them
keeps, or is about the training step that they share.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import chosen_gradients
import keras
import models
import network_reference
import numpy as np
import pytest
import saving_models
from keras import ops
from saving_models import X, Y
from sharpness_cases import (
    RULES,
    half_square,
    network,
    rule_of,
    sgd,
    step_on_weights,
    values_of,
    weight,
    weights_model,
)

import keras_groupopt as kgo
from keras_groupopt import backend

BACKEND = os.environ["KERAS_BACKEND"]
each_rule = pytest.mark.parametrize("name", RULES)
# The two ways to take a pass: always, and under a condition.
each_way_to_pass = pytest.mark.parametrize("name", ["SAM", "LookSAM"])
OWN_LOGS = {"sam_gap", "gradient_norm"}


# TensorFlow would trace the step of each model: only tests of compiled steps ask for that.
EAGERLY = BACKEND == "tensorflow"


def on_weights(
    rule: Any, values: Any = None, rate: float = 1.0, eagerly: bool = EAGERLY, **options: Any
) -> Any:
    """The weights 3 and 4, or others, with a rule and SGD."""
    model = kgo.sharpness_aware(weights_model(**(values or {"a": 3.0, "b": 4.0})), rule)
    model.compile(optimizer=sgd(model, rate, **options), loss=half_square, run_eagerly=eagerly)
    return model


# What a perturbation is ---------------------------------------------------------------------------


@each_rule
def test_the_gradient_is_taken_at_the_perturbed_weights(name):
    """SAM-04: with ½‖w‖² and a rate of 0.1, plain training would give 2.7 and 3.6."""
    model = on_weights(rule_of(name, 0.5), rate=0.1, eagerly=False)
    history = step_on_weights(model)
    epsilon = np.array(RULES[name][2])
    weights = np.array([3.0, 4.0])
    np.testing.assert_allclose(values_of(model), weights - 0.1 * (weights + epsilon), rtol=1e-6)
    (gap,), (norm,) = history["sam_gap"], history["gradient_norm"]
    assert gap == pytest.approx(0.5 * np.sum((weights + epsilon) ** 2) - 12.5, rel=1e-5)
    assert norm == pytest.approx(5.0)
    assert history["loss"] == [pytest.approx(12.5)]


def excluded_by_path(model: Any) -> dict[str, Any]:
    return {"exclude_from_perturbation": "c"}


def excluded_by_layer(model: Any) -> dict[str, Any]:
    return {"exclude_from_perturbation": model.get_layer("c")}


def frozen_layer(model: Any) -> dict[str, Any]:
    model.get_layer("c").trainable = False
    return {}


# How the third weight is kept out, the groups for it, and what it is afterwards.
KEPT_OUT: dict[str, tuple[Callable[[Any], dict[str, Any]], list[kgo.Group], float]] = {
    "excluded by path": (excluded_by_path, [], 0.0),
    "excluded by layer": (excluded_by_layer, [], 0.0),
    "frozen layer": (frozen_layer, [], 12.0),
    "frozen group": (lambda model: {}, [kgo.Group("c", "c", frozen=True)], 12.0),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in RULES for how in ("excluded by path", "frozen group")),
        ("SAM", "excluded by layer"),
        ("SAM", "frozen layer"),
    ],
)
def test_what_is_excluded_or_frozen_is_neither_perturbed_nor_counted(name, how):
    options_of, groups, third = KEPT_OUT[how]
    plain = weights_model(a=3.0, b=4.0, c=12.0)
    model = kgo.sharpness_aware(plain, rule_of(name, 0.5, **options_of(plain)))
    model.compile(optimizer=sgd(model, groups=groups), loss=half_square, run_eagerly=True)
    step_on_weights(model)
    expected = [*(-np.array(RULES[name][2])), third]
    np.testing.assert_allclose(values_of(model), expected, rtol=1e-5)


def test_the_norm_is_over_all_groups_whatever_their_rates():
    """SAM-09: a norm per tensor would perturb both by 0.5."""
    groups = [kgo.Group("a", "a", learning_rate_ratio=0.5), kgo.Group("b", "b")]
    model = on_weights(kgo.SAM(0.5), groups=groups)
    step_on_weights(model)
    np.testing.assert_allclose(values_of(model), [3.0 - 0.5 * 3.3, -0.4], rtol=1e-5)


@each_rule
def test_a_gradient_of_zero_perturbs_nothing(name):
    model = on_weights(rule_of(name), {"a": 0.0, "b": 0.0})
    history = step_on_weights(model, 3)
    assert values_of(model) == [0.0, 0.0]
    assert history["sam_gap"] == history["gradient_norm"] == [0.0]


@each_rule
def test_rho_may_be_a_schedule_over_optimizer_steps(name):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.0])
    model = on_weights(rule_of(name, schedule), gradient_accumulation_steps=2)
    step_on_weights(model, 2)
    epsilon = np.array(RULES[name][2])
    np.testing.assert_allclose(values_of(model), -epsilon, rtol=1e-5)
    step_on_weights(model, 2)
    # A rho of zero: w − w. A direction that was kept is of rounding only, as g is w here.
    np.testing.assert_allclose(values_of(model), [0.0, 0.0], atol=1e-6)


@pytest.mark.backends("tensorflow", "jax", reason="compiled steps")
@each_way_to_pass
def test_rho_changes_without_a_retrace(name):
    traces = []

    @keras.saving.register_keras_serializable(package="test_sharpness")
    class Counted(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            traces.append(1)
            return x

    inputs = keras.Input((1,))
    outputs = {"a": Counted(name="a")(weight(3.0, "weight")(inputs))}
    rule = rule_of(name, 0.0)
    model = kgo.SharpnessAwareModel(inputs, outputs, gradient_rule=rule)
    model.compile(optimizer=sgd(model), loss=half_square)
    step_on_weights(model)
    # The second step of LookSAM takes no pass, and may be another function: the third does.
    step_on_weights(model)
    count = len(traces)
    model.set_weights([np.float32([[3.0]])])
    rule.rho = 0.5
    assert rule.rho == 0.5
    assert step_on_weights(model)["sam_gap"] == [pytest.approx(0.5 * 3.5**2 - 4.5, rel=1e-5)]
    assert len(traces) == count


# What a pass must not touch -----------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="test_sharpness")
class Noise(keras.layers.Layer):
    """Adds noise, by a generator of its own or by the global one."""

    def __init__(self, own: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(3) if own else None

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.generator)


def busy() -> keras.Model:
    """A model with statistics and all sorts of random numbers."""
    layers = keras.layers
    inputs = keras.Input((4,))
    x = layers.Dense(6, kernel_regularizer="l2")(inputs)
    x = layers.BatchNormalization()(x)
    x = Noise()(layers.Dropout(0.3, seed=1)(x))
    x = layers.GaussianNoise(0.1)(layers.Dropout(0.3)(layers.ActivityRegularization(l2=0.1)(x)))
    if BACKEND != "jax":  # there Keras needs a generator that the layer makes
        x = Noise(own=False)(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def spectral() -> keras.Model:
    """A layer that sets its weights in each pass."""
    dense = keras.layers.Dense(2, name="head", kernel_initializer="ones")
    return keras.Sequential([keras.Input((4,)), keras.layers.SpectralNormalization(dense)])


def recurrent() -> keras.Model:
    gru = keras.layers.GRU(2, dropout=0.2, recurrent_dropout=0.2, seed=2)
    return keras.Sequential([keras.Input((3, 2)), gru])


def by_batches(model: Any, x: Any = X, batch_size: int = 4, **options: Any) -> Any:
    return models.fit(model, x=x, y=Y, batch_size=batch_size, **options)


@functools.cache
def trained(
    make: Callable[[], keras.Model], rule: Any, rate: float, eagerly: bool = False
) -> tuple[dict[str, list[float]], list[np.ndarray], Any]:
    """History, every variable, and what the global generators draw next; without a rule too."""
    keras.utils.set_random_seed(0)
    model = make() if rule is None else kgo.sharpness_aware(make(), rule())
    momentum = kgo.rule("sgd", momentum=0.5)
    optimizer = kgo.GroupedOptimizer(model=model, rule=momentum, learning_rate=rate)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], run_eagerly=eagerly)
    x = np.random.default_rng(0).normal(size=(12, *model.input_shape[1:])).astype("float32")
    keras.utils.set_random_seed(1)
    by_batches(model, x, epochs=2, validation_data=None if rate else (x, Y))
    drawn = [keras.random.uniform((3,)), *backend.random_states()]
    return model.history.history, models.arrays(model.variables), models.arrays(drawn)


@pytest.mark.parametrize(("name", "eagerly"), [("SAM", EAGERLY), ("LookSAM", False)])
def test_statistics_seeds_and_metrics_are_those_of_plain_training(name, eagerly):
    history, values, drawn = trained(busy, None, 0.0)
    rule = functools.partial(rule_of, name, 0.5)
    found, same_values, same_drawn = trained(busy, rule, 0.0, eagerly)
    assert set(found) == set(history) | OWN_LOGS
    for key, expected in history.items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-6, err_msg=key)
    assert all(np.abs(found["sam_gap"]) > 1e-3)
    # Weights do not move at a rate of 0; statistics are of float32, and seeds are exact.
    for value, expected in zip(same_values, values, strict=True):
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(value, expected)
    if BACKEND != "jax":  # where no compiled step draws from them
        np.testing.assert_equal(same_drawn, drawn)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (busy, kgo.SingleGradient),
        (busy, lambda: kgo.SAM(0.0)),
        (busy, lambda: rule_of("LookSAM", 0.0)),
        (spectral, kgo.SingleGradient),
        (spectral, lambda: kgo.SAM(0.0)),
        (recurrent, lambda: kgo.SAM(0.0)),
    ],
)
def test_one_gradient_or_a_rho_of_zero_is_plain_training(make, rule):
    """Also of a model that draws masks: both passes must have the same ones."""
    history, values, drawn = trained(make, None, 0.1)
    found, same_values, same_drawn = trained(make, rule, 0.1)
    passes = rule().perturbs
    assert set(found) == set(history) | (OWN_LOGS if passes else {"gradient_norm"})
    tolerance = {"rtol": 2e-5, "atol": 1e-6} if passes else {"rtol": 1e-6, "atol": 1e-7}
    models.assert_equal(same_values, values, **tolerance)
    np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
    np.testing.assert_allclose(found.get("sam_gap", 0.0), 0.0, atol=1e-6)
    if BACKEND != "jax":  # where no compiled step draws from them
        np.testing.assert_equal(same_drawn, drawn)


class InAnotherPrecision(kgo.GradientRule):
    """The gradients in float16."""

    def gradients(self, batch: kgo.Batch) -> Any:
        return [ops.cast(gradient, "float16") for gradient in batch.gradients]


def test_gradients_of_another_precision_are_cast():
    model = on_weights(InAnotherPrecision(), {"a": 3.0}, rate=0.5)
    step_on_weights(model)
    assert values_of(model) == [1.5]


@pytest.mark.parametrize("taken", ["sam_gap", "gradient_norm"])
def test_a_metric_of_the_users_is_not_hidden_by_one_of_ours(taken):
    model = kgo.sharpness_aware(weights_model(a=3.0), kgo.SAM(0.5))
    metric = keras.metrics.MeanMetricWrapper(lambda y, p: ops.zeros_like(p) + 7.0, name=taken)
    model.compile(sgd(model), half_square, metrics=[metric], run_eagerly=EAGERLY)
    ones = np.ones((1, 1), "float32")
    history = step_on_weights(model, validation_data=(ones, ones))
    assert history[taken] == history[f"val_{taken}"] == [7.0]
    assert {"gradient_norm", "sam_gap", "loss"} < set(history)


def as_float32(variable: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(ops.cast(variable.value, "float32")))


@pytest.mark.filterwarnings("ignore:Weights in float16/bfloat16 lose updates")
@pytest.mark.parametrize(
    ("name", "dtype", "size", "rho"),
    [
        *((name, "float32", 1e4, 0.0123) for name in RULES),
        ("SAM", "bfloat16", 1.0, 1e-3),
        ("LookSAM", "bfloat16", 1.0, 1e-3),
    ],
)
def test_weights_come_back_to_the_bit(name, dtype, size, rho):
    """SAM-11: taking the perturbation off again would round."""
    inputs = keras.Input((4,), dtype=dtype)
    outputs = keras.layers.Dense(3, dtype=dtype, bias_initializer="ones")(inputs)
    model = kgo.SharpnessAwareModel(inputs, outputs, gradient_rule=rule_of(name, rho))
    start = [
        size * (1 + np.random.default_rng(0).uniform(size=w.shape)) for w in model.get_weights()
    ]
    model.set_weights(start)
    before = [as_float32(variable) for variable in model.variables]
    model.compile(optimizer=sgd(model, 0.0), loss="mse", run_eagerly=True)
    logs = model.train_on_batch(X, np.ones((12, 3)), return_dict=True)
    assert logs["gradient_norm"] > 0
    np.testing.assert_equal([as_float32(variable) for variable in model.variables], before)


class FailsAt(keras.layers.Layer):
    """Counts its calls, and raises in one of them."""

    fails_at = calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("no memory left")
        return x

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class WithLayer(kgo.SharpnessAware, keras.Model):
    """Weights a and b, and a layer between; its `call` has no `training`."""

    def __init__(self, between: keras.layers.Layer, rule: Any) -> None:
        super().__init__(gradient_rule=rule)
        self.a, self.b, self.between = weight(3.0, "a"), weight(4.0, "b"), between
        self.output_names = ["a", "b"]

    def build(self, shape: Any) -> None:
        self.a.build(shape)
        self.b.build(shape)

    def call(self, x: Any) -> Any:
        return {"a": self.a(self.between(x)), "b": self.b(x)}


def with_layer(between: Any, rule: Any, **options: Any) -> Any:
    model = WithLayer(between, rule)
    model.build((None, 1))
    model.compile(sgd(model, **options), {"a": half_square, "b": half_square}, run_eagerly=True)
    # Keras calls the layers once to make the metrics.
    ones = np.ones((1, 1), "float32")
    model.test_on_batch(ones, {"a": ones, "b": ones})
    between.calls = 0
    return model


@each_way_to_pass
def test_weights_come_back_where_the_second_pass_raises(name):
    layer = FailsAt()
    model = with_layer(layer, rule_of(name, 0.5))
    layer.fails_at = 2
    with pytest.raises(Exception, match="no memory left"):
        step_on_weights(model)
    assert values_of(model) == [3.0, 4.0]
    assert layer.calls == 2
    if BACKEND == "jax":  # there `fit` has taken the variables' values
        return
    step_on_weights(model)
    np.testing.assert_allclose(values_of(model), [-0.3, -0.4], rtol=1e-5)


@pytest.mark.backends("torch", reason="weights are perturbed in place")
def test_only_what_is_perturbed_is_copied(monkeypatch):
    import torch

    model = on_weights(kgo.SAM(0.5, exclude_from_perturbation="b"), rate=0.1)
    step_on_weights(model)
    weights = {variable.value.data_ptr(): variable.path for variable in model.variables}
    copied = []

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.clone.default and args[0].data_ptr() in weights:
                copied.append(weights[args[0].data_ptr()])
            return function(*args, **(kwargs or {}))

    model.optimizer.build(model.trainable_variables)
    with Copies():
        model.compute_gradients(lambda: ops.sum(ops.square(model(np.ones((1, 1)))["a"])))
    assert copied == [model.get_layer("a").kernel.path]


# How many passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "steps", "calls"),
    [
        (kgo.SingleGradient, {}, 5, 5),
        (kgo.SAM, {}, 5, 10),
        (lambda: kgo.LookSAM(every=2), {}, 5, 5 + 3),
        (lambda: kgo.LookSAM(every=3), {"gradient_accumulation_steps": 2}, 8, 8 + 4),
    ],
    ids=["SingleGradient", "SAM", "LookSAM", "LookSAM, micro-batches"],
)
def test_a_pass_is_made_only_where_the_rule_asks_for_one(rule, options, steps, calls):
    layer = FailsAt()
    model = with_layer(layer, rule(), rate=0.01, **options)
    ones = np.ones((1, 1), "float32")
    for _ in range(steps):
        model.train_on_batch(ones, {"a": 0.0 * ones, "b": 0.0 * ones})
    assert layer.calls == calls


# Gradients of all sorts ---------------------------------------------------------------------------


class Twice(kgo.GradientRule):
    """Takes a pass, and another one only if it is told to."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.second = second

    def gradients(self, batch: kgo.Batch) -> Any:
        ahead = batch.gradients_at(batch.gradients)
        return batch.gradients_at(ahead, only_if=self.second)


@pytest.mark.parametrize(("second", "gap"), [(True, 0.5 * (9**2 - 3**2)), (False, 0.5 * 27)])
def test_the_gap_is_that_of_the_last_pass_that_was_made(second, gap):
    model = on_weights(Twice(second), {"a": 3.0})
    assert step_on_weights(model)["sam_gap"] == pytest.approx([gap])


@each_way_to_pass
def test_each_micro_batch_is_perturbed_by_its_own_gradient(name):
    """SAM-06: from the unperturbed weights, and only gradients of the second pass are summed."""
    model = kgo.sharpness_aware(network(), rule_of(name, 0.2))
    weights = dict(zip(network_reference.PATHS, model.get_weights(), strict=True))
    optimizer = sgd(model, 0.25, gradient_accumulation_steps=2)
    model.compile(optimizer=optimizer, loss="mse")
    by_batches(model, batch_size=2)
    rule = RULES[name][1](0.2)
    for step in range(3):
        parts = []
        for start in (4 * step, 4 * step + 2):
            at = functools.partial(
                network_reference.gradients_of, x=X[start : start + 2], y=Y[start : start + 2]
            )
            parts.append(rule(at, weights, step))
        weights = {p: w - 0.125 * (parts[0][p] + parts[1][p]) for p, w in weights.items()}
    models.assert_equal(model.get_weights(), list(weights.values()), rtol=2e-5, atol=1e-6)


class Unused(kgo.SharpnessAware, chosen_gradients.UnusedHead):
    """The output has one of the two weights."""


@pytest.mark.filterwarnings("ignore:No gradient for unused", "ignore:Gradients do not exist")
@each_way_to_pass
def test_a_variable_without_a_gradient_stays(name):
    model = Unused(3.0, gradient_rule=rule_of(name, 0.5))
    model.build((None, 1))
    model.compile(optimizer=sgd(model), loss=half_square)
    chosen_gradients.fit(model)
    np.testing.assert_allclose(values_of(model), [-0.5, 3.0], rtol=1e-5)


def looked_up(one_hot: bool) -> keras.Model:
    """An embedding, whose gradient on TensorFlow is sparse, or the same by multiplication."""
    if one_hot:
        inputs = keras.Input((3, 5))
        table = keras.layers.Dense(2, use_bias=False)(inputs)
    else:
        inputs = keras.Input((3,), dtype="int32")
        table = keras.layers.Embedding(5, 2)(inputs)
    hidden = keras.layers.Activation("tanh")(table)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(hidden)))


@pytest.mark.backends("tensorflow", reason="sparse gradients")
@each_rule
def test_a_sparse_gradient_is_perturbed_as_the_dense_one_it_stands_for(name):
    ids = np.random.default_rng(0).integers(0, 4, size=(12, 3))  # repeated, and one never
    weights = []
    for one_hot in (False, True):
        model = kgo.sharpness_aware(saving_models.fill(looked_up(one_hot)), rule_of(name, 0.3))
        # A condition is one in a compiled step only.
        eagerly = name != "LookSAM"
        model.compile(optimizer=sgd(model, 0.1), loss="mse", run_eagerly=eagerly)
        x = np.eye(5, dtype="float32")[ids] if one_hot else ids
        weights.append(by_batches(model, x, batch_size=3).get_weights())
    models.assert_equal(*weights, rtol=1e-5, atol=1e-6)


class Penalty(keras.layers.Layer):
    """Half the square of its input as a loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.5 * ops.mean(ops.square(x)))
        return x


def ignored(y_true: Any, y_pred: Any) -> Any:
    return 0.0 * ops.sum(y_pred, axis=-1)


def half(y_true: Any, y_pred: Any) -> Any:
    return 0.5 * half_square(y_true, y_pred)


def penalised(**values: float) -> keras.Model:
    inputs = keras.Input((1,))
    outputs = {n: Penalty(name=n)(weight(v, f"{n}_weight")(inputs)) for n, v in values.items()}
    return keras.Model(inputs, outputs)


def regularised(**values: float) -> keras.Model:
    inputs = keras.Input((1,))
    own = {"kernel_regularizer": keras.regularizers.L2(0.5)}
    return keras.Model(inputs, {n: weight(v, n, **own)(inputs) for n, v in values.items()})


@each_way_to_pass
@pytest.mark.parametrize(
    ("make", "loss", "options"),
    [
        (penalised, ignored, {}),
        (regularised, ignored, {}),
        (weights_model, half, {"sample_weight": {"a": np.full(1, 2.0), "b": np.full(1, 2.0)}}),
    ],
    ids=["add_loss", "regularizer", "sample_weight"],
)
def test_all_that_is_in_the_loss_is_in_the_second_pass(make, loss, options, name):
    model = kgo.sharpness_aware(make(a=3.0, b=4.0), rule_of(name, 0.5))
    model.compile(optimizer=sgd(model), loss={"a": loss, "b": loss}, run_eagerly=True)
    step_on_weights(model, **options)
    np.testing.assert_allclose(values_of(model), [-0.3, -0.4], rtol=1e-5)


# Loss scaling, and gradients that are not finite --------------------------------------------------

SCALED: dict[str, Callable[[Any, Any], Any]] = {
    "ours": lambda inner, scale: kgo.LossScaleOptimizer(inner, initial_scale=scale),
    "Keras' own": lambda inner, scale: keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=scale
    ),
}


def scaled_step(name: str, way: str, values: Any = (3.0, 4.0), loss: Any = half_square) -> Any:
    model = kgo.sharpness_aware(weights_model(a=values[0], b=values[1]), rule_of(name, 0.5))
    options = {"loss_scale_factor": 8.0} if way == "loss_scale_factor" else {}
    inner = sgd(model, **options)
    optimizer = SCALED[way](inner, 1024.0) if way in SCALED else inner
    # A condition is one in a compiled step only.
    eagerly = EAGERLY and name == "SAM"
    model.compile(optimizer=optimizer, loss=loss, run_eagerly=eagerly)
    return model, inner, step_on_weights(model)


@each_way_to_pass
@pytest.mark.parametrize("way", [*SCALED, "loss_scale_factor"])
def test_a_scaled_loss_gives_the_same_step_gap_and_norm(way, name):
    model, _, history = scaled_step(name, way)
    np.testing.assert_allclose(values_of(model), [-0.3, -0.4], rtol=1e-5)
    assert history["sam_gap"] == [pytest.approx(0.5 * 5.5**2 - 12.5, rel=1e-5)]
    assert history["gradient_norm"] == [pytest.approx(5.0)]


def beyond(y_true: Any, y_pred: Any) -> Any:
    """As `half_square` up to outputs of 4.1; infinite from about there on."""
    return half_square(y_true, y_pred) * ops.exp(1e5 * ops.sum(ops.relu(y_pred - 4.1), axis=-1))


@pytest.mark.filterwarnings("ignore:Steps skipped")
@each_way_to_pass
@pytest.mark.parametrize("way", ["none", "ours"])
@pytest.mark.parametrize(
    "values", [(3.0, float("inf")), (3.0, 4.0)], ids=["the first pass", "only the second pass"]
)
def test_where_a_pass_overflows_the_step_is_skipped(name, way, values):
    model, inner, history = scaled_step(name, way, values, beyond)
    assert values_of(model) == list(values)
    if way == "none":
        assert int(inner.skipped_steps.numpy()) == 1
    else:
        assert float(model.optimizer.dynamic_scale.numpy()) == 512.0
    assert int(inner.iterations.numpy()) == 0
    # Nothing was measured; 0 would read as flat.
    assert np.all(np.isnan(history["sam_gap"]))
    # It goes on as if that had not been.
    model.set_weights([np.full((1, 1), value, "float32") for value in (0.3, 0.4)])
    step_on_weights(model)
    assert np.all(np.isfinite(values_of(model)))
    assert values_of(model) != [0.3, 0.4]


def test_a_model_of_mixed_precision_trains_nearly_as_one_of_float32():
    """MP-02: `compile` puts Keras' loss scaling around a plain optimizer."""
    results = []
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        model = kgo.sharpness_aware(network(), rule_of("LookSAM", 0.2))
        model.compile(optimizer=sgd(model, 0.1), loss="mse")
        history = by_batches(model, epochs=2).history.history
        results.append((history["sam_gap"], *model.get_weights()))
    assert hasattr(model.optimizer, "inner_optimizer")
    for mixed, full in zip(*results, strict=True):
        np.testing.assert_allclose(mixed, full, rtol=0.05, atol=0.02)


# How a model is written and trained ---------------------------------------------------------------


class Mixed(kgo.SharpnessAware, saving_models.Subclassed):
    """The subclassed model, with a training step that asks a gradient rule."""


def mixed_in(rule: Any) -> Any:
    model = Mixed(gradient_rule=rule)
    model.build((None, 4))
    return saving_models.fill(model)


def shared(kind: str) -> Callable[[Any], Any]:
    return lambda rule: kgo.sharpness_aware(network(kind), rule)


class Batches(keras.utils.PyDataset):
    """The batches of `X` and `Y` in order."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(4 * index, 4 * index + 4)
        return X[rows], Y[rows]


def by_fit(model: Any) -> None:
    by_batches(model, epochs=2)


def by_train_on_batch(model: Any) -> None:
    for _ in range(2):
        for x, y in (Batches()[index] for index in range(3)):
            logs = model.train_on_batch(x, y, return_dict=True)
    assert "sam_gap" in logs


def by_dataset(model: Any) -> None:
    models.fit(model, x=Batches(), y=None, epochs=2)
    assert not OWN_LOGS & set(model.evaluate(Batches(), verbose=0, return_dict=True))
    assert model.predict(X, verbose=0).shape == (12, 2)


KINDS: dict[str, Callable[[Any], Any]] = {
    "nested": shared("nested"),
    "sequential": shared("sequential"),
    "twice nested": shared("twice nested"),
    "subclassed": mixed_in,
}
# Keras itself refuses these on torch.
AT_ONCE = {} if BACKEND == "torch" else {"steps_per_execution": 3}
NOT_BY_XLA = {} if BACKEND == "torch" else {"jit_compile": False}
TRAINED = [
    ("nested", by_fit, {}),
    ("sequential", by_dataset, NOT_BY_XLA),
    ("twice nested", by_train_on_batch, {}),
    ("subclassed", by_fit, AT_ONCE),
    ("nested", by_fit, {"run_eagerly": True}),
]


@pytest.mark.parametrize(("kind", "train", "options"), TRAINED)
def test_the_numbers_depend_on_neither_the_kind_of_model_nor_the_way_to_train(kind, train, options):
    """With LookSAM, which has a condition and state in its step."""
    model = KINDS[kind](rule_of("LookSAM", 0.2))
    start = model.get_weights()
    model.compile(optimizer=saving_models.optimizer(model), loss="mse", **options)
    train(model)
    batches = [Batches()[index] for _ in range(2) for index in range(3)]
    rule = RULES["LookSAM"][1](0.2)
    expected = network_reference.trained(start, batches, 0.125, None, rule)
    models.assert_equal(model.get_weights(), expected, rtol=3e-5, atol=5e-6)


@pytest.mark.parametrize("name", [name for name in RULES if name != "LookSAM"])
def test_a_plain_optimizer_will_do(name):
    pair = [kgo.sharpness_aware(network(), rule_of(name, 0.2)) for _ in range(2)]
    grouped = kgo.GroupedOptimizer(model=pair[1], rule="adam", learning_rate=0.001)
    for model, optimizer in zip(pair, ["adam", grouped], strict=True):
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        by_fit(model)
    models.assert_equal(*pair, rtol=1e-5, atol=1e-6)


def test_a_custom_loop_gets_its_gradients_from_the_model():
    model = kgo.sharpness_aware(weights_model(a=3.0, b=4.0), kgo.SAM(0.5))
    model.compile(optimizer=sgd(model))
    x = np.ones((1, 1), "float32")

    def loss() -> Any:
        return sum(0.5 * ops.sum(ops.square(y)) for y in model(x, training=True).values())

    if BACKEND == "jax":
        with pytest.raises(NotImplementedError, match="needs TensorFlow or torch"):
            model.compute_gradients(loss)
        return
    value, gradients = model.compute_gradients(loss)
    model.optimizer.apply(gradients, model.trainable_variables)
    assert float(ops.convert_to_numpy(value)) == pytest.approx(12.5)
    np.testing.assert_allclose(values_of(model), [-0.3, -0.4], rtol=1e-5)
