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
# `clipnorm`, `global_clipnorm` and `clipvalue` of a group, of which at most one is set.
Limits = tuple[float | None, float | None, float | None]


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


def clip_group(gradients: Sequence[Tensor], limits: Limits) -> list[Tensor]:
    """Applies a group's own clipping."""
    clipnorm, global_clipnorm, clipvalue = limits
    if clipvalue is not None:
        return [backend.clip_by_value(gradient, clipvalue) for gradient in gradients]
    if clipnorm is not None:
        return [clip_by_global_norm([gradient], clipnorm)[0] for gradient in gradients]
    if global_clipnorm is not None:
        return clip_by_global_norm(gradients, global_clipnorm)
    return list(gradients)


def is_clipped(gradients: Sequence[Tensor], limits: Limits, norm: Tensor | None = None) -> Tensor:
    """Returns whether a group's own clipping changes a gradient, a boolean scalar.

    Args:
        gradients: The gradients of a group that clips by itself.
        limits: The group's limits.
        norm: The norm of all of these gradients. Default: it is taken here, if it is needed.
    """
    clipnorm, global_clipnorm, clipvalue = limits
    if clipvalue is not None:
        return backend.largest(gradients) > clipvalue
    if clipnorm is not None:
        norms = ops.stack([backend.global_norm([gradient]) for gradient in gradients])
        return ops.max(norms) > clipnorm
    return (backend.global_norm(gradients) if norm is None else norm) > global_clipnorm
