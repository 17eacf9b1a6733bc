"""RAdam: Adam that waits until its second moment can be trusted.

In its first steps, Adam divides by a second moment that it estimates from a handful of gradients.
RAdam computes how many gradients the estimate is worth. It moves without the estimate while they
are too few, and then lets it in by degrees. A warm-up of the rate serves the same purpose, so RAdam
needs none.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from keras import ops

from keras_groupopt.base.arguments import FRACTION, NUMBER
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.scalars import bias_correction, rectification
from keras_groupopt.rules.update_rule import Tensor, UpdateRule


@register_rule("radam")
class RAdam(UpdateRule):
    """Adam that divides by the second moment, rectified, only once its variance is known.

    With gradient `g`, step `t` counted from 1, η = `learning_rate`, β₁ = `beta_1`,
    β₂ = `beta_2` and ε = `epsilon`:

        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g²
        ρ∞ = 2 / (1 - β₂) - 1
        ρ  = ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ)                                 (gradients `v` is worth)
        r  = √( (ρ - 4)(ρ - 2) ρ∞ / ((ρ∞ - 4)(ρ∞ - 2) ρ) )            (rectification)

        w ← w - η m / (1 - β₁ᵗ) · r √(1 - β₂ᵗ) / (√v + ε)             if ρ > 5
        w ← w - η m / (1 - β₁ᵗ)                                       otherwise

    The numbers are those of `torch.optim.RAdam`. With the default `beta_2` the first five steps are
    not adaptive. With a `beta_2` of 2/3 or less, no step is.

    Moments have the dtype of their variable. The arithmetic is done in float32 or wider, since the
    bias correction of a bfloat16 variable would round to `1 - 1`.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        beta_1: Decay of the mean of the gradients per step, in [0, 1). Default: 0.9.
        beta_2: Decay of the mean of the squared gradients per step, in [0, 1). Default: 0.999.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-8.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled), `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: A beta is not in [0, 1), or another number is negative or not finite.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([1.0, 2.0])
        >>> gradient = keras.ops.convert_to_tensor([0.5, -0.25])
        >>> optimizer = kgo.RAdam(learning_rate=0.1)
        >>> optimizer.apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.95, 2.025]

    Reference:
        Liu et al. 2019, "On the Variance of the Adaptive Learning Rate and Beyond",
        arXiv:1908.03265.
    """

    slots: ClassVar = {"_momentums": "momentum", "_velocities": "velocity"}
    fused_slots = tuple(slots)

    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-8, metadata=NUMBER)

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns 1 - β₁ᵗ, whether the second moment is trusted, and r √(1 - β₂ᵗ)."""
        return bias_correction(own.beta_1, step), *rectification(own.beta_2, step)

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        correction, trusted, factor = self.corrections(own.dtype)
        m = self._moved(self._momentums[at], gradient, 1.0 - own.beta_1)
        v = self._moved(self._velocities[at], ops.square(gradient), 1.0 - own.beta_2)
        rate = rate / correction
        adaptive = rate * factor / (ops.sqrt(v) + own.epsilon)
        return m * ops.where(trusted, adaptive, rate)
