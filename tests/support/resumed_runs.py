"""A run with all that outlives a step, stopped in the middle of a window and gone on with."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import keras
import numpy as np
from saving_models import load

import keras_groupopt as kgo

POLICIES = ("float32", "mixed_float16")
FILES = ("run.keras", "run.weights.h5")
# Micro-batches before and after the stop: neither ends a window of three.
BEFORE, AFTER = 8, 9


def make(policy: str) -> keras.Model:
    """A small network, compiled with averages, accumulation, an anchor, a schedule and a clip."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inner = [layers.Dense(6, activation="tanh", dtype=policy), layers.Dense(5, dtype=policy)]
    body = keras.Sequential(inner, name="body")
    model = keras.Sequential([keras.Input((4,)), body, layers.Dense(2, dtype="float32")])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    optimizer = kgo.GroupedOptimizer(
        [
            kgo.Group("body", "body", weight_decay=0.1, anchor="initial", rule="nadam"),
            kgo.Group("head", "dense", learning_rate=schedule),
        ],
        model=model,
        rule="adam",
        learning_rate=0.02,
        global_clipnorm=0.5,
        gradient_accumulation_steps=3,
        ema=kgo.EMA(0.9, warmup=True, every=2, start=1),
    )
    if policy == "mixed_float16":
        optimizer = kgo.LossScaleOptimizer(optimizer, initial_scale=16.0, dynamic_growth_steps=3)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fit(model: keras.Model, start: int, count: int) -> keras.Model:
    """Trains on micro-batches `start … start + count`; the third of all is not finite."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BEFORE + AFTER, 2, 4)).astype("float32")
    y = generator.normal(size=(BEFORE + AFTER, 2, 2)).astype("float32")
    x[2] = np.inf
    # In one call: arrays of a caller are read in place, and sums depend on how they are aligned.
    rows = slice(2 * start, 2 * (start + count))
    x, y = x.reshape(-1, 4), y.reshape(-1, 2)
    model.fit(x[rows], y[rows], batch_size=2, shuffle=False, verbose=0)
    return model


def stopped(policy: str) -> keras.Model:
    """The run up to the stop, with a rate and a ratio set on the way."""
    model = fit(make(policy), 0, BEFORE)
    model.optimizer.learning_rate = 0.01
    model.optimizer.set_learning_rate_ratio("body", 0.25)
    return model


def gone_on(path: str, policy: str) -> dict[str, Any]:
    """The run read from a file and gone on with."""
    model = load(pathlib.Path(path), functools.partial(make, policy))
    return described(fit(model, BEFORE, AFTER))


def described(model: keras.Model) -> dict[str, Any]:
    """Every bit of a model and its optimizer, as text."""
    optimizer = model.optimizer
    state = optimizer.state_dict()
    arrays = {
        f"{group}/{path}/{slot}": value
        for group, paths in state["groups"].items()
        for path, slots in paths.items()
        for slot, value in slots.items()
    }
    arrays |= state["scalars"]
    arrays |= {f"weights/{i}": weight for i, weight in enumerate(model.get_weights())}
    for name in ("dynamic_scale", "step_counter", "skipped_steps"):
        value = getattr(optimizer, name, None)
        if value is not None:
            arrays[name] = np.asarray(keras.ops.convert_to_numpy(value))
    return {name: np.ascontiguousarray(value).tobytes().hex() for name, value in arrays.items()}


def all_gone_on(folder: str) -> dict[str, Any]:
    """Every run whose files are in the folder, gone on with."""
    return {
        f"{policy} {name}": gone_on(str(pathlib.Path(folder) / policy / name), policy)
        for policy in POLICIES
        for name in FILES
    }
