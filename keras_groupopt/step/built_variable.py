"""One variable of a built group, and everything that is kept beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_groupopt.plan.plan import PlannedVariable
from keras_groupopt.step.state_keys import ACCUMULATOR, ANCHOR, AVERAGE

Tensor = Any


@dataclasses.dataclass(eq=False)
class BuiltVariable:
    """A variable of a built group.

    Attributes:
        variable: The Keras variable.
        planned: The variable in the plan.
        is_overwritten: Whether its gradient is its next value, so that no rule moves it.
        anchor: What it decays toward; `None` for zero.
        average: The average of its values; `None` if there is none.
        accumulator: The sum of its gradients over a window; `None` without accumulation.
        slots: The state of the rule that belongs to this variable alone, by name.
        fused_slots: The part of that state that a fused step takes, in its order.
    """

    variable: Any
    planned: PlannedVariable
    is_overwritten: bool
    anchor: Any = None
    average: Any = None
    accumulator: Any = None
    slots: dict[str, Any] = dataclasses.field(default_factory=dict)
    fused_slots: tuple[Any, ...] = ()

    @property
    def path(self) -> str:
        """The layer path."""
        return self.planned.path

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies to it."""
        return self.planned.decayed

    def beside(self) -> dict[str, Any]:
        """Returns its anchor, average and accumulator, by the last part of their keys."""
        found = {ANCHOR: self.anchor, AVERAGE: self.average, ACCUMULATOR: self.accumulator}
        return {name: variable for name, variable in found.items() if variable is not None}


# A variable and its gradient.
Pair = tuple[BuiltVariable, Tensor]
