"""Several rates within one group: the group's, times a ratio for some of its variables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from keras import ops

from keras_groupopt.base import compat
from keras_groupopt.plan.plan import PlannedVariable
from keras_groupopt.plan.ratios import Ratio

Tensor = Any


class VariableRates:
    """Which variables of a group move at which rate.

    Those with one ratio are a class, named by its place among `ratios`; those with none are one
    too.

    Args:
        variables: The group's variables in the plan.
        ratios: The optimizer's ratios.
    """

    def __init__(self, variables: Sequence[PlannedVariable], ratios: Sequence[Ratio]) -> None:
        self.classes = [variable.ratio_index for variable in variables]
        self._values = {place: None if place is None else ratios[place].value for place in self}

    def __iter__(self) -> Any:
        return iter(dict.fromkeys(self.classes))

    def at(self, rate: Tensor, step: Tensor) -> dict[Hashable, Tensor]:
        """Returns the rate of each class at `step`, float32 scalars, given the group's."""
        rates: dict[Hashable, Tensor] = {}
        for place, value in self._values.items():
            ratio = ops.cast(value(step), "float32") if callable(value) else value
            rates[place] = rate if ratio is None else rate * ratio
        return rates


def members_of(classes: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Returns the numbers of those in each class, in order."""
    members: dict[Hashable, list[int]] = {}
    for number, place in enumerate(classes):
        members.setdefault(place, []).append(number)
    return members


class SplitUpdates:
    """A built rule that updates each of its variables at the rate of that variable's class.

    Args:
        rule: The rule.
        classes: The class of each variable it was built with.
        set_rate: Makes a rate the one that the rule reads.
        where: The group's name, for errors.
    """

    def __init__(
        self,
        rule: Any,
        classes: Sequence[Hashable],
        set_rate: Callable[[Tensor], None],
        where: str,
    ) -> None:
        self._rule = rule
        self._classes = list(classes)
        self._set_rate = set_rate
        self._where = where
        self._rates: Mapping[Hashable, Tensor] = {}
        self._updated = 0
        compat.redirect_updates(rule, self._update)

    def apply(
        self,
        gradients: Sequence[Tensor],
        variables: Sequence[Any],
        rates: Mapping[Hashable, Tensor],
    ) -> None:
        """Does the rule's step.

        Args:
            gradients: One per variable.
            variables: Among those the rule was built with.
            rates: The rate of each class.

        Raises:
            ValueError: If the rule updates variables in a way of its own, all at one rate.
        """
        self._rates, self._updated = rates, 0
        try:
            self._rule.apply(gradients, variables)
        finally:
            self._rates = {}
        if self._updated != len(variables):
            raise ValueError(
                "A rule must update its variables in `update_step` where `ratios` give them "
                f"several rates. Received: {type(self._rule).__name__} in {self._where}, which "
                "does not. Make a group of the variables that have one ratio."
            )

    def note(self, count: int) -> None:
        """Notes that so many variables have been updated in another way, at their own rates."""
        self._updated += count

    def _update(
        self,
        update: Callable[[Sequence[Tensor], Sequence[Any], Tensor], None],
        gradients: Sequence[Tensor],
        variables: Sequence[Any],
    ) -> None:
        places = [compat.place_in(self._rule, variable) for variable in variables]
        members = members_of([self._classes[place] for place in places])
        # A rule that takes a list advances what all variables share: once for the whole step.
        shared = compat.shared_state(self._rule) if len(members) > 1 else []
        before = [ops.copy(ops.convert_to_tensor(variable)) for variable in shared]
        for turn, (place, numbers) in enumerate(members.items()):
            if turn:
                for variable, value in zip(shared, before, strict=True):
                    variable.assign(value)
            rate = self._rates[place]
            self._set_rate(rate)
            update([gradients[n] for n in numbers], [variables[n] for n in numbers], rate)
        self._updated += len(variables)
