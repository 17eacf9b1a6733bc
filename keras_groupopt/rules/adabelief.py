"""AdaBelief: Adam that divides by how far gradients are from their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import keras
from keras import ops

from keras_groupopt.base.arguments import FRACTION, NUMBER, SWITCH
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.scalars import bias_correction, rectification
from keras_groupopt.rules.update_rule import Tensor, UpdateRule

# The smallest float16 above 0. With a smaller epsilon, a variance that rounds to 0 gives steps
# without a bound.
_SMALLEST_OF_FLOAT16 = 2.0**-24


@register_rule("adabelief")
class AdaBelief(UpdateRule):
    """Adam with the variance of the gradients around their mean in place of their square.

    With gradient `g`, step `t` counted from 1, η = `learning_rate`, β₁ = `beta_1`,
    β₂ = `beta_2` and ε = `epsilon`:

        m ← β₁ m + (1 - β₁) g
        s ← β₂ s + (1 - β₂)(g - m)² + ε
        w ← w - η m / (1 - β₁ᵗ) / (√(s / (1 - β₂ᵗ)) + ε)

    With `amsgrad`, the largest `s` so far is used in place of `s`. With `rectify`, as in `RAdam`,

        w ← w - η m / (1 - β₁ᵗ) · r √(1 - β₂ᵗ) / (√s + ε)             if ρ > 5
        w ← w - η m / (1 - β₁ᵗ)                                       otherwise

    If gradients hardly change, steps are large and only ε bounds them. The default suits float32.
    In float16, ε is at least 6e-8, the smallest float16 above 0.

    State per variable: two values per weight, three with `amsgrad`, in its dtype.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        beta_1: Decay of the mean of the gradients per step, in [0, 1). Default: 0.9.
        beta_2: Decay of the variance per step, in [0, 1). Default: 0.999.
        epsilon: Added to the variance at every step and to its root, at least 0. Default: 1e-16.
        rectify: Whether to begin without the variance and to rectify it, as in `RAdam`. Default:
            False.
        amsgrad: Whether to divide by the largest variance so far. Default: False.
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
        >>> kgo.AdaBelief(learning_rate=0.09).apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.9, 2.1]

    Reference:
        Zhuang et al. 2020, "AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed
        Gradients", arXiv:2010.07468.
    """

    slots: ClassVar = {"_momentums": "momentum", "_variances": "variance"}
    fused_slots = (*slots, "_largest")

    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-16, metadata=NUMBER)
    rectify: bool = field(default=False, metadata=SWITCH)
    amsgrad: bool = field(default=False, metadata=SWITCH)

    def _build_more(self, variables: Sequence[Any]) -> None:
        if self.amsgrad:
            self._largest = self.add_optimizer_variables(variables, "largest_variance")

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns 1 - β₁ᵗ, whether the variance is trusted, and r √(1 - β₂ᵗ) or √(1 - β₂ᵗ)."""
        correction = bias_correction(own.beta_1, step)
        if self.rectify:
            return correction, *rectification(own.beta_2, step)
        return correction, True, ops.sqrt(bias_correction(own.beta_2, step))

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        epsilon = own.epsilon
        if keras.backend.standardize_dtype(variable.dtype) == "float16":
            epsilon = ops.maximum(ops.cast(epsilon, own.dtype), _SMALLEST_OF_FLOAT16)

        variance = self._variances[at]
        m = self._moved(self._momentums[at], gradient, 1.0 - own.beta_1)
        old_s = ops.cast(variance, own.dtype)
        s = old_s + (ops.square(gradient - m) - old_s) * (1.0 - own.beta_2) + epsilon
        self.assign(variance, ops.cast(s, variance.dtype))
        if self.amsgrad:
            largest = self._largest[at]
            s = ops.maximum(ops.cast(largest, own.dtype), s)
            self.assign(largest, ops.cast(s, largest.dtype))

        correction, trusted, factor = self.corrections(own.dtype)
        rate = rate / correction
        root = ops.sqrt(s)
        if self.rectify:
            rate = ops.where(trusted, rate * factor / (root + epsilon), rate)
        else:
            rate = rate / (root / factor + epsilon)
        return m * rate
