"""Models that `fit` trains with chosen gradients, so that weights after it are known numbers.

The loss is the mean of the outputs. In a model of towers each weight is a scalar with an input of
its own, hence the gradient of a weight is the number fed to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_groupopt as kgo
from keras_groupopt.selectors.layer_paths import describe_model


@keras.saving.register_keras_serializable(package="chosen_gradients")
def mean_output(y_true: Any, y_pred: Any) -> Any:
    """The output itself as the loss."""
    return ops.mean(y_pred, axis=-1)


def no_gradient(y_true: Any, y_pred: Any) -> Any:
    """A loss that every weight reaches with gradient zero."""
    return 0.0 * ops.mean(y_pred, axis=-1)


def towers(*names: str, start: float | Mapping[str, float] = 0.0, **options: Any) -> keras.Model:
    """One `Dense(1)` without bias per name, each on an input of its own; outputs are added."""
    inputs, outputs = [], []
    for name in names:
        value = start if isinstance(start, (int, float)) else start[name]
        inputs.append(keras.Input((1,)))
        layer = keras.layers.Dense(
            1,
            use_bias=False,
            kernel_initializer=keras.initializers.Constant(value),
            name=name,
            **options,
        )
        outputs.append(layer(inputs[-1]))
    # Keras warns if a model of a list gets an array alone.
    taken = inputs[0] if len(inputs) == 1 else inputs
    return keras.Model(taken, sum(outputs[1:], start=outputs[0]))


def fit(
    model: keras.Model,
    gradients: Sequence[Any] | float = 1.0,
    steps: int = 1,
    **options: Any,
) -> keras.callbacks.History:
    """Fits a compiled model of towers for `steps` steps, with one gradient per tower."""
    count = len(getattr(model, "inputs", None) or [None])
    each = [gradients] * count if isinstance(gradients, (int, float)) else gradients
    x = [np.full((steps, 1), value, "float32") for value in each]
    options = {"batch_size": 1, "shuffle": False, "verbose": 0} | options
    return model.fit(x[0] if count == 1 else x, np.zeros((steps, 1), "float32"), **options)


def fit_rows(model: keras.Model, *rows: Sequence[float], **options: Any) -> keras.callbacks.History:
    """Fits a compiled model of towers, one step for each row of gradients."""
    columns = [np.float32(column)[:, None] for column in zip(*rows, strict=True)]
    return fit(model, columns, steps=len(rows), **options)


def train(
    model: keras.Model,
    optimizer: Any,
    gradients: Sequence[float] | float = 1.0,
    steps: int = 1,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Compiles a model of towers, fits it, and returns its weights by layer path."""
    model.compile(optimizer=optimizer, loss=mean_output, **options)
    fit(model, gradients, steps)
    return weights(model)


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Every weight's value by its layer path; a float where it has one element."""
    by_identity = {id(variable): variable for variable in model.variables}
    values = {
        info.path: ops.convert_to_numpy(by_identity[info.identity]).copy()
        for info in describe_model(model)
    }
    return {path: float(v.reshape(())) if v.size == 1 else v for path, v in values.items()}


def groups_of(optimizer: kgo.GroupedOptimizer) -> dict[str, list[str]]:
    """The layer paths in each group of the plan."""
    return {group.name: [v.path for v in group.variables] for group in optimizer.plan.groups}


def ones_model() -> keras.Model:
    """A Dense layer and a normalization whose weights are all 1, except beta, which is 0."""
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, name="head", kernel_initializer="ones", bias_initializer="ones"),
            keras.layers.LayerNormalization(name="ln_final"),
        ]
    )


def fit_ones(model: keras.Model, optimizer: Any, steps: int = 1) -> dict[str, np.ndarray]:
    """Compiles it, fits it with gradients that are zero, and returns its weights by layer path."""
    model.compile(optimizer=optimizer, loss=no_gradient)
    x, y = np.ones((steps, 3), "float32"), np.zeros((steps, 2), "float32")
    model.fit(x, y, batch_size=1, verbose=0)
    return weights(model)


class UnusedHead(keras.Model):
    """Two scalar weights, of which the output uses only the first."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        options = {
            "use_bias": False,
            "kernel_initializer": keras.initializers.Constant(start),
        }
        self.used = keras.layers.Dense(1, name="used", **options)
        self.unused = keras.layers.Dense(1, name="unused", **options)

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, x: Any) -> Any:
        return self.used(x)
