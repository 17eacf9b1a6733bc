"""What a built optimizer holds: its groups, and what all of them share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.dtypes import bytes_of
from keras_groupopt.plan.plan import Plan
from keras_groupopt.selectors.layer_names import plain_names
from keras_groupopt.step import averages
from keras_groupopt.step.accumulation import Window
from keras_groupopt.step.averages import Averages, Pair
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.built_variable import BuiltVariable
from keras_groupopt.step.clipped_steps import ClippedSteps
from keras_groupopt.step.gradient_rule_state import GradientState, Wanted
from keras_groupopt.step.kept import Kept
from keras_groupopt.step.measurements import Measurements
from keras_groupopt.step.nonfinite import Guard
from keras_groupopt.step.run_length import RunLength, is_needed
from keras_groupopt.step.state_keys import ANCHOR, AVERAGE

Tensor = Any

# What `remember` puts back, beside what each piece of state puts back itself.
_NOTES = (
    "anchors_are_due",
    "due_anchors",
    "due_averages",
    "with_gradient",
    "warned",
)


class BuiltOptimizer:
    """All groups of a built optimizer, and where each trainable variable is.

    A plain object on purpose: Keras tracks lists and optimizers set on an optimizer, and would
    save and count them a second time.

    Args:
        plan: The plan.
        variables: The model's trainable variables, by position.
        model: The model, or `None` if there is none.
        live_model: Returns the model that the optimizer has later, or `None`.
        wanted: What the model's gradient rule asks to be kept. Default: nothing.
    """

    def __init__(
        self,
        plan: Plan,
        variables: Sequence[Any],
        model: Any,
        live_model: Callable[[], Any],
        wanted: Wanted | None = None,
    ) -> None:
        self.plan = plan
        self.variables = list(variables)
        # The optimizer's counter of steps.
        self.iterations: Any = None
        prefixes = plain_names(planned.name for planned in plan.groups)
        self.groups = [
            BuiltGroup(
                planned,
                number,
                plan,
                [variables[own.position] for own in planned.variables],
                model,
                prefix,
            )
            for number, (planned, prefix) in enumerate(zip(plan.groups, prefixes, strict=True))
        ]
        found = {own.planned.position: (group, own) for group, own in self._members()}
        # The group and the record of each variable, by position.
        self.places = [found[position] for position in range(len(variables))]
        self.digest = 0
        # What steps measure on request.
        self.measurements: Measurements | None = None
        # In a sweep, the variable with the rate of each group that moves, by name.
        self.swept_rates: Mapping[str, Any] = {}

        defaults = plan.defaults
        steps = defaults.gradient_accumulation_steps
        self.guard = (
            None if defaults.on_nonfinite == "propagate" else Guard(defaults.max_skipped_steps)
        )
        self.window = None if steps is None else Window(steps, [own for _, own in self.places])
        self.averages = None if defaults.ema is None else Averages(defaults.ema)
        self.clipped_steps = (
            ClippedSteps(self.moving_groups) if defaults.count_clipped_steps else None
        )
        self.run_length = RunLength(live_model, steps) if is_needed(plan) else None
        self.gradient_state = None if wanted is None else GradientState(wanted, self.moving)

        # The weights before the first step are the anchors: some may be set or loaded until then.
        self.anchors_are_due = any(group.starts_at_initial for group in self.moving_groups)
        # Of state that was matched by path, these paths had no anchor: the same holds for them.
        self.due_anchors: frozenset[str] = frozenset()
        # Nor an average, which starts as a copy of the weights.
        self.due_averages: frozenset[str] = frozenset()
        # The positions of variables that every step so far brought gradients for.
        self.with_gradient: set[int] | None = None
        self.warned: frozenset[tuple[str, ...]] = frozenset()

    def __getitem__(self, name: str) -> BuiltGroup:
        self.plan[name]
        return next(group for group in self.groups if group.name == name)

    def _members(self) -> list[tuple[BuiltGroup, BuiltVariable]]:
        return [(group, own) for group in self.groups for own in group.members]

    @property
    def moving_groups(self) -> list[BuiltGroup]:
        """The groups that are not frozen."""
        return [group for group in self.groups if not group.frozen]

    @property
    def moving(self) -> list[Any]:
        """The variables of groups that are not frozen."""
        return [own.variable for group in self.moving_groups for own in group.members]

    @property
    def trained_places(self) -> list[int]:
        """The positions of variables that no group freezes, and that still train."""
        return [
            position
            for position, (group, own) in enumerate(self.places)
            if not group.frozen and getattr(own.variable, "trainable", True)
        ]

    @property
    def paths(self) -> dict[int, str]:
        """The layer path of each variable, by identity."""
        return {id(own.variable): own.path for _, own in self.places}

    # State --------------------------------------------------------------------------------------

    @property
    def kept(self) -> list[Kept]:
        """Every piece of state, in the order of the optimizer's variables."""
        shared = (self.guard, self.window, self.averages, self.run_length, self.clipped_steps)
        own = (*shared, *self.groups, self.gradient_state)
        return [kept for kept in own if kept is not None]

    def make_variables(self, owner: Any) -> None:
        """Makes what the outer optimizer owns, once nothing can fail any more."""
        self.iterations = owner.iterations
        for kept in self.kept:
            kept.make_variables(owner)

    def entries(self) -> dict[str, Any]:
        """Returns all state to save beside the step and the base rate, by key."""
        found: dict[str, Any] = {}
        for kept in self.kept:
            found.update(kept.entries())
        for group, own in self._members():
            for slot, variable in self._gradient_slots(own).items():
                found[f"{group.name}/{own.path}/{slot}"] = variable
        return found

    def _gradient_slots(self, own: BuiltVariable) -> dict[str, Any]:
        state = self.gradient_state
        return {} if state is None else state.beside(own.variable)

    def after_load(self, loaded: Collection[str], iterations: int, begun: bool) -> None:
        """Settles what follows from loaded state.

        Args:
            loaded: The keys whose values were loaded. All others start fresh.
            iterations: The optimizer steps that were made when the state was saved.
            begun: Whether this optimizer had made steps before. If it had not, the weights that
                come with the state are where the run starts from.
        """
        fresh = {
            (name, own.path)
            for group, own in self._members()
            for name in own.beside()
            if f"{group.name}/{own.path}/{name}" not in loaded
        }
        anchors = (path for name, path in fresh if name == ANCHOR and not begun)
        self.anchors_are_due, self.due_anchors = False, frozenset(anchors)
        self.due_averages = frozenset(path for name, path in fresh if name == AVERAGE)
        for kept in self.kept:
            kept.after_load(loaded, iterations)
        if self.guard is not None:
            self.guard.begin(self.taken())

    def remember(self) -> Callable[[], None]:
        """Returns a function that puts back what is not among the optimizer's variables."""
        notes = {name: getattr(self, name) for name in _NOTES}
        put_back = [kept.remember() for kept in self.kept]

        def restore() -> None:
            vars(self).update(notes)
            for undo in put_back:
                undo()

        return restore

    @property
    def is_anything_due(self) -> bool:
        """Whether `capture_due` may have something to do."""
        unsettled = self.averages is not None and not self.averages.settled
        return bool(self.anchors_are_due or self.due_anchors or self.due_averages or unsettled)

    def capture_due(self, stepping: bool = False) -> None:
        """Takes initial anchors and averages again if weights came after the build.

        Args:
            stepping: Whether an optimizer step follows. Default: `False`.
        """
        if self.averages is not None and not self.averages.settled:
            self.averages.start(self.average_pairs(), self.iterations, stepping)
        if self.due_averages:
            due, self.due_averages = self.due_averages, frozenset()
            with backend.outside_compiled_step():
                averages.copy_from_weights(self.average_pairs(due))
        if self.due_anchors:
            due, self.due_anchors = self.due_anchors, frozenset()
            with backend.outside_compiled_step():
                self._capture_anchors(due)
        with backend.outside_compiled_step():
            if self.anchors_are_due and self._are_weights_at_hand():
                has_begun = backend.on_host(self.iterations) > 0
                self.anchors_are_due = not stepping and not has_begun
                if not has_begun:
                    self._capture_anchors()

    def _are_weights_at_hand(self) -> bool:
        """Whether the present weights can be read, which they cannot in a step on values."""
        own = [self.iterations, *self.variables]
        if not all(map(compat.is_readable, own)) or any(map(backend.is_gone, own)):
            return False
        return all(map(backend.is_initialized, self.variables))

    def _capture_anchors(self, only: Collection[str] | None = None) -> None:
        for group in self.groups:
            if group.starts_at_initial:
                group.capture_anchors(only)

    def average_pairs(self, paths: Collection[str] | None = None) -> list[Pair]:
        """Returns averages and their variables.

        Args:
            paths: The layer paths of the variables. Default: all that have an average.
        """
        return [
            (own.average, own.variable)
            for _, own in self._members()
            if own.average is not None and (paths is None or own.path in paths)
        ]

    @property
    def averages_in_weights(self) -> bool:
        """Whether the averages are in the weights' place."""
        return self.averages is not None and self.averages.in_weights

    @property
    def passing_variables(self) -> list[Any]:
        """What a compiled step uses for a while; it is not part of the state to save."""
        measured = () if self.measurements is None else self.measurements.variables
        return [*measured, *self.swept_rates.values()]

    @property
    def rule_variables(self) -> list[Any]:
        """Every rule's state variables."""
        return [variable for group in self.groups for variable in group.rule_variables]

    def set_scalars(self, current: Mapping[tuple[str, str], float]) -> None:
        """Sets numbers by group and name, if they are still declared as numbers."""
        for (name, scalar), value in current.items():
            for group in self.groups:
                found = group.scalars.get(scalar) if group.name == name else None
                if found is not None and not found.is_schedule:
                    found.set(value)

    def state_bytes(self) -> dict[int, int]:
        """Returns, per position of each variable, the bytes of state that belong to it."""
        sizes = {}
        for position, (group, own) in enumerate(self.places):
            state = [*own.slots.values(), *own.beside().values()]
            if not group.frozen:
                state += self._gradient_slots(own).values()
            sizes[position] = sum(bytes_of(variable.shape, variable.dtype) for variable in state)
        return sizes

    # Run ----------------------------------------------------------------------------------------

    def rate_of(self, group: BuiltGroup, base: Tensor, step: Tensor) -> Tensor:
        """Returns the rate at which a step moves a group, a float32 scalar.

        Args:
            group: The group.
            base: The base rate.
            step: The optimizer step.
        """
        swept = self.swept_rates.get(group.name)
        return group.rate(base, step) if swept is None else ops.convert_to_tensor(swept)

    @contextlib.contextmanager
    def sweep(self, rates: Mapping[str, Any]) -> Iterator[None]:
        """Returns a block in which groups move at the rates of a sweep.

        A step that is compiled within the block reads the rates from the variables.

        Args:
            rates: A float32 variable for each group that moves, by the group's name.
        """
        self.swept_rates = rates
        try:
            yield
        finally:
            self.swept_rates = {}

    def taken(self) -> int:
        """Returns how many steps, or micro-batches, were not skipped so far; reads the device."""
        made: int = backend.on_host(self.iterations)
        if self.window is None:
            return made
        return made * self.window.steps + int(backend.on_host(self.window.count))

    def in_run(self) -> AbstractContextManager[Any]:
        """Returns a block in which schedules may be called that end with the run."""
        if self.run_length is None:
            return contextlib.nullcontext()
        return self.run_length.in_run(self.iterations)

    def note_gradients(self, positions: set[int]) -> None:
        """Notes which variables a step brought gradients for, once for each compiled step.

        `flush` needs it, and cannot ask which of several compiled steps ran.
        """
        before = positions if self.with_gradient is None else self.with_gradient
        # `torch.compile` cannot make a frozenset.
        self.with_gradient = positions & before
