"""Averages over optimizer steps, against float64 and torch's own; where they begin."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import models
import numpy as np
import pytest
from cases import (
    by_path,
    gradients,
    make_model,
    numpy_of,
    stairs,
    stairs_at,
    take_step,
    weights_of,
)
from chosen_gradients import fit, mean_output, towers
from comparing import Arrays, compiled_step, stepper
from models import number, sgd

import keras_groupopt as kgo


def averages_of(optimizer: Any, model: Any) -> dict[str, np.ndarray]:
    """The averages, by path."""
    paths = {id(variable): path for path, variable in by_path(model).items()}
    return {paths[id(v)]: numpy_of(mean) for mean, v in optimizer._average_pairs()}


# Against float64 ------------------------------------------------------------------------------


def transcript(
    weights: Sequence[Arrays],
    momentum: Callable[[int, int], float],
    every: int = 1,
    start: int = 0,
) -> list[Arrays]:
    """The averages after each step, from the weights before the first and after each.

    Args:
        weights: Weights by path.
        momentum: From the averages made so far and the optimizer step to β.
        every: Steps from one average to the next.
        start: The step at which the average is the weights.
    """
    means: list[Arrays] = [{path: np.array(w, "float64") for path, w in weights[0].items()}]
    made = 0
    for step, now in enumerate(weights[1:], 1):
        if step <= start:
            means.append(dict(now))
        elif (step - start) % every:
            means.append(means[-1])
        else:
            beta = momentum(made, step - 1)
            means.append({p: beta * v + (1 - beta) * now[p] for p, v in means[-1].items()})
            made += 1
    return means[1:]


def swa(made: int, step: int) -> float:
    return made / (made + 1)


def warm(beta: float) -> Callable[[int, int], float]:
    return lambda made, step: min(beta, (1 + made) / (10 + made))


# What is declared, and what it means.
TRANSCRIPTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ema": ({"ema": kgo.EMA(0.9)}, {"momentum": lambda made, step: 0.9}),
    "ema that warms up": ({"ema": kgo.EMA(0.6, warmup=True)}, {"momentum": warm(0.6)}),
    "ema now and then": (
        {"ema": kgo.EMA(0.9, every=3, start=4, warmup=True)},
        {"momentum": warm(0.9), "every": 3, "start": 4},
    ),
    "ema on a schedule": (
        {"ema": kgo.EMA(stairs(0.8))},
        {"momentum": lambda made, step: stairs_at(0.8)(step)},
    ),
    "swa": ({"ema": kgo.SWA()}, {"momentum": swa}),
    "swa now and then": (
        {"ema": kgo.SWA(every=4, start=5)},
        {"momentum": swa, "every": 4, "start": 5},
    ),
    "use_ema": (
        {"use_ema": True, "ema_momentum": 0.75},
        {"momentum": lambda made, step: 0.75 if made else 0.0},
    ),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "compiled") for name in TRANSCRIPTS),
        ("ema now and then", "eager"),
        ("swa", "eager"),
    ],
)
def test_twelve_steps_match_the_float64_transcript(name, way):
    options, meaning = TRANSCRIPTS[name]
    # A compiled step is of micro-batches, of which two make an optimizer step.
    size = 2 if way == "compiled" else 1
    model = make_model()
    by_path(model)["backbone/kernel"].constraint = keras.constraints.NonNeg()
    window = {"gradient_accumulation_steps": size} if size > 1 else {}
    optimizer = sgd(model, learning_rate=0.125, **window, **options)
    step = stepper(optimizer, model, way, traced_once=True)
    weights, found = [weights_of(model)], []
    for place in range(12):
        for part in range(size):
            step(gradients(size * place + part))
        weights.append(weights_of(model))
        found.append(averages_of(optimizer, model))
    for mean, expected in zip(found, transcript(weights, **meaning), strict=True):
        assert list(mean) == list(expected)
        for path, value in expected.items():
            np.testing.assert_allclose(mean[path], value, rtol=2e-6, atol=2e-6, err_msg=path)
    # The constraint acted, and came first.
    assert any(np.any(each["backbone/kernel"] == 0) for each in weights)


@pytest.mark.backends("torch", reason="it asks torch")
@pytest.mark.parametrize("declared", ["ema", "swa"])
def test_the_transcript_is_that_of_torchs_own_averages(declared):
    import torch

    torches = torch.optim.swa_utils
    functions = {"ema": {"multi_avg_fn": torches.get_ema_multi_avg_fn(0.9)}, "swa": {}}
    weights = [gradients(place) for place in range(7)]
    module = torch.nn.ParameterList([torch.tensor(value) for value in weights[0].values()])
    average = torches.AveragedModel(module, **functions[declared])
    if declared == "ema":
        average.update_parameters(module)  # The first one copies.
    for now, expected in zip(
        weights[1:], transcript(weights, **TRANSCRIPTS[declared][1]), strict=True
    ):
        for parameter, value in zip(module, now.values(), strict=True):
            parameter.data = torch.tensor(value)
        average.update_parameters(module)
        for mean, value in zip(average.module, expected.values(), strict=True):
            np.testing.assert_allclose(mean.detach(), value, rtol=2e-6, atol=2e-6)


def test_what_rests_is_averaged_as_it_is():
    """Two parts in turn: an equal average counts each step of each part."""
    model = make_model()
    optimizer = sgd(model, ema=kgo.SWA())
    optimizer.build(model.trainable_variables)
    weights = [weights_of(model)]
    for place in range(4):
        part = ("backbone", "head")[place % 2]
        take_step(optimizer, model, gradients(place), [part])
        weights.append(weights_of(model))
    for path, mean in averages_of(optimizer, model).items():
        expected = np.mean([w[path] for w in weights[1:]], axis=0)
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_weight_of_low_precision_has_an_average_that_moves(dtype):
    """K32: 0.999 is 1 in bfloat16, and the average stayed where it was."""
    model = towers("weight", start=1.0, dtype=dtype)
    optimizer = sgd(model, ema=kgo.EMA(0.999))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Weights in float16/bfloat16")
        optimizer.build(model.trainable_variables)
    step, _ = compiled_step(optimizer, model.trainable_variables)
    for place in range(200):
        # The weight goes to 0 and stays there.
        step([keras.ops.full((1, 1), float(place == 0), dtype=dtype)])
    ((mean, _),) = optimizer._average_pairs()
    np.testing.assert_allclose(number(mean), 0.999**200, rtol=1e-4)


# In `fit` -------------------------------------------------------------------------------------


def pairs(model: Any) -> list[tuple[float, float]]:
    """Each weight and its average."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [(number(weight), number(mean)) for mean, weight in optimizer._average_pairs()]


def compiled(start: float = 0.0, policy: str = "float32", **options: Any) -> Any:
    """One weight, whose gradient in `fit` is 1 and whose rate is 1."""
    model = towers("weight", start=start, dtype=policy)
    model.compile(sgd(model, **options), loss=mean_output)
    return model


USE = {"use_ema": True, "ema_momentum": 0.5}
OVERWRITE = USE | {"ema_overwrite_frequency": 2}
FITS: dict[str, tuple[dict[str, Any], Sequence[int], float, float]] = {
    # EMA-01, EMA-02, EMA-09 and EMA-12: what is trained, the steps of each fit, the weight and
    # its average.
    "ema": ({"ema": kgo.EMA(0.5), "start": 10.0}, (3,), 7.0, 7.875),
    "ema in three fits": ({"ema": kgo.EMA(0.5)}, (1, 2, 1), -4.0, -3.0625),
    "ema in mixed": ({"ema": kgo.EMA(0.5), "policy": "mixed_float16"}, (4,), -4.0, -3.0625),
    "use_ema in two fits": (USE, (4, 1), -3.625, -3.625),
    "use_ema that overwrites": (OVERWRITE, (4,), -2.75, -2.75),
    "accumulated": (OVERWRITE | {"gradient_accumulation_steps": 2}, (8,), -2.75, -2.75),
    "use_ema in mixed": (USE | {"policy": "mixed_float16"}, (4,), -3.125, -3.125),
}


@pytest.mark.parametrize("name", FITS)
def test_a_weight_and_its_average_after_fit(name):
    options, fits, weight, average = FITS[name]
    model = compiled(**options)
    for steps in fits:
        fit(model, steps=steps)
    assert pairs(model) == [(weight, average)]


def test_use_ema_gives_the_weights_of_plain_keras():
    found = []
    for make in (functools.partial(kgo.GroupedOptimizer, rule="adam"), keras.optimizers.Adam):
        model = models.dense(head=2)
        options = {"use_ema": True, "ema_momentum": 0.75, "ema_overwrite_frequency": 3}
        model.compile(make(learning_rate=0.1, **options), loss="mse")
        found.append(models.fit(model, batch_size=4))
    models.assert_equal(*found, rtol=1e-6, atol=1e-7)


# Where they begin -----------------------------------------------------------------------------


def _set_weights(model, other, path):
    model.set_weights(other.get_weights())


def _load_weights(model, other, path):
    other.save_weights(path)
    model.load_weights(path)


def _load_weights_alone(model, other, path):
    other.save_weights(path)
    kgo.load_weights(model, path, optimizer=False)


@pytest.mark.parametrize(
    ("bring", "options", "steps_before", "expected"),
    [
        (_set_weights, {"ema": kgo.EMA(0.5)}, 0, 31.5),
        (_load_weights, {"ema": kgo.SWA(every=2)}, 0, 32.0),
        (_load_weights_alone, {"ema": kgo.EMA(0.5, start=2)}, 1, 31.0),
        (_load_weights_alone, {"ema": kgo.EMA(0.5), "gradient_accumulation_steps": 2}, 1, 31.5),
    ],
    ids=["ema", "swa", "start", "accumulation"],
)
def test_averages_begin_at_the_weights_of_their_first_step_not_of_the_build(
    bring, options, steps_before, expected, tmp_path
):
    model, path = compiled(**options), tmp_path / "pretrained.weights.h5"
    model.optimizer.build(model.trainable_variables)
    if steps_before:
        fit(model)
    bring(model, towers("weight", start=64.0), path)
    assert pairs(model) == [(64.0, 64.0)]
    bring(model, towers("weight", start=32.0), path)
    if steps_before:
        # A step that TensorFlow compiled does not look: reading the averages does.
        assert pairs(model) == [(32.0, 32.0)]
    fit(model)
    assert pairs(model) == [(31.0, expected)]


@pytest.mark.parametrize(("built", "every"), [(False, 1), (True, 2)])
def test_averages_that_are_new_to_a_resumed_run_begin_at_the_weights_then(built, every, tmp_path):
    first, second = compiled(start=64.0), compiled(ema=kgo.EMA(0.5, every=every))
    fit(first, steps=3)
    first.save_weights(tmp_path / "first.weights.h5")
    if built:
        # Its own average has moved already.
        fit(second, steps=2)
    second.load_weights(tmp_path / "first.weights.h5")
    fit(second)
    # From 61 to 60; the step is the fourth, which is a second one too.
    assert pairs(second) == [(60.0, 60.5)]
    fit(second)
    assert pairs(second) == [(59.0, 59.75 if every == 1 else 60.5)]


@pytest.mark.parametrize("options", [{"ema": kgo.EMA(0.5)}, USE], ids=["ema", "use_ema"])
def test_a_layer_frozen_later_keeps_its_weight_and_its_own_average(options):
    """K39: with equal shapes one layer's average went into the other."""
    model = towers("a", "b", start={"a": 100.0, "b": -100.0})
    optimizer = sgd(model, **options)
    optimizer.build(model.trainable_variables)
    # A loop of one's own, so that nothing is overwritten before the layer is frozen.
    for _ in range(4):
        ones = [keras.ops.ones((1, 1))] * 2
        optimizer.apply(ones, model.trainable_variables)
    model.get_layer("a").trainable = False
    model.compile(optimizer, loss=mean_output)
    before = pairs(model)
    fit(model, steps=2)
    after = pairs(model)
    assert after[0] == before[0]
    assert after[1] != before[1]
    # An average is never outside of what it is an average of.
    for (weight, average), start in zip(after, (100.0, -100.0), strict=True):
        assert start - 6.0 <= weight <= average <= start
