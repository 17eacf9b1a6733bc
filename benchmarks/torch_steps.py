"""Steps as in the training loop of Keras on torch: eager, or compiled if asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import measuring
import models
import numpy as np
import torch
from prepared import Prepared, Setting

MODES = ("eager", "compiled")
USUAL_MODES = ("eager",)


class Feed:
    """Two sets of gradients, and the buffers that hold the gradients of a step.

    Peers scale gradients in place, so each step gets new ones, as from a backward pass.
    """

    def __init__(self, sets: Sequence[Sequence[np.ndarray]], variables: Sequence[Any]) -> None:
        self._sets = [
            [
                torch.as_tensor(gradient).to(variable.value.device, variable.value.dtype)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            for gradients in sets
        ]
        self.received = [torch.empty_like(gradient) for gradient in self._sets[0]]

    def fill(self, step: int) -> None:
        """Copies the gradients of a step into the buffers."""
        torch._foreach_copy_(self.received, self._sets[step % 2])


def fresh() -> None:
    """Clears the functions that earlier contenders compiled."""
    torch._dynamo.reset()


def devices() -> list[str]:
    """Returns the names of the accelerators."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def wait() -> None:
    """Waits until all operations are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prepare(make: Callable[[], Any], setting: Setting) -> Prepared:
    """Prepares the step of a Keras optimizer."""
    variables, watch = setting.model.trainable_variables, measuring.Stopwatch()
    optimizer = make()
    watch.part("build", lambda: optimizer.build(variables))

    def apply() -> None:
        # Keras' trainer applies gradients without recording them.
        with torch.no_grad():
            optimizer.apply(setting.feed.received, variables)

    def weights() -> list[np.ndarray]:
        return read([variable.value for variable in variables])

    return start(apply, setting, watch, weights, models.nbytes(optimizer.variables))


def start(
    apply: Callable[[], Any],
    setting: Setting,
    watch: measuring.Stopwatch,
    weights: Callable[[], list[np.ndarray]] | None,
    state_bytes: int | Callable[[], int],
) -> Prepared:
    """Takes the first step, and returns the prepared step."""
    if setting.mode == "compiled":
        if not shutil.which("c++"):
            raise ValueError(
                "The mode 'compiled' needs a C++ compiler, and none was found. Install one."
            )
        apply = torch.compile(apply)
    count = 0

    def step() -> tuple[float, float]:
        nonlocal count
        setting.feed.fill(count)
        count += 1
        wait()
        return measuring.timed(lambda: (apply(), wait()))

    watch.part("first_call", step)
    state_bytes = state_bytes() if callable(state_bytes) else state_bytes
    return Prepared(step, watch.seconds, weights, state_bytes)


def read(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Returns copies of tensors in float32."""
    return [np.array(tensor.detach().float().cpu().numpy()) for tensor in tensors]


def addition(setting: Setting) -> Prepared:
    """Prepares a step that only adds the gradients to sums in float32."""
    sums = [torch.zeros_like(g, dtype=torch.float32) for g in setting.feed.received]

    def add() -> None:
        torch._foreach_add_(sums, setting.feed.received)

    return start(add, setting, measuring.Stopwatch(), None, 0)
