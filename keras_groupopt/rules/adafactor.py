"""Adafactor: second moments kept as the means of rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base import compat
from keras_groupopt.base.arguments import NUMBER, POSITIVE, SWITCH, checked_by
from keras_groupopt.base.checks import check_negative
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.update_rule import Tensor, UpdateRule


@register_rule("adafactor")
class Adafactor(UpdateRule):
    """Adaptive steps of bounded size, with state for the rows and the columns of a matrix.

    With gradient `g`, step `t` counted from 1, η = `learning_rate`, c = `beta_2_decay`,
    ε₁ = `epsilon_1`, ε₂ = `epsilon_2`, d = `clip_threshold` and κ = `relative_limit`:

        β = 1 - tᶜ
        v ← β v + (1 - β)(g² + ε₁)
        u = g / √v;   u ← u / max(1, RMS(u) / d)
        α = η · min(1, 1 / (κ √t))             with `relative_step`, else η
        α ← α · max(ε₂, RMS(w))                with `scale_parameter`
        w ← w - α u

    For a variable of rank 2 or more, the state is not `v` but its means over the last axis and over
    the last but one, `r` and `s`, and `v = r sᵀ / mean(r)`. RMS is over one variable, also within a
    group of several.

    The rate multiplies the relative step, which is constant up to step 1/κ² and then falls as 1/√t.
    A group's `learning_rate_ratio` therefore multiplies every step, also while the relative step
    falls. With η = κ the curve is that of the paper, min(η, 1/√t). Other implementations use that
    curve for every η, so that in the end groups of all ratios move at the same rate.

    This class differs from `keras.optimizers.Adafactor` in three points: without `relative_step`
    the rate has no bound, matrices have no full second moment, and `scale_parameter` can be
    switched off.

    State per variable: one value per row and per column; one per weight if the rank is below 2.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.01.
        beta_2_decay: The exponent c, below 0, by which the memory grows longer. Default: -0.8.
        epsilon_1: Added to the squared gradients, at least 0. Default: 1e-30.
        epsilon_2: The smallest root mean square that a variable is taken to have, at least 0.
            Default: 0.001.
        clip_threshold: The largest root mean square d of a step at a rate of 1, more than 0.
            Default: 1.0.
        relative_step: Whether the rate falls as 1/√t. Default: True.
        scale_parameter: Whether steps are relative to the size of the weights. Default: True.
        relative_limit: The rate κ at which the fall begins, when 1/√t reaches it, more than 0.
            Default: 0.01, which 1/√t reaches at step 10,000.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled), `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: A number is negative or not finite, `beta_2_decay` is not below 0, or
            `clip_threshold` or `relative_limit` is 0.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([[3.0, 4.0], [4.0, 3.0]])
        >>> gradient = keras.ops.convert_to_tensor([[0.5, -0.5], [0.5, -0.5]])
        >>> kgo.Adafactor(learning_rate=0.1, scale_parameter=False).apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight).ravel()]
        [2.9, 4.1, 3.9, 3.1]

    Reference:
        Shazeer & Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
        arXiv:1804.04235.
    """

    default_learning_rate = 0.01
    beta_2_decay: float = field(default=-0.8, metadata=checked_by(check_negative))
    epsilon_1: float = field(default=1e-30, metadata=NUMBER)
    epsilon_2: float = field(default=1e-3, metadata=NUMBER)
    clip_threshold: float = field(default=1.0, metadata=POSITIVE)
    relative_step: bool = field(default=True, metadata=SWITCH)
    scale_parameter: bool = field(default=True, metadata=SWITCH)
    relative_limit: float = field(default=0.01, metadata=POSITIVE)

    def _build_more(self, variables: Sequence[Any]) -> None:
        self._rows: list[Any] = []
        self._columns: list[Any] = []
        self._velocities: list[Any] = []
        for variable in variables:
            rows = columns = velocity = None
            if compat.overwritten_by_gradient(variable):
                pass
            elif len(variable.shape) < 2:
                velocity = self.add_variable_from_reference(variable, name="velocity")
            else:
                *outer, height, width = variable.shape
                dtype = variable.dtype
                rows = self.add_variable((*outer, height), dtype=dtype, name="rows")
                columns = self.add_variable((*outer, width), dtype=dtype, name="columns")
            self._rows.append(rows)
            self._columns.append(columns)
            self._velocities.append(velocity)

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        fresh, factor = self.corrections(own.dtype)
        squares = ops.square(gradient) + own.epsilon_1
        update = gradient / self._roots(squares, at, fresh)
        excess = _rms(update) / own.clip_threshold
        update = update / ops.maximum(excess, ops.ones((), own.dtype))

        rate = rate * factor
        if self.scale_parameter:
            smallest = ops.cast(self.epsilon_2, own.dtype)
            rate = rate * ops.maximum(smallest, _rms(ops.cast(variable, own.dtype)))
        return update * rate

    def _corrections(self, step: Tensor, own: Any) -> tuple[Tensor, Tensor]:
        """Returns 1 - β and the relative step."""
        fresh = ops.exp(own.beta_2_decay * ops.log(step))
        if not self.relative_step:
            return fresh, ops.ones((), own.dtype)
        return fresh, ops.minimum(ops.rsqrt(step) / own.relative_limit, ops.ones((), own.dtype))

    def _roots(self, squares: Tensor, at: int, fresh: Tensor) -> Tensor:
        """Moves the means by `squares`, and returns √v."""
        if self._velocities[at] is not None:
            return ops.sqrt(self._moved(self._velocities[at], squares, fresh))
        rows = self._moved(self._rows[at], ops.mean(squares, axis=-1), fresh)
        columns = self._moved(self._columns[at], ops.mean(squares, axis=-2), fresh)
        # Roots come first, since the product of two small moments could round to 0.
        share = ops.sqrt(rows / ops.mean(rows, axis=-1, keepdims=True))
        return ops.expand_dims(share, -1) * ops.expand_dims(ops.sqrt(columns), -2)


def _rms(x: Tensor) -> Tensor:
    return ops.sqrt(ops.mean(ops.square(x)))
