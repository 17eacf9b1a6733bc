"""The training step on TensorFlow: perturbed weights are values, and variables do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.training.stateful import Recorder, StatefulTrainStep, total

Tensor = Any


class TrainStep(StatefulTrainStep):
    """The training step of a model with a gradient rule."""

    def train_step(self: Any, data: Any) -> dict[str, Tensor]:
        """Trains on one batch, with the gradients of the gradient rule."""
        if not self.built:
            # The first call would build the layers within the pass, which is too late.
            with tf.init_scope():
                compat.build_for(self, data)
        return super().train_step(data)

    def _pass(
        self: Any,
        compute_loss: Callable[[], Tensor],
        variables: Sequence[Any],
        perturbations: dict[int, Tensor],
    ) -> tuple[Tensor, list[Tensor | None], Recorder]:
        """Returns the loss at `w + ε`, its gradients, and the recorded assignments.

        Nothing is assigned, so that a pass can be in a branch under a distribution strategy.
        """
        values = [
            _plus(tf.convert_to_tensor(variable.value), perturbations.get(place))
            for place, variable in enumerate(variables)
        ]
        native = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            tape.watch(values)

            def leaf(value: Tensor) -> Tensor:
                value = tf.stop_gradient(value)
                tape.watch(value)
                return value

            with Recorder(list(zip(variables, values, strict=True)), leaf) as scope:
                loss = compute_loss()
                scaled = self.optimizer.scale_loss(loss)
        count = len(values)
        found = tape.gradient(scaled, [*values, *native, *scope.given.values()])
        gradients, beside = found[:count], found[count : 2 * count]
        of_given = dict(zip(scope.given, found[2 * count :], strict=True))
        gradients = [
            total(gradient, of_given.get(id(variable)))
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        unseen = [v.path for v, g in zip(variables, beside, strict=True) if g is not None]
        if unseen:
            raise ValueError(
                "Layers must read their weights as Keras variables, or a gradient rule cannot "
                f"perturb them. Received: {', '.join(unseen[:5])}, read as TensorFlow variables. "
                "Use the weight itself instead of its `value`."
            )
        return backend.loss_of_all(loss), gradients, scope


def _plus(value: Tensor, perturbation: Tensor | None) -> Tensor:
    """Returns `w + ε`. A sparse `ε` changes only its rows."""
    if perturbation is None:
        return value
    if isinstance(perturbation, tf.IndexedSlices):
        rows = perturbation.indices[:, None]
        return tf.tensor_scatter_nd_add(value, rows, tf.cast(perturbation.values, value.dtype))
    return value + tf.cast(perturbation, value.dtype)
