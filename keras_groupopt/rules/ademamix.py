"""AdEMAMix: Adam with a second, much slower mean of the gradients."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from keras import ops

from keras_groupopt.base.arguments import FRACTION, NUMBER, count
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.scalars import bias_correction, logarithm
from keras_groupopt.rules.update_rule import Tensor, UpdateRule


@register_rule("ademamix")
class AdEMAMix(UpdateRule):
    """Adam that adds a slow mean of the gradients, which remembers thousands of steps.

    With gradient `g`, step `t` counted from 1, η = `learning_rate`, β₁ = `beta_1`, β₂ = `beta_2`,
    β₃ = `beta_3`, α = `alpha` and ε = `epsilon`:

        m ← β₁ m + (1 - β₁) g
        s ← β₃ s + (1 - β₃) g
        v ← β₂ v + (1 - β₂) g²
        w ← w - η (m / (1 - β₁ᵗ) + α s) / (√(v / (1 - β₂ᵗ)) + ε)

    The slow mean `s` starts at 0 and has no bias correction. In early steps it follows the
    gradients of a model that still changes fast, so both of its numbers can be warmed up. Over
    `alpha_warmup_steps` steps, α rises in a straight line from 0. Over `beta_3_warmup_steps` steps,
    the half-life of `s` rises in a straight line from that of `m`. With a the share of the steps
    that are done:

        β₃(t) = min(β₃, exp(1 / ((1 - a) / log β₁ + a / log β₃)))

    State per variable: three values per weight, in its dtype.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        beta_1: Decay of the fast mean of the gradients per step, in [0, 1). Default: 0.9.
        beta_2: Decay of the mean of the squared gradients per step, in [0, 1). Default: 0.999.
        beta_3: Decay of the slow mean of the gradients per step, in [0, 1). Default: 0.9999.
        alpha: The share α of the slow mean in a step, at least 0. Default: 5.0.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-8.
        alpha_warmup_steps: Steps over which α rises. Default: None, for no warm-up.
        beta_3_warmup_steps: Steps over which β₃ rises. Default: None, for no warm-up.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled; none unless given),
            `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: A beta is not in [0, 1), another number is negative or not finite, or a warm-up
            is shorter than one step.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([1.0, 2.0])
        >>> gradient = keras.ops.convert_to_tensor([0.5, -0.25])
        >>> optimizer = kgo.AdEMAMix(learning_rate=0.1, beta_3=0.9, alpha=5.0)
        >>> optimizer.apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.85, 2.15]

    Reference:
        Pagliardini et al. 2024, "The AdEMAMix Optimizer: Better, Faster, Older", arXiv:2409.03137.
    """

    slots: ClassVar = {
        "_momentums": "momentum",
        "_slow_momentums": "slow_momentum",
        "_velocities": "velocity",
    }
    fused_slots = tuple(slots)

    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    beta_3: float = field(default=0.9999, metadata=FRACTION)
    alpha: float = field(default=5.0, metadata=NUMBER)
    epsilon: float = field(default=1e-8, metadata=NUMBER)
    alpha_warmup_steps: int | None = field(default=None, metadata=count(1))
    beta_3_warmup_steps: int | None = field(default=None, metadata=count(1))

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what `m`, `s` and √v are multiplied by, and 1 - β₃(t)."""
        alpha = ops.cast(self.alpha, own.dtype)
        slow_share = ops.cast(1.0 - own.beta_3, own.dtype)
        if self.alpha_warmup_steps is not None:
            alpha = alpha * _share_done(step, self.alpha_warmup_steps)
        if self.beta_3_warmup_steps is not None:
            a = _share_done(step, self.beta_3_warmup_steps)
            length = (1.0 - a) * (1.0 / logarithm(own.beta_1)) + a * (1.0 / logarithm(own.beta_3))
            # As 1 - exp, in float32, it could be off by a thousandth of itself.
            slow_share = ops.maximum(slow_share, -ops.expm1(1.0 / length))
        of_m = 1.0 / bias_correction(own.beta_1, step)
        return of_m, alpha, ops.rsqrt(bias_correction(own.beta_2, step)), slow_share

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        of_m, of_s, of_root, slow_share = self.corrections(own.dtype)
        m = self._moved(self._momentums[at], gradient, 1.0 - own.beta_1)
        s = self._moved(self._slow_momentums[at], gradient, slow_share)
        v = self._moved(self._velocities[at], ops.square(gradient), 1.0 - own.beta_2)
        root = ops.sqrt(v) * of_root + own.epsilon
        return (m * of_m + s * of_s) * rate / root


def _share_done(step: Tensor, steps: int) -> Tensor:
    """Returns how much of a warm-up is done, from 0 to 1."""
    return ops.minimum(step / steps, 1.0)
