"""Adan: Adam with Nesterov's look-ahead taken from the change of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

from keras import ops

from keras_groupopt.base import compat
from keras_groupopt.base.arguments import FRACTION, NUMBER, SWITCH
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.scalars import bias_correction, scalar
from keras_groupopt.rules.update_rule import Tensor, Untracked, UpdateRule


@register_rule("adan")
class Adan(UpdateRule):
    """Adaptive Nesterov momentum: moments of the gradient and of its change since the last step.

    With gradient `g`, the variable's last gradient `g₋` (`g` in its first step), step `t` counted
    from 1, η = `learning_rate`, β₁ = `beta_1`, β₂ = `beta_2`, β₃ = `beta_3`, ε = `epsilon` and
    λ = `weight_decay`:

        m ← β₁ m + (1 - β₁) g
        d ← β₂ d + (1 - β₂)(g - g₋)
        n ← β₃ n + (1 - β₃)(g + β₂ (g - g₋))²
        u = (m / (1 - β₁ᵗ) + β₂ d / (1 - β₂ᵗ)) / (√(n / (1 - β₃ᵗ)) + ε)

        w ← (w - η u) / (1 + η λ)                                     (the paper's decay)
        w ← w - η λ w - η u                                           with `no_prox`

    The betas are those of the authors' code: `beta_1` near 1 is a long memory. The paper writes
    1 - β for them. Adan trains best at a larger rate than Adam.

    In a group of a `GroupedOptimizer`, the decay is the group's: `w ← w - η λ (w - anchor)` before
    the step, for both values of `no_prox`.

    State per variable: four values per weight, in its dtype, and one float32 scalar.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        beta_1: Decay of the mean of the gradients per step, in [0, 1). Default: 0.98.
        beta_2: Decay of the mean of their changes per step, and the weight of the look-ahead, in
            [0, 1). Default: 0.92.
        beta_3: Decay of the second moment per step, in [0, 1). Default: 0.99.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-8.
        no_prox: Whether decay comes before the step, as in AdamW. Default: False.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled), `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: A beta is not in [0, 1), or another number is negative or not finite.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer = kgo.Adan(learning_rate=0.1)
        >>> for gradient in ([0.5, -0.25], [0.5, -0.25]):
        ...     optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.8, 2.2]

    Reference:
        Xie et al. 2022, "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep
        Models", arXiv:2208.06677.
    """

    slots: ClassVar = {
        "_momentums": "momentum",
        "_differences": "difference",
        "_velocities": "velocity",
        "_last_gradients": "last_gradient",
    }
    fused_slots = (*slots, "_started")

    beta_1: float = field(default=0.98, metadata=FRACTION)
    beta_2: float = field(default=0.92, metadata=FRACTION)
    beta_3: float = field(default=0.99, metadata=FRACTION)
    epsilon: float = field(default=1e-8, metadata=NUMBER)
    no_prox: bool = field(default=False, metadata=SWITCH)
    # The decay that is part of the steps of one `apply`, and whether each variable decays.
    _prox: Any = Untracked(rate=None, decayed=())

    def _build_more(self, variables: Sequence[Any]) -> None:
        # Whether there is a last gradient: a variable may have none in the first steps.
        self._started = self._add_scalars(self._momentums, "started")
        if self.weight_decay is not None:
            decayed = tuple(compat.is_decayed(self, v) for v in variables)
            self._prox = Untracked(rate=None, decayed=decayed)

    def apply(self, grads: Sequence[Tensor], trainable_variables: Any = None) -> None:
        """Moves all variables by one step.

        Args:
            grads: One gradient per variable; a variable whose gradient is `None` stays.
            trainable_variables: The variables. Default: all that the optimizer was built with.
        """
        can_build = self.built or trainable_variables is not None
        if self.weight_decay is None or self.no_prox or not can_build:
            super().apply(grads, trainable_variables)
            return
        if not self.built:
            self.build(list(trainable_variables))
        # Keras would decay before the step. Here the decay is part of the step.
        self._prox.rate, self.weight_decay = self.weight_decay, None
        try:
            super().apply(grads, trainable_variables)
        finally:
            self._prox.rate, self.weight_decay = None, self._prox.rate

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `m`, `d` and √n are multiplied by."""
        first, second = bias_correction(own.beta_1, step), bias_correction(own.beta_2, step)
        return 1.0 / first, own.beta_2 / second, ops.rsqrt(bias_correction(own.beta_3, step))

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        last, started = self._last_gradients[at], self._started[at]
        change = gradient - ops.cast(last, own.dtype)
        change = ops.where(ops.greater(started, 0.0), change, ops.zeros_like(change))
        m = self._moved(self._momentums[at], gradient, 1.0 - own.beta_1)
        d = self._moved(self._differences[at], change, 1.0 - own.beta_2)
        ahead = ops.square(gradient + own.beta_2 * change)
        n = self._moved(self._velocities[at], ahead, 1.0 - own.beta_3)
        self.assign(last, ops.cast(gradient, last.dtype))
        self.assign(started, ops.ones((), started.dtype))
        of_m, of_d, of_root = self.corrections(own.dtype)
        root = ops.sqrt(n) * of_root + own.epsilon
        update = (m * of_m + d * of_d) * rate / root
        if self._prox.rate is not None and self._prox.decayed[at]:
            # (w - u) / (1 + x) = w - (u + x w) / (1 + x), in which small numbers stay exact.
            shrink = rate * scalar(self._prox.rate, own.dtype)
            update = (update + shrink * ops.cast(variable, own.dtype)) / (1.0 + shrink)
        return update
