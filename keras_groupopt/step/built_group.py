"""What a built optimizer holds for one group: its rule, scalars, anchors and variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.plan.plan import Plan, PlannedGroup
from keras_groupopt.rules import slots
from keras_groupopt.rules.fields import ScheduledFields, scheduled
from keras_groupopt.rules.making import make_rule
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.step import anchors, clipping
from keras_groupopt.step.averages import wide_dtype
from keras_groupopt.step.group_update import Move, Updates
from keras_groupopt.step.scalar import Scalar
from keras_groupopt.step.variable_rates import VariableRates

Tensor = Any


class BuiltGroup:
    """One group of a built optimizer.

    Args:
        planned: The group in the plan.
        plan: The plan.
        variables: The group's Keras variables, in the plan's order.
        model: The model, where a given anchor needs it.
        prefix: What the paths of the group's state begin with; no other group has it.
    """

    def __init__(
        self,
        planned: PlannedGroup,
        plan: Plan,
        variables: Sequence[Any],
        model: Any,
        prefix: str,
    ) -> None:
        group = planned.group
        self.name = group.name
        self.planned = planned
        self.variables = list(variables)
        self.frozen = group.frozen
        self.rule: Any = None
        self.scalars: dict[str, Scalar] = {}
        self.anchors: list[Any] = [None] * len(self.variables)
        self.averages: list[Any] = [None] * len(self.variables)
        self.accumulators: list[Any] = [None] * len(self.variables)
        # Anchors given as arrays are not in a config: until state is loaded they are unknown.
        self.anchors_unknown = False
        # A rate in place of what is declared, for the length of a sweep.
        self.swept: Any = None
        if self.frozen:
            return
        self.clipping = (group.clipnorm, group.global_clipnorm, group.clipvalue)
        self._rate: Tensor = None
        self._prefix = prefix
        self._own_rate = group.learning_rate
        self._rates = VariableRates(planned.variables, plan.defaults.ratios)
        self._build_rule(plan.defaults.fused)
        self._given = self._given_anchors(plan, model)

    def make_variables(self, optimizer: Any, averaged: bool, accumulated: bool) -> None:
        """Makes the group's scalars, anchors, averages and accumulators.

        Args:
            optimizer: The outer optimizer, which owns them.
            averaged: Whether weights are averaged.
            accumulated: Whether gradients are accumulated.
        """
        if self.frozen:
            return
        group = self.planned.group
        self._add_scalar("learning_rate_ratio", group.learning_rate_ratio, optimizer)
        if group.weight_decay is not None:
            self._add_scalar("weight_decay", group.weight_decay, optimizer)
        for index, planned in enumerate(self.planned.variables):
            if planned.anchored:
                variable = self.variables[index]
                self.anchors[index] = optimizer.add_variable_from_reference(
                    variable,
                    name="anchor",
                    initializer=backend.copy_of(self._given.pop(planned.position, variable)),
                )
        for index, variable in enumerate(self.variables):
            written = compat.overwritten_by_gradient(variable)
            if averaged and not written:
                self.averages[index] = self._add_beside(optimizer, index, "average", True)
            if accumulated:
                self.accumulators[index] = self._add_beside(optimizer, index, "accumulator", False)

    def _add_beside(self, optimizer: Any, index: int, name: str, copied: bool) -> Any:
        """Makes a variable of the shape and layout of a weight, and of at least float32."""
        reference = self.variables[index]
        return optimizer.add_variable(
            shape=reference.shape,
            initializer=backend.copy_of(reference) if copied else "zeros",
            dtype=wide_dtype(reference),
            layout=compat.layout_of(reference),
            name=name,
        )

    def _add_scalar(self, name: str, declared: Any, optimizer: Any) -> None:
        scalar = Scalar(name, declared, self.planned.group.where)
        scalar.build(optimizer, self._prefix)
        self.scalars[name] = scalar

    def _build_rule(self, fused: bool) -> None:
        where = self.planned.group.where
        rule = make_rule(self.planned.group.rule, lambda: self._rate, where)
        self.rule = backend.without_reduction(rule)
        self.rule.name = self._prefix
        ruled = [v for v in self.variables if not compat.overwritten_by_gradient(v)]
        self.rule.build(ruled)
        compat.track_all_state(self.rule)
        schedules = scheduled(self.planned.group.rule)
        self._fields = ScheduledFields(self.rule, schedules)
        self.slots = slots.slot_names(self.rule, len(ruled))
        self.ruled = ruled
        self._ruled_places = {id(variable): place for place, variable in enumerate(ruled)}
        classes = [
            place
            for place, v in zip(self._rates.classes, self.variables, strict=True)
            if not compat.overwritten_by_gradient(v)
        ]
        # Fused steps take hyperparameters that are numbers.
        fused = fused and not schedules
        self._updates = Updates(self.rule, classes, self._set_rate, where, fused)

    def _set_rate(self, rate: Tensor) -> None:
        self._rate = rate

    def _given_anchors(self, plan: Plan, model: Any) -> dict[int, np.ndarray]:
        anchor = self.planned.group.anchor
        if anchor is None or anchor.kind != "given":
            return {}
        if anchor.source is None:
            self.anchors_unknown = any(variable.anchored for variable in self.planned.variables)
            return {}
        return anchors.given_values(self.planned, plan, model)

    @property
    def starts_at_initial(self) -> bool:
        """Whether the group's anchors are the weights it started from."""
        anchor = self.planned.group.anchor
        return anchor is not None and anchor.kind == "initial"

    def capture_anchors(self, only: Collection[str] | None = None) -> None:
        """Takes the present weights as the anchors, of the paths in `only` or of all."""
        for index, planned in enumerate(self.planned.variables):
            anchor = self.anchors[index]
            if anchor is not None and (only is None or planned.path in only):
                variable = self.variables[index]
                anchor.assign(keras.ops.copy(keras.ops.convert_to_tensor(variable)))
        if only is None:
            self.anchors_unknown = False

    def drift(self) -> Tensor:
        """Returns `‖w − a‖` over the anchored variables, a float32 scalar."""
        squares = [
            keras.ops.sum(keras.ops.square(keras.ops.cast(v - a, "float32")))
            for v, a in zip(self.variables, self.anchors, strict=True)
            if a is not None
        ]
        return keras.ops.stop_gradient(keras.ops.sqrt(keras.ops.sum(keras.ops.stack(squares))))

    def state_at(self, index: int) -> list[Any]:
        """Returns a variable, and the rule's state that belongs to it alone."""
        place = self._ruled_places.get(id(self.variables[index]))
        slots = [v for v in self.rule.variables if self.slots[id(v)][0] == place]
        return [self.variables[index], *(slots if place is not None else ())]

    @property
    def follows_base(self) -> bool:
        """Whether the rate is the base rate times the ratio."""
        return self._own_rate is None

    def rate(self, base: Tensor, step: Tensor) -> Tensor:
        """Returns the group's rate at `step`, a float32 scalar."""
        if self.swept is not None:
            return keras.ops.convert_to_tensor(self.swept)
        own = base
        if isinstance(self._own_rate, FromBase):
            own = self._own_rate.function(base)
        elif self._own_rate is not None:
            own = self._own_rate(step)
        return keras.ops.cast(own, "float32") * self.scalars["learning_rate_ratio"].at(step)

    def clip(self, gradients: list[Tensor]) -> list[Tensor]:
        """Applies the group's own clipping."""
        return clipping.clip_group(gradients, *self.clipping)

    def update(
        self,
        gradients: list[Tensor],
        indices: Sequence[int],
        base: Tensor,
        step: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Decays, then runs the rule, at the group's rate.

        Args:
            gradients: One per index, as the group clipped them.
            indices: Places of their variables in the group.
            base: The base rate.
            step: The optimizer step.
            scale: What clipping over all groups multiplies gradients by; `None` for 1.
        """
        if self.anchors_unknown:
            raise ValueError(
                f"The anchors of {self.planned.group.where} are not known. They were given as "
                "values, which a config does not hold: load the saved state, or pass `anchor=` "
                "again."
            )
        variables = [self.variables[index] for index in indices]
        rates = self._rates.at(self.rate(base, step), step)
        try:
            decays = "weight_decay" in self.scalars
            if self.accumulators[indices[0]] is not None:
                # Means are wider than weights of low precision, which not every rule expects.
                gradients = [
                    keras.ops.cast(gradient, variable.dtype)
                    for gradient, variable in zip(gradients, variables, strict=True)
                ]
            move = Move(
                gradients=gradients,
                variables=variables,
                classes=[self._rates.classes[index] for index in indices],
                rates=rates,
                scale=scale,
                weight_decay=self.scalars["weight_decay"].at(step) if decays else None,
                decayed=[self.planned.variables[index].decayed for index in indices],
                anchors=[self.anchors[index] for index in indices],
            )
            with self._fields.at(step):
                self._updates.apply(move)
        finally:
            # A traced value must not outlive its trace.
            self._rate = None

    def skip(self, step: Tensor) -> None:
        """Counts a step in which the group had no gradient, so that groups stay in phase."""
        with self._fields.at(step):
            compat.skip_step(self.rule)

    @property
    def rule_variables(self) -> list[Any]:
        """The rule's state variables, its own step counter included."""
        return [] if self.rule is None else list(self.rule.variables)

    def entries(self) -> dict[str, Any]:
        """Returns the state to save, by key."""
        found: dict[str, Any] = {}
        for name, scalar in self.scalars.items():
            if scalar.variable is not None:
                found[f"@{name}/{self.name}"] = scalar.variable
        if self.rule is None:
            return found
        paths = {id(v): p.path for v, p in zip(self.variables, self.planned.variables, strict=True)}
        for variable in self.rule.variables:
            if variable is self.rule.iterations:
                # Not the optimizer's own: a rule that starts over later has made fewer steps.
                found[f"{self.name}/@rule/@iterations"] = variable
                continue
            index, slot = self.slots[id(variable)]
            owner = "@rule" if index is None else paths[id(self.ruled[index])]
            found[f"{self.name}/{owner}/{slot}"] = variable
        for planned, anchor in zip(self.planned.variables, self.anchors, strict=True):
            if anchor is not None:
                found[f"{self.name}/{planned.path}/@anchor"] = anchor
        for name, own in (("@average", self.averages), ("@accumulator", self.accumulators)):
            for planned, variable in zip(self.planned.variables, own, strict=True):
                if variable is not None:
                    found[f"{self.name}/{planned.path}/{name}"] = variable
        return found
