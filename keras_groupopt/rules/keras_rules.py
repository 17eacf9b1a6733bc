"""Keras' own rules: their slots for fused steps, and the classes that take the place of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.rules.fused import slots_of
from keras_groupopt.rules.registry import RULES, Registration

Tensor = Any


class _KeepsMomentum(keras.optimizers.Optimizer):
    """The part that stand-ins share: slots for the momentum, whatever its value, and a step."""

    momentum: Any
    fused_slots: ClassVar[tuple[str, ...]]

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of each variable.

        Args:
            variables: The trainable variables, as `keras.Variable`s.
        """
        # Keras makes slots for a momentum only if it is above 0.
        momentum, self.momentum = self.momentum, 0.5
        super().build(variables)
        self.momentum = momentum

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Moves one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape.
            variable: A variable that the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        index = compat.place_in(self, variable)
        slots = [slot[index] for slot in slots_of(self, self.fused_slots)]
        self.step_of_backend(gradient, variable, slots, learning_rate)


class SGD(_KeepsMomentum, keras.optimizers.SGD):
    """Stands for `keras.optimizers.SGD`, which tests in Python whether there is momentum.

    With gradient `g`, η = `learning_rate` and μ = `momentum`:

        v ← μ v - η g
        w ← w + v                    or w ← w + μ v - η g with `nesterov`

    The numbers are those of Keras, bit for bit, if μ is a number above 0. During a step the
    attribute `momentum` may be a scalar tensor. The velocity is kept for every μ.
    """

    stands_for = keras.optimizers.SGD
    fused_slots = ("momentums",)
    step_of_backend = backend.sgd_step


class RMSprop(_KeepsMomentum, keras.optimizers.RMSprop):
    """Stands for `keras.optimizers.RMSprop`, which tests in Python whether there is momentum.

    With gradient `g`, η = `learning_rate`, ρ = `rho`, μ = `momentum` and ε = `epsilon`:

        v ← ρ v + (1 - ρ) g²
        a ← ρ a + (1 - ρ) g                        with `centered`, else a = 0
        m ← μ m + η g / √(v - a² + ε)
        w ← w - m

    The numbers are those of Keras, bit for bit, if μ is a number. During a step the attributes
    `momentum`, `rho` and `epsilon` may be scalar tensors. `m` is kept for every μ.
    """

    stands_for = keras.optimizers.RMSprop
    fused_slots = ("_velocities", "_momentums", "_average_gradients")
    step_of_backend = backend.rmsprop_step


class Ftrl(keras.optimizers.Ftrl):
    """Stands for `keras.optimizers.Ftrl`, which divides by the rate.

    At a rate above 0 the numbers are those of Keras. At rate 0 neither the variable nor its state
    moves, where Keras makes them NaN.
    """

    stands_for = keras.optimizers.Ftrl
    fused_slots = ("_accumulators", "_linears")

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Moves one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape.
            variable: A variable that the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        index = compat.place_in(self, variable)
        moving = [variable, *(slot[index] for slot in slots_of(self, self.fused_slots))]
        before = [ops.copy(ops.convert_to_tensor(each)) for each in moving]
        rate = ops.convert_to_tensor(learning_rate)
        moves = rate > 0
        super().update_step(gradient, variable, ops.where(moves, rate, ops.ones_like(rate)))
        for each, value in zip(moving, before, strict=True):
            self.assign(each, ops.where(moves, ops.convert_to_tensor(each), value))


_optimizers = keras.optimizers
RULES.update(
    {
        _optimizers.Adadelta: Registration(
            "adadelta", ("_accumulated_grads", "_accumulated_delta_vars")
        ),
        _optimizers.Adagrad: Registration("adagrad", ("_accumulators",)),
        _optimizers.Adam: Registration("adam", ("_momentums", "_velocities", "_velocity_hats")),
        _optimizers.Adamax: Registration("adamax", ("_m", "_u")),
        _optimizers.Ftrl: Registration("ftrl", Ftrl.fused_slots, stand_in=Ftrl),
        _optimizers.Lion: Registration("lion", ("_momentums",)),
        _optimizers.RMSprop: Registration("rmsprop", RMSprop.fused_slots, RMSprop),
        _optimizers.SGD: Registration("sgd", SGD.fused_slots, SGD),
    }
)
