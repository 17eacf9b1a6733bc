"""What the examples on several devices share: a model, its optimizer, pictures, a comparison."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

sys.path.insert(0, str(Path(__file__).parents[1]))
from finetune_backbone_and_head import build_model, images

BATCH = 32  # over all devices


def options(description: str | None) -> argparse.Namespace:
    """Return how long to train."""
    parser = argparse.ArgumentParser(description=description)
    # Rounding differs between the two trainings, and grows with each step.
    parser.add_argument("--batches", type=int, default=8, help="micro-batches to train on")
    return parser.parse_args()


def make_model() -> keras.Model:
    """Return a pretrained ResNet8 with a new head, the same each time, compiled for SAM.

    Its batch statistics are frozen: they would be those of the pictures on each device.
    """
    keras.utils.set_random_seed(0)
    model = kgo.sharpness_aware(build_model(), kgo.SAM(0.05))
    backbone = kgo.Group(
        "backbone", "resnet8", learning_rate_ratio=0.3, weight_decay=0.1, anchor="initial"
    )
    optimizer = kgo.GroupedOptimizer(
        groups=[backbone, kgo.Group("head", "head")],
        model=model,
        rule=kgo.rule("sgd", momentum=0.9),
        learning_rate=1e-2,
        global_clipnorm=1.0,
        gradient_accumulation_steps=2,
        ema=kgo.EMA(0.9),
    )
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    return model


def pictures(batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of clothes and their labels, in batches that differ."""
    x, y = images("train")
    places = np.arange(batches * BATCH) % len(x)
    return x[places], y[places]


def fit(model: keras.Model, batches: int) -> keras.Model:
    """Train on some batches, in their order."""
    x, y = pictures(batches)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def numbers(model: keras.Model) -> np.ndarray:
    """Return the weights and the state of the optimizer."""
    arrays = map(keras.ops.convert_to_numpy, [*model.weights, *model.optimizer.variables])
    return np.concatenate([np.ravel(array).astype("float64") for array in arrays])


def report(several: np.ndarray, alone: np.ndarray, devices: str) -> None:
    """Print how far two trainings are apart."""
    difference = np.abs(several - alone).max()
    print(f"largest difference between {devices} and one: {difference:.1e}")
