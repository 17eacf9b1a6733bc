"""Gradients that are not finite: found per group, counted, and kept out of the state.

A group's gradients `g_i` are finite when `sqrt(Σ_i ‖g_i‖²)` is, in float32: a norm that overflows
could not be clipped either. One group that is not finite skips the step of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_groupopt import kernels

Tensor = Any

NONE = -1
POLICIES = ("skip", "propagate", "raise")


class Guard:
    """What a built optimizer keeps of steps it skipped."""

    def __init__(self) -> None:
        self.skipped: Any = None
        self.first: Any = None

    def make_variables(self, optimizer: Any) -> None:
        """Makes the count of skipped steps and the index of the group at fault."""
        self.skipped, self.first = (
            optimizer.add_variable(
                shape=(),
                initializer=initializer,
                dtype="int32",
                aggregation="only_first_replica",
                name=name,
            )
            for name, initializer in (("skipped_steps", "zeros"), ("first_nonfinite_group", _none))
        )

    def record(self, finite: Tensor, first: Tensor) -> None:
        """Counts a step that was skipped, and keeps the first group at fault."""
        self.skipped.assign_add(1 - ops.cast(finite, "int32"))
        self.first.assign(ops.where(finite, ops.convert_to_tensor(self.first), first))


def _none(shape: Any, dtype: Any = None) -> Tensor:
    return ops.full(shape, NONE, dtype=dtype)


def group_norms(gradients: Sequence[Sequence[Tensor]]) -> tuple[list[int], Tensor]:
    """Returns which groups have gradients, and the norm of each, a float32 vector."""
    numbers = [number for number, own in enumerate(gradients) if own]
    return numbers, ops.stack([kernels.global_norm(gradients[number]) for number in numbers])


def first_at_fault(numbers: Sequence[int], norms: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whether all norms are finite, and the first group whose norm is not.

    Args:
        numbers: The groups, in order.
        norms: The norm of each, a float32 vector.
    """
    bad = ops.logical_not(ops.isfinite(norms))
    places = ops.convert_to_tensor(list(numbers), dtype="int32")
    first = ops.take(places, ops.argmax(ops.cast(bad, "int32")))
    return ops.logical_not(ops.any(bad)), ops.cast(first, "int32")


def message(group: str) -> str:
    """Returns the error for gradients that are not finite, first in `group`."""
    return (
        'Gradients must be finite with `on_nonfinite="raise"`. Received: inf or NaN, first in '
        f'group "{group}". The step was skipped: no weight and no state moved.'
    )
