"""Steps of Keras' SGD and RMSprop as they are on torch, with a momentum that may be a tensor.

Foreach function by foreach function those of Keras, so that the numbers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from keras import ops

Tensor = Any


@torch.no_grad()
def sgd_step(
    optimizer: Any,
    gradient: Tensor,
    variable: Any,
    velocity: Any,
    learning_rate: Tensor,
    momentum: Any,
    nesterov: bool,
) -> None:
    """Does `v ← μ v − η g`, then `w ← w + v`, or `w ← w + μ v − η g` with `nesterov`."""
    del optimizer
    weights, velocities, gradients = [variable.value], [velocity.value], [gradient]
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, gradients, alpha=-learning_rate)
    if nesterov:
        torch._foreach_add_(weights, gradients, alpha=-learning_rate)
        torch._foreach_add_(weights, velocities, alpha=momentum)
    else:
        torch._foreach_add_(weights, velocities)


@torch.no_grad()
def rmsprop_step(
    optimizer: Any,
    gradient: Tensor,
    variable: Any,
    slots: Sequence[Any],
    learning_rate: Tensor,
    hyperparameters: tuple[Any, Any, Any],
) -> None:
    """Does `v ← ρ v + (1 − ρ) g²`, `m ← μ m + η g / √(v + ε)`, `w ← w − m`."""
    del optimizer
    rho, share, epsilon = hyperparameters
    weights, gradients = [variable.value], [gradient]
    velocities, momentums, *centers = ([slot.value] for slot in slots)
    torch._foreach_mul_(velocities, rho)
    torch._foreach_add_(velocities, torch._foreach_mul(gradients, gradients), alpha=1 - rho)
    denominators = torch._foreach_add(velocities, epsilon)
    for averages in centers:
        torch._foreach_mul_(averages, rho)
        torch._foreach_add_(averages, gradients, alpha=1 - rho)
        torch._foreach_add_(denominators, torch._foreach_mul(averages, averages), alpha=-1)
    torch._foreach_sqrt_(denominators)
    rate = ops.cast(learning_rate, weights[0].dtype)
    increments = torch._foreach_div(torch._foreach_mul(gradients, rate), denominators)
    torch._foreach_mul_(momentums, share)
    torch._foreach_add_(momentums, increments)
    torch._foreach_add_(weights, momentums, alpha=-1)
