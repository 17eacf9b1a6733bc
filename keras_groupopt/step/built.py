"""What a built optimizer holds: its groups, and what all of them share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from keras_groupopt import backend
from keras_groupopt.base.dtypes import bytes_of
from keras_groupopt.plan.plan import Plan
from keras_groupopt.selectors.layer_names import plain_names
from keras_groupopt.step import averages
from keras_groupopt.step.accumulation import Window
from keras_groupopt.step.averages import Averages, Pair
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.gradient_rule_state import GradientState, Wanted
from keras_groupopt.step.measurements import Measurements
from keras_groupopt.step.nonfinite import Guard
from keras_groupopt.step.run_length import RunLength

Tensor = Any


class BuiltOptimizer:
    """All groups of a built optimizer, and where each trainable variable is.

    A plain object on purpose: Keras tracks lists and optimizers set on an optimizer, and would
    save and count them a second time.
    """

    def __init__(
        self, plan: Plan, variables: Sequence[Any], model: Any, wanted: Wanted | None = None
    ) -> None:
        self.plan = plan
        self.gradient_state = None if wanted is None else GradientState(wanted)
        defaults = plan.defaults
        steps = defaults.gradient_accumulation_steps
        self.window = None if steps is None else Window(steps)
        self.averages = None if defaults.ema is None else Averages(defaults.ema)
        self.guard = None if defaults.on_nonfinite == "propagate" else Guard()
        self.run_length: RunLength | None = None
        self.variables = list(variables)
        prefixes = plain_names(planned.name for planned in plan.groups)
        self.groups = [
            BuiltGroup(
                planned, plan, [variables[v.position] for v in planned.variables], model, prefix
            )
            for planned, prefix in zip(plan.groups, prefixes, strict=True)
        ]
        self.places = [(0, 0)] * len(variables)
        for number, planned in enumerate(plan.groups):
            for index, variable in enumerate(planned.variables):
                self.places[variable.position] = (number, index)
        self.digest = 0
        # What steps measure on request.
        self.measurements: Measurements | None = None
        # Weights without optimizer state were loaded before the first step: they are the anchors,
        # but other layers may still be loading.
        self.anchors_are_due = False
        # Of state that was matched by path, these paths had no anchor: the same holds for them.
        self.due_anchors: frozenset[str] = frozenset()
        # Nor an average, which starts as a copy of the weights.
        self.due_averages: frozenset[str] = frozenset()
        # Positions whose gradients the last traced or eager step received.
        self.received: frozenset[int] | None = None
        # Per group, the places of variables that every step so far brought gradients for.
        self.with_gradient: list[set[int]] | None = None
        # The model's training function at that step, held weakly; `None` in a loop of one's own.
        self.received_in: Any = None
        self.warned: set[tuple[str, ...]] = set()

    def make_variables(self, optimizer: Any) -> None:
        """Makes what the outer optimizer owns, once nothing can fail any more."""
        for own in (self.guard, self.window, self.averages, self.run_length):
            if own is not None:
                own.make_variables(optimizer)
        for group in self.groups:
            group.make_variables(optimizer, self.averages is not None, self.window is not None)
        if self.gradient_state is not None:
            self.gradient_state.make_variables(optimizer, self.moving)

    def in_run(self, iterations: Any) -> AbstractContextManager[Any]:
        """Returns a block in which schedules may be called that end with the run.

        Args:
            iterations: The optimizer steps done.
        """
        if self.run_length is None:
            return contextlib.nullcontext()
        return self.run_length.in_run(iterations)

    @property
    def moving(self) -> list[Any]:
        """The variables of groups that are not frozen."""
        return [v for group in self.groups if not group.frozen for v in group.variables]

    @property
    def averages_in_weights(self) -> bool:
        """Whether the averages are in the weights' place."""
        return self.averages is not None and self.averages.in_weights

    def within_reach(self, positions: Sequence[int]) -> list[int]:
        """Returns the positions that came to a step, and those of variables that still train.

        What a step did not bring may have a gradient from an earlier micro-batch, and its average
        goes on. The value of a variable that was frozen later is not at hand in `fit` on JAX.

        Args:
            positions: Positions that came.
        """
        came = set(positions)
        return [
            position
            for position, (number, _) in enumerate(self.places)
            if position in came
            or (
                not self.groups[number].frozen
                and getattr(self.variables[position], "trainable", True)
            )
        ]

    def note_gradients(self, indices: Sequence[Sequence[int]]) -> None:
        """Notes which variables a step brought gradients for, once for each compiled step.

        `flush` needs it, and cannot ask which of several compiled steps ran.

        Args:
            indices: Per group, the places of those variables in it.
        """
        before = self.with_gradient or indices
        self.with_gradient = [set(now) & set(old) for now, old in zip(indices, before, strict=True)]

    @property
    def accumulators(self) -> list[Any]:
        """Every accumulator."""
        return [a for group in self.groups for a in group.accumulators if a is not None]

    def average_pairs(self, indices: Sequence[Sequence[int]] | None = None) -> list[Pair]:
        """Returns averages and their variables.

        Args:
            indices: Per group, the places of variables in it; default all.
        """
        return [
            (group.averages[index], group.variables[index])
            for number, group in enumerate(self.groups)
            for index in (range(len(group.averages)) if indices is None else indices[number])
            if group.averages[index] is not None
        ]

    def set_scalars(self, current: Mapping[tuple[str, str], float]) -> None:
        """Sets numbers by group and name, where they are still declared as numbers."""
        for (name, scalar), value in current.items():
            for group in self.groups:
                found = group.scalars.get(scalar) if group.name == name else None
                if found is not None and not found.is_schedule:
                    found.set(value)

    def __getitem__(self, name: str) -> BuiltGroup:
        self.plan[name]
        return next(group for group in self.groups if group.name == name)

    @property
    def due(self) -> tuple[bool, frozenset[str], frozenset[str]]:
        """What is to be taken from the weights at the next step."""
        return self.anchors_are_due, self.due_anchors, self.due_averages

    @due.setter
    def due(self, value: tuple[bool, frozenset[str], frozenset[str]]) -> None:
        self.anchors_are_due, self.due_anchors, self.due_averages = value

    @property
    def is_anything_due(self) -> bool:
        """Whether `capture_due` may have something to do."""
        return any(self.due) or (self.averages is not None and not self.averages.settled)

    def capture_due(self, iterations: Any, stepping: bool = False) -> None:
        """Takes initial anchors and averages again where weights came after the build.

        Args:
            iterations: The optimizer's step counter.
            stepping: Whether an optimizer step follows.
        """
        if self.averages is not None and not self.averages.settled:
            self.averages.start(self.average_pairs(), iterations, stepping)
        if self.due_averages:
            due, self.due_averages = self.due_averages, frozenset()
            places = [
                [index for index, v in enumerate(group.planned.variables) if v.path in due]
                for group in self.groups
            ]
            with backend.outside_compiled_step():
                averages.copy_from_weights(self.average_pairs(places))
        if self.anchors_are_due or self.due_anchors:
            only = None if self.anchors_are_due else self.due_anchors
            self.anchors_are_due, self.due_anchors = False, frozenset()
            with backend.outside_compiled_step():
                for group in self.groups:
                    if group.starts_at_initial:
                        group.capture_anchors(only)

    @property
    def passing_variables(self) -> list[Any]:
        """What a compiled step uses for a while; no part of the state to save."""
        swept = [group.swept for group in self.groups if group.swept is not None]
        return swept if self.measurements is None else [*self.measurements.variables, *swept]

    @property
    def rule_variables(self) -> list[Any]:
        """Every rule's state variables."""
        return [variable for group in self.groups for variable in group.rule_variables]

    def entries(self) -> dict[str, Any]:
        """Returns all state to save beside the step and the base rate, by key."""
        found: dict[str, Any] = {}
        if self.guard is not None:
            found["@skipped_steps"] = self.guard.skipped
            found["@first_nonfinite_group"] = self.guard.first
        if self.window is not None:
            found["@micro_batches"] = self.window.count
            found["@accumulated_weight"] = self.window.weight
        if self.run_length is not None:
            found["@total_steps"] = self.run_length.variable
        if self.averages is not None:
            found.update(self.averages.entries())
        for group in self.groups:
            found.update(group.entries())
        if self.gradient_state is not None:
            found.update(self.gradient_state.entries())
            for group in self.groups:
                for variable, planned in zip(group.variables, group.planned.variables, strict=True):
                    for slot, own in self.gradient_state.beside(variable).items():
                        found[f"{group.name}/{planned.path}/{slot}"] = own
        return found

    @property
    def paths(self) -> dict[int, str]:
        """The layer path of each variable, by identity."""
        pairs = zip(self.variables, self.plan.variables, strict=True)
        return {id(variable): planned.path for variable, planned in pairs}

    def state_bytes(self) -> dict[int, int]:
        """Returns, per position of each variable, the bytes of state that belong to it."""
        sizes = dict.fromkeys(range(len(self.places)), 0)
        for group in self.groups:
            if group.rule is None:
                continue
            positions = {
                id(v): p.position
                for v, p in zip(group.variables, group.planned.variables, strict=True)
            }
            for variable in group.rule.variables:
                index, _ = group.slots[id(variable)]
                if index is not None and variable is not group.rule.iterations:
                    sizes[positions[id(group.ruled[index])]] += bytes_of(
                        variable.shape, variable.dtype
                    )
            for own in (group.anchors, group.averages, group.accumulators):
                for planned, beside in zip(group.planned.variables, own, strict=True):
                    if beside is not None:
                        sizes[planned.position] += bytes_of(beside.shape, beside.dtype)
            if self.gradient_state is not None:
                for variable, planned in zip(group.variables, group.planned.variables, strict=True):
                    for own in self.gradient_state.beside(variable).values():
                        sizes[planned.position] += bytes_of(own.shape, own.dtype)
        return sizes
