"""AdamW of torch with its clipping by the global norm."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import measuring
import torch
import torch_steps
from prepared import (
    BETA_1,
    BETA_2,
    CLIPNORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Prepared,
    Setting,
)

EPSILON_NOTE = "epsilon is added to the corrected root"


def adamw(setting: Setting, *, groups: int = 2, **form: bool) -> Prepared:
    """Prepares a variant of `torch.optim.AdamW` over groups with equal options."""
    parameters = [
        torch.nn.Parameter(variable.value.detach().clone())
        for variable in setting.model.trainable_variables
    ]
    for parameter, gradient in zip(parameters, setting.feed.received, strict=True):
        parameter.grad = gradient
    parts: list[list[Any]] = [[] for _ in range(groups)]
    for parameter, variable in zip(parameters, setting.model.trainable_variables, strict=True):
        first = groups == 1 or re.match(setting.pattern, variable.path)
        parts[0 if first else 1].append(parameter)
    watch = measuring.Stopwatch()
    optimizer = watch.part(
        "build",
        lambda: torch.optim.AdamW(
            [{"params": part} for part in parts],
            lr=LEARNING_RATE,
            betas=(BETA_1, BETA_2),
            eps=setting.epsilon,
            weight_decay=WEIGHT_DECAY,
            **form,
        ),
    )
    many_at_once = form.get("foreach", True)

    def apply() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIPNORM, foreach=many_at_once)
        optimizer.step()

    def state_bytes() -> int:
        return sum(
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    # `torch.compile` would compile it again at a later step, and fail there.
    eager = dataclasses.replace(setting, mode="eager")
    return torch_steps.start(apply, eager, watch, lambda: torch_steps.read(parameters), state_bytes)


def _form(what: str, **options: Any) -> tuple[str, Callable[[Setting], Prepared]]:
    return what, lambda setting: adamw(setting, **options)


# Description and preparation of each peer, by name.
PEERS = {
    "torch_loop": _form(
        "torch.optim.AdamW, one variable after the other, two groups", foreach=False, fused=False
    ),
    "torch_foreach": _form("torch.optim.AdamW(foreach=True), two groups", foreach=True),
    "torch_fused": _form("torch.optim.AdamW(fused=True), two groups", fused=True),
    "torch_fused_one_group": _form(
        "torch.optim.AdamW(fused=True), one group", fused=True, groups=1
    ),
}
