"""Model, optimizer, pictures and comparison, which the examples on several devices use."""

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
    """Returns the number of micro-batches to train on."""
    parser = argparse.ArgumentParser(description=description)
    # The two trainings round differently, and the difference grows with each step.
    parser.add_argument("--batches", type=int, default=8, help="micro-batches to train on")
    return parser.parse_args()


def make_model() -> keras.Model:
    """Returns a pretrained ResNet8 with a new head, compiled for SAM. It is the same each time.

    Its batch statistics are frozen. Otherwise each device would use those of its own pictures.
    """
    keras.utils.set_random_seed(0)
    model = kgo.sharpness_aware(build_model(), kgo.SAM(0.05))
    backbone = kgo.Group(
        "backbone", "resnet8", learning_rate_ratio=0.3, weight_decay=10.0, anchor="initial"
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
    """Returns pictures of clothes and their labels, enough for a number of batches."""
    x, y = images("train")
    places = np.arange(batches * BATCH) % len(x)
    return x[places], y[places]


def fit(model: keras.Model, batches: int) -> keras.Model:
    """Trains on a number of batches, in order."""
    x, y = pictures(batches)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def numbers(model: keras.Model) -> np.ndarray:
    """Returns the weights and the state of the optimizer."""
    arrays = map(keras.ops.convert_to_numpy, [*model.weights, *model.optimizer.variables])
    return np.concatenate([np.ravel(array).astype("float64") for array in arrays])


def report(several: np.ndarray, alone: np.ndarray, devices: str) -> None:
    """Prints the largest difference between two trainings."""
    difference = np.abs(several - alone).max()
    print(f"largest difference between {devices} and one: {difference:.1e}")
