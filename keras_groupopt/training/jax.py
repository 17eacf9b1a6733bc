"""The training step on JAX: a function of values, which each pass calls with the same state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from keras_groupopt.base import compat

Tensor = Any
Logs = dict[str, Tensor]


class TrainStep:
    """The training step of a model with a gradient rule."""

    # Whether the step that is being compiled is due by the rule's `every`, if that is known.
    _is_due: bool | None = None

    def compute_gradients(self, compute_loss: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Refuses: a step on JAX is a function of values.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "`compute_gradients` needs TensorFlow or torch. Received: the JAX backend. Call "
            "`model.train_step(state, data)`, which is a function of values."
        )

    def make_train_function(self: Any, force: bool = False) -> None:
        """Makes the function that `fit` calls for each batch, as Keras does.

        On a CPU, XLA runs convolutions in a branch many times slower than outside. So a rule with
        `every` gets two compiled steps there, and the host chooses.

        Args:
            force: Whether to make it anew if there is one. Default: `False`.
        """
        make = super().make_train_function  # type: ignore[misc]
        compiled = not self.run_eagerly and self.jit_compile and self.steps_per_execution == 1
        every = self._attachment.rule.every
        if every == 1 or not compiled or jax.default_backend() != "cpu":
            make(force=force)
            return
        if self.train_function is not None and not force:
            return
        functions = {}
        for is_due in (True, False):
            # JAX knows what it compiled by the function: with one function for both, it would
            # use the first step for the second.
            vars(self)["train_step"] = functools.partial(self._known_step, is_due)
            try:
                make(force=True)
            finally:
                del vars(self)["train_step"]
            functions[is_due] = self.train_function

        def train_function(state: Any, data: Any) -> Any:
            at = [v is self.optimizer.iterations for v in self.optimizer.variables].index(True)
            return functions[int(state[2][at]) % every == 0](state, data)

        self.train_function = train_function

    def _known_step(self: Any, is_due: bool, state: Any, data: Any) -> tuple[Logs, Any]:
        self._is_due = is_due
        try:
            return type(self).train_step(self, state, data)
        finally:
            self._is_due = None

    def train_step(self: Any, state: Any, data: Any) -> tuple[Logs, Any]:
        """Trains on one batch, with the gradients of the gradient rule.

        In your own training loop, with a compiled model, after
        `model.optimizer.build(model.trainable_variables)`:

            lists = (model.trainable_variables, model.non_trainable_variables,
                     model.optimizer.variables, model.metrics_variables)
            state = tuple([variable.value for variable in variables] for variables in lists)
            step = jax.jit(model.train_step)
            logs, state = step(state, (x, y))          # for each batch
            for variables, values in zip(lists, state):    # at the end
                for variable, value in zip(variables, values):
                    variable.assign(value)

        Args:
            state: Values of the trainable, non-trainable, optimizer and metrics variables.
            data: A batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The metrics by name, and the new state.
        """
        trainable, rest, own, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        differentiated = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def taken(values: Sequence[Tensor]) -> Any:
            return differentiated(
                values, rest, metrics, x, y, sample_weight, training=True, optimizer_variables=own
            )

        (_, (loss, y_pred, new_rest, new_metrics)), first = taken(trainable)

        def evaluate(perturbations: dict[int, Tensor]) -> tuple[Tensor, list[Tensor]]:
            values = list(trainable)
            for place, perturbation in perturbations.items():
                values[place] += perturbation.astype(values[place].dtype)
            (_, (again, *_)), gradients = taken(values)
            return again, gradients

        variables = self.optimizer.variables
        mapping = [
            *zip(self.trainable_variables, trainable, strict=True),
            *zip(variables, own, strict=True),
            *zip(self.metrics_variables, new_metrics, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            gradients = self._attachment.gradients(
                loss, first, self.trainable_variables, evaluate, self.optimizer, self._is_due
            )
        own = [scope.get_current_value(variable) for variable in variables]
        new_metrics = [scope.get_current_value(variable) for variable in self.metrics_variables]
        trainable, own = self.optimizer.stateless_apply(own, gradients, trainable)
        logs, new_metrics = compat.update_metrics(
            self, new_metrics, loss, x, y, y_pred, sample_weight
        )
        return logs, compat.with_layouts(self, (trainable, new_rest, own, new_metrics))
