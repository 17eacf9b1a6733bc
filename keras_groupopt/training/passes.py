"""The passes that a gradient rule takes after the first, in one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_groupopt import backend

Tensor = Any
# Per trainable variable `ε` or `None` → the loss there, unscaled, and the gradients. It may empty
# the list, to free each `ε` once it is added.
Evaluate = Callable[[list[Tensor | None]], tuple[Tensor, list[Tensor | None]]]


class Passes:
    """The passes after the first, in one batch.

    Args:
        loss: The loss of the first pass, unscaled.
        first: Its gradients; `None` where there is none.
        present: The places of gradients that there are.
        perturbed: The places of variables that are perturbed.
        evaluate: Takes a pass.
        merges: Whether replicas merge within a pass.
    """

    def __init__(
        self,
        loss: Tensor,
        first: list[Tensor | None],
        present: list[int],
        perturbed: list[int],
        evaluate: Evaluate,
        merges: bool,
    ) -> None:
        self.loss = loss
        self.last: dict[int, Tensor] = {}
        # Whether any of them was made, a boolean scalar; `None` if none was asked for.
        self.made: Tensor | None = None
        self._first = first
        self._present = present
        self._perturbed = perturbed
        self._evaluate = evaluate
        self._merges = merges

    def take(
        self, perturbations: Callable[[], list[Tensor]], only_if: Tensor | bool | None
    ) -> list[Tensor]:
        """Takes a pass, and returns its gradients of the perturbed variables.

        Args:
            perturbations: Returns `ε`, one tensor per perturbed variable.
            only_if: Where this is false, the gradients are those of the first pass.

        Raises:
            ValueError: If the pass has no gradient where the first has one.
        """
        first_loss, present = self.loss, self._present

        def another() -> list[Tensor]:
            at: list[Tensor | None] = [None] * len(self._first)
            for place, perturbation in zip(self._perturbed, perturbations(), strict=True):
                at[place] = perturbation
            loss, gradients = self._evaluate(at)
            return [ops.cast(loss, first_loss.dtype), *(gradients[place] for place in present)]

        def none() -> list[Tensor]:
            return [first_loss, *(self._first[place] for place in present)]

        if only_if is None:
            results = another()
        elif only_if is False:
            results = none()
        elif self._merges and backend.concrete(only_if) is None:
            # Replicas cannot merge in a branch.
            results = backend.where_lists(only_if, another(), none())
        else:
            results = backend.cond(only_if, another, none)
        missing = [p for p, result in zip(present, results[1:], strict=True) if result is None]
        if missing:
            raise ValueError(
                "The second pass must reach every variable that the first one reaches. Received: "
                f"no gradient for {len(missing)} variables. Does `call` depend on something that "
                "changes from one call to the next?"
            )
        self.loss = results[0]
        made = ops.convert_to_tensor(True if only_if is None else only_if)
        self.made = made if self.made is None else ops.logical_or(self.made, made)
        summed = map(backend.combine_repeated_rows, backend.sum_over_replicas(results[1:]))
        self.last = dict(zip(present, summed, strict=True))
        return [self.last[place] for place in self._perturbed]
