"""LARS: momentum whose rate follows the size of each variable."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from keras import ops

from keras_groupopt.base.arguments import FRACTION, NUMBER, POSITIVE, SWITCH
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.update_rule import Tensor, UpdateRule


@register_rule("lars")
class LARS(UpdateRule):
    """Layer-wise adaptive rate scaling: SGD with momentum and one trust ratio per variable.

    With gradient `g`, η = `learning_rate`, μ = `momentum`, τ = `trust_coefficient` and
    ε = `epsilon`:

        r = τ ‖w‖ / (‖g‖ + ε)        (1 if ‖w‖ or ‖g‖ is 0)
        v ← μ v + η r g
        w ← w - v                    or w ← w - (μ v + η r g) with `nesterov`

    The norms are over one variable, also within a group of several. Decay is decoupled, as in all
    rules of Keras: it comes before the step and enters neither `r` nor `v`. The paper adds it to
    `g`.

    Since τ is small, use a rate of the order of 1. Biases and the scales of norms are usually
    trained by plain SGD, for which they need a group of their own.

    State per variable: one value per weight, in its dtype.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 1.0.
        momentum: Share μ of the last step that is kept, in [0, 1). Default: 0.9.
        trust_coefficient: The share τ of its own length that a variable moves at a rate of 1, more
            than 0. Default: 0.001.
        epsilon: Added to the norm of the gradient, at least 0. Default: 0.
        nesterov: Whether to look ahead by one more share of momentum. Default: False.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled), `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: `momentum` is not in [0, 1), `trust_coefficient` is 0, or a number is negative
            or not finite.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([3.0, 4.0])
        >>> gradient = keras.ops.convert_to_tensor([0.0, 10.0])
        >>> kgo.LARS(learning_rate=1.0, trust_coefficient=0.1).apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [3.0, 3.5]

    Reference:
        You et al. 2017, "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
    """

    slots: ClassVar = {"_velocities": "velocity"}

    default_learning_rate = 1.0
    momentum: float = field(default=0.9, metadata=FRACTION)
    trust_coefficient: float = field(default=0.001, metadata=POSITIVE)
    epsilon: float = field(default=0.0, metadata=NUMBER)
    nesterov: bool = field(default=False, metadata=SWITCH)

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        velocity = self._velocities[at]
        length = ops.sqrt(ops.sum(ops.square(ops.cast(variable, own.dtype))))
        slope = ops.sqrt(ops.sum(ops.square(gradient)))
        has_ratio = ops.logical_and(length > 0, slope > 0)
        divisor = ops.where(has_ratio, slope + own.epsilon, 1.0)
        trusted = own.trust_coefficient * length / divisor
        scaled = gradient * (rate * ops.where(has_ratio, trusted, 1.0))
        v = ops.cast(velocity, own.dtype) * own.momentum + scaled
        self.assign(velocity, ops.cast(v, velocity.dtype))
        return v * own.momentum + scaled if self.nesterov else v
