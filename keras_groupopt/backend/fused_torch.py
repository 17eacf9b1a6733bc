"""Steps of whole lists on torch: its fused kernels, and its foreach functions block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops

from keras_groupopt.backend.fused_step import FusedStep, ListStep
from keras_groupopt.backend.torch_blocks import BLOCK_SIZES, blocks_of, by_device_and_dtype
from keras_groupopt.base import compat

Tensor = Any
Tensors = Sequence[Tensor]
Move = Callable[..., None]

_DTYPES = (torch.float32, torch.float64)


def fused_step(kind: str) -> FusedStep | None:
    """Returns the step of a rule on a list of variables, by its name; `None` where none is."""
    prepare = _PREPARE.get(kind)
    if prepare is None:
        return None

    def fused(step: ListStep) -> None:
        _run(step, prepare)
        if kind == "adan":
            # Parts of one variable share its mark.
            for mark in compat.values_of([own.fused_slots[-1] for own, _ in step.pairs]):
                mark.fill_(1.0)

    return torch.no_grad()(fused)


def are_fusible(gradients: Tensors, variables: Sequence[Any]) -> list[bool]:
    """Returns for each gradient and its variable whether a fused step takes them."""
    return [
        gradient.layout is torch.strided
        and value.dtype in _DTYPES
        and value.is_contiguous()
        and value.device.type in BLOCK_SIZES
        and gradient.device == value.device
        and gradient.dtype == value.dtype
        and gradient.shape == value.shape
        for gradient, value in zip(gradients, compat.values_of(variables), strict=True)
    ]


def _run(step: ListStep, prepare: Callable[..., Move]) -> None:
    members = [own for own, _ in step.pairs]
    weights = compat.values_of([own.variable for own in members])
    # Fused kernels read memory in order, whatever the strides.
    gradients = [gradient.contiguous() for _, gradient in step.pairs]
    by_slot = zip(*(own.fused_slots for own in members), strict=True)
    slots = [compat.values_of(slot) for slot in by_slot]
    anchors = [None if own.anchor is None else own.anchor.value for own in members]
    # A rule may make up its mind only once: all of a list are of one dtype and on one device.
    for places in by_device_and_dtype(weights):
        device, dtype = weights[places[0]].device, weights[places[0]].dtype

        def scalar(value: Any, device: Any = device, dtype: Any = dtype) -> Tensor:
            return torch.as_tensor(value, dtype=dtype, device=device)

        move = prepare(step.rule, scalar(step.rate))
        scale = None if step.scale is None else scalar(step.scale)
        share = None if step.decay is None else scalar(step.decay)
        # Not times 1 − share, which rounds a small share away.
        back = None if share is None else -share
        for block in blocks_of(weights, places):
            own = block.of(weights)
            moved_by = block.of(gradients)
            if scale is not None:
                moved_by = list(torch._foreach_mul(moved_by, scale))
            if back is not None:
                free = []
                for place, weight, anchor in zip(block.places, own, block.of(anchors), strict=True):
                    if not members[place].is_decayed:
                        continue
                    if anchor is None:
                        free.append(weight)
                    else:
                        weight.lerp_(anchor, share)
                if free:
                    torch._foreach_addcmul_(free, free, [back] * len(free))
            move(own, moved_by, *(block.of(slot) for slot in slots))


# The rules ------------------------------------------------------------------------------------
# Each takes the rule and the rate, a scalar of the variables' dtype and device. It returns what
# moves a block: a function of weights, gradients that it may not write to, and slots.


def _adam_move(rule: Any, rate: Tensor) -> Move:
    """`m ← β₁ m + (1 − β₁) g`, `v ← β₂ v + (1 − β₂) g²`, `w ← w − rate · m / (√v + ε)`."""
    if torch.compiler.is_compiling():
        # The fused kernel is none that a compiler can look into.
        return _adam_chain(rule, rate)
    # torch's own bias corrections are 1 after so many steps: Keras' are in the rate.
    forever = torch.full((), float("inf"), dtype=torch.float32, device=rate.device)

    def move(
        weights: Tensors, gradients: Tensors, m: Tensors, v: Tensors, largest: Tensors = ()
    ) -> None:
        torch._fused_adam_(
            weights,
            gradients,
            m,
            v,
            list(largest),
            [forever] * len(weights),
            lr=rate,
            beta1=rule.beta_1,
            beta2=rule.beta_2,
            weight_decay=0.0,
            eps=rule.epsilon,
            amsgrad=bool(largest),
            maximize=False,
        )

    return move


def _adam_chain(rule: Any, rate: Tensor) -> Move:
    def move(
        weights: Tensors, gradients: Tensors, m: Tensors, v: Tensors, largest: Tensors = ()
    ) -> None:
        _moments(rule, gradients, m, v)
        if largest:
            torch._foreach_maximum_(largest, v)
        roots = torch._foreach_sqrt(largest or v)
        torch._foreach_add_(roots, rule.epsilon)
        steps = torch._foreach_mul(m, rate)
        torch._foreach_div_(steps, roots)
        torch._foreach_sub_(weights, steps)

    return move


def _moments(rule: Any, gradients: Tensors, m: Tensors, v: Tensors) -> None:
    torch._foreach_lerp_(m, gradients, 1.0 - rule.beta_1)
    torch._foreach_mul_(v, rule.beta_2)
    torch._foreach_addcmul_(v, gradients, gradients, value=1.0 - rule.beta_2)


def _move_by_two_means(
    rule: Any, rate: Tensor, weights: Tensors, means: Sequence[Tensors], factors: Sequence[Tensor]
) -> None:
    """Moves weights by `rate (a m₁ + b m₂) / (c √v + ε)`, with m₁, m₂, v and a, b, c as given."""
    first, second, squares = means
    roots = torch._foreach_sqrt(squares)
    torch._foreach_mul_(roots, factors[2])
    torch._foreach_add_(roots, rule.epsilon)
    steps = torch._foreach_mul(first, factors[0])
    torch._foreach_add_(steps, torch._foreach_mul(second, factors[1]))
    torch._foreach_mul_(steps, rate)
    torch._foreach_div_(steps, roots)
    torch._foreach_sub_(weights, steps)


def _adam(rule: Any, rate: Tensor) -> Move:
    step = ops.convert_to_tensor(rule.iterations).to(rate) + 1
    # As Keras rounds them.
    powers = (torch.pow(torch.full_like(rate, beta), step) for beta in (rule.beta_1, rule.beta_2))
    first, second = (1 - power for power in powers)
    return _adam_move(rule, rate * torch.sqrt(second) / first)


def _radam(rule: Any, rate: Tensor) -> Move:
    correction, trusted, factor = rule.corrections(str(rate.dtype).removeprefix("torch."))
    plain = rate / correction
    adaptive = _adam_move(rule, plain * factor)
    one = torch.ones_like(rate)

    def not_adaptive(weights: Tensors, gradients: Tensors, m: Tensors, v: Tensors) -> None:
        _moments(rule, gradients, m, v)
        torch._foreach_sub_(weights, torch._foreach_mul(m, plain))

    def either(weights: Tensors, gradients: Tensors, m: Tensors, v: Tensors) -> None:
        _moments(rule, gradients, m, v)
        roots = torch._foreach_sqrt(v)
        torch._foreach_add_(roots, rule.epsilon)
        steps = torch._foreach_div(m, [torch.where(trusted, root, one) for root in roots])
        torch._foreach_mul_(steps, torch.where(trusted, plain * factor, plain))
        torch._foreach_sub_(weights, steps)

    if isinstance(trusted, bool):
        return adaptive if trusted else not_adaptive
    if rate.device.type != "cpu" or torch.compiler.is_compiling():
        # The host would have to wait for the device.
        return either
    return adaptive if bool(trusted) else not_adaptive


def _adan(rule: Any, rate: Tensor) -> Move:
    factors = rule.corrections(str(rate.dtype).removeprefix("torch."))

    def move(weights: Tensors, gradients: Tensors, *slots: Tensors) -> None:
        m, d, n, last, started = slots
        changes = torch._foreach_sub(gradients, last)
        for change, mark in zip(changes, started, strict=True):
            change.mul_(mark.to(change.dtype))
        torch._foreach_copy_(last, gradients)
        torch._foreach_lerp_(m, gradients, 1.0 - rule.beta_1)
        torch._foreach_lerp_(d, changes, 1.0 - rule.beta_2)
        torch._foreach_mul_(changes, rule.beta_2)
        torch._foreach_add_(changes, gradients)
        torch._foreach_mul_(n, rule.beta_3)
        torch._foreach_addcmul_(n, changes, changes, value=1.0 - rule.beta_3)
        _move_by_two_means(rule, rate, weights, (m, d, n), factors)

    return move


def _ademamix(rule: Any, rate: Tensor) -> Move:
    *factors, slow_share = rule.corrections(str(rate.dtype).removeprefix("torch."))

    def move(weights: Tensors, gradients: Tensors, m: Tensors, s: Tensors, v: Tensors) -> None:
        _moments(rule, gradients, m, v)
        changes = torch._foreach_sub(gradients, s)
        torch._foreach_mul_(changes, slow_share)
        torch._foreach_add_(s, changes)
        _move_by_two_means(rule, rate, weights, (m, s, v), factors)

    return move


def _sgd(rule: Any, rate: Tensor) -> Move:
    backward = -rate

    def move(weights: Tensors, gradients: Tensors, velocities: Tensors = ()) -> None:
        steps = torch._foreach_mul(gradients, backward)
        if not velocities:
            torch._foreach_add_(weights, steps)
            return
        torch._foreach_mul_(velocities, rule.momentum)
        torch._foreach_add_(velocities, steps)
        if rule.nesterov:
            torch._foreach_add_(weights, steps)
            torch._foreach_add_(weights, velocities, alpha=rule.momentum)
        else:
            torch._foreach_add_(weights, velocities)

    return move


def _lion(rule: Any, rate: Tensor) -> Move:
    def move(weights: Tensors, gradients: Tensors, m: Tensors) -> None:
        # Operation by operation Keras': what is near zero has a sign too.
        steps = torch._foreach_mul(m, rule.beta_1)
        torch._foreach_add_(steps, gradients, alpha=1 - rule.beta_1)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(steps, rate)
        torch._foreach_sub_(weights, steps)
        torch._foreach_mul_(m, rule.beta_2)
        torch._foreach_add_(m, gradients, alpha=1 - rule.beta_2)

    return move


def _rmsprop(rule: Any, rate: Tensor) -> Move:
    def move(weights: Tensors, gradients: Tensors, v: Tensors, *rest: Tensors) -> None:
        more = list(rest)
        momentums = more.pop(0) if rule.momentum > 0 else []
        torch._foreach_mul_(v, rule.rho)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - rule.rho)
        roots = torch._foreach_add(v, rule.epsilon)
        if rule.centered:
            means = more.pop(0)
            torch._foreach_mul_(means, rule.rho)
            torch._foreach_add_(means, gradients, alpha=1 - rule.rho)
            torch._foreach_addcmul_(roots, means, means, value=-1)
        torch._foreach_sqrt_(roots)
        steps = torch._foreach_mul(gradients, rate)
        torch._foreach_div_(steps, roots)
        if momentums:
            torch._foreach_mul_(momentums, rule.momentum)
            torch._foreach_add_(momentums, steps)
        torch._foreach_sub_(weights, momentums or steps)

    return move


def _adagrad(rule: Any, rate: Tensor) -> Move:
    def move(weights: Tensors, gradients: Tensors, sums: Tensors) -> None:
        torch._foreach_addcmul_(sums, gradients, gradients)
        roots = torch._foreach_add(sums, rule.epsilon)
        torch._foreach_sqrt_(roots)
        steps = torch._foreach_mul(gradients, rate)
        torch._foreach_div_(steps, roots)
        torch._foreach_sub_(weights, steps)

    return move


_PREPARE: dict[str, Callable[..., Move]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "adan": _adan,
    "ademamix": _ademamix,
    "lion": _lion,
    "radam": _radam,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
}
