"""Gradients that are not finite: found per group, counted, and kept out of the state.

Gradients are finite when `Σ ‖g‖²` over all groups is, in float32: a norm that overflows could not
be clipped either. One group that is not finite skips the step of all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.step.built_variable import Pair
from keras_groupopt.step.kept import Kept, add_scalar
from keras_groupopt.step.state_keys import FIRST_NONFINITE_GROUP, SKIPPED_STEPS

Tensor = Any

NONE = -1
POLICIES = ("skip", "propagate", "raise")


class Guard(Kept):
    """What a built optimizer keeps of steps it skipped."""

    def __init__(self) -> None:
        self.skipped: Any = None
        self.first: Any = None

    def make_variables(self, owner: Any) -> None:
        """Makes the count of skipped steps and the index of the group at fault."""
        self.skipped = add_scalar(owner, "skipped_steps", "int32")
        self.first = add_scalar(owner, "first_nonfinite_group", "int32", _none)

    def entries(self) -> dict[str, Any]:
        """Returns both, by key."""
        return {SKIPPED_STEPS: self.skipped, FIRST_NONFINITE_GROUP: self.first}

    def record(self, finite: Tensor, first: Tensor) -> None:
        """Counts a step that was skipped, and keeps the first group at fault.

        Args:
            finite: Whether it was not skipped, a boolean scalar.
            first: The first group at fault, an integer scalar.
        """
        self.skipped.assign_add(1 - ops.cast(finite, "int32"))
        self.first.assign(ops.where(finite, ops.convert_to_tensor(self.first), first))


def _none(shape: Any, dtype: Any = None) -> Tensor:
    return ops.full(shape, NONE, dtype=dtype)


def group_norms(came: Iterable[Sequence[Pair]]) -> Tensor:
    """Returns the norm of the gradients of each group, a float32 vector."""
    return ops.stack([backend.global_norm([g for _, g in pairs]) for pairs in came])


def are_finite(norms: Tensor) -> Tensor:
    """Returns whether the gradients of all groups are finite, a boolean scalar.

    By squares, as some backends find norms whose squares overflow, and some do not.

    Args:
        norms: The norm of each group, a float32 vector.
    """
    return ops.isfinite(ops.sum(ops.square(norms)))


def first_at_fault(numbers: Sequence[int], norms: Tensor) -> Tensor:
    """Returns the first group at fault where gradients are not finite, an integer scalar.

    Norms that overflow only together are the fault of the largest.

    Args:
        numbers: The groups, in order.
        norms: The norm of each, a float32 vector.
    """
    squares = ops.square(norms)
    bad = ops.logical_not(ops.isfinite(squares))
    largest = ops.all(squares[:, None] >= squares[None, :], axis=1)
    fault = ops.where(ops.any(bad), bad, largest)
    # How many groups come before the first at fault. `argmax` may give any of several.
    before = ops.sum(ops.cumprod(1 - ops.cast(fault, "int32")))
    return ops.take(ops.convert_to_tensor(list(numbers), dtype="int32"), before)


def message(group: str) -> str:
    """Returns the error for gradients that are not finite, first in `group`."""
    return (
        'Gradients must be finite with `on_nonfinite="raise"`. Received: inf or NaN, first in '
        f'group "{group}". The step was skipped: no weight and no state moved.'
    )
