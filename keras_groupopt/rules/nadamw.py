"""NAdamW: Adam with Nesterov's look-ahead, a momentum that warms up, and decoupled decay."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
from keras import ops

from keras_groupopt.base.arguments import FRACTION, NUMBER
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.scalars import bias_correction, logarithm
from keras_groupopt.rules.update_rule import Tensor, UpdateRule

# Enough terms for double precision, since each is at most half of the one before.
_TERMS = np.arange(1, 51)


@register_rule("nadamw")
class NAdamW(UpdateRule):
    """Adam whose momentum grows from β₁/2 to β₁ and is applied one step ahead.

    With gradient `g`, step `t` counted from 1, η = `learning_rate`, β₁ = `beta_1`,
    β₂ = `beta_2`, ε = `epsilon` and ψ = `momentum_decay`:

        μₜ = β₁ (1 - ½ 0.96^(t ψ));  Pₜ = μ₁ μ₂ … μₜ
        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g²
        u = μₜ₊₁ m / (1 - Pₜ₊₁) + (1 - μₜ) g / (1 - Pₜ)
        w ← w - η u / (√(v / (1 - β₂ᵗ)) + ε)

    The numbers are those of `torch.optim.NAdam` with `decoupled_weight_decay=True`, and with a
    `momentum_decay` of 1 those of `keras.optimizers.Nadam`. The product `Pₜ` is computed from `t`
    and is not part of the state.

    State per variable: two values per weight, in its dtype.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.002.
        beta_1: Decay of the mean of the gradients per step, in [0, 1). Default: 0.9.
        beta_2: Decay of the mean of the squared gradients per step, in [0, 1). Default: 0.999.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-8.
        momentum_decay: How fast ψ the momentum warms up, at least 0; at 0 it stays at β₁/2.
            Default: 0.004.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled; none unless given),
            `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: A beta is not in [0, 1), or another number is negative or not finite.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([1.0, 2.0])
        >>> gradient = keras.ops.convert_to_tensor([0.5, -0.25])
        >>> kgo.NAdamW(learning_rate=0.1, weight_decay=0.5).apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.8444, 2.0056]

    Reference:
        Dozat 2016, "Incorporating Nesterov Momentum into Adam". Decay: Loshchilov & Hutter 2019,
        arXiv:1711.05101.
    """

    slots: ClassVar = {"_momentums": "momentum", "_velocities": "velocity"}
    fused_slots = tuple(slots)

    default_learning_rate = 0.002
    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-8, metadata=NUMBER)
    momentum_decay: float = field(default=0.004, metadata=NUMBER)

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `m`, `g` and √v are multiplied by."""
        of_m, of_g = _lookahead(own.beta_1, own.momentum_decay, step, own.dtype)
        return of_m, of_g, ops.rsqrt(bias_correction(own.beta_2, step))

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        m = self._moved(self._momentums[at], gradient, 1.0 - own.beta_1)
        v = self._moved(self._velocities[at], ops.square(gradient), 1.0 - own.beta_2)
        of_m, of_g, of_root = self.corrections(own.dtype)
        root = ops.sqrt(v) * of_root + own.epsilon
        return (m * of_m + gradient * of_g) * rate / root


def _lookahead(beta: Any, decay: Any, step: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Returns μₜ₊₁ / (1 - Pₜ₊₁) and (1 - μₜ) / (1 - Pₜ)."""
    exponent = ops.cast(math.log(0.96) * decay, dtype)
    momentum = beta * (1.0 - 0.5 * ops.exp(step * exponent))
    following = beta * (1.0 - 0.5 * ops.exp((step + 1.0) * exponent))
    product = _product(beta, exponent, step, dtype)
    return following / (1.0 - product * following), (1.0 - momentum) / (1.0 - product)


def _product(beta: Any, exponent: Tensor, step: Tensor, dtype: str) -> Tensor:
    """Returns Pₜ = βᵗ Π (1 - qⁱ/2), i = 1 … t, with q = exp(`exponent`), without a loop.

    Since log(1 - x) = -Σ xᵏ/k, and the powers of q sum up to a geometric series:

        log Π (1 - qⁱ/2) = -Σₖ (½)ᵏ/k · qᵏ (1 - qᵏᵗ)/(1 - qᵏ)         (t in place of the last
                                                                       fraction where q is 1)
    """
    k = ops.convert_to_tensor(_TERMS, dtype)
    flat = ops.equal(exponent, 0.0)
    power = k * ops.where(flat, -1.0, exponent)
    sums = ops.exp(power) * ops.expm1(power * step) / ops.expm1(power)
    sums = ops.where(flat, step, sums)
    series = ops.sum(ops.convert_to_tensor(0.5**_TERMS / _TERMS, dtype) * sums)
    return ops.exp(step * logarithm(beta) - series)
