"""What a gradient rule sees of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_groupopt import kernels
from keras_groupopt.gradient_state import GradientState
from keras_groupopt.selectors import Selector

Tensor = Any


class Batch:
    """The first gradients of a batch, and a way to take others at perturbed weights.

    Everything is of the perturbed variables alone, in the order of `variables`: those that have a
    gradient, are in no frozen group, and are not in the rule's `exclude_from_perturbation`.
    Gradients are summed over replicas, and are those of the loss as the optimizer scales it
    (`loss_scale` times the loss): a rule that is linear in them need not care.

    Args:
        variables: The Keras variables.
        gradients: One tensor per variable, of its shape and dtype.
        evaluate: Takes another pass.
        choose: Applies a selector to variables.
        state: What is kept for the rule.
        step: The optimizer steps done, an integer scalar.
        is_due: Whether this optimizer step is one of each `every` of the rule, from the first on; a
            boolean scalar, or a Python boolean where each kind of step is compiled by itself.
        loss_scale: What the loss is multiplied by, a float32 scalar.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> class Extrapolation(kgo.GradientRule):
    ...     def gradients(self, batch):
    ...         ahead = batch.gradients_at([-0.1 * g / batch.loss_scale for g in batch.gradients])
    ...         return [2 * h - g for g, h in zip(batch.gradients, ahead)]
    >>> model = kgo.SharpnessAwareSequential(
    ...     [keras.Input((4,)), keras.layers.Dense(2)], gradient_rule=Extrapolation())
    """

    def __init__(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Tensor],
        evaluate: Callable[[Callable[[], list[Tensor]], Tensor | None], list[Tensor]],
        choose: Callable[[Selector, Sequence[Any]], list[bool]],
        state: GradientState,
        step: Tensor,
        is_due: Tensor | bool,
        loss_scale: Tensor,
    ) -> None:
        self.variables = list(variables)
        self.gradients = list(gradients)
        self.step = step
        self.is_due = is_due
        self.loss_scale = loss_scale
        self._evaluate = evaluate
        self._choose = choose
        self._state = state

    def scalar(self, name: str) -> Tensor:
        """Returns a hyperparameter of the rule at this step, a float32 scalar."""
        return _named(self._state.scalars, name, "a `kgo.Hyperparameter()`").at(self.step)

    def selected(self, selector: Any) -> list[bool]:
        """Returns, per variable, whether a selector of the rule chooses it."""
        if not isinstance(selector, Selector):
            return [False] * len(self.variables)
        return self._choose(selector, self.variables)

    def gradients_at(
        self,
        perturbations: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        only_if: Tensor | None = None,
    ) -> list[Tensor]:
        """Returns the gradients of the batch at `w + ε`, in a pass of its own.

        With the dropout masks of the first pass; statistics and metrics stay those of the first.
        The weights are as before when it returns.

        Args:
            perturbations: `ε`, one tensor per variable, of its shape and dtype; or a function that
                returns them, is called only where the pass is made, and lets each `ε` be freed
                once it is added.
            only_if: A boolean scalar: where it is false no pass is made, and the gradients are
                those of the first. Default: always.

        Raises:
            ValueError: If there are more or fewer perturbations than variables.
        """

        def given() -> list[Tensor]:
            values = perturbations() if callable(perturbations) else perturbations
            return self.checked(values, "`perturbations` must be")

        return self._evaluate(given, only_if)

    def checked(self, values: Any, what: str) -> list[Tensor]:
        """Returns values as tensors, if they are one per variable and of its shape.

        Args:
            values: The values.
            what: How the error begins.

        Raises:
            ValueError: If there are more or fewer, or a shape differs.
            TypeError: If they are no list.
        """
        rule = f"{what} a list of one tensor per variable of the batch, of its shape."
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{rule} Received: {values!r} of type {type(values).__name__}.")
        if len(values) != len(self.variables):
            raise ValueError(f"{rule} Received: {len(values)} for {len(self.variables)} variables.")
        tensors = []
        for variable, value in zip(self.variables, values, strict=True):
            if not _fits(getattr(value, "shape", ()), variable.shape):
                raise ValueError(
                    f"{rule} Received: shape {list(getattr(value, 'shape', ()))} for "
                    f"{variable.path} of shape {list(variable.shape)}."
                )
            array = isinstance(value, np.ndarray)
            tensors.append(ops.convert_to_tensor(value) if array else value)
        return tensors

    def kept(self, slot: str) -> list[Tensor]:
        """Returns what `keep` was given last, or zeros; of at least float32."""
        own = _named(self._state.slots, slot, "one of `slots`")
        return [ops.convert_to_tensor(own[id(variable)]) for variable in self.variables]

    def keep(self, slot: str, values: Sequence[Tensor]) -> None:
        """Keeps one tensor per variable for later steps.

        Args:
            slot: One of the rule's `slots`.
            values: Tensors of the variables' shapes. Where one is not finite, nothing is kept.
        """
        own = _named(self._state.slots, slot, "one of `slots`")
        finite = ops.isfinite(ops.square(kernels.global_norm(values)))
        if kernels.known(finite) is False:
            return
        if kernels.known(finite) is None:
            values = [
                ops.where(finite, value, before)
                for value, before in zip(values, self.kept(slot), strict=True)
            ]
        kernels.assign_on_replicas([own[id(v)] for v in self.variables], values)


def _named(known: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in known:
        raise KeyError(
            f"`{name}` must be {what} of the gradient rule. Received: {name!r}; it has "
            f"{', '.join(map(repr, known)) or 'none'}."
        )
    return known[name]


def _fits(shape: Any, wanted: Sequence[int]) -> bool:
    """Whether a shape may be the one that is wanted; a compiled step may not know all of it."""
    if getattr(shape, "rank", 0) is None:
        return True
    pairs = zip(tuple(shape), wanted, strict=False)
    return len(shape) == len(wanted) and all(own in (None, size) for own, size in pairs)
