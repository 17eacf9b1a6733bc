"""Steps of Keras' SGD and RMSprop in `keras.ops`, with a momentum that may be a tensor.

Operation by operation those of Keras, so that the numbers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

Tensor = Any


def sgd_step(
    optimizer: Any,
    gradient: Tensor,
    variable: Any,
    velocity: Any,
    learning_rate: Tensor,
    momentum: Any,
    nesterov: bool,
) -> None:
    """Does `v ← μ v − η g`, then `w ← w + v`, or `w ← w + μ v − η g` with `nesterov`.

    Args:
        optimizer: The optimizer, whose `assign` is used.
        gradient: The gradient.
        variable: The variable.
        velocity: Its velocity, a variable.
        learning_rate: The rate η, a scalar.
        momentum: The momentum μ, a number or a scalar.
        nesterov: Whether to look ahead.
    """
    rate = ops.cast(learning_rate, variable.dtype)
    gradient = ops.cast(gradient, variable.dtype)
    share = ops.cast(momentum, variable.dtype)

    def pulled() -> Tensor:
        return ops.subtract(ops.multiply(velocity, share), ops.multiply(gradient, rate))

    optimizer.assign(velocity, pulled())
    optimizer.assign_add(variable, pulled() if nesterov else velocity)


def rmsprop_step(
    optimizer: Any,
    gradient: Tensor,
    variable: Any,
    slots: Sequence[Any],
    learning_rate: Tensor,
    hyperparameters: tuple[Any, Any, Any],
) -> None:
    """Does `v ← ρ v + (1 − ρ) g²`, `m ← μ m + η g / √(v + ε)`, `w ← w − m`.

    Centered: `a ← ρ a + (1 − ρ) g`, and `v − a²` in place of `v` under the root.

    Args:
        optimizer: The optimizer, whose `assign` is used.
        gradient: The gradient.
        variable: The variable.
        slots: The variables `v` and `m`, and `a` if it is centered.
        learning_rate: The rate η, a scalar.
        hyperparameters: ρ, μ and ε, numbers or scalars.
    """
    velocity, momentum, *averages = slots
    rho, share, epsilon = hyperparameters
    rate = ops.cast(learning_rate, variable.dtype)
    gradient = ops.cast(gradient, variable.dtype)

    def mean(slot: Any, value: Tensor) -> Tensor:
        return ops.add(ops.multiply(rho, slot), ops.multiply(1 - rho, value))

    optimizer.assign(velocity, mean(velocity, ops.square(gradient)))
    denominator = ops.add(velocity, epsilon)
    for average in averages:
        optimizer.assign(average, mean(average, gradient))
        denominator = velocity - ops.square(average) + epsilon
    increment = ops.divide(ops.multiply(rate, gradient), ops.sqrt(denominator))
    optimizer.assign(momentum, ops.add(ops.multiply(share, momentum), increment))
    optimizer.assign_sub(variable, momentum)
