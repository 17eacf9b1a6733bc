"""Gradient clipping: per element, per variable, over a group, over all groups.

With gradients `g_i`, a limit `c`, and norms in float32:

    clipvalue:        g_i ← min(max(g_i, −c), c)
    clipnorm:         g_i ← g_i · min(1, c / ‖g_i‖)
    global_clipnorm:  g_i ← g_i · min(1, c / sqrt(Σ_j ‖g_j‖²))

A norm that is not finite makes the scale NaN, so that every variable shows it: scaling by
`c / inf = 0` would stop training without a word.

Reference: Pascanu et al. 2013, arXiv:1211.5063.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_groupopt import backend

# Tensors have no common type over three backends.
Tensor = Any


def scale_for(norm: Tensor, limit: float) -> Tensor:
    """Returns `min(1, limit / norm)` as a float32 scalar; NaN when `norm` is not finite."""
    scale = ops.minimum(1.0, limit / ops.maximum(norm, limit))
    return ops.where(ops.isfinite(norm), scale, float("nan"))


def clip_by_global_norm(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Scales all gradients by one factor so that their joint norm is at most `limit`.

    Args:
        gradients: The gradients.
        limit: The limit.
    """
    if not gradients:
        return []
    return backend.scale(gradients, scale_for(backend.global_norm(gradients), limit))


def clip_group(
    gradients: Sequence[Tensor],
    clipnorm: float | None,
    global_clipnorm: float | None,
    clipvalue: float | None,
) -> list[Tensor]:
    """Applies a group's own clipping; at most one limit is set."""
    if clipvalue is not None:
        return [backend.clip_by_value(gradient, clipvalue) for gradient in gradients]
    if clipnorm is not None:
        return [clip_by_global_norm([gradient], clipnorm)[0] for gradient in gradients]
    if global_clipnorm is not None:
        return clip_by_global_norm(gradients, global_clipnorm)
    return list(gradients)
