"""One joint step over all groups, in the order that makes clipping and decay mean one thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_groupopt import clipping, kernels
from keras_groupopt.parts import Parts, overwritten_by_gradient

Tensor = Any


def joint_step(
    parts: Parts,
    gradients: Sequence[Tensor | None],
    positions: Sequence[int],
    *,
    base: Tensor,
    at: Tensor,
    global_clipnorm: float | None,
    loss_scale_factor: float | None,
) -> list[str]:
    """Unscales, clips in groups, clips over all groups, and lets each group decay and update.

    Args:
        parts: The built groups.
        gradients: One per position; `None` where there is none.
        positions: Places of their variables among those the optimizer was built with.
        base: The base rate, a float32 scalar.
        at: The optimizer step, an integer scalar.
        global_clipnorm: Limit of the norm over all groups.
        loss_scale_factor: What the loss was multiplied by.

    Returns:
        The paths of variables without a gradient.

    Raises:
        ValueError: If every gradient is `None`.
    """
    routed, indices, missing = _route(parts, gradients, positions)
    if loss_scale_factor is not None:
        routed = [kernels.scale(own, 1.0 / loss_scale_factor) for own in routed]
    routed = [
        group.clip(own) if own else own for group, own in zip(parts.groups, routed, strict=True)
    ]
    if global_clipnorm is not None:
        joint = [gradient for own in routed for gradient in own]
        clipped = iter(clipping.clip_by_global_norm(joint, global_clipnorm))
        routed = [[next(clipped) for _ in own] for own in routed]
    for group, own, places in zip(parts.groups, routed, indices, strict=True):
        if own:
            group.update(own, places, base, at)
        elif not group.frozen:
            group.skip()
    return missing


def _route(
    parts: Parts, gradients: Sequence[Tensor | None], positions: Sequence[int]
) -> tuple[list[list[Tensor]], list[list[int]], list[str]]:
    """Returns gradients and indices of their variables per group, and paths without a gradient."""
    routed: list[list[Tensor]] = [[] for _ in parts.groups]
    indices: list[list[int]] = [[] for _ in parts.groups]
    missing = []
    for gradient, position in zip(gradients, positions, strict=True):
        number, index = parts.places[position]
        group = parts.groups[number]
        if group.frozen:
            continue
        if gradient is None:
            missing.append(group.planned.variables[index].path)
        elif overwritten_by_gradient(group.variables[index]):
            group.variables[index].assign(gradient)
        else:
            routed[number].append(kernels.combine_repeated_rows(gradient))
            indices[number].append(index)
    if missing and all(gradient is None for gradient in gradients):
        raise ValueError(
            "At least one gradient must be given. Received: None for every variable. Does the "
            "loss depend on the model's outputs?"
        )
    return routed, indices, missing
