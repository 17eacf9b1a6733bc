"""The training step on torch: weights are perturbed in place and restored from a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keras_groupopt import backend
from keras_groupopt.training.stateful import Recorder, StatefulTrainStep, total

Tensor = Any


class TrainStep(StatefulTrainStep):
    """The training step of a model with a gradient rule."""

    def _passes(self: Any, compute_loss: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Takes the passes, and keeps torch's own random states and buffers of the first pass."""
        before = backend.random_states()
        # Modules of torch keep statistics in buffers, which Keras' scopes do not see.
        own = list(self.buffers())
        after: list[Tensor] = []
        states: list[Any] = []
        passes = 0

        def counted() -> Tensor:
            nonlocal passes
            passes += 1
            if passes > 1:
                # Layers without a seed draw from torch's own generators.
                backend.restore_random_states(before)
                return compute_loss()
            loss = compute_loss()
            after.extend(buffer.clone() for buffer in own)
            states.extend(backend.random_states())
            return loss

        try:
            return super()._passes(counted)
        finally:
            if passes > 1:
                backend.restore_random_states(states)
                for buffer, value in zip(own, after, strict=True):
                    buffer.copy_(value)

    def _pass(
        self: Any,
        compute_loss: Callable[[], Tensor],
        variables: Sequence[Any],
        perturbations: dict[int, Tensor],
    ) -> tuple[Tensor, list[Tensor | None], Recorder]:
        """Returns the loss at `w + ε`, its gradients, and the recorded assignments.

        `perturbations` is empty afterwards.
        """
        values = [variable.value for variable in variables]
        for value in values:
            value.grad = None
        with _perturbed(values, perturbations), torch.enable_grad():
            mapping = list(zip(variables, values, strict=True))
            with Recorder(mapping, lambda value: value.detach().requires_grad_()) as scope:
                loss = compute_loss()
                scaled = self.optimizer.scale_loss(loss)
            scaled.backward()
        gradients = [
            total(value.grad, getattr(scope.given.get(id(variable)), "grad", None))
            for variable, value in mapping
        ]
        return loss.detach(), gradients, scope


@contextlib.contextmanager
def _perturbed(values: Sequence[Tensor], perturbations: dict[int, Tensor]) -> Iterator[None]:
    """Adds `ε` to weights, also to those that modules of torch hold, and puts the weights back.

    The dict is emptied on the way: each `ε` is freed once it is added.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for place in list(perturbations):
                copies.append((values[place], values[place].clone()))
                values[place].add_(perturbations.pop(place))
        yield
    finally:
        with torch.no_grad():
            for value, copy in copies:
                value.copy_(copy)
