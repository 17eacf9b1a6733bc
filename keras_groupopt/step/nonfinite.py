"""Gradients that are not finite: found per group, counted, and kept out of the state.

Gradients are finite when `Σ ‖g‖²` over all groups is, in float32: a norm that overflows could not
be clipped either. One group that is not finite skips the step of all groups.
"""

from __future__ import annotations

import warnings
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
    """What a built optimizer keeps of steps it skipped.

    Args:
        limit: How many steps that are skipped in a row are an error; `None` for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.skipped: Any = None
        self.first: Any = None
        # The steps that were not skipped when the host last looked, those skipped before the row
        # that it sees, and before the run.
        self._taken = self._before_row = self._before_run = 0
        self._warned = False

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

    def begin(self, taken: int) -> None:
        """Forgets what the host has seen: a run begins, or goes on from other state.

        Args:
            taken: The steps, or micro-batches, that were not skipped so far.
        """
        self._taken, self._warned = taken, False
        self._before_row = self._before_run = backend.on_host(self.skipped)

    def look(self, taken: int, group: str, was_skipped: bool = False) -> None:
        """Raises if too many steps in a row were skipped.

        A compiled step cannot look, so a row begins where the host last saw a step that was not.

        Args:
            taken: The steps, or micro-batches, that were not skipped so far.
            group: The first group at fault in the last that was.
            was_skipped: Whether the last step was skipped, and each skip so far was looked at.
                Default: `False`.

        Raises:
            FloatingPointError: If so.
        """
        skipped = backend.on_host(self.skipped)
        if taken != self._taken:
            self._taken, self._before_row = taken, skipped - int(was_skipped)
        in_a_row = skipped - self._before_row
        if self.limit is not None and in_a_row >= self.limit:
            self.begin(taken)
            raise FloatingPointError(
                f"{in_a_row} steps in a row were skipped, as gradients were not finite, first in "
                f'group "{group}": nothing moved in them (`max_skipped_steps={self.limit}`). Look '
                "for inf and NaN in the data and the loss, and try a lower rate."
            )

    def warn(self, group: str, is_over: bool = False) -> None:
        """Warns of the first step skipped in a run, and when it or an epoch is over of all of them.

        Args:
            group: The first group at fault in the last step that was skipped.
            is_over: Whether the run or an epoch is over. Default: `False`.
        """
        skipped = backend.on_host(self.skipped)
        in_run = skipped - self._before_run
        if in_run > 0 and (is_over or not self._warned):
            warnings.warn(
                f"Steps skipped, as gradients were not finite: {in_run}. The first group at fault "
                f'in the last of them was "{group}". Nothing moved in them.',
                stacklevel=2,
            )
        self._warned = not is_over
        if is_over:
            self._before_run = skipped


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
