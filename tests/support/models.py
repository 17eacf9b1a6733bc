"""Small models and their data, and how tests compile, train, read and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

import keras_groupopt as kgo

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(32, 2)).astype("float32")


def dense(name: str | None = None, **widths: int) -> keras.Sequential:
    """Dense layers of these names and widths on 4 inputs, with the same weights every time.

    Args:
        name: Name of the model. Default: an automatic one.
        **widths: Width of each layer by its name. Default: `enc=3, head=2`.
    """
    keras.utils.set_random_seed(0)
    widths = widths or {"enc": 3, "head": 2}
    layers = [keras.layers.Dense(width, name=layer) for layer, width in widths.items()]
    return keras.Sequential([keras.Input((4,)), *layers], name=name)


def compiled(
    model: keras.Model,
    /,
    *groups: kgo.Group,
    wrap: Callable[[Any], Any] = lambda optimizer: optimizer,
    loss: Any = "mse",
    **options: Any,
) -> keras.Model:
    """Compiles a model with a GroupedOptimizer of these groups and options; returns the model.

    Args:
        model: Any model. `model=None` among the options leaves the optimizer without it.
        *groups: Groups of the optimizer.
        wrap: Puts a loss scale around the optimizer. Default: nothing.
        loss: As in `compile`. Default: the mean squared error.
        **options: Options of the optimizer.
    """
    optimizer = kgo.GroupedOptimizer(**{"groups": groups, "model": model, **options})
    model.compile(optimizer=wrap(optimizer), loss=loss)
    return model


def sgd(model: keras.Model | None = None, groups: Any = (), **options: Any) -> kgo.GroupedOptimizer:
    """SGD at rate 1, by which a weight moves as far as its gradient, unless options change it."""
    options = {"rule": "sgd", "learning_rate": 1.0, **options}
    return kgo.GroupedOptimizer(groups, model=model, **options)


def fit(model: keras.Model, epochs: int = 1, **options: Any) -> keras.Model:
    """Trains on `X` and `Y` in order, in silence; returns the model.

    Args:
        model: A compiled model.
        epochs: As in `fit`. Default: 1.
        **options: Options of `fit`. `x` and `y` replace the data.
    """
    data = options.pop("x", X), options.pop("y", Y)
    model.fit(*data, **{"epochs": epochs, "verbose": 0, "shuffle": False, **options})
    return model


def numpy_of(value: Any) -> np.ndarray:
    """A copy in NumPy: on torch a view would follow the variable."""
    return np.array(keras.ops.convert_to_numpy(value))


def number(value: Any) -> float:
    """The one number of a variable or tensor."""
    return float(numpy_of(value).reshape(()))


def arrays(variables: keras.Model | Iterable[Any]) -> list[np.ndarray]:
    """Copies of the values of variables, or of all weights of a model."""
    if isinstance(variables, keras.Model):
        variables = variables.weights
    return [numpy_of(variable) for variable in variables]


def state(model: keras.Model) -> list[np.ndarray]:
    """All weights and all optimizer state."""
    return arrays([*model.variables, *model.optimizer.variables])


def assert_equal(one: Any, other: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Two models have the same weights, or two lists of arrays are the same.

    Args:
        one: A model or a list of arrays.
        other: A model or a list of arrays.
        rtol: Relative tolerance. Default: 0, bit for bit.
        atol: Absolute tolerance. Default: 0, bit for bit.
    """
    pairs = [each if isinstance(each, Sequence) else arrays(each) for each in (one, other)]
    for value, expected in zip(*pairs, strict=True):
        if rtol or atol:
            np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol)
        else:
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)
