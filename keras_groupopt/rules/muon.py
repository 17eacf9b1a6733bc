"""Muon: momentum made orthogonal, for the hidden matrices of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

from keras import ops

from keras_groupopt.base.arguments import FINITE, FRACTION, NUMBER, SWITCH, checked_by, count
from keras_groupopt.base.checks import check_positive, optional
from keras_groupopt.rules.registry import register_rule
from keras_groupopt.rules.update_rule import Tensor, UpdateRule


@register_rule("muon")
class Muon(UpdateRule):
    """Moves a matrix along its momentum, after bringing all singular values near 1.

    With gradient `g`, η = `learning_rate`, μ = `momentum`, a, b, c = `muon_a`, `muon_b`, `muon_c`,
    ε = `epsilon` and a matrix of `n` rows and `k` columns:

        m ← μ m + g
        x = g + μ m with `nesterov`, else m
        x ← x / (‖x‖ + ε)
        x ← a x + (b x xᵀ + c (x xᵀ)²) x          `ns_steps` times
        w ← w - η · ρ √max(n, k) · x              with ρ = `rms_rate`
        w ← w - η · √max(1, k/n) · x              with `rms_rate=None`

    With ρ = 0.2 a step has about the size of an Adam step, so that rates and decays of Adam fit.
    With `rms_rate=None`, steps are those of Jordan's code for a kernel from `n` inputs to `k`
    outputs.

    Every variable must have rank 2. Other variables are an error when the plan is made, while
    `keras.optimizers.Muon` moves them by Adam without a word. Embeddings and the output layer are
    matrices too, but Muon should not move them. Give them, norms and biases to another group.

    State per variable: one value per weight, in its dtype.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        momentum: Decay μ of the sum of the gradients per step, in [0, 1). Default: 0.95.
        nesterov: Whether to look ahead by one more share of the momentum. Default: True.
        ns_steps: How many Newton-Schulz iterations to do, at least 1. Default: 5.
        muon_a: Coefficient a of the iteration. Default: 3.4445.
        muon_b: Coefficient b of the iteration. Default: -4.775.
        muon_c: Coefficient c of the iteration. Default: 2.0315.
        rms_rate: The root mean square ρ of a step at a rate of 1, more than 0, or `None`.
            Default: 0.2.
        epsilon: Added to the norm of the momentum, at least 0. Default: 1e-7.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled; none unless given),
            `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: `momentum` is not in [0, 1), a number is negative or not finite, or `ns_steps`
            is below 1; at build, a variable is not a matrix.
        TypeError: An argument has the wrong type.

    Example:
        >>> import keras, keras_groupopt as kgo
        >>> weight = keras.Variable([[1.0, 0.0], [0.0, 1.0]])
        >>> gradient = keras.ops.convert_to_tensor([[8.0, 0.0], [0.0, -2.0]])
        >>> kgo.Muon(learning_rate=0.1, rms_rate=None).apply([gradient], [weight])
        >>> [round(float(value), 1) for value in keras.ops.convert_to_numpy(weight).diagonal()]
        [0.9, 1.1]

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The size of
        steps: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982.
    """

    slots: ClassVar = {"_momentums": "momentum"}

    momentum: float = field(default=0.95, metadata=FRACTION)
    nesterov: bool = field(default=True, metadata=SWITCH)
    ns_steps: int = field(default=5, metadata=count(1))
    muon_a: float = field(default=3.4445, metadata=FINITE)
    muon_b: float = field(default=-4.7750, metadata=FINITE)
    muon_c: float = field(default=2.0315, metadata=FINITE)
    rms_rate: float | None = field(default=0.2, metadata=checked_by(optional(check_positive)))
    epsilon: float = field(default=1e-7, metadata=NUMBER)

    @classmethod
    def check_shapes(cls, shapes: Sequence[tuple[str, Sequence[int]]], where: str) -> None:
        """Refuses variables that are not matrices.

        Args:
            shapes: The path and the shape of each variable.
            where: The name of the group or optimizer that has them, for the error.

        Raises:
            ValueError: If the rank of a variable is not 2.
        """
        others = [f"{path} of shape {tuple(shape)}" for path, shape in shapes if len(shape) != 2]
        if others:
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            raise ValueError(
                "Variables that Muon moves must be matrices. Received: "
                f"{', '.join(others[:5])}{more} in {where}. Give them to another group: "
                "`kgo.recipes.muon_with_adamw(model)` makes groups of hidden matrices for Muon "
                "and of all others for AdamW, and `kgo.rank(2) & selector` selects matrices."
            )

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the momentum of each variable.

        Args:
            variables: The trainable variables, as `keras.Variable`s of rank 2.

        Raises:
            ValueError: If the rank of a variable is not 2.
        """
        named = [(getattr(v, "path", v.name), v.shape) for v in variables]
        self.check_shapes(named, where=f'optimizer "{self.name}"')
        super().build(variables)

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        slot = self._momentums[at]
        m = ops.cast(slot, own.dtype) * own.momentum + gradient
        self.assign(slot, ops.cast(m, slot.dtype))

        direction = self._orthogonal(gradient + m * own.momentum if self.nesterov else m, own)
        rows, columns = variable.shape
        if self.rms_rate is None:
            size = math.sqrt(max(1.0, columns / rows))
        else:
            size = own.rms_rate * math.sqrt(max(rows, columns))
        return direction * (rate * size)

    def _orthogonal(self, x: Tensor, own: Any) -> Tensor:
        a, b, c = own.muon_a, own.muon_b, own.muon_c
        is_tall = x.shape[0] > x.shape[1]
        x = ops.transpose(x) if is_tall else x
        x = x / (ops.sqrt(ops.sum(ops.square(x))) + own.epsilon)
        for _ in range(self.ns_steps):
            square = ops.matmul(x, ops.transpose(x))
            x = a * x + ops.matmul(b * square + c * ops.matmul(square, square), x)
        return ops.transpose(x) if is_tall else x
