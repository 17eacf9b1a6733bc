"""Keras' RMSprop with a momentum that a schedule can drive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt import backend

Tensor = Any


class RMSprop(keras.optimizers.RMSprop):
    """Stands for `keras.optimizers.RMSprop`, whose step asks in Python whether there is momentum.

    With gradient `g`, η = `learning_rate`, ρ = `rho`, μ = `momentum` and ε = `epsilon`:

        v ← ρ v + (1 - ρ) g²
        a ← ρ a + (1 - ρ) g                        with `centered`, else a = 0
        m ← μ m + η g / √(v - a² + ε)
        w ← w - m

    Bit for bit the numbers of Keras where μ is a number. While a step is taken, the attributes
    `momentum`, `rho` and `epsilon` may be scalar tensors. `m` is kept whatever μ is.
    """

    stands_for = keras.optimizers.RMSprop

    def build(self, variables: Sequence[Any]) -> None:
        """Create the state of each variable.

        Args:
            variables: The trainable variables, as `keras.Variable`s.
        """
        if self.built:
            return
        keras.optimizers.Optimizer.build(self, variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        self._average_gradients: list[Any] = []
        if self.centered:
            self._average_gradients = self.add_optimizer_variables(variables, "average_gradient")

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Move one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape.
            variable: The variable, one of those the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        index = self._get_variable_index(variable)
        average = self._average_gradients[index] if self.centered else None
        slots = (self._velocities[index], self._momentums[index], average)
        hyperparameters = (self.rho, self.momentum, self.epsilon)
        backend.rmsprop_step(self, gradient, variable, slots, learning_rate, hyperparameters)
