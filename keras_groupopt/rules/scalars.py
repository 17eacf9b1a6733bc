"""Scalars of a step that several rules need, without the rounding errors of the plain formulas.

A hyperparameter may be a Python number or, if a schedule drives it, a scalar tensor of a compiled
step. What follows from a number alone is computed in double precision.
"""

from __future__ import annotations

import math
from typing import Any

from keras import ops

Tensor = Any

# The paper's bound: the variance has no closed form for fewer than about five gradients.
_SHORTEST_AVERAGE = 5.0


def scalar(value: Any, dtype: str) -> Any:
    """Returns a Python number as it is, and a scalar tensor in `dtype`."""
    return value if isinstance(value, (int, float)) else ops.cast(value, dtype)


def logarithm(value: Any) -> Any:
    """Returns log(`value`), which is -∞ at 0, in double precision if it is a number."""
    if isinstance(value, (int, float)):
        return math.log(value) if value > 0 else -math.inf
    return ops.log(value)


def bias_correction(beta: Any, step: Tensor) -> Tensor:
    """Returns 1 - βᵗ without cancellation."""
    return -ops.expm1(step * logarithm(beta))


def rectification(beta: Any, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whether RAdam uses the second moment at a step, and r √(1 - βᵗ) if it does."""
    longest = 2.0 / (1.0 - beta) - 1.0
    if isinstance(longest, float):
        if longest <= _SHORTEST_AVERAGE:
            return False, 1.0
        bounded: Any = longest
    else:
        bounded = ops.maximum(longest, _SHORTEST_AVERAGE)
    length = _average_length(beta, longest, step)
    # If the second moment is not used, the value is not either, but its root must exist.
    usable = ops.maximum(length, _SHORTEST_AVERAGE)
    constant = bounded / ((bounded - 4.0) * (bounded - 2.0))
    squared = (usable - 4.0) * (usable - 2.0) / usable * constant
    return length > _SHORTEST_AVERAGE, ops.sqrt(squared * bias_correction(beta, step))


def _average_length(beta: Any, longest: Any, step: Tensor) -> Tensor:
    """Returns ρ at a step, to float32 rounding.

    In the early steps, ρ is a small difference of two large numbers (1999 - 1993 for β = 0.999),
    and in float32 r would be off by a hundredth. There, the terms that cancel are removed by hand:
    with βᵗ = exp(-x), x = L t, and 1 / (exp x - 1) = 1/x - 1/2 + x/12 - x³/720 …,

        ρ = t (1 - x/6 + x³/360) + ρ∞ - 2/L        (error x⁵/15120)
    """
    exponent = -logarithm(beta)
    late = longest - 2.0 * step / ops.expm1(step * exponent)
    cubic = (exponent**3 / 360.0) * ops.square(step) - exponent / 6.0
    early = step * (1.0 + step * cubic) + (longest - 2.0 / exponent)
    return ops.where(step * exponent < 0.25, early, late)
