"""Keras' SGD with a momentum that a schedule can drive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt import backend

Tensor = Any


class SGD(keras.optimizers.SGD):
    """Stands for `keras.optimizers.SGD`, whose step asks in Python whether there is momentum.

    With gradient `g`, η = `learning_rate` and μ = `momentum`:

        v ← μ v - η g
        w ← w + v                    or w ← w + μ v - η g with `nesterov`

    Bit for bit the numbers of Keras where μ is a number above 0. While a step is taken, the
    attribute `momentum` may be a scalar tensor. A velocity is kept whatever μ is.
    """

    stands_for = keras.optimizers.SGD

    def build(self, variables: Sequence[Any]) -> None:
        """Create the velocity of each variable.

        Args:
            variables: The trainable variables, as `keras.Variable`s.
        """
        if self.built:
            return
        keras.optimizers.Optimizer.build(self, variables)
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Move one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape.
            variable: The variable, one of those the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        velocity = self.momentums[self._get_variable_index(variable)]
        backend.sgd_step(
            self, gradient, variable, velocity, learning_rate, self.momentum, self.nesterov
        )
