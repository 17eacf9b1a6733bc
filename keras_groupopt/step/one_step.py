"""One step over all groups, in the order that makes clipping, decay and averages mean one thing.

Unscale, refuse what is not finite, accumulate; then clip in groups, clip over all groups, let each
group decay and update, and average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.step import accumulation, clipping, nonfinite
from keras_groupopt.step.accumulation import Window
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.built_variable import BuiltVariable, Pair

Tensor = Any


@dataclasses.dataclass
class Gradients:
    """What an optimizer step has of gradients. Frozen groups are not in it.

    Args:
        came: Per group that has some, its variables and their gradients.
        absent: Per group that has some, the variables without a gradient.
        overwritten: Variables whose gradient is their next value, and those gradients; `None` if
            there is none.
    """

    came: dict[BuiltGroup, list[Pair]] = dataclasses.field(default_factory=dict)
    absent: dict[BuiltGroup, list[BuiltVariable]] = dataclasses.field(default_factory=dict)
    overwritten: list[tuple[BuiltVariable, Tensor | None]] = dataclasses.field(default_factory=list)


def on_each_device(
    function: Callable[[list[Tensor | None], Tensor | None], None],
    gradients: Sequence[Tensor | None],
    variables: Sequence[Any],
    sample_count: Any,
    state: Sequence[Any],
) -> None:
    """Runs a step on what all replicas bring, once on each device.

    Args:
        function: Takes the gradients and the sample count of the whole micro-batch.
        gradients: Those of the part of the micro-batch that is at hand.
        variables: Their variables.
        sample_count: The samples of that part, or `None` if they are not known.
        state: The optimizer's variables.
    """
    came = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
    own = [gradient for gradient, _ in came]
    largest = [compat.overwritten_by_gradient(variable) for _, variable in came]
    samples = accumulation.check_samples(sample_count)
    if samples is not None:
        own.append(ops.cast(samples, "float32"))
        largest.append(False)

    def run(whole: list[Tensor]) -> None:
        each = iter(whole)
        sums = [None if gradient is None else next(each) for gradient in gradients]
        function(sums, next(each, None))

    backend.over_replicas(run, own, [*state, *variables], largest)


class Step:
    """One micro-batch, and the optimizer step that it completes.

    Args:
        built: The built groups, and what they share.
        base: Returns the base rate, a float32 scalar.
        state: The optimizer's variables that a step may change.
        loss_scale_factor: What the loss was multiplied by. Default: 1.
        sample_count: The samples in this micro-batch, a scalar. Default: not known.
    """

    def __init__(
        self,
        built: BuiltOptimizer,
        base: Callable[[], Tensor],
        state: Sequence[Any],
        loss_scale_factor: float | None = None,
        sample_count: Tensor | None = None,
    ) -> None:
        self._built = built
        self._base = base
        self._loss_scale_factor = loss_scale_factor
        self._sample_count = sample_count
        # Every variable that may be read or assigned.
        self._variables = list(state)

    def take(
        self, gradients: Sequence[Tensor | None], positions: Sequence[int]
    ) -> tuple[list[str], bool]:
        """Takes the gradients of one micro-batch, and does the step that they complete.

        Args:
            gradients: One per position; `None` if there is none.
            positions: Places of their variables among those the optimizer was built with.

        Returns:
            The layer paths of the variables that came without a gradient, and whether the step is
            known to be skipped, as it is if it is not compiled.

        Raises:
            FloatingPointError: If gradients are not finite and that is to be raised, in a step
                that is not compiled.
            ValueError: If every gradient is `None`.
        """
        built, window = self._built, self._built.window
        with built.in_run() as run:
            found, missing = self._sorted(gradients, positions)
            built.note_gradients(
                {own.planned.position for pairs in found.came.values() for own, _ in pairs}
            )
            if built.run_length is not None:
                built.run_length.keep(run.total)
            if self._loss_scale_factor is not None:
                factor = 1.0 / self._loss_scale_factor
                for group, pairs in found.came.items():
                    found.came[group] = _scaled(pairs, factor)
            if window is not None:
                window.expect(self._sample_count)
            keep, norms = self._check(found)
            if keep is False:
                return missing, True
            if window is not None:
                self._accumulate(window, found, keep)
            elif keep is None:
                self._joint_step(found, norms)
            else:
                backend.run_if(keep, lambda: self._joint_step(found, norms), self._variables)
        return missing, False

    def _sorted(
        self, gradients: Sequence[Tensor | None], positions: Sequence[int]
    ) -> tuple[Gradients, list[str]]:
        """Sorts gradients by group; returns also the paths of variables that came without one.

        A variable that did not come and still trains is absent: an earlier micro-batch may have
        brought its gradient, and its average goes on. The value of a variable that was frozen
        later is not at hand in `fit` on JAX.
        """
        built, brought = self._built, set(positions)
        pairs = list(zip(positions, gradients, strict=True))
        pairs += [(place, None) for place in built.trained_places if place not in brought]
        came: dict[BuiltGroup, list[Pair]] = {group: [] for group in built.moving_groups}
        absent: dict[BuiltGroup, list[BuiltVariable]] = {group: [] for group in came}
        found, missing = Gradients(), []
        for position, gradient in pairs:
            group, own = built.places[position]
            self._variables.append(own.variable)
            if group.frozen:
                continue
            if gradient is None and position in brought:
                missing.append(own.path)
            if own.is_overwritten:
                found.overwritten.append((own, gradient))
            elif gradient is None:
                absent[group].append(own)
            else:
                came[group].append((own, backend.combine_repeated_rows(gradient)))
        if missing and all(gradient is None for gradient in gradients):
            raise ValueError(
                "At least one gradient must be given. Received: None for every variable. Does the "
                "loss depend on the model's outputs?"
            )
        found.came = {group: own for group, own in came.items() if own}
        found.absent = {group: others for group, others in absent.items() if others}
        return found, missing

    def _check(self, found: Gradients) -> tuple[Any, Tensor | None]:
        """Looks at the gradients before anything takes them in.

        Returns:
            Whether the step may go on: `None` if it may, `False` if it may not, and a tensor in a
            compiled step. And the norm of each group that has gradients, if it was taken.
        """
        guard = self._built.guard
        if guard is None or not found.came:
            return None, None
        norms = nonfinite.group_norms(found.came.values())
        finite = nonfinite.are_finite(norms)
        known = backend.concrete(finite)
        if known:
            return None, norms
        first = nonfinite.first_at_fault([group.number for group in found.came], norms)
        guard.record(finite, first)
        if known is None:
            return finite, norms
        if self._built.plan.defaults.on_nonfinite == "raise":
            guard.first.assign(nonfinite.NONE)
            raise FloatingPointError(nonfinite.message(self._built.groups[int(first)].name))
        return False, norms

    # Accumulation -------------------------------------------------------------------------------

    def _accumulate(self, window: Window, found: Gradients, keep: Tensor | None) -> None:
        for pairs in found.came.values():
            accumulators = [own.accumulator for own, _ in pairs]
            gradients = [gradient for _, gradient in pairs]
            backend.accumulate(accumulators, gradients, self._sample_count, keep)
        for own, gradient in found.overwritten:
            if gradient is None:
                continue
            # Of scales for float8 the largest of the window counts.
            value = ops.convert_to_tensor(own.accumulator)
            larger = ops.where(window.count > 0, ops.maximum(value, gradient), gradient)
            own.accumulator.assign(larger if keep is None else ops.where(keep, larger, value))
        window.count_in(self._sample_count, keep)
        full = window.count >= window.steps
        if backend.concrete(full):
            # A new window may begin with sample counts, or without.
            window.weighted = None
        sure = {own for pairs in found.came.values() for own, _ in pairs}
        maybe = {own for others in found.absent.values() for own in others}
        overwritten = [own for own, _ in found.overwritten]
        backend.run_if(
            full, lambda: self._apply_window(window, sure, maybe, overwritten), self._variables
        )

    def flush(self, window: Window) -> None:
        """Does the step of a window that is not full, with what its micro-batches brought."""
        built = self._built
        members = [own for group in built.moving_groups for own in group.members]
        self._variables += built.variables
        ruled = [own for own in members if not own.is_overwritten]
        sure = {own for own in ruled if own.planned.position in (built.with_gradient or ())}
        trained = {own for own in ruled if getattr(own.variable, "trainable", True)}
        with built.in_run():
            overwritten = [own for own in members if own.is_overwritten]
            self._apply_window(window, sure, trained - sure, overwritten)
        window.weighted = None

    def _apply_window(
        self,
        window: Window,
        sure: Collection[BuiltVariable],
        maybe: Collection[BuiltVariable],
        overwritten: Sequence[BuiltVariable],
    ) -> None:
        """Does the optimizer step of the open window, and empties it.

        Args:
            window: The window.
            sure: The variables that surely have a gradient in the window.
            maybe: Those that may have one, of an earlier micro-batch.
            overwritten: Those whose gradient is their next value.
        """
        mean = Gradients(overwritten=[(own, _next_value(own)) for own in overwritten])
        uncertain: list[tuple[Any, Tensor, Tensor]] = []
        for group in self._built.moving_groups:
            for own in group.members:
                if own in maybe:
                    came = ops.any(ops.not_equal(own.accumulator, 0))
                    known = backend.concrete(came)
                    if known is False:
                        mean.absent.setdefault(group, []).append(own)
                        continue
                    if known is None:
                        state = [own.variable, *own.slots.values()]
                        old = [ops.copy(ops.convert_to_tensor(variable)) for variable in state]
                        uncertain += [(v, came, value) for v, value in zip(state, old, strict=True)]
                elif own not in sure:
                    continue
                mean.came.setdefault(group, []).append((own, window.mean(own.accumulator)))
        before = self._move(mean)
        for variable, came, value in uncertain:
            variable.assign(ops.where(came, ops.convert_to_tensor(variable), value))
        self._finish(mean, before)
        # All of them: a variable may have been frozen since its gradient came.
        window.reset()

    # The optimizer step -------------------------------------------------------------------------

    def _joint_step(self, found: Gradients, norms: Tensor | None) -> None:
        self._finish(found, self._move(found, norms))

    def _move(self, found: Gradients, norms: Tensor | None = None) -> Any:
        """Moves the weights; returns what the measurements need of them before, if anything.

        Args:
            found: The gradients.
            norms: The norms of the groups that have some. Default: not known.
        """
        built, before = self._built, None
        if built.measurements is not None:
            norms = built.measurements.note_gradients(found.came, norms)
            before = built.measurements.weights_before(found.came, found.absent)
        at = ops.convert_to_tensor(built.iterations)
        base = self._base()
        for own, gradient in found.overwritten:
            if gradient is not None:
                own.variable.assign(gradient)
        clipped = {group: group.clip(pairs) for group, pairs in found.came.items()}
        scale = None
        if built.plan.defaults.global_clipnorm is not None and clipped:
            if any(any(group.clipping) for group in built.moving_groups):
                norms = None
            scale = self._joint_scale(clipped, built.plan.defaults.global_clipnorm, norms)
        for kept in built.kept:
            kept.note_clipping(found.came, scale)
        for group in built.moving_groups:
            if group in clipped:
                group.update(clipped[group], built.rate_of(group, base, at), at, scale)
            else:
                group.skip(at)
        return before

    def _joint_scale(
        self, clipped: dict[BuiltGroup, list[Pair]], limit: float, norms: Tensor | None
    ) -> Tensor:
        if norms is None:
            # By groups, as if norms are known: the same numbers to the bit.
            norms = nonfinite.group_norms(clipped.values())
        norm = ops.sqrt(ops.sum(ops.square(norms)))
        if self._built.measurements is not None:
            self._built.measurements.note_joint_clip(norm, limit)
        return clipping.scale_for(norm, limit)

    def _finish(self, found: Gradients, before: Any) -> None:
        built = self._built
        if built.measurements is not None:
            built.measurements.note_step(found.came, before)
        at = ops.convert_to_tensor(built.iterations)
        if built.averages is not None:
            moved = []
            for group in built.moving_groups:
                moved += [own for own, _ in found.came.get(group, ())]
                moved += found.absent.get(group, ())
            pairs = [(own.average, own.variable) for own in moved if own.average is not None]
            built.averages.update(pairs, at, self._variables)
            built.averages.overwrite(pairs, at, self._variables)
        built.iterations.assign_add(1)


def _scaled(pairs: Sequence[Pair], factor: Any) -> list[Pair]:
    gradients = backend.scale([gradient for _, gradient in pairs], factor)
    return [(own, gradient) for (own, _), gradient in zip(pairs, gradients, strict=True)]


def _next_value(own: BuiltVariable) -> Tensor:
    """Returns the next value of a variable that its gradients of the window overwrite."""
    largest = ops.convert_to_tensor(own.accumulator)
    came = ops.any(ops.not_equal(largest, 0))
    return ops.where(came, largest, ops.cast(own.variable, largest.dtype))
