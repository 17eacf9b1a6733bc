"""The passes that a gradient rule takes after the first, in one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_groupopt import backend

Tensor = Any
# Takes `ε` by the place of its variable. Returns the loss there, unscaled, and one gradient per
# trainable variable. It may empty the dict, to free each `ε` once it is added.
Evaluate = Callable[[dict[int, Tensor]], tuple[Tensor, list[Tensor | None]]]


class Passes:
    """The passes after the first, in one batch.

    Args:
        loss: The loss of the first pass, unscaled.
        first: The gradients of the first pass, by the place of the variable.
        perturbed: The places of the variables that are perturbed.
        evaluate: Takes a pass.
        merges: Whether replicas merge within a pass.
    """

    def __init__(
        self,
        loss: Tensor,
        first: dict[int, Tensor],
        perturbed: list[int],
        evaluate: Evaluate,
        merges: bool,
    ) -> None:
        # The loss and the gradients of the last pass.
        self.loss = loss
        self.gradients: dict[int, Tensor] = {}
        # A boolean scalar: whether any pass was taken. `None` if the rule asked for none.
        self.taken: Tensor | None = None
        self._first = first
        self._perturbed = perturbed
        self._evaluate = evaluate
        self._merges = merges

    def take(
        self, perturbations: Callable[[], list[Tensor]], only_if: Tensor | bool
    ) -> list[Tensor]:
        """Takes a pass, and returns its gradients of the perturbed variables.

        Args:
            perturbations: Returns `ε`, one tensor per perturbed variable.
            only_if: If this is false, the gradients are those of the first pass.

        Raises:
            ValueError: If the pass has no gradient for a variable that the first has one for.
        """
        before = self.loss

        def another() -> list[Tensor]:
            at = dict(zip(self._perturbed, perturbations(), strict=True))
            loss, gradients = self._evaluate(at)
            return [ops.cast(loss, before.dtype), *(gradients[place] for place in self._first)]

        def none() -> list[Tensor]:
            return [before, *self._first.values()]

        is_known = isinstance(only_if, bool) or backend.concrete(only_if) is not None
        if self._merges and not is_known:
            # Replicas cannot merge in a branch.
            self.loss, *found = backend.where_lists(only_if, another(), none())
        else:
            self.loss, *found = backend.cond(only_if, another, none)
        missing = sum(gradient is None for gradient in found)
        if missing:
            raise ValueError(
                f"The second pass reached no gradient for {missing} variables that the first pass "
                "reached. Does `call` depend on something that changes from one call to the next?"
            )
        taken = ops.convert_to_tensor(only_if)
        self.taken = taken if self.taken is None else ops.logical_or(self.taken, taken)
        self.gradients = summed(dict(zip(self._first, found, strict=True)))
        return [self.gradients[place] for place in self._perturbed]


def summed(gradients: dict[int, Tensor]) -> dict[int, Tensor]:
    """Returns gradients summed over replicas, sparse ones with each row once."""
    over_replicas = backend.sum_over_replicas(list(gradients.values()))
    return dict(zip(gradients, map(backend.combine_repeated_rows, over_replicas), strict=True))
