"""A run of `fit` in NumPy and float64: the network of `saving_models`, both ways by hand.

The rules and the joint step are those of `grouped_reference.py`; the network's gradient is derived
here, so that no backend has a part in the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from grouped_reference import ReferenceGroup, grouped_step, make_rules
from references import SGD, Adam, Array
from sharpness_reference import Plain

LAYERS = ("body/first", "body/dense", "head")
KERNELS = ("body/first/kernel", "body/dense/kernel")
PATHS = tuple(f"{layer}/{name}" for layer in LAYERS for name in ("kernel", "bias"))
Weights = Mapping[str, Array]


def gradients_of(weights: Weights, x: Array, y: Array) -> dict[str, Array]:
    """The gradient of the mean squared error of tanh(tanh(x W + b) W + b) W + b."""
    inputs = [np.asarray(x, "float64")]
    for layer in LAYERS[:2]:
        inputs.append(np.tanh(inputs[-1] @ weights[f"{layer}/kernel"] + weights[f"{layer}/bias"]))
    outputs = inputs[-1] @ weights["head/kernel"] + weights["head/bias"]
    error = outputs - y
    flowing = 2.0 * error / error.size
    gradients: dict[str, Array] = {}
    for layer, own in zip(reversed(LAYERS), reversed(inputs), strict=True):
        gradients[f"{layer}/kernel"] = own.T @ flowing
        gradients[f"{layer}/bias"] = flowing.sum(axis=0)
        flowing = flowing @ weights[f"{layer}/kernel"].T * (1.0 - own**2)
    return gradients


def trained(
    start: Sequence[Array],
    batches: Sequence[tuple[Array, Array]],
    learning_rate: float | Callable[[int], float],
    global_clipnorm: float | None = None,
    gradient_rule: Plain | None = None,
) -> list[Array]:
    """The weights after one step on each batch, with the gradients of a rule.

    The groups are those of `saving_models.groups`: the backbone by Adam at a quarter of the rate,
    its kernels pulled toward where they started; the head by SGD with momentum, without decay.
    """
    weights = {p: np.asarray(w, "float64") for p, w in zip(PATHS, start, strict=True)}
    groups = [
        ReferenceGroup(
            PATHS[:4],
            Adam,
            learning_rate_ratio=0.25,
            weight_decay=0.5,
            anchor={path: weights[path] for path in KERNELS},
            decayed=KERNELS,
        ),
        ReferenceGroup(PATHS[4:], lambda: SGD(momentum=0.5)),
    ]
    rules = make_rules(groups)
    gradient_rule = gradient_rule or Plain()
    for step, (x, y) in enumerate(batches):
        gradients = gradient_rule(functools.partial(gradients_of, x=x, y=y), weights, step)
        weights = grouped_step(
            weights, gradients, groups, rules, step, learning_rate, global_clipnorm
        )
    return [weights[path] for path in PATHS]
