"""Steps of Keras' SGD and RMSprop as they are on torch, with a momentum that may be a tensor.

`keras_momentum.py` says what they take. The foreach functions are those of Keras, one by one, so
that the numbers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from keras import ops

Tensor = Any


@torch.no_grad()
def sgd_step(
    rule: Any, gradient: Tensor, variable: Any, slots: Sequence[Any], learning_rate: Tensor
) -> None:
    """Moves a variable by a step of SGD."""
    weights, velocities, gradients = [variable.value], [slots[0].value], [gradient]
    torch._foreach_mul_(velocities, rule.momentum)
    torch._foreach_add_(velocities, gradients, alpha=-learning_rate)
    if rule.nesterov:
        torch._foreach_add_(weights, gradients, alpha=-learning_rate)
        torch._foreach_add_(weights, velocities, alpha=rule.momentum)
    else:
        torch._foreach_add_(weights, velocities)


@torch.no_grad()
def rmsprop_step(
    rule: Any, gradient: Tensor, variable: Any, slots: Sequence[Any], learning_rate: Tensor
) -> None:
    """Moves a variable by a step of RMSprop."""
    weights, gradients = [variable.value], [gradient]
    velocities, momentums, *centers = ([slot.value] for slot in slots)
    torch._foreach_mul_(velocities, rule.rho)
    torch._foreach_add_(velocities, torch._foreach_mul(gradients, gradients), alpha=1 - rule.rho)
    denominators = torch._foreach_add(velocities, rule.epsilon)
    for averages in centers:
        torch._foreach_mul_(averages, rule.rho)
        torch._foreach_add_(averages, gradients, alpha=1 - rule.rho)
        torch._foreach_add_(denominators, torch._foreach_mul(averages, averages), alpha=-1)
    torch._foreach_sqrt_(denominators)
    rate = ops.cast(learning_rate, weights[0].dtype)
    increments = torch._foreach_div(torch._foreach_mul(gradients, rate), denominators)
    torch._foreach_mul_(momentums, rule.momentum)
    torch._foreach_add_(momentums, increments)
    torch._foreach_add_(weights, momentums, alpha=-1)
