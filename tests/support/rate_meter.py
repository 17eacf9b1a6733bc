"""A model whose weights tell the rate of every group, whatever the precision.

Its output is the sum of two Dense layers without bias, its inputs are ones and its loss is the mean
output: every gradient is exactly 1, and one SGD step moves each weight by its group's rate. In
float16 nothing is rounded as long as rates are powers of two.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import keras_groupopt as kgo

BATCHES = 2
BATCH_SIZE = 4
X = np.ones((BATCHES * BATCH_SIZE, 2), "float32")
Y = np.zeros((BATCHES * BATCH_SIZE, 1), "float32")
RATIO = 0.25


@keras.saving.register_keras_serializable(package="rate_meter")
def mean_output(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(y_pred, axis=-1)


def make_model(value: float = 0.0) -> keras.Model:
    inputs = keras.Input((2,))
    zeros = keras.initializers.Constant(value)
    tower = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(1, use_bias=False, name="dense", kernel_initializer=zeros),
        ],
        name="backbone",
    )
    head = keras.layers.Dense(1, use_bias=False, name="head", kernel_initializer=zeros)
    return keras.Model(inputs, keras.layers.Add()([tower(inputs), head(inputs)]))


def make_optimizer(model: keras.Model | None, **options: Any) -> kgo.GroupedOptimizer:
    settings = {"rule": "sgd", "learning_rate": 0.5, **options}
    groups = [
        kgo.Group("backbone", "**/dense", learning_rate_ratio=RATIO),
        kgo.Group("head", "head"),
    ]
    return kgo.GroupedOptimizer(groups, model=model, **settings)


def compiled(*, named_model: bool = True, **options: Any) -> keras.Model:
    model = make_model()
    optimizer = make_optimizer(model if named_model else None, **options)
    model.compile(optimizer=optimizer, loss=mean_output)
    return model


def fit(model: keras.Model, epochs: int = 1, **options: Any) -> dict[str, list[Any]]:
    settings = {"batch_size": BATCH_SIZE, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, **{**settings, **options}).history


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """The weights by group, as float64 copies."""
    backbone, head = (
        keras.ops.convert_to_numpy(model.get_layer(name).weights[0]).astype("float64")
        for name in ("backbone", "head")
    )
    return {"backbone": backbone, "head": head}


class Rates(keras.callbacks.Callback):
    """Reads the rate of each group from how far its weights moved, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.by_group: dict[str, list[float]] = {"backbone": [], "head": []}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.before = weights(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name, after in weights(self.model).items():
            moved = (self.before[name] - after) / BATCHES
            assert np.ptp(moved) == 0
            self.by_group[name].append(float(moved.flat[0]))
