"""The operations on lists at once, by torch's foreach functions, and conditionals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from keras import ops

from keras_groupopt.backend.fused_torch import are_fusible as are_fusible
from keras_groupopt.backend.fused_torch import fused_step as fused_step
from keras_groupopt.backend.torch_blocks import by_device_and_dtype
from keras_groupopt.backend.torch_momentum import rmsprop_step as rmsprop_step
from keras_groupopt.backend.torch_momentum import sgd_step as sgd_step
from keras_groupopt.base import compat

Tensor = Any

# Values from which on it takes longer to read a gradient than to call one more function.
_LARGE = 1 << 16


def without_gradients() -> AbstractContextManager[Any]:
    """Returns a context in which nothing is recorded for gradients."""
    return torch.no_grad()


def random_states() -> list[Any]:
    """Returns the states of torch's generators: a `Dropout` without a seed draws from them."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [state.numpy() for state in (torch.get_rng_state(), *devices)]


def restore_random_states(states: Sequence[Any]) -> None:
    """Sets what `random_states` returned, of as many devices as there are."""
    host, *devices = (torch.from_numpy(state) for state in states)
    torch.set_rng_state(host)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(devices[:count]):
        torch.cuda.set_rng_state(state, device)


def buffers(model: Any) -> list[Any]:
    """Returns the buffers of modules of torch, such as their statistics."""
    return list(model.buffers())


@torch.no_grad()
def set_buffer(buffer: Tensor, value: Any) -> None:
    """Gives a buffer a value, an array, in place."""
    buffer.copy_(torch.from_numpy(value))


@torch.no_grad()
def private_copies(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns values that an update cannot write through to the caller's.

    Updates on lists are in place, also where Keras passes values instead of variables.
    """
    # Fused steps read memory in order.
    tensors = map(ops.convert_to_tensor, values)
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


@torch.no_grad()
def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm over all gradients, a float32 scalar."""
    # float64 has to be narrowed first: torch refuses to do it on the way.
    own = [g.float() if g.dtype == torch.float64 else g for g in gradients]
    device = own[0].device
    halved = [g for g in own if _has_halves(g)]
    norms = [
        torch.linalg.vector_norm(g.view(2, -1), dim=1, dtype=torch.float32).to(device)
        for g in halved
    ]
    whole = own if not halved else [g for g in own if not _has_halves(g)]
    if whole:
        rest = torch._foreach_norm(whole, 2, dtype=torch.float32)
        norms.append(torch.stack([norm.to(device) for norm in rest]))
    return torch.linalg.vector_norm(torch.cat(norms), 2)


def _has_halves(gradient: Tensor) -> bool:
    """Whether two norms are faster than one: each core of a processor sums a row in one pass."""
    values = gradient.numel()
    return (
        values >= _LARGE
        and values % 2 == 0
        and gradient.device.type == "cpu"
        and gradient.is_contiguous()
    )


@torch.no_grad()
def distance(values: Sequence[Tensor], variables: Sequence[Any]) -> Tensor:
    """Returns `‖v − w‖` over values, which it writes to, and variables; a float32 scalar."""
    weights = compat.values_of(variables)
    for indices in by_device_and_dtype(values):
        torch._foreach_sub_([values[i] for i in indices], [weights[i] for i in indices])
    return global_norm(values)


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Returns each gradient times `factor`, in the gradient's dtype."""
    scaled: list[Tensor] = list(gradients)
    for indices in by_device_and_dtype(gradients):
        first = gradients[indices[0]]
        own = torch.as_tensor(factor, dtype=first.dtype, device=first.device)
        products = torch._foreach_mul([gradients[i] for i in indices], own)
        for index, product in zip(indices, products, strict=True):
            scaled[index] = product
    return scaled


@torch.no_grad()
def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Returns `gradient` with each element in `[-limit, limit]`.

    `keras.ops.clip` makes a tensor of the limit, whose dtype a gradient of rank 0 would take.
    """
    return torch.clamp(gradient, -limit, limit)


@torch.no_grad()
def decay_to_zero(variables: Sequence[Any], factor: Tensor) -> None:
    """Does `w ← w − factor · w` for each variable, in place."""
    values = compat.values_of(variables)
    for indices in by_device_and_dtype(values):
        first = values[indices[0]]
        # Weights of float64 need the factor of float64: in float32, 1 − 1e-7 is 1 − 1.2e-7.
        precise = torch.promote_types(first.dtype, torch.float32)
        kept = (1.0 - factor.to(first.device, precise)).to(first.dtype)
        torch._foreach_mul_([values[i] for i in indices], kept)


@torch.no_grad()
def decay_to_anchor(variables: Sequence[Any], anchors: Sequence[Any], factor: Tensor) -> None:
    """Does `w ← w − factor · (w − a)` for each variable and its anchor, in place."""
    values, targets = compat.values_of(variables), compat.values_of(anchors)
    for indices in by_device_and_dtype(values):
        weights = [values[i] for i in indices]
        wanted = [targets[i] for i in indices]
        steps = torch._foreach_sub(wanted, weights)
        torch._foreach_mul_(steps, factor.to(wanted[0].device, wanted[0].dtype))
        torch._foreach_add_(weights, [step.to(weights[0].dtype) for step in steps])


@torch.no_grad()
def accumulate(
    accumulators: Sequence[Any], gradients: Sequence[Tensor], weight: Tensor | None, keep: Any
) -> None:
    """Does `a ← a + weight · g` for each accumulator and its gradient, in place."""
    values = compat.values_of(accumulators)
    for indices in by_device_and_dtype(values):
        own = [values[i] for i in indices]
        added = [gradients[i].to(own[0].dtype) for i in indices]
        if weight is not None:
            added = list(torch._foreach_mul(added, weight.to(own[0].device, own[0].dtype)))
        if keep is not None:
            added = [torch.where(keep, tensor, torch.zeros_like(tensor)) for tensor in added]
        torch._foreach_add_(own, added)


@torch.no_grad()
def average(averages: Sequence[Any], variables: Sequence[Any], share: Tensor, copies: bool) -> None:
    """Does `v ← v + share · (w − v)`, in place and in one pass; exactly `w` where `share` is 1."""
    del copies
    means, values = compat.values_of(averages), compat.values_of(variables)
    for indices in by_device_and_dtype(means):
        first = means[indices[0]]
        part = share.to(first.device, first.dtype)
        for index in indices:
            means[index].lerp_(values[index].to(first.dtype), part)


def concrete(predicate: Tensor) -> bool | None:
    """Returns a boolean scalar's value, or `None` while a step is being compiled."""
    return None if torch.compiler.is_compiling() else bool(predicate)


@torch.no_grad()
def traced_run_if(predicate: Tensor, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body`, and takes back what it did unless `predicate` holds.

    A branch on a value would break a compiled step in two.
    """
    before = [variable.value.clone() for variable in variables]
    body()
    for variable, old in zip(variables, before, strict=True):
        # Not in place: a value that was assigned in a stateless step may be the caller's.
        variable.assign(torch.where(predicate, variable.value, old))


@torch.no_grad()
def dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Returns the inner product over all tensors, a float32 scalar."""
    products = [
        torch.dot(a.flatten().float(), b.flatten().float())
        for a, b in zip(first, second, strict=True)
    ]
    device = products[0].device
    return torch.stack([product.to(device) for product in products]).sum()


@torch.no_grad()
def add_scaled(first: Sequence[Tensor], second: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Returns `a + factor · b` for each pair, in the dtype of `a`."""
    sums: list[Tensor] = list(first)
    for indices in by_device_and_dtype(first):
        own = [first[i] for i in indices]
        others = [second[i].to(own[0].dtype) for i in indices]
        scaled = torch._foreach_mul(others, factor.to(own[0].device, own[0].dtype))
        torch._foreach_add_(scaled, own)
        for index, total in zip(indices, scaled, strict=True):
            sums[index] = total
    return sums


def traced_cond(
    predicate: Tensor, then: Callable[[], list[Tensor]], otherwise: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Returns the tensors of one of two functions, both of which run: a branch breaks a graph."""
    pairs = zip(then(), otherwise(), strict=True)
    return [torch.where(predicate, first, second) for first, second in pairs]
