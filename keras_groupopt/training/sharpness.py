"""Perturbations of sharpness-aware training, and projections of gradients.

With gradients `g` of the perturbed variables `w`, a radius `ρ`, and norms over all of them:

    perturbation:           ε = ρ · g / ‖g‖
    adaptive_perturbation:  ε = ρ · T² g / ‖T g‖,  T = |w| + η if adaptive, else 1
    without_projection:     a − (⟨a, b⟩ / ‖b‖²) · b

A norm of zero gives `ε = 0`, and a projection on zero is zero. Norms and products are in float32.

References: Foret et al. 2021, arXiv:2010.01412; Kwon et al. 2021, arXiv:2102.11600.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_groupopt import backend

Tensor = Any
# Relative float32 rounding error when a vector is projected onto itself.
ROUNDING = 1e-6


def perturbation(gradients: Sequence[Tensor], rho: Tensor) -> list[Tensor]:
    """Returns `ρ · g / ‖g‖` for each gradient, in its dtype.

    Args:
        gradients: Tensors of any shape and float dtype; sparse ones stay sparse.
        rho: `ρ`, a float32 scalar.
    """
    return backend.scale(gradients, quotient(rho, backend.global_norm(gradients)))


def adaptive_perturbation(
    gradients: Sequence[Tensor],
    variables: Sequence[Any],
    adaptive: Sequence[bool],
    rho: Tensor,
    eta: Tensor,
) -> list[Tensor]:
    """Returns `ρ · T² g / ‖T g‖` for each gradient, in its dtype.

    Args:
        gradients: Tensors of any shape and float dtype.
        variables: Their variables.
        adaptive: Per variable, whether `T = |w| + η`; else `T = 1`.
        rho: `ρ`, a float32 scalar.
        eta: `η`, a float32 scalar.
    """
    dense = [backend.dense(gradient) for gradient in gradients]
    sizes = [
        ops.abs(ops.convert_to_tensor(variable)) + ops.cast(eta, gradient.dtype) if chosen else None
        for gradient, variable, chosen in zip(dense, variables, adaptive, strict=True)
    ]
    stretched = [
        gradient if size is None else gradient * size
        for gradient, size in zip(dense, sizes, strict=True)
    ]
    scaled = backend.scale(stretched, quotient(rho, backend.global_norm(stretched)))
    del stretched
    return [
        value if size is None else value * size for value, size in zip(scaled, sizes, strict=True)
    ]


def without_projection(values: Sequence[Tensor], onto: Sequence[Tensor]) -> list[Tensor]:
    """Returns the part of `values` that is orthogonal to `onto`, both taken as one vector.

    The result is zero if it is only rounding error, whose direction means nothing.

    Args:
        values: Tensors of any shape and float dtype.
        onto: Tensors of their shapes.
    """
    squared = ops.square(backend.global_norm(onto))
    share = quotient(backend.dot(values, onto), squared)
    across = backend.add_scaled(values, onto, -share)
    least = ROUNDING * backend.global_norm(values)
    return backend.scale(across, ops.cast(backend.global_norm(across) > least, "float32"))


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns `numerator / denominator` of scalars; 0 if the denominator is 0."""
    zero = ops.equal(denominator, 0)
    safe = ops.where(zero, ops.ones_like(denominator), denominator)
    return ops.where(zero, ops.zeros_like(denominator), numerator / safe)
