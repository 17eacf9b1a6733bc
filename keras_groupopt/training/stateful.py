"""The training step on TensorFlow and torch, where a pass assigns to variables of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base import compat

Tensor = Any


class Recorder(keras.StatelessScope):
    """A stateless scope that records which variables a pass assigns to.

    The pass changes nothing until `make_updates`: another pass sees the same seeds and the same
    statistics, and nothing has to be copied before.
    """

    def __init__(
        self, mapping: Sequence[tuple[Any, Tensor]], leaf: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self.assigned: dict[int, Any] = {}
        # Values that a layer assigned to a weight, as spectral normalization does. Gradients are
        # taken at such a value, as if the variable held it, and do not flow on through it.
        self.given: dict[int, Tensor] = {}
        self._differentiated = {id(variable) for variable, _ in mapping}
        self._leaf = leaf

    def add_update(self, update: tuple[Any, Tensor]) -> None:
        """Records a value instead of assigning it."""
        variable, value = update
        self.assigned[id(variable)] = variable
        if id(variable) in self._differentiated:
            value = self.given[id(variable)] = self._leaf(value)
        super().add_update((variable, value))

    def make_updates(self) -> None:
        """Assigns the recorded values."""
        for variable in self.assigned.values():
            variable.assign(self.get_current_value(variable))


def total(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Returns the sum of two gradients, either of which may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


class StatefulTrainStep:
    """The part of a training step that TensorFlow and torch share."""

    def compute_gradients(
        self: Any, compute_loss: Callable[[], Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss of a batch and the gradients of the gradient rule.

        In your own training loop on TensorFlow and torch, with a compiled model:

            loss, gradients = model.compute_gradients(
                lambda: loss_function(y, model(x, training=True)))
            model.optimizer.apply(gradients, model.trainable_variables)

        On JAX call `model.train_step(state, data)`.

        Args:
            compute_loss: Returns the loss, a scalar tensor. It is called once per pass. With
                torch's `DistributedDataParallel` call the wrapped model in it.

        Returns:
            The loss of the first pass, and one gradient of the scaled loss per trainable variable,
            or `None` if it has none.

        Raises:
            ValueError: If the model is not compiled.
            TypeError: If `compute_loss` is not a function.
        """
        if not callable(compute_loss):
            raise TypeError(
                "`compute_loss` must be a function that returns the loss, as it is called once per "
                f"pass. Received: compute_loss={compute_loss!r}. Write `lambda: ...`."
            )
        if getattr(self, "optimizer", None) is None:
            raise ValueError(
                "`compute_gradients` needs a compiled model, as the optimizer scales the loss. "
                "Call `model.compile(optimizer=...)` first."
            )
        return self._passes(compute_loss)

    def _passes(self: Any, compute_loss: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        variables = list(self.trainable_variables)
        loss, first, scope = self._pass(compute_loss, variables, {})

        def evaluate(perturbations: dict[int, Tensor]) -> tuple[Tensor, list[Any]]:
            again, gradients, _ = self._pass(compute_loss, variables, perturbations)
            return again, gradients

        with backend.without_gradients():
            gradients = self._attachment.gradients(loss, first, variables, evaluate, self.optimizer)
            # Another pass must find seeds and statistics as the first one did, so this is last.
            scope.make_updates()
        return loss, gradients

    def train_step(self: Any, data: Any) -> dict[str, Tensor]:
        """Trains on one batch, with the gradients of the gradient rule.

        Args:
            data: A batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The metrics, by name.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs: list[Any] = []

        def compute_loss() -> Tensor:
            y_pred = compat.call_for_training(self, x)
            if not outputs:
                outputs.append(y_pred)
            return compat.compute_loss(self, x, y, y_pred, sample_weight)

        if self.trainable_variables:
            loss, gradients = self.compute_gradients(compute_loss)
            compat.track_loss(self, loss, x)
            with backend.without_gradients():
                self.optimizer.apply(gradients, self.trainable_variables)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            compat.track_loss(self, compute_loss(), x)
        return self.compute_metrics(x, y, outputs[0], sample_weight=sample_weight)
