"""Schedule-free AdamW: an average of weights in place of a schedule of the rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

from keras import ops

from keras_groupopt.base.arguments import FRACTION, NUMBER, count
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.scalars import bias_correction, scalar
from keras_groupopt.rules.update_rule import Tensor, UpdateRule


@register_rule("schedulefreeadamw")
class ScheduleFreeAdamW(UpdateRule):
    """Adam's second moment, with weights between a fast sequence `z` and its average `x`.

    With gradient `g` taken at the weights `w`, step `t` counted from 1, η = `learning_rate`,
    β₁ = `beta_1`, β₂ = `beta_2`, ε = `epsilon`, r = `r` and p = `weight_lr_power`:

        η ← η · min(1, t / warmup_steps)
        v ← β₂ v + (1 - β₂) g²
        u = g / (√(v / (1 - β₂ᵗ)) + ε)
        a = tʳ (largest η so far)ᵖ;   A ← A + a;   c = a / A
        z ← z - η u
        x ← (1 - c) x + c z
        w ← (1 - β₁) z + β₁ x

    `x` is computed from `w` and `z` and is not part of the state. Use a rate that does not fall.
    The model's weights are `w`, during training and after it. If a variable has no gradient, it
    stays and the step is not added to its sums.

    `z` starts from the weights at the first step, so weights that were loaded before it count.
    Decay moves `w` before the step.

    State per variable: two values per weight, in its dtype, and two float32 scalars.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.0025.
        beta_1: The share of `x` in the weights, in [0, 1). Default: 0.9.
        beta_2: Decay of the mean of the squared gradients per step, in [0, 1). Default: 0.999.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-8.
        warmup_steps: Steps over which the rate rises from 0. Default: 0, for no warm-up.
        r: Power of the step in the weights of the average, at least 0. Default: 0.
        weight_lr_power: Power of the rate in the weights of the average, at least 0. Default: 2.
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
        >>> kgo.ScheduleFreeAdamW(learning_rate=0.1).apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.9, 2.1]

    Reference:
        Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682.
    """

    slots: ClassVar = {"_velocities": "velocity"}

    default_learning_rate = 0.0025
    beta_1: float = field(default=0.9, metadata=FRACTION)
    beta_2: float = field(default=0.999, metadata=FRACTION)
    epsilon: float = field(default=1e-8, metadata=NUMBER)
    warmup_steps: int = field(default=0, metadata=count(0))
    r: float = field(default=0.0, metadata=NUMBER)
    weight_lr_power: float = field(default=2.0, metadata=NUMBER)

    def _build_more(self, variables: Sequence[Any]) -> None:
        self._fast = self._add_copies(variables, "fast")
        self._weight_sums = self._add_scalars(self._fast, "weight_sum")
        self._largest_rates = self._add_scalars(self._fast, "largest_rate")

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the rate and √v are multiplied by, and tʳ."""
        # Without a warm-up, the first step is past its end.
        warmup = ops.minimum(step / max(self.warmup_steps, 1), ops.ones((), own.dtype))
        root = ops.rsqrt(bias_correction(own.beta_2, step))
        return warmup, root, ops.power(step, own.r)

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        warmup, of_root, weight = self.corrections(own.dtype)
        rate = rate * warmup
        share, is_first = self._taken_in(at, rate, weight)
        v = self._moved(self._velocities[at], ops.square(gradient), 1.0 - own.beta_2)
        update = gradient * rate / (ops.sqrt(v) * of_root + own.epsilon)

        fast, w = self._fast[at], ops.cast(variable, own.dtype)
        # The sequence starts here if nothing has been averaged yet.
        z = ops.where(is_first, w, ops.cast(fast, own.dtype))
        self.assign(fast, ops.cast(z - update, fast.dtype))
        # (1 - β₁) z + β₁ x, with x from w: the division by β₁ cancels.
        kept = 1.0 - own.beta_1 * (1.0 - share)
        return (w - z) * share + update * kept

    def _taken_in(self, at: int, rate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Adds this step to the sums, and returns c and whether the sum of weights was 0 before."""
        largest, total = self._largest_rates[at], self._weight_sums[at]
        wide = ops.maximum(ops.convert_to_tensor(largest), ops.cast(rate, largest.dtype))
        self.assign(largest, wide)
        added = ops.cast(weight, wide.dtype) * ops.power(
            wide, scalar(self.weight_lr_power, wide.dtype)
        )
        before = ops.convert_to_tensor(total) * 1.0
        after = before + added
        self.assign(total, after)
        share = ops.where(after > 0, added / ops.where(after > 0, after, 1.0), 0.0)
        return ops.cast(share, weight.dtype), ops.equal(before, 0.0)
