"""What an optimizer keeps for the gradient rule of its model: scalars, and slots beside weights.

A gradient rule (SAM, LookSAM) is the model's, as it needs passes through the model. Its state is
the optimizer's, which saves and restores all else that a run needs to go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keras_groupopt.step.kept import Kept, add_beside
from keras_groupopt.step.scalar import Scalar
from keras_groupopt.step.state_keys import GRADIENT_RULE_STATE


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a gradient rule asks to be kept.

    Args:
        name: The rule's name, for errors.
        scalars: Hyperparameters by name: a number or a schedule.
        current: Numbers among them that were set to something else.
        slots: Names of arrays beside each weight that the rule perturbs.
        reach: Returns the identities of the variables that it perturbs, among given ones.
    """

    name: str
    scalars: Mapping[str, Any]
    current: Mapping[str, float]
    slots: tuple[str, ...]
    reach: Callable[[Sequence[Any]], Collection[int]]
    # Numbers that were set after state was loaded that waits for the build.
    late: dict[str, float] = dataclasses.field(default_factory=dict)


class GradientState(Kept):
    """The variables of a gradient rule.

    Args:
        wanted: What to keep.
        weights: The weights that may be perturbed.
    """

    def __init__(self, wanted: Wanted, weights: Sequence[Any]) -> None:
        self.wanted = wanted
        self._weights = weights
        self.scalars = {
            name: Scalar(name, declared, wanted.name) for name, declared in wanted.scalars.items()
        }
        # Per slot, by the identity of the weight it is beside.
        self.slots: dict[str, dict[int, Any]] = {name: {} for name in wanted.slots}

    def make_variables(self, owner: Any) -> None:
        """Makes the scalars and the slots, which start at zero."""
        for scalar in self.scalars.values():
            scalar.build(owner, "gradient_rule")
        for name, value in self.wanted.current.items():
            self.scalars[name].set(value)
        if not self.slots:
            return
        reached = self.wanted.reach(self._weights)
        for name, own in self.slots.items():
            for weight in self._weights:
                if id(weight) in reached:
                    own[id(weight)] = add_beside(owner, weight, name)

    def set_late(self) -> None:
        """Sets the numbers that were set after the state was loaded."""
        for name, value in self.wanted.late.items():
            self.scalars[name].set(value)
        self.wanted.late.clear()

    def go_on_from(self, other: GradientState | None) -> None:
        """Takes over what is kept for a rule of the same kind, as after a `compile`.

        Args:
            other: What was kept. A number counts where it is declared as before, and was not set
                in the new rule.
        """
        if other is None or other.wanted.name != self.wanted.name:
            return
        for name, scalar in self.scalars.items():
            old = other.scalars.get(name)
            if (
                old is not None
                and old.declared == scalar.declared
                and scalar.variable is not None
                and name not in self.wanted.current
            ):
                scalar.variable.assign(old.variable)
        for name, own in self.slots.items():
            for identity, old in other.slots.get(name, {}).items():
                if identity in own:
                    own[identity].assign(old)

    @property
    def variables(self) -> list[Any]:
        """Every variable."""
        scalars = [s.variable for s in self.scalars.values() if s.variable is not None]
        return [*scalars, *(v for own in self.slots.values() for v in own.values())]

    def declared(self) -> dict[str, Any]:
        """Returns what was declared for each scalar, by the key of its state."""
        return {
            GRADIENT_RULE_STATE + name: scalar.declared for name, scalar in self.scalars.items()
        }

    def entries(self) -> dict[str, Any]:
        """Returns the scalars to save, by key."""
        return {
            GRADIENT_RULE_STATE + name: scalar.variable
            for name, scalar in self.scalars.items()
            if scalar.variable is not None
        }

    def beside(self, variable: Any) -> dict[str, Any]:
        """Returns the slots beside a weight, by the last part of their keys."""
        return {
            GRADIENT_RULE_STATE + name: own[id(variable)]
            for name, own in self.slots.items()
            if id(variable) in own
        }
