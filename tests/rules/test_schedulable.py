"""What stands for rules of Keras that ask in Python whether there is momentum."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from comparing import assert_same
from references import SGD, RMSprop, Rule

from keras_groupopt.rules.registry import RULES, type_of

KO = keras.optimizers
ROWS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (KO.SGD, {"momentum": 0.9}),
    "sgd, nesterov": (KO.SGD, {"momentum": 0.7, "nesterov": True}),
    "rmsprop": (KO.RMSprop, {"momentum": 0.0, "rho": 0.8}),
    "rmsprop with momentum": (KO.RMSprop, {"momentum": 0.5}),
    "rmsprop, centered": (KO.RMSprop, {"momentum": 0.9, "centered": True, "epsilon": 1e-3}),
}
SHAPES = {"kernel": (33, 7), "bias": (7,)}


def gradients(dtype: str, steps: int) -> list[list[Any]]:
    random = np.random.default_rng(0)
    return [
        [keras.ops.convert_to_tensor(random.normal(size=s), dtype) for s in SHAPES.values()]
        for _ in range(steps)
    ]


def make_variables(dtype: str) -> list[keras.Variable]:
    random = np.random.default_rng(1)
    return [keras.Variable(random.normal(size=s), dtype=dtype, name=n) for n, s in SHAPES.items()]


def values(variables: list[Any]) -> dict[str, np.ndarray]:
    wide = [np.array(keras.ops.convert_to_numpy(keras.ops.cast(v, "float32"))) for v in variables]
    return dict(zip(SHAPES, wide, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ROWS),
        ("sgd, nesterov", "bfloat16"),
        ("sgd", "float16"),
        ("rmsprop, centered", "bfloat16"),
        ("rmsprop with momentum", "float16"),
    ],
)
def test_a_stand_in_has_the_numbers_of_keras_bit_for_bit(name: str, dtype: str) -> None:
    cls, arguments = ROWS[name]
    ours, theirs = make_variables(dtype), make_variables(dtype)
    optimizers = RULES[cls].if_scheduled(0.05, **arguments), cls(0.05, **arguments)
    for step in gradients(dtype, 10):
        for optimizer, variables in zip(optimizers, (ours, theirs), strict=True):
            optimizer.apply(step, variables)
    assert_same(values(ours), values(theirs))
    assert type_of(optimizers[0]) is cls


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (KO.SGD, {}),
        (KO.SGD, {"nesterov": True}),
        (KO.RMSprop, {}),
        (KO.RMSprop, {"centered": True}),
    ],
)
def test_the_momentum_may_be_a_tensor_that_changes_from_step_to_step(
    cls: type, options: dict[str, Any]
) -> None:
    optimizer = RULES[cls].if_scheduled(0.05, **options)
    variables = make_variables("float32")
    optimizer.build(variables)
    make = {KO.SGD: SGD, KO.RMSprop: RMSprop}[cls]
    rules: dict[str, Rule] = {name: make(**options) for name in SHAPES}
    weights = values(variables)
    for count, step in enumerate(gradients("float32", 12)):
        momentum = min(0.9, 0.1 * count)
        optimizer.momentum = keras.ops.convert_to_tensor(momentum, "float32")
        optimizer.apply(step)
        for (name, rule), gradient in zip(rules.items(), step, strict=True):
            rule.momentum = momentum
            weights[name] = rule.step(weights[name], keras.ops.convert_to_numpy(gradient), 0.05)
    for name, value in values(variables).items():
        np.testing.assert_allclose(value, weights[name], rtol=0, atol=2e-6, err_msg=name)
