"""One group of a built optimizer: its variables, rule and scalars, and how a step moves it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_groupopt import backend
from keras_groupopt.backend.fused_step import ListStep
from keras_groupopt.base import compat
from keras_groupopt.plan.plan import Plan, PlannedGroup
from keras_groupopt.rules import slots
from keras_groupopt.rules.fields import ScheduledFields, scheduled
from keras_groupopt.rules.fused import fused_step
from keras_groupopt.rules.making import make_rule
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.step import anchors, clipping, decay, state_keys
from keras_groupopt.step.built_variable import BuiltVariable, Pair
from keras_groupopt.step.kept import Kept, add_beside
from keras_groupopt.step.scalar import Scalar
from keras_groupopt.step.state_keys import ACCUMULATOR, ANCHOR, AVERAGE, ITERATIONS, RULE

Tensor = Any

# The scalars of a group, and their keys.
_SCALARS = {
    "learning_rate_ratio": state_keys.LEARNING_RATE_RATIO,
    "weight_decay": state_keys.WEIGHT_DECAY,
}


class BuiltGroup(Kept):
    """One group of a built optimizer.

    Args:
        planned: The group in the plan.
        number: The group's place among all groups.
        plan: The plan.
        variables: The group's Keras variables, in the plan's order.
        model: The model, which a given anchor may need.
        prefix: What the paths of the group's state begin with; no other group has it.
    """

    def __init__(
        self,
        planned: PlannedGroup,
        number: int,
        plan: Plan,
        variables: Sequence[Any],
        model: Any,
        prefix: str,
    ) -> None:
        group = planned.group
        self.name = group.name
        self.planned = planned
        self.number = number
        self.frozen = group.frozen
        self.members = [
            BuiltVariable(variable, own, compat.overwritten_by_gradient(variable))
            for variable, own in zip(variables, planned.variables, strict=True)
        ]
        self.rule: Any = None
        # The variable and the name of each piece of the rule's state, by identity.
        self.slots: dict[int, tuple[BuiltVariable | None, str]] = {}
        self.scalars: dict[str, Scalar] = {}
        # Anchors given as arrays are not in a config: until state is loaded they are unknown.
        self.anchors_unknown = False
        if self.frozen:
            return
        self.clipping = (group.clipnorm, group.global_clipnorm, group.clipvalue)
        self._prefix = prefix
        self._is_averaged = plan.defaults.ema is not None
        self._is_accumulated = plan.defaults.gradient_accumulation_steps is not None
        self._ratios = {
            index: None if index is None else plan.defaults.ratios[index].value
            for index in dict.fromkeys(own.planned.ratio_index for own in self.members)
        }
        # The rule reads its rate through this: Keras' `apply` has no argument for it.
        self._rate: Tensor = None
        self._build_rule(plan.defaults.fused)
        self._given = self._given_anchors(plan, model)

    def _build_rule(self, fused: bool) -> None:
        declared = self.planned.group.rule
        rule = make_rule(declared, lambda: self._rate, self.planned.group.where)
        self.rule = backend.without_reduction(rule)
        self.rule.name = self._prefix
        ruled = [own for own in self.members if not own.is_overwritten]
        self.rule.build([own.variable for own in ruled])
        compat.track_all_state(self.rule)
        for identity, (place, name) in slots.slot_names(self.rule, len(ruled)).items():
            self.slots[identity] = (None if place is None else ruled[place], name)
        for variable in self.rule.variables:
            owner, name = self.slots[id(variable)]
            if owner is not None:
                owner.slots[name] = variable
        schedules = scheduled(declared)
        self._fields = ScheduledFields(self.rule, schedules)
        # Fused steps take hyperparameters that are numbers.
        found = fused_step(self.rule) if fused and not schedules else None
        self._fused_step: Any = None if found is None else found[0]
        for slot in () if found is None else found[1]:
            for own, variable in zip(ruled, slot, strict=True):
                own.fused_slots += (variable,)

    def _given_anchors(self, plan: Plan, model: Any) -> dict[int, np.ndarray]:
        anchor = self.planned.group.anchor
        if anchor is None or anchor.kind != "given":
            return {}
        if anchor.source is None:
            self.anchors_unknown = any(own.planned.anchored for own in self.members)
            return {}
        return anchors.given_values(self.planned, plan, model)

    # State --------------------------------------------------------------------------------------

    def make_variables(self, owner: Any) -> None:
        """Makes the group's scalars, anchors, averages and accumulators."""
        if self.frozen:
            return
        group = self.planned.group
        for name in _SCALARS:
            declared = getattr(group, name)
            if declared is not None:
                self.scalars[name] = Scalar(name, declared, group.where)
                self.scalars[name].build(owner, self._prefix)
        for own in self.members:
            if own.planned.anchored:
                value = self._given.pop(own.planned.position, own.variable)
                own.anchor = owner.add_variable_from_reference(
                    own.variable, name="anchor", initializer=backend.copy_of(value)
                )
        for own in self.members:
            if self._is_averaged and not own.is_overwritten:
                copy = backend.copy_of(own.variable)
                own.average = add_beside(owner, own.variable, "average", copy)
            if self._is_accumulated:
                own.accumulator = add_beside(owner, own.variable, "accumulator")

    def entries(self) -> dict[str, Any]:
        """Returns the state to save, by key."""
        found: dict[str, Any] = {}
        for name, scalar in self.scalars.items():
            if scalar.variable is not None:
                found[f"{_SCALARS[name]}/{self.name}"] = scalar.variable
        for variable in self.rule_variables:
            owner, slot = self.slots[id(variable)]
            if variable is self.rule.iterations:
                # Not the optimizer's own: a rule that starts over later has made fewer steps.
                slot = ITERATIONS
            found[f"{self.name}/{RULE if owner is None else owner.path}/{slot}"] = variable
        for name in (ANCHOR, AVERAGE, ACCUMULATOR):
            for own in self.members:
                if name in own.beside():
                    found[f"{self.name}/{own.path}/{name}"] = own.beside()[name]
        return found

    def after_load(self, loaded: Collection[str], iterations: int) -> None:
        """Settles the rule's count of steps, and whether the anchors are known."""
        if self.frozen:
            return
        own = [key for key in self.entries() if not key.startswith("@")]
        slots = [key for key in own if "/@" not in key[key.rindex("/") :]]
        counted = f"{self.name}/{RULE}/{ITERATIONS}" in loaded
        # A rule starts over if none of its state was loaded: bias corrections count its steps.
        if not counted and (not slots or any(key in loaded for key in slots)):
            self.rule.iterations.assign(iterations)
        if all(key in loaded for key in own if key.endswith(f"/{ANCHOR}")):
            self.anchors_unknown = False

    def remember(self) -> Callable[[], None]:
        """Returns a function that puts back whether the anchors are known."""
        unknown = self.anchors_unknown

        def put_back() -> None:
            self.anchors_unknown = unknown

        return put_back

    @property
    def rule_variables(self) -> list[Any]:
        """The rule's state variables, its own step counter included."""
        return [] if self.rule is None else list(self.rule.variables)

    @property
    def starts_at_initial(self) -> bool:
        """Whether the group's anchors are the weights it started from."""
        anchor = self.planned.group.anchor
        return anchor is not None and anchor.kind == "initial"

    @property
    def anchored(self) -> list[BuiltVariable]:
        """The variables that have a stored anchor."""
        return [own for own in self.members if own.anchor is not None]

    def capture_anchors(self, only: Collection[str] | None = None) -> None:
        """Takes the present weights as the anchors.

        Args:
            only: The layer paths of the variables. Default: all of the group.
        """
        for own in self.anchored:
            if only is None or own.path in only:
                own.anchor.assign(ops.copy(ops.convert_to_tensor(own.variable)))
        if only is None:
            self.anchors_unknown = False

    def drift(self) -> Tensor:
        """Returns `‖w − a‖` over the anchored variables, a float32 scalar."""
        squares = [
            ops.sum(ops.square(ops.cast(own.variable - own.anchor, "float32")))
            for own in self.anchored
        ]
        return ops.stop_gradient(ops.sqrt(ops.sum(ops.stack(squares))))

    # Step ---------------------------------------------------------------------------------------

    @property
    def is_fused(self) -> bool:
        """Whether a fused step stands for the rule's own."""
        return self._fused_step is not None

    @property
    def follows_base(self) -> bool:
        """Whether the rate is the base rate times the ratio."""
        return self.planned.group.learning_rate is None

    def rate(self, base: Tensor, step: Tensor) -> Tensor:
        """Returns the declared rate of the group at `step`, a float32 scalar."""
        own = self.planned.group.learning_rate
        if isinstance(own, FromBase):
            base = own.function(base)
        elif own is not None:
            base = own(step)
        return ops.cast(base, "float32") * self.scalars["learning_rate_ratio"].at(step)

    def clip(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Applies the group's own clipping to gradients."""
        clipped = clipping.clip_group([gradient for _, gradient in pairs], self.clipping)
        return [(own, gradient) for (own, _), gradient in zip(pairs, clipped, strict=True)]

    def update(
        self, pairs: Sequence[Pair], rate: Tensor, step: Tensor, scale: Tensor | None = None
    ) -> None:
        """Lets weights decay, and moves them by the rule.

        Args:
            pairs: Variables of the group and their gradients, as the group clipped them.
            rate: The group's rate, a float32 scalar.
            step: The optimizer step.
            scale: The factor of the clip over all groups. Default: 1.

        Raises:
            ValueError: If the group decays toward anchors that are not known.
        """
        if self.anchors_unknown:
            raise ValueError(
                f"The anchors of {self.planned.group.where} are not known. They were given as "
                "values, which a config does not hold: load the saved state, or pass `anchor=` "
                "again."
            )
        if self._is_accumulated:
            # Means are wider than weights of low precision, which not every rule expects.
            pairs = [(own, ops.cast(g, own.variable.dtype)) for own, g in pairs]
        rates = self._rates(rate, step)
        decays = "weight_decay" in self.scalars
        weight_decay = self.scalars["weight_decay"].at(step) if decays else None
        made: dict[Any, Any] = {}

        def by_rate(pairs: Sequence[Pair]) -> list[ListStep]:
            found: dict[int | None, list[Pair]] = {}
            for pair in pairs:
                found.setdefault(pair[0].planned.ratio_index, []).append(pair)
            return [
                ListStep(
                    self.rule,
                    own,
                    rates[index],
                    scale,
                    None if weight_decay is None else rates[index] * weight_decay,
                    made,
                )
                for index, own in found.items()
            ]

        fused, rest = self._split(pairs)
        with self._fields.at(step):
            for part in by_rate(fused):
                self._fused_step(part)
            for own, _ in fused:
                if own.variable.constraint is not None:
                    own.variable.assign(own.variable.constraint(own.variable))
            if rest:
                self._apply_rule(by_rate(rest))
            else:
                self.rule.iterations.assign_add(1)

    def _rates(self, rate: Tensor, step: Tensor) -> dict[int | None, Tensor]:
        """Returns the rate of the variables of each ratio, float32 scalars."""
        rates = {}
        for index, ratio in self._ratios.items():
            value = ops.cast(ratio(step), "float32") if callable(ratio) else ratio
            rates[index] = rate if value is None else rate * value
        return rates

    def _split(self, pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
        """Returns the pairs that a fused step takes, and the rest."""
        if self._fused_step is None:
            return [], list(pairs)
        can = backend.are_fusible([g for _, g in pairs], [own.variable for own, _ in pairs])
        fused = [pair for pair, is_fused in zip(pairs, can, strict=True) if is_fused]
        return fused, [pair for pair, is_fused in zip(pairs, can, strict=True) if not is_fused]

    def _apply_rule(self, steps: Sequence[ListStep]) -> None:
        """Lets the rule's own `apply` move variables, once for each rate.

        Each call takes the same optimizer step: state that all variables share, such as the step
        counter, is put back in between.
        """
        shared = [
            variable
            for variable in self.rule.variables
            if len(steps) > 1 and self.slots[id(variable)][0] is None and len(variable.shape) == 0
        ]
        before = [(variable, ops.copy(ops.convert_to_tensor(variable))) for variable in shared]
        for turn, part in enumerate(steps):
            for variable, value in before if turn else ():
                variable.assign(value)
            gradients = [gradient for _, gradient in part.pairs]
            if part.scale is not None:
                gradients = backend.scale(gradients, part.scale)
            if part.decay is not None:
                decay.apply_decay([own for own, _ in part.pairs if own.is_decayed], part.decay)
            self._rate = part.rate
            try:
                self.rule.apply(gradients, [own.variable for own, _ in part.pairs])
            finally:
                # A traced value must not outlive its trace.
                self._rate = None

    def skip(self, step: Tensor) -> None:
        """Counts a step in which the group had no gradient, so that groups stay in phase."""
        with self._fields.at(step):
            compat.skip_step(self.rule)
