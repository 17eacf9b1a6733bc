"""How a group's rule moves its variables: at one rate or several, all at once where that is faster.

Around the rule's update, and in this order, gradients are scaled and weights decay. A fused step
does all of it in one go; for what no fused step takes it is done before the rule's own update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from keras_groupopt import backend
from keras_groupopt.backend.fused_step import ListStep
from keras_groupopt.base import compat
from keras_groupopt.rules.fused import fused_step
from keras_groupopt.step import decay
from keras_groupopt.step.variable_rates import SplitUpdates, members_of

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Move:
    """What a group does in one step; lists are parallel.

    Args:
        gradients: One per variable.
        variables: The variables that move.
        classes: The class of each, at one rate.
        rates: The rate of each class, float32 scalars.
        scale: What gradients are multiplied by; `None` for 1.
        weight_decay: The coefficient λ, a float32 scalar; `None` for no decay.
        decayed: Whether each variable decays.
        anchors: The anchor of each; `None` for zero.
    """

    gradients: list[Tensor]
    variables: list[Any]
    classes: list[Hashable]
    rates: Mapping[Hashable, Tensor]
    scale: Tensor | None
    weight_decay: Tensor | None
    decayed: list[bool]
    anchors: list[Any | None]

    def only(self, numbers: Sequence[int]) -> Move:
        """Returns the part of it that is about some of the variables."""
        if len(numbers) == len(self.variables):
            return self
        return dataclasses.replace(
            self,
            gradients=[self.gradients[n] for n in numbers],
            variables=[self.variables[n] for n in numbers],
            classes=[self.classes[n] for n in numbers],
            decayed=[self.decayed[n] for n in numbers],
            anchors=[self.anchors[n] for n in numbers],
        )

    def by_class(self) -> list[tuple[Tensor, Move]]:
        """Returns the rate of each class that is there, and the part of it at that rate."""
        members = members_of(self.classes)
        return [(self.rates[place], self.only(numbers)) for place, numbers in members.items()]


class Updates:
    """Moves the variables of a built rule.

    Args:
        rule: The rule.
        classes: The class of each variable it was built with.
        set_rate: Makes a rate the one that the rule reads.
        where: The group's name, for errors.
        fused: Whether a fused step may stand for the rule's own.
    """

    def __init__(
        self,
        rule: Any,
        classes: Sequence[Hashable],
        set_rate: Callable[[Tensor], None],
        where: str,
        fused: bool,
    ) -> None:
        self._rule = rule
        self._set_rate = set_rate
        # Before anything is put in the place of the rule's own update.
        self._fused = fused_step(rule) if fused else None
        several = len(set(classes)) > 1
        self._split = SplitUpdates(rule, classes, set_rate, where) if several else None
        self._now: Move | None = None
        if self._fused is not None:
            compat.redirect_list_updates(rule, self._update)

    @property
    def is_fused(self) -> bool:
        """Whether a fused step stands for the rule's own."""
        return self._fused is not None

    def apply(self, move: Move) -> None:
        """Does the rule's step.

        Args:
            move: What is to be done.

        Raises:
            ValueError: If there are several rates, and the rule updates variables in a way of its
                own, all at one.
        """
        self._set_rate(move.rates[move.classes[0]])
        self._now = move
        gradients = move.gradients if self.is_fused else _prepared(move)
        try:
            if self._split is not None:
                self._split.apply(gradients, move.variables, move.rates)
            else:
                self._rule.apply(gradients, move.variables)
        finally:
            self._now = None

    def _update(
        self,
        update: Callable[[Sequence[Tensor], Sequence[Any]], None],
        gradients: Sequence[Tensor],
        variables: Sequence[Any],
    ) -> None:
        assert self._now is not None
        # The rule may have made something of the gradients.
        move = dataclasses.replace(self._now, gradients=list(gradients))
        can = backend.are_fusible(gradients, variables)
        fused = move.only([number for number, own in enumerate(can) if own])
        made: dict[Any, Any] = {}
        for rate, part in fused.by_class():
            self._fuse(part, rate, made)
        if self._split is not None:
            self._split.note(len(fused.variables))
        if not all(can):
            rest = move.only([number for number, own in enumerate(can) if not own])
            update(_prepared(rest), rest.variables)

    def _fuse(self, move: Move, rate: Tensor, made: dict[Any, Any]) -> None:
        assert self._fused is not None
        step, slots = self._fused
        places = [compat.place_in(self._rule, variable) for variable in move.variables]
        step(
            ListStep(
                rule=self._rule,
                gradients=move.gradients,
                variables=move.variables,
                slots=[[slot[place] for place in places] for slot in slots],
                rate=rate,
                scale=move.scale,
                decay=None if move.weight_decay is None else rate * move.weight_decay,
                decayed=move.decayed,
                anchors=move.anchors,
                made=made,
            )
        )


def _prepared(move: Move) -> list[Tensor]:
    """Scales gradients and returns them, and lets weights decay."""
    if move.weight_decay is not None:
        for rate, part in move.by_class():
            own = part.only([number for number, decays in enumerate(part.decayed) if decays])
            decay.apply_decay(own.variables, own.anchors, rate, move.weight_decay)
    return move.gradients if move.scale is None else backend.scale(move.gradients, move.scale)
