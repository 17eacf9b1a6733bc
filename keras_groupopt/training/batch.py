"""One batch, as a gradient rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import text
from keras_groupopt.step.gradient_rule_state import GradientState

Tensor = Any


class Batch:
    """The first gradients of a batch, and a way to take others at perturbed weights.

    All lists hold one item per perturbed variable, in the order of `variables`. A variable is
    perturbed if it has a gradient, is in no frozen group, and is not in the rule's
    `exclude_from_perturbation`. Gradients are summed over replicas. They are gradients of
    `loss_scale` times the loss, which makes no difference to a rule that is linear in them.

    Args:
        variables: The Keras variables.
        gradients: One tensor per variable, of its shape and dtype.
        evaluate: Takes another pass.
        choose: Applies a selector to variables.
        state: The state of the rule.
        step: The optimizer steps done, an integer scalar.
        is_due: Whether this optimizer step is due, as the first and then each `every`-th step is. A
            boolean scalar, or a Python boolean if each kind of step is compiled by itself.
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
        evaluate: Callable[[Callable[[], list[Tensor]], Tensor | bool], list[Tensor]],
        choose: Callable[[Any, Sequence[Any]], list[bool]],
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
        return _named("hyperparameter", name, self._state.scalars).at(self.step)

    def selected(self, selector: Any) -> list[bool]:
        """Returns for each variable whether a selector of the rule chooses it."""
        return self._choose(selector, self.variables)

    def gradients_at(
        self,
        perturbations: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        only_if: Tensor | bool | None = None,
    ) -> list[Tensor]:
        """Takes another pass, and returns the gradients of the batch at `w + ε`.

        The pass has the dropout masks of the first pass. Statistics and metrics stay those of the
        first. The weights are as before when it returns.

        Args:
            perturbations: `ε`, one tensor per variable, of its shape and dtype; or a function that
                returns them. The function is called only if the pass is taken, and lets each `ε`
                be freed once it is added.
            only_if: A boolean scalar. If it is false, no pass is taken, and the gradients are
                those of the first. Default: `None`, which always takes the pass.

        Raises:
            ValueError: If there is not one perturbation per variable, of its shape.
        """

        def checked() -> list[Tensor]:
            given = perturbations() if callable(perturbations) else perturbations
            return one_per_variable("`perturbations`", given, self.variables)

        return self._evaluate(checked, True if only_if is None else only_if)

    def kept(self, slot: str) -> list[Tensor]:
        """Returns the values that `keep` last kept, at first zeros, in at least float32.

        Args:
            slot: One of the rule's `slots`.
        """
        own = _named("slot", slot, self._state.slots)
        return [ops.convert_to_tensor(own[id(variable)]) for variable in self.variables]

    def keep(
        self, slot: str, values: Sequence[Tensor], only_if: Tensor | bool | None = None
    ) -> None:
        """Keeps one tensor per variable for later steps.

        Args:
            slot: One of the rule's `slots`.
            values: Tensors of the variables' shapes. If one is not finite, nothing is kept.
            only_if: A boolean scalar. If it is false, nothing is kept. Default: `None`, which
                always keeps them.

        Raises:
            ValueError: If there is not one value per variable, of its shape.
        """
        own = _named("slot", slot, self._state.slots)
        values = one_per_variable("`values`", values, self.variables)
        if only_if is False or (only_if is not None and backend.concrete(only_if) is False):
            return
        finite = ops.isfinite(ops.square(backend.global_norm(values)))
        wanted = finite if only_if is None else ops.logical_and(finite, only_if)
        backend.assign_on_replicas([own[id(v)] for v in self.variables], values, wanted)


def one_per_variable(what: str, values: Any, variables: Sequence[Any]) -> list[Tensor]:
    """Returns a list of values, after checking that each has the shape of its variable.

    Values of other shapes would be broadcast without an error.

    Args:
        what: The name of the values, for the error.
        values: Any iterable.
        variables: The variables, in order.

    Raises:
        ValueError: If there is not one value per variable, of its shape.
    """
    must = f"{what} must hold one tensor per variable of the batch, of its shape."
    if values is None:
        raise ValueError(f"{must} Received: None.")
    given = list(values)
    if len(given) != len(variables):
        raise ValueError(f"{must} Received: {len(given)} for {len(variables)} variables.")
    for value, variable in zip(given, variables, strict=True):
        shape = () if value is None else getattr(value, "shape", ())
        # TensorFlow may not know a shape, or a part of it, in a compiled step.
        if getattr(shape, "rank", 0) is None:
            continue
        wanted = tuple(variable.shape)
        if (
            value is None
            or len(shape) != len(wanted)
            or not all(size is None or size == own for size, own in zip(shape, wanted, strict=True))
        ):
            found = "None" if value is None else f"a value of shape {tuple(shape)}"
            raise ValueError(f"{must} Received: {found} for {variable.path} of shape {wanted}.")
    return given


def _named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        hint = text.nearest(name, known, ' Did you mean "{}"?')
        raise ValueError(
            f"`{name}` must be a {kind} of the rule: {', '.join(known) or 'it has none'}. "
            f'Received: "{name}".{hint}'
        )
    return known[name]
