"""Averages over optimizer steps, against float64 and the backends' own; where they begin."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from cases import RULES, by_path, gradients, make_model, numpy_of, stairs, stairs_at, weights_of
from chosen_gradients import fit, mean_output, towers
from comparing import Arrays, assert_same, compiled_step, state_of
from models import assert_equal

import keras_groupopt as kgo


def sgd(model: Any = None, **options: Any) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(model=model, **{"rule": "sgd", "learning_rate": 1.0, **options})


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
def test_twelve_steps_match_the_float64_transcript(name: str, way: str) -> None:
    options, meaning = TRANSCRIPTS[name]
    # A compiled step is of micro-batches, of which two make an optimizer step.
    size = 2 if way == "compiled" else 1
    model = make_model()
    by_path(model)["backbone/kernel"].constraint = keras.constraints.NonNeg()
    optimizer = sgd(
        model,
        learning_rate=0.125,
        gradient_accumulation_steps=size if size > 1 else None,
        **options,
    )
    variables = by_path(model)
    optimizer.build(list(variables.values()))
    step: Callable[..., Any] = optimizer.apply
    if way == "compiled":
        step, traces = compiled_step(optimizer, list(variables.values()))
    weights, found = [weights_of(model)], []
    for number in range(12):
        for part in range(size):
            given = gradients(size * number + part)
            step([keras.ops.convert_to_tensor(given[path]) for path in variables])
        weights.append(weights_of(model))
        found.append(averages_of(optimizer, model))
    for mean, expected in zip(found, transcript(weights, **meaning), strict=True):
        assert list(mean) == list(expected)
        for path, value in expected.items():
            np.testing.assert_allclose(mean[path], value, rtol=2e-6, atol=2e-6, err_msg=path)
    assert way == "eager" or traces() == 1
    # The constraint acted, and came first.
    assert any(np.any(each["backbone/kernel"] == 0) for each in weights)


def torch_average(declared: str, weights: list[Arrays]) -> list[Arrays]:
    import torch

    torches = torch.optim.swa_utils
    functions = {"ema": {"multi_avg_fn": torches.get_ema_multi_avg_fn(0.9)}, "swa": {}}
    module = torch.nn.ParameterDict(
        {p.replace("/", "_"): torch.tensor(w) for p, w in weights[0].items()}
    )
    average = torches.AveragedModel(module, **functions[declared])
    if declared == "ema":
        average.update_parameters(module)  # The first one copies.
    found = []
    for now in weights[1:]:
        for path, value in now.items():
            module[path.replace("/", "_")].data = torch.tensor(value)
        average.update_parameters(module)
        found.append({p: average.module[p.replace("/", "_")].detach().numpy().copy() for p in now})
    return found


def optax_average(declared: str, weights: list[Arrays]) -> list[Arrays]:
    optax = pytest.importorskip("optax")
    found, mean = [], dict(weights[0])
    for number, now in enumerate(weights[1:]):
        share = 0.1 if declared == "ema" else 1 / (number + 1)
        mean = optax.incremental_update(now, mean, share)
        found.append({path: np.asarray(value) for path, value in mean.items()})
    return found


def tensorflow_average(declared: str, weights: list[Arrays]) -> list[Arrays]:
    import tensorflow as tf

    # With its count of updates, TensorFlow's average warms up; SWA it has not.
    variables = {path: tf.Variable(w) for path, w in weights[0].items()}
    average = tf.train.ExponentialMovingAverage(0.9)
    average.apply(list(variables.values()))
    found = []
    for number, now in enumerate(weights[1:]):
        for path, variable in variables.items():
            variable.assign(now[path])
        if declared == "swa":
            average = tf.train.ExponentialMovingAverage(number / (number + 1))
            for path, variable in variables.items():
                old = found[-1][path] if found else now[path]
                average.apply([variable])
                average.average(variable).assign(old)
        average.apply(list(variables.values()))
        found.append({p: average.average(v).numpy() for p, v in variables.items()})
    return found


@pytest.mark.parametrize("declared", ["ema", "swa"])
def test_an_average_is_that_of_the_backends_own_library(declared: str, backend: str) -> None:
    theirs = {"torch": torch_average, "jax": optax_average, "tensorflow": tensorflow_average}
    model = make_model()
    optimizer = sgd(model, learning_rate=0.125, ema=TRANSCRIPTS[declared][0]["ema"])
    optimizer.build(model.trainable_variables)
    weights, found = [weights_of(model)], []
    for number in range(6):
        given = gradients(number)
        optimizer.apply([keras.ops.convert_to_tensor(given[path]) for path in by_path(model)])
        weights.append(weights_of(model))
        found.append(averages_of(optimizer, model))
    for mean, expected in zip(found, theirs[backend](declared, weights), strict=True):
        for path, value in expected.items():
            np.testing.assert_allclose(mean[path], value, rtol=2e-6, atol=2e-6)


def test_what_rests_is_averaged_as_it_is() -> None:
    """Two parts in turn: an equal average counts each step of each part."""
    model = make_model()
    optimizer = sgd(model, ema=kgo.SWA())
    optimizer.build(model.trainable_variables)
    weights = [weights_of(model)]
    for number in range(4):
        part = ("backbone", "head")[number % 2]
        own = {p: v for p, v in by_path(model).items() if p.startswith(part)}
        given = [keras.ops.convert_to_tensor(gradients(number)[path]) for path in own]
        optimizer.apply(given, list(own.values()))
        weights.append(weights_of(model))
    for path, mean in averages_of(optimizer, model).items():
        expected = np.mean([w[path] for w in weights[1:]], axis=0)
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_weight_of_low_precision_has_an_average_that_moves(dtype: str) -> None:
    """K32: 0.999 is 1 in bfloat16, and the average stayed where it was."""
    model = towers("weight", start=1.0, dtype=dtype)
    optimizer = sgd(model, ema=kgo.EMA(0.999))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Weights in float16/bfloat16")
        optimizer.build(model.trainable_variables)
    step, _ = compiled_step(optimizer, model.trainable_variables)
    for number in range(200):
        # The weight goes to 0 and stays there.
        step([keras.ops.full((1, 1), float(number == 0), dtype=dtype)])
    ((mean, _),) = optimizer._average_pairs()
    np.testing.assert_allclose(float(numpy_of(mean).squeeze()), 0.999**200, rtol=1e-4)


# In `fit` -------------------------------------------------------------------------------------


def trained(
    fits: Sequence[int] = (4,), start: float = 0.0, policy: str = "float32", **options: Any
) -> tuple[float, float]:
    """A weight and its average after fits of so many steps, each of gradient 1 at rate 1."""
    model = towers("weight", start=start, dtype=policy)
    model.compile(sgd(model, **options), loss=mean_output)
    for steps in fits:
        fit(model, steps=steps)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    ((mean, variable),) = optimizer._average_pairs()
    return float(numpy_of(variable).squeeze()), float(numpy_of(mean).squeeze())


FITS = {
    # EMA-01, EMA-02, EMA-09 and EMA-12: how it is trained, the weight, its average.
    "ema": ({"ema": kgo.EMA(0.5), "start": 10.0, "fits": (3,)}, 7.0, 7.875),
    "ema in three fits": ({"ema": kgo.EMA(0.5), "fits": (1, 2, 1)}, -4.0, -3.0625),
    "ema in mixed precision": ({"ema": kgo.EMA(0.5), "policy": "mixed_float16"}, -4.0, -3.0625),
    "use_ema in two fits": (
        {"use_ema": True, "ema_momentum": 0.5, "fits": (4, 1)},
        -3.625,
        -3.625,
    ),
    "use_ema that overwrites": (
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        -2.75,
        -2.75,
    ),
    "use_ema that overwrites, accumulated": (
        {
            "use_ema": True,
            "ema_momentum": 0.5,
            "ema_overwrite_frequency": 2,
            "gradient_accumulation_steps": 2,
            "fits": (8,),
        },
        -2.75,
        -2.75,
    ),
    "use_ema in mixed precision": (
        {"use_ema": True, "ema_momentum": 0.5, "policy": "mixed_float16"},
        -3.125,
        -3.125,
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_weight_and_its_average_after_fit(name: str) -> None:
    options, weight, average = FITS[name]
    assert trained(**options) == (weight, average)


def test_use_ema_gives_the_weights_of_plain_keras() -> None:
    found = []
    for make in (kgo.GroupedOptimizer, keras.optimizers.Adam):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        rule = {"rule": "adam"} if make is kgo.GroupedOptimizer else {}
        options = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.75}
        model.compile(make(**options, **rule, ema_overwrite_frequency=3), loss="mse")
        x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
        model.fit(x, x[:, :2], batch_size=4, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert_equal(*found, rtol=1e-6, atol=1e-7)


# Where they begin -----------------------------------------------------------------------------


def _set_weights(model: Any, other: Any, tmp_path: Any) -> None:
    model.set_weights(other.get_weights())


def _load_weights(model: Any, other: Any, tmp_path: Any) -> None:
    other.save_weights(tmp_path / "pretrained.weights.h5")
    model.load_weights(tmp_path / "pretrained.weights.h5")


@pytest.mark.parametrize("bring", [_set_weights, _load_weights])
@pytest.mark.parametrize("average", [kgo.EMA(0.5), kgo.SWA(every=2)], ids=["ema", "swa"])
def test_averages_begin_at_the_weights_of_the_first_step_not_of_the_build(
    bring: Callable[..., None], average: Any, tmp_path: Any
) -> None:
    model = towers("weight")
    model.compile(sgd(model, ema=average), loss=mean_output)
    model.optimizer.build(model.trainable_variables)
    bring(model, towers("weight", start=64.0), tmp_path)
    ((mean, _),) = model.optimizer._average_pairs()
    assert float(numpy_of(mean).squeeze()) == 64.0
    bring(model, towers("weight", start=32.0), tmp_path)
    fit(model)
    expected = 31.5 if isinstance(average, kgo.EMA) else 32.0
    assert float(numpy_of(mean).squeeze()) == expected


@pytest.mark.parametrize(("built", "every"), [(False, 1), (True, 2)])
def test_averages_that_are_new_to_a_resumed_run_begin_at_the_weights_then(
    built: bool, every: int, tmp_path: Any
) -> None:
    first = towers("weight", start=64.0)
    first.compile(sgd(first), loss=mean_output)
    fit(first, steps=3)
    first.save_weights(tmp_path / "first.weights.h5")
    second = towers("weight")
    second.compile(sgd(second, ema=kgo.EMA(0.5, every=every)), loss=mean_output)
    if built:
        # Its own average has moved already.
        fit(second, steps=2)
    second.load_weights(tmp_path / "first.weights.h5")
    fit(second)
    ((mean, variable),) = second.optimizer._average_pairs()
    # From 61 to 60; the step is the fourth, which is a second one too.
    assert (float(numpy_of(variable).squeeze()), float(numpy_of(mean).squeeze())) == (60.0, 60.5)
    fit(second)
    assert float(numpy_of(mean).squeeze()) == (59.75 if every == 1 else 60.5)


def test_an_average_begins_at_the_weights_of_its_start_and_never_before() -> None:
    model = towers("weight")
    model.compile(sgd(model, ema=kgo.EMA(0.5, start=3, every=2)), loss=mean_output)
    found = []
    for _ in range(5):
        fit(model)
        ((mean, _),) = model.optimizer._average_pairs()
        found.append(float(numpy_of(mean).squeeze()))
    assert found == [-1.0, -2.0, -3.0, -3.0, -4.0]


@pytest.mark.parametrize(
    "options", [{"ema": kgo.EMA(0.5)}, {"use_ema": True, "ema_momentum": 0.5}], ids=["ema", "use"]
)
def test_a_layer_frozen_later_keeps_its_weight_and_its_own_average(options: Any) -> None:
    """K39: with equal shapes one layer's average went into the other."""
    model = towers("a", "b", start={"a": 100.0, "b": -100.0})
    optimizer = sgd(model, **options)
    optimizer.build(model.trainable_variables)
    # A loop of one's own, so that nothing is overwritten before the layer is frozen.
    for _ in range(4):
        ones = [keras.ops.ones((1, 1))] * 2
        optimizer.apply(ones, model.trainable_variables)
    pairs = optimizer._average_pairs()
    before = [(float(numpy_of(v).squeeze()), float(numpy_of(m).squeeze())) for m, v in pairs]
    model.get_layer("a").trainable = False
    model.compile(optimizer, loss=mean_output)
    fit(model, steps=2)
    after = [(float(numpy_of(v).squeeze()), float(numpy_of(m).squeeze())) for m, v in pairs]
    assert after[0] == before[0]
    assert after[1] != before[1]
    # An average is never outside of what it is an average of.
    for (weight, average), start in zip(after, (100.0, -100.0), strict=True):
        assert start - 6.0 <= weight <= average <= start


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
@pytest.mark.parametrize("average", [kgo.SWA(every=2, start=1), kgo.EMA(0.9, warmup=True)], ids=str)
def test_averages_and_their_counts_are_saved(average: Any, suffix: str, tmp_path: Any) -> None:
    def compiled() -> Any:
        model = make_model()
        case = next(case for case in RULES if case.name == "adam")
        model.compile(case.optimizer(model, ema=average), loss="mse")
        return model

    def steps(model: Any, numbers: Sequence[int]) -> None:
        for number in numbers:
            given = gradients(number)
            values = [keras.ops.convert_to_tensor(given[path]) for path in by_path(model)]
            model.optimizer.apply(values, model.trainable_variables)

    model = compiled()
    steps(model, range(4))
    path = tmp_path / f"model{suffix}"
    (model.save if suffix == ".keras" else model.save_weights)(path)
    again = keras.saving.load_model(path) if suffix == ".keras" else compiled()
    if suffix != ".keras":
        again.load_weights(path)
    for each in (model, again):
        steps(each, range(4, 7))
    assert_same(weights_of(again), weights_of(model))
    assert_same(state_of(again.optimizer), state_of(model.optimizer))
    assert "@averages_made" in state_of(again.optimizer)


@pytest.mark.once
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_config_keeps_the_average(name: str) -> None:
    optimizer = kgo.GroupedOptimizer(**TRANSCRIPTS[name][0])
    config = optimizer.get_config()
    again = kgo.GroupedOptimizer.from_config(config)
    assert again.get_config() == config
    assert (config["ema"] is None) == (name == "use_ema")


def test_an_optimizer_without_averages_says_so() -> None:
    model = towers("a")
    optimizer = sgd(model)
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="needs an optimizer with averages"):
        optimizer._average_pairs()
