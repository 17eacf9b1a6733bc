"""Steps of Keras' SGD and RMSprop in `keras.ops`, with a momentum that may be a tensor.

The formulas are in `rules/keras_rules.py`. The operations are those of Keras, one by one, so that
the numbers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

Tensor = Any


def sgd_step(
    rule: Any, gradient: Tensor, variable: Any, slots: Sequence[Any], learning_rate: Tensor
) -> None:
    """Moves a variable by a step of SGD.

    Args:
        rule: The optimizer, whose hyperparameters are numbers or scalars.
        gradient: The gradient.
        variable: The variable.
        slots: The velocity, a variable.
        learning_rate: The rate, a scalar.
    """
    (velocity,) = slots
    rate = ops.cast(learning_rate, variable.dtype)
    gradient = ops.cast(gradient, variable.dtype)
    momentum = ops.cast(rule.momentum, variable.dtype)

    def pulled() -> Tensor:
        return ops.subtract(ops.multiply(velocity, momentum), ops.multiply(gradient, rate))

    rule.assign(velocity, pulled())
    rule.assign_add(variable, pulled() if rule.nesterov else velocity)


def rmsprop_step(
    rule: Any, gradient: Tensor, variable: Any, slots: Sequence[Any], learning_rate: Tensor
) -> None:
    """Moves a variable by a step of RMSprop.

    Args:
        rule: The optimizer, whose hyperparameters are numbers or scalars.
        gradient: The gradient.
        variable: The variable.
        slots: The variables `v`, `m` and, if the rule is centered, `a`.
        learning_rate: The rate, a scalar.
    """
    velocity, momentum, *averages = slots
    rate = ops.cast(learning_rate, variable.dtype)
    gradient = ops.cast(gradient, variable.dtype)

    def mean(slot: Any, value: Tensor) -> Tensor:
        return ops.add(ops.multiply(rule.rho, slot), ops.multiply(1 - rule.rho, value))

    rule.assign(velocity, mean(velocity, ops.square(gradient)))
    denominator = ops.add(velocity, rule.epsilon)
    for average in averages:
        rule.assign(average, mean(average, gradient))
        denominator = velocity - ops.square(average) + rule.epsilon
    increment = ops.divide(ops.multiply(rate, gradient), ops.sqrt(denominator))
    rule.assign(momentum, ops.add(ops.multiply(rule.momentum, momentum), increment))
    rule.assign_sub(variable, momentum)
