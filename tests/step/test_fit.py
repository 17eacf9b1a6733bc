"""The optimizer in `fit`, however the model is compiled, and in loops written by hand.

Final weights are compared with a run in NumPy and float64, so that each backend, and each way to
compile on it, gives the same numbers to the rounding of float32.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import models
import network_reference
import numpy as np
import pytest
import rate_meter
import saving_models
from rate_meter import RATIO, Rates
from saving_models import X, Y

import keras_groupopt as kgo

BACKEND = os.environ["KERAS_BACKEND"]
BATCH = 4
CLIPNORM = 0.5
SCHEDULE = keras.optimizers.schedules.InverseTimeDecay(0.125, 1, 0.25)

WAYS: dict[str, dict[str, Any]] = {"as is": {}, "eagerly": {"run_eagerly": True}}
if BACKEND != "torch":  # there Keras itself refuses the first, and the next needs a C++ compiler
    WAYS["several steps an execution"] = {"steps_per_execution": 3}
    WAYS["by XLA"] = {"jit_compile": True}
    WAYS["without XLA"] = {"jit_compile": False}


def optimizer_of(model: keras.Model | None, **changes: Any) -> kgo.GroupedOptimizer:
    settings = {"learning_rate": SCHEDULE, "global_clipnorm": CLIPNORM, "ema": kgo.EMA(0.5)}
    return saving_models.optimizer(model, **{**settings, **changes})


def new_model(kind: str = "nested", window: int | None = None, **options: Any) -> keras.Model:
    model = saving_models.fill(saving_models.MODELS[kind]())
    optimizer = optimizer_of(model, gradient_accumulation_steps=window)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def fit(model: keras.Model, epochs: int = 1, **options: Any) -> keras.Model:
    return models.fit(model, epochs, **{"x": X, "y": Y, "batch_size": BATCH, **options})


def batches(epochs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    starts = range(0, len(X), BATCH)
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for _ in range(epochs) for i in starts]


def reference(epochs: int, clipnorm: float | None = CLIPNORM) -> list[np.ndarray]:
    def rate(step: int) -> float:
        return 0.125 / (1 + 0.25 * step)

    start = saving_models.fill(saving_models.MODELS["nested"]()).get_weights()
    return network_reference.trained(start, batches(epochs), rate, clipnorm)


def check(model: keras.Model, epochs: int, optimizer: Any = None) -> None:
    """Weights are those of the reference, averages those of `fit`; the counter counts its steps."""
    optimizer = optimizer or model.optimizer
    assert int(optimizer.iterations) == len(batches(epochs))
    models.assert_equal(model.get_weights(), reference(epochs), rtol=2e-5, atol=2e-6)
    averages = models.arrays(mean for mean, _ in optimizer._average_pairs())
    models.assert_equal(averages, averages_of_fit(epochs), rtol=2e-5, atol=2e-6)


@functools.cache
def averages_of_fit(epochs: int) -> list[np.ndarray]:
    optimizer = fit(new_model(), epochs).optimizer
    return models.arrays(mean for mean, _ in optimizer._average_pairs())


def test_the_reference_is_clipped_and_decays():
    """Otherwise the comparisons below would not see clipping."""
    clipped, free = reference(2), reference(2, clipnorm=None)
    assert max(np.abs(a - b).max() for a, b in zip(clipped, free, strict=True)) > 1e-2


# fit ----------------------------------------------------------------------------------------------


def batch_by_batch(model: keras.Model) -> keras.Model:
    for x, y in batches(2):
        model.train_on_batch(x, y)
    return model


def compiled_in_between(model: keras.Model) -> keras.Model:
    fit(model).compile(optimizer=model.optimizer, loss="mse", metrics=["mae"])
    return fit(model)


def cloned(model: keras.Model) -> keras.Model:
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    config = model.optimizer.get_config()
    clone.compile(optimizer=kgo.GroupedOptimizer.from_config(config), loss="mse")
    return fit(clone, 2)


# How a model is compiled, how it is written, and how it is trained for two epochs.
TRAINED: dict[str, Callable[[], keras.Model]] = {
    **{way: lambda way=way: fit(new_model(**WAYS[way]), 2) for way in WAYS},
    **{
        kind: lambda kind=kind: fit(new_model(kind), 2)
        for kind in ("twice nested", "sequential", "subclassed")
    },
    "in micro-batches": lambda: fit(new_model(window=2), 2, batch_size=BATCH // 2),
    "batch by batch": lambda: batch_by_batch(new_model()),
    "compiled in between": lambda: compiled_in_between(new_model()),
    "a clone with an optimizer from the config": lambda: cloned(new_model()),
}


@pytest.mark.parametrize("how", TRAINED)
def test_training_gives_the_numbers_of_the_reference(how):
    check(TRAINED[how](), 2)


@pytest.mark.parametrize("way", ["as is", "eagerly"])
def test_several_fits_equal_one_with_evaluate_and_predict_between(way):
    model, straight = new_model(**WAYS[way]), new_model(**WAYS[way])
    fit(straight, 3)
    for _ in range(3):
        fit(model)
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
    saving_models.assert_equal(model, straight)


def test_a_cloned_model_cannot_take_the_optimizer_itself():
    model = new_model()
    fit(model)
    clone = keras.models.clone_model(model)
    clone.set_weights(before := model.get_weights())
    clone.compile(optimizer=model.optimizer, loss="mse")
    with pytest.raises(ValueError, match=r"unknown .*kernel.*another model"):
        fit(clone, callbacks=[kgo.GroupLogger()])
    models.assert_equal(clone, before)
    model.compile(optimizer=model.optimizer, loss="mse")
    fit(model)
    check(model, 2)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "in a loss scale"])
def test_a_layer_frozen_while_its_group_has_state_rests_and_goes_on(scaled):
    model = new_model()
    if scaled:
        outer = kgo.LossScaleOptimizer(model.optimizer, initial_scale=8.0)
        model.compile(optimizer=outer, loss="mse")
    fit(model)
    body, head = model.get_layer("body"), model.get_layer("head")
    before, before_head = body.get_weights(), head.get_weights()
    for trainable in (False, True):
        body.trainable = trainable
        model.compile(optimizer=model.optimizer, loss="mse")
        fit(model)
        if not trainable:
            models.assert_equal(body, before)
    assert np.abs(head.get_weights()[0] - before_head[0]).max() > 1e-3
    assert np.abs(body.get_weights()[0] - before[0]).max() > 1e-4


def test_an_optimizer_built_in_another_order_than_the_models_never_mixes_up_layers(backend):
    model = models.dense(still=4, moving=4)
    still = kgo.Group("still", "still", learning_rate_ratio=0.0)
    models.compiled(model, still, rule="sgd", learning_rate=0.1)
    model.optimizer.build(model.trainable_variables[::-1])
    before = models.arrays(model)
    if backend == "jax":
        # Keras passes values there, which only their order tells apart.
        with pytest.raises(ValueError, match=r"built with moving/bias first"):
            models.fit(model, y=models.X)
    else:
        models.fit(model, y=models.X)
        assert not np.array_equal(models.arrays(model)[2], before[2])
    models.assert_equal(models.arrays(model)[:2], before[:2])


# Mixed precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("policy", "wrap"),
    [
        ("mixed_float16", lambda inner: inner),  # Keras wraps it
        ("mixed_float16", kgo.LossScaleOptimizer),
        ("mixed_bfloat16", lambda inner: inner),
    ],
    ids=["mixed_float16", "our loss scale", "mixed_bfloat16"],
)
def test_mixed_precision_moves_each_group_at_its_rate_and_clips_what_is_unscaled(policy, wrap, way):
    keras.config.set_dtype_policy(policy)
    model = rate_meter.make_model()
    # Four gradients of 1 have the norm 2, so each becomes a quarter.
    optimizer = rate_meter.make_optimizer(model, learning_rate=0.5, global_clipnorm=0.5)
    model.compile(optimizer=wrap(optimizer), loss=rate_meter.mean_output, **WAYS[way])
    rates = Rates()
    rate_meter.fit(model, 2, callbacks=[rates])
    assert rates.by_group["head"] == pytest.approx([0.125, 0.125], rel=1e-6)
    assert rates.by_group["backbone"] == pytest.approx([0.125 * RATIO] * 2, rel=1e-6)
    assert all(variable.dtype == "float32" for variable in model.trainable_variables)
    assert int(optimizer.iterations) == 2 * rate_meter.BATCHES


# Loops written by hand ----------------------------------------------------------------------------


def tensorflow_loop(model: keras.Model, optimizer: Any, compiled: bool) -> None:
    import tensorflow as tf

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        return loss

    step = tf.function(train_step) if compiled else train_step
    for x, y in batches(2):
        step(tf.constant(x), tf.constant(y))


def torch_loop(model: keras.Model, optimizer: Any, compiled: bool) -> None:
    import torch

    for x, y in batches(2):
        outputs = model(torch.from_numpy(x), training=True)
        loss = keras.ops.mean(keras.losses.mean_squared_error(torch.from_numpy(y), outputs))
        model.zero_grad()
        loss.backward()
        gradients = [variable.value.grad for variable in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)


def jax_loop(model: keras.Model, optimizer: Any, compiled: bool) -> None:
    import jax

    def loss_and_updates(trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        outputs, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        loss = keras.ops.mean(keras.losses.mean_squared_error(y, outputs))
        return loss, non_trainable

    gradient_of = jax.value_and_grad(loss_and_updates, has_aux=True)

    def train_step(state: Any, x: Any, y: Any) -> Any:
        trainable, non_trainable, slots = state
        (_, non_trainable), gradients = gradient_of(trainable, non_trainable, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return trainable, non_trainable, slots

    step = jax.jit(train_step) if compiled else train_step
    optimizer.build(model.trainable_variables)
    owners = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple([variable.value for variable in variables] for variables in owners)
    for x, y in batches(2):
        state = step(state, x, y)
    for variables, values in zip(owners, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


LOOPS: dict[str, Callable[[keras.Model, Any, bool], None]] = {
    "tensorflow": tensorflow_loop,
    "torch": torch_loop,
    "jax": jax_loop,
}


@pytest.mark.parametrize("compiled", [True, False] if BACKEND != "torch" else [False])
@pytest.mark.parametrize("bound", [True, False], ids=["model=", "no model"])
def test_a_loop_as_the_keras_guides_write_it_gives_the_numbers_of_the_reference(bound, compiled):
    model = saving_models.fill(saving_models.MODELS["sequential"]())
    optimizer = optimizer_of(model if bound else None)
    LOOPS[BACKEND](model, optimizer, compiled)
    check(model, 2, optimizer)


def test_fit_goes_on_from_a_loop_written_by_hand():
    model = new_model()
    LOOPS[BACKEND](model, model.optimizer, False)
    fit(model, callbacks=[kgo.GroupLogger()])
    check(model, 3)


# Subclasses override what Keras' protocol and the public methods name ---------------------------


class Counting(kgo.GroupedOptimizer):
    """Overrides `apply` with Keras' signature, and `rebuild`."""

    calls: tuple[str, ...] = ()

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls += ("apply",)
        super().apply(grads, trainable_variables)

    def rebuild(self, model: Any, groups: Any = None) -> Any:
        self.calls += ("rebuild",)
        return super().rebuild(model, groups)


class Outer(kgo.LossScaleOptimizer):
    calls: tuple[str, ...] = ()

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls += ("apply",)
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("wrap", [lambda inner: inner, kgo.LossScaleOptimizer, Outer])
def test_an_apply_with_the_signature_of_keras_trains(wrap):
    model = models.dense()
    inner = Counting(model=model, learning_rate=0.1)
    optimizer = wrap(inner)
    model.compile(optimizer=optimizer, loss="mse")
    before = model.get_weights()
    models.fit(model)
    assert not np.array_equal(before[0], model.get_weights()[0])
    assert "apply" in inner.calls
    assert not isinstance(optimizer, Outer) or "apply" in optimizer.calls


def test_add_group_calls_the_rebuild_of_a_subclass():
    model = models.dense()
    model.get_layer("enc").trainable = False
    optimizer = Counting(model=model, learning_rate=0.1)
    model.compile(optimizer=optimizer, loss="mse")
    models.fit(model)
    model.get_layer("enc").trainable = True
    optimizer.add_group(kgo.Group("enc", "enc"))
    assert "rebuild" in optimizer.calls


@pytest.mark.parametrize("build", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_count_of_weights_is_refused_by_a_loss_scale_built_or_not(count, build):
    model = models.compiled(models.dense(), wrap=kgo.LossScaleOptimizer)
    optimizer = model.optimizer
    if build:
        optimizer.build(model.trainable_variables)
    before = models.arrays(optimizer.variables)
    with pytest.raises(ValueError, match="values for"):
        optimizer.set_weights([np.float32(7.0)] * count)
    models.assert_equal(models.arrays(optimizer.variables), before)
