"""One step over all groups, in the order that makes clipping, decay and averages mean one thing.

Unscale, refuse what is not finite, accumulate; then clip in groups, clip over all groups, let each
group decay and update, and average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.step import accumulation, clipping, nonfinite
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.measurements import Before, Measurements

Tensor = Any


@dataclasses.dataclass
class Routed:
    """What a step received, sorted by group.

    Args:
        gradients: Per group, its gradients.
        indices: Per group, the places of their variables in it.
        absent: Per group, the places of variables that came without a gradient or not at all.
        written: Variables whose gradient is their next value, and those gradients; `None` where
            there is none.
        paths: The paths of the variables that came without a gradient.
    """

    gradients: list[list[Tensor]]
    indices: list[list[int]]
    absent: list[list[int]]
    written: list[tuple[BuiltGroup, int, Tensor | None]]
    paths: list[str]

    @classmethod
    def empty(cls, built: BuiltOptimizer) -> Routed:
        """Returns one without any variable."""
        count = len(built.groups)
        return cls(
            gradients=[[] for _ in range(count)],
            indices=[[] for _ in range(count)],
            absent=[[] for _ in range(count)],
            written=[],
            paths=[],
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a step needs beside gradients.

    Args:
        base: Returns the base rate, a float32 scalar.
        iterations: The counter of optimizer steps.
        global_clipnorm: Limit of the norm over all groups.
        loss_scale_factor: What the loss was multiplied by.
        on_nonfinite: What to do where gradients are not finite.
        sample_count: The samples in this micro-batch, a scalar, where it is known.
    """

    base: Callable[[], Tensor]
    iterations: Any
    global_clipnorm: float | None = None
    loss_scale_factor: float | None = None
    on_nonfinite: str = "skip"
    sample_count: Tensor | None = None


def step(
    built: BuiltOptimizer, routed: Routed, settings: Settings, variables: Sequence[Any]
) -> None:
    """Takes the gradients of one micro-batch, and does the optimizer step that they complete.

    Args:
        built: The built groups.
        routed: The gradients, sorted.
        settings: What else is needed.
        variables: Every variable that may be read or assigned.

    Raises:
        FloatingPointError: If gradients are not finite and that is to be raised, where the step
            is not compiled.
    """
    if settings.loss_scale_factor is not None:
        factor = 1.0 / settings.loss_scale_factor
        routed.gradients = [backend.scale(own, factor) for own in routed.gradients]
    if built.window is not None:
        built.window.expect(settings.sample_count)
    keep, norms = _check(built, routed, settings)
    if keep is False:
        return
    if built.window is not None:
        _accumulate(built, built.window, routed, settings, keep, variables)
    elif keep is None:
        joint_step(built, routed, settings, variables, norms)
    else:
        backend.run_if(
            keep, lambda: joint_step(built, routed, settings, variables, norms), variables
        )


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
        sample_count: The samples of that part, where they are known.
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


def route(
    built: BuiltOptimizer,
    gradients: Sequence[Tensor | None],
    positions: Sequence[int],
    reach: Sequence[int],
) -> Routed:
    """Sorts gradients by group.

    Args:
        built: The built groups.
        gradients: One per position; `None` where there is none.
        positions: Places of their variables among those the optimizer was built with.
        reach: Places of all variables that the step may read and assign.

    Raises:
        ValueError: If every gradient is `None`.
    """
    routed = Routed.empty(built)
    came = set(positions)
    missing = [(None, position) for position in reach if position not in came]
    for gradient, position in [*zip(gradients, positions, strict=True), *missing]:
        number, index = built.places[position]
        group = built.groups[number]
        if group.frozen:
            continue
        if gradient is None and position in came:
            routed.paths.append(group.planned.variables[index].path)
        if compat.overwritten_by_gradient(group.variables[index]):
            routed.written.append((group, index, gradient))
        elif gradient is None:
            routed.absent[number].append(index)
        else:
            routed.gradients[number].append(backend.combine_repeated_rows(gradient))
            routed.indices[number].append(index)
    if routed.paths and all(gradient is None for gradient in gradients):
        raise ValueError(
            "At least one gradient must be given. Received: None for every variable. Does the "
            "loss depend on the model's outputs?"
        )
    return routed


def _check(built: BuiltOptimizer, routed: Routed, settings: Settings) -> tuple[Any, Tensor | None]:
    """Looks at the gradients before anything takes them in.

    Returns:
        Whether the step may go on: `None` where it may, `False` where it may not, and a tensor in
        a compiled step. And the norm per group that has gradients, where it was taken.
    """
    if built.guard is None or not any(routed.gradients):
        return None, None
    numbers, norms = nonfinite.group_norms(routed.gradients)
    finite = nonfinite.are_finite(norms)
    known = backend.concrete(finite)
    if known:
        return None, norms
    first = nonfinite.first_at_fault(numbers, norms)
    built.guard.record(finite, first)
    if known is None:
        return finite, norms
    if settings.on_nonfinite == "raise":
        built.guard.first.assign(nonfinite.NONE)
        raise FloatingPointError(nonfinite.message(built.groups[int(first)].name))
    return False, norms


def _accumulate(
    built: BuiltOptimizer,
    window: accumulation.Window,
    routed: Routed,
    settings: Settings,
    keep: Tensor | None,
    variables: Sequence[Any],
) -> None:
    for group, own, indices in zip(built.groups, routed.gradients, routed.indices, strict=True):
        backend.accumulate(
            [group.accumulators[i] for i in indices], own, settings.sample_count, keep
        )
    for group, index, gradient in routed.written:
        if gradient is None:
            continue
        # Of scales for float8 the largest of the window counts.
        accumulator = group.accumulators[index]
        value = ops.convert_to_tensor(accumulator)
        larger = ops.where(window.count > 0, ops.maximum(value, gradient), gradient)
        accumulator.assign(larger if keep is None else ops.where(keep, larger, value))
    window.count_in(settings.sample_count, keep)
    full = window.count >= window.steps
    if backend.concrete(full):
        # A new window may begin with sample counts, or without.
        window.weighted = None
    backend.run_if(
        full, lambda: apply_window(built, window, routed, settings, variables), variables
    )


def apply_window(
    built: BuiltOptimizer,
    window: accumulation.Window,
    routed: Routed,
    settings: Settings,
    variables: Sequence[Any],
) -> None:
    """Does the optimizer step of the open window, and empties it.

    Args:
        built: The built groups.
        window: The window.
        routed: Which variables surely have a gradient in the window, and which may have.
        settings: What else is needed.
        variables: Every variable that may be read or assigned.
    """
    mean = Routed.empty(built)
    uncertain: list[tuple[BuiltGroup, int, Tensor]] = []
    for number, group in enumerate(built.groups):
        for index in sorted((*routed.indices[number], *routed.absent[number])):
            accumulator = group.accumulators[index]
            if index in routed.absent[number]:
                # An earlier micro-batch of the window may have brought a gradient.
                came = ops.any(ops.not_equal(accumulator, 0))
                known = backend.concrete(came)
                if known is False:
                    mean.absent[number].append(index)
                    continue
                if known is None:
                    uncertain.append((group, index, came))
            mean.gradients[number].extend(window.mean([accumulator]))
            mean.indices[number].append(index)
    mean.written = [(group, index, _written(group, index)) for group, index, _ in routed.written]
    before = [(group.state_at(index), came) for group, index, came in uncertain]
    old = [[ops.copy(ops.convert_to_tensor(v)) for v in state] for state, _ in before]
    weights = _move(built, mean, settings)
    for (state, came), values in zip(before, old, strict=True):
        for variable, value in zip(state, values, strict=True):
            variable.assign(ops.where(came, ops.convert_to_tensor(variable), value))
    _finish(built, mean, settings, variables, weights)
    # All of them: a variable may have been frozen since its gradient came.
    window.reset(built.accumulators)


def _written(group: BuiltGroup, index: int) -> Tensor:
    """Returns the next value of a variable that its gradients of the window overwrite."""
    largest = ops.convert_to_tensor(group.accumulators[index])
    came = ops.any(ops.not_equal(largest, 0))
    return ops.where(came, largest, ops.cast(group.variables[index], largest.dtype))


def flush(
    built: BuiltOptimizer, window: accumulation.Window, settings: Settings, variables: Sequence[Any]
) -> None:
    """Does the step of a window that is not full, with what its micro-batches brought."""
    known = built.with_gradient or [set() for _ in built.groups]
    routed = Routed.empty(built)
    for number, group in enumerate(built.groups):
        for index, variable in enumerate([] if group.frozen else group.variables):
            if compat.overwritten_by_gradient(variable):
                routed.written.append((group, index, None))
            elif index in known[number]:
                routed.indices[number].append(index)
            elif getattr(variable, "trainable", True):
                routed.absent[number].append(index)
    apply_window(built, window, routed, settings, variables)
    window.weighted = None


def joint_step(
    built: BuiltOptimizer,
    routed: Routed,
    settings: Settings,
    variables: Sequence[Any],
    norms: Tensor | None = None,
) -> None:
    """Clips in groups, clips over all groups, lets each group decay and update, and averages.

    Args:
        built: The built groups.
        routed: The gradients, sorted.
        settings: What else is needed.
        variables: Every variable that may be read or assigned.
        norms: The norms of the groups' gradients, where they are known.
    """
    weights = _move(built, routed, settings, norms)
    _finish(built, routed, settings, variables, weights)


def _move(
    built: BuiltOptimizer, routed: Routed, settings: Settings, norms: Tensor | None = None
) -> Before | None:
    """Moves the weights; returns what the measurements need of them before, if anything."""
    weights = None
    if built.measurements is not None:
        norms = built.measurements.note_gradients(routed.gradients, norms)
        weights = built.measurements.weights_before(routed.indices, routed.absent)
    at = ops.convert_to_tensor(settings.iterations)
    base = settings.base()
    for group, index, gradient in routed.written:
        if gradient is not None:
            group.variables[index].assign(gradient)
    gradients = [
        group.clip(own) if own else own
        for group, own in zip(built.groups, routed.gradients, strict=True)
    ]
    scale = None
    if settings.global_clipnorm is not None:
        if any(any(group.clipping) for group in built.groups if not group.frozen):
            norms = None
        scale = _joint_scale(gradients, settings.global_clipnorm, norms, built.measurements)
    for group, own, places in zip(built.groups, gradients, routed.indices, strict=True):
        if own:
            group.update(own, places, base, at, scale)
        elif not group.frozen:
            group.skip(at)
    return weights


def _finish(
    built: BuiltOptimizer,
    routed: Routed,
    settings: Settings,
    variables: Sequence[Any],
    weights: Before | None,
) -> None:
    if built.measurements is not None:
        built.measurements.note_step(routed.indices, weights)
    at = ops.convert_to_tensor(settings.iterations)
    if built.averages is not None:
        pairs = built.average_pairs(
            [(*own, *none) for own, none in zip(routed.indices, routed.absent, strict=True)]
        )
        built.averages.update(pairs, at, variables)
        built.averages.overwrite(pairs, at, variables)
    settings.iterations.assign_add(1)


def _joint_scale(
    gradients: list[list[Tensor]],
    limit: float,
    norms: Tensor | None,
    measurements: Measurements | None,
) -> Tensor | None:
    if not any(gradients):
        return None
    if norms is None:
        # By groups, as where norms are known: the same numbers to the bit.
        _, norms = nonfinite.group_norms(gradients)
    norm = ops.sqrt(ops.sum(ops.square(norms)))
    if measurements is not None:
        measurements.note_joint_clip(norm, limit)
    return clipping.scale_for(norm, limit)
