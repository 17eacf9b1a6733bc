"""Models and optimizers whose state has one of everything, made from NumPy's numbers."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import models
import numpy as np
import pytest
from models import state

import keras_groupopt as kgo

either_way = pytest.mark.parametrize("build", [True, False], ids=["built", "not built"])
_numbers = np.random.default_rng(0)
X = _numbers.normal(size=(12, 4)).astype("float32")
Y = _numbers.normal(size=(12, 2)).astype("float32")


@keras.saving.register_keras_serializable(package="saving_models")
class Subclassed(keras.Model):
    """A backbone and a head as attributes, and a list of layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backbone = [keras.layers.Dense(3, activation="tanh") for _ in range(2)]
        self.head = keras.layers.Dense(2, name="head")

    def build(self, input_shape: Any) -> None:
        self.backbone[0].build(input_shape)
        self.backbone[1].build((None, 3))
        self.head.build((None, 3))
        self.built = True

    def call(self, inputs: Any) -> Any:
        for layer in self.backbone:
            inputs = layer(inputs)
        return self.head(inputs)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


def nested() -> keras.Model:
    """A functional backbone inside a functional model; nested names are not in `variable.path`."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="tanh", name="first")(inputs)
    backbone = keras.Model(inputs, keras.layers.Dense(3, activation="tanh")(hidden), name="body")
    outer = keras.Input((4,))
    return keras.Model(outer, keras.layers.Dense(2, name="head")(backbone(outer)))


def sequential() -> keras.Model:
    hidden = [keras.layers.Dense(3, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(2, name="head")])


def new_head(name: str, width: int = 2) -> keras.Model:
    """The nested model with another head."""
    inputs = keras.Input((4,))
    hidden = nested().get_layer("body")(inputs)
    return keras.Model(inputs, keras.layers.Dense(width, name=name)(hidden))


def twice_nested() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), nested()])


def subclassed() -> keras.Model:
    model = Subclassed()
    model.build((None, 4))
    return model


MODELS = {
    "nested": nested,
    "sequential": sequential,
    "twice nested": twice_nested,
    "subclassed": subclassed,
}


def fill(model: keras.Model, seed: int = 1) -> keras.Model:
    """Gives the weights numbers that do not depend on the backend."""
    numbers = np.random.default_rng(seed)
    model.set_weights([numbers.normal(size=w.shape) * 0.5 for w in model.get_weights()])
    return model


def groups(**changes: Any) -> list[kgo.Group]:
    head = {"rule": kgo.rule("sgd", momentum=0.5), "weight_decay": 0.0, **changes}
    return [backbone("backbone", ~kgo.path("**/head")), kgo.Group("head", "**/head", **head)]


def backbone(name: str = "backbone", selector: Any = "body", **changes: Any) -> kgo.Group:
    settings = {"learning_rate_ratio": 0.25, "anchor": "initial", **changes}
    return kgo.Group(name, selector, **settings)


def split() -> list[kgo.Group]:
    """The groups of the nested model with one more."""
    return [backbone("first", "body/first"), backbone("backbone", "body/dense"), groups()[1]]


def optimizer(model: keras.Model | None, groups_: Any = None, **changes: Any) -> Any:
    settings = {"rule": "adam", "learning_rate": 0.125, "weight_decay": 0.5, **changes}
    return kgo.GroupedOptimizer(groups() if groups_ is None else groups_, model=model, **settings)


def compiled(kind: str = "nested", *, seed: int = 1, build: bool = False, **changes: Any) -> Any:
    model = fill(MODELS[kind](), seed)
    model.compile(optimizer=optimizer(model, **changes), loss="mse")
    if build:
        model.optimizer.build(model.trainable_variables)
    return model


def in_loss_scale(model: keras.Model) -> keras.Model:
    """Puts the optimizer of a model into a loss scale of Keras, and builds it there."""
    model.compile(keras.optimizers.LossScaleOptimizer(model.optimizer), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def grouped(model: keras.Model) -> Any:
    """The optimizer of a model, inside a loss scale too."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def fit(model: keras.Model, steps: int = 3) -> keras.Model:
    model.fit(X, Y, batch_size=len(X), epochs=steps, shuffle=False, verbose=0)
    return model


def gradients(model: keras.Model, step: int) -> list[np.ndarray]:
    numbers = np.random.default_rng(step)
    return [numbers.normal(size=v.shape) * 0.1 for v in model.trainable_variables]


def train(model: keras.Model, steps: int = 3) -> keras.Model:
    """Steps with gradients that depend on the step alone, without compiling anything."""
    variables = model.trainable_variables
    for _ in range(steps):
        values = gradients(model, int(model.optimizer.iterations.numpy()))
        model.optimizer.apply(
            [
                keras.ops.convert_to_tensor(value, dtype=variable.dtype)
                for value, variable in zip(values, variables, strict=True)
            ],
            variables,
        )
    return model


def with_adam() -> keras.Model:
    """The nested model, trained with an optimizer of Keras alone."""
    model = nested()
    model.compile(optimizer="adam", loss="mse")
    return train(model, 1)


def assert_state(model: keras.Model, expected: list[np.ndarray]) -> None:
    """Bit for bit."""
    models.assert_equal(state(model), expected)


def assert_equal(actual: keras.Model, expected: keras.Model) -> None:
    """Bit for bit."""
    assert len(state(actual)) > 10
    assert_state(actual, state(expected))


@contextlib.contextmanager
def refused(model: keras.Model, error: Any, message: Any) -> Iterator[None]:
    """Expects an error that leaves the model and its optimizer as they were."""
    before = state(model)
    with pytest.raises(error, match=message):
        yield
    assert_state(model, before)


def store_of(model: keras.Model) -> dict[str, Any]:
    """The state as Keras asks for it where it saves."""
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    return store


def by_dict(source: keras.Model, target: keras.Model, folder: pathlib.Path) -> Any:
    return grouped(target).load_state_dict(grouped(source).state_dict())


def by_state_file(source: keras.Model, target: keras.Model, folder: pathlib.Path) -> Any:
    grouped(source).save_state(folder / "state.npz")
    return grouped(target).load_state(folder / "state.npz")


def save(model: keras.Model, path: pathlib.Path) -> pathlib.Path:
    """As a model or as weights, by the path's ending."""
    (model.save if path.suffix == ".keras" else model.save_weights)(path)
    return path


def load(path: pathlib.Path, make: Callable[[], keras.Model]) -> keras.Model:
    """The model in a file, or one that is made, with the weights in the file."""
    if path.suffix == ".keras":
        return keras.saving.load_model(path)
    model = make()
    model.load_weights(path)
    return model
