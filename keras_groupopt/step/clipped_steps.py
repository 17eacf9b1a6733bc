"""How many optimizer steps clipping shortened the gradients of each group in, kept as state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras import ops

from keras_groupopt.step import clipping
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.built_variable import Pair
from keras_groupopt.step.kept import Kept, add_scalar
from keras_groupopt.step.state_keys import CLIPPED_STEPS


class ClippedSteps(Kept):
    """A count per group that moves, of its own clipping and of the clip over all groups.

    Args:
        groups: The groups that move.
    """

    def __init__(self, groups: Sequence[BuiltGroup]) -> None:
        self._groups = groups
        self.counts: dict[str, Any] = {}

    def make_variables(self, owner: Any) -> None:
        """Makes the counts, which start at 0."""
        for group in self._groups:
            self.counts[group.name] = add_scalar(owner, f"clipped_steps_{group.number}", "int32")

    def entries(self) -> dict[str, Any]:
        """Returns the counts, by key."""
        return {f"{CLIPPED_STEPS}/{name}": count for name, count in self.counts.items()}

    def note_clipping(self, came: Mapping[BuiltGroup, Sequence[Pair]], scale: Any) -> None:
        """Counts a step for each group whose gradients clipping shortens."""
        jointly = False if scale is None else scale < 1.0
        for group, pairs in came.items():
            clipped = ops.convert_to_tensor(jointly)
            if any(group.clipping):
                gradients = [gradient for _, gradient in pairs]
                clipped = ops.logical_or(clipped, clipping.is_clipped(gradients, group.clipping))
            self.counts[group.name].assign_add(ops.cast(clipped, "int32"))
