"""What is trained on several devices of JAX and on several processes of torch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import keras_groupopt as kgo

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
# Larger gradients for one device than for another, so that means of clipped ones would differ.
X[::8] *= 3.0
WHOLE = {"gradient_accumulation_steps": 2, "ema": kgo.EMA(0.5)}
# Options of the optimizer, the rule of its gradients among them, and what is put around it.
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "clip and anchors": ({}, None),
    "accumulation and averages": (WHOLE, None),
    "loss scale": (WHOLE, kgo.LossScaleOptimizer),
    "SAM": (WHOLE | {"gradient_rule": lambda: kgo.SAM(0.1)}, kgo.LossScaleOptimizer),
    "LookSAM": (WHOLE | {"gradient_rule": lambda: kgo.LookSAM(0.5, every=3)}, None),
}


def make(options: dict[str, Any], wrap: Any, seed: int = 0, outputs: int = 4) -> keras.Model:
    """Returns the compiled model of a row."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, name="enc"), keras.layers.Dense(outputs, name="head")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    options = dict(options)
    make_rule = options.pop("gradient_rule", None)
    if make_rule is not None:
        model = kgo.sharpness_aware(model, make_rule())
    group = kgo.Group("enc", "enc", learning_rate_ratio=0.5, weight_decay=0.1, anchor="initial")
    options = {"rule": "adam", "learning_rate": 0.01, "global_clipnorm": 0.1, **options}
    optimizer = kgo.GroupedOptimizer([group], model=model, **options)
    model.compile(wrap(optimizer) if wrap else optimizer, loss="mse", auto_scale_loss=False)
    return model


def numbers(model: keras.Model) -> np.ndarray:
    """Returns the values of all weights and all state, end to end."""
    found = [*model.weights, *model.optimizer.variables]
    return np.concatenate(
        [np.ravel(keras.ops.convert_to_numpy(v)).astype("float64") for v in found]
    )
