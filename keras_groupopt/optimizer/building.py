"""From a plan to a built optimizer: its groups and all of its state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import compat, text
from keras_groupopt.optimizer.declaration import Declared
from keras_groupopt.optimizer.link import Link
from keras_groupopt.plan import plan as planning
from keras_groupopt.plan.plan import Plan
from keras_groupopt.rules import instances
from keras_groupopt.step import run_length
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.measurements import Measurements

_LOW_PRECISION = ("float16", "bfloat16")
# Rules of Keras that compute 1 - β₂ᵗ in the dtype of the weights.
_WITH_BETA_2 = ("adam", "adamw", "lamb", "nadam")


def is_built(optimizer: Any) -> bool:
    """Whether it is built, and still knows every trainable variable of its model, in order.

    Keras asks before `fit` on JAX, and calls `build` if the answer is no. `build` then refuses
    variables that it does not know, before Keras has taken the weights out of the model.
    """
    built, link = optimizer._built, optimizer._link
    if built is None or optimizer._run.pending is not None:
        return False
    if built.run_length is not None:
        # A compiled step cannot read it.
        built.run_length.look()
    if link.model is None:
        return may_know_length(optimizer, link, built)
    places = compat.positions_of(optimizer, link.model.trainable_variables)
    return None not in places and _are_in_order(places)


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Resolves the plan for `variables`, freezes it, and makes all state.

    With `keras.distribution` state lies beside its weight, unless an entry of the layout map
    of `ModelParallel` matches its key, `group/layer path/slot`; scalars are on every device.

    Args:
        variables: The trainable Keras variables, in the order gradients will come in.

    Raises:
        ValueError: If the plan cannot be made, an entry of a layout map does not fit its state,
            or state that was loaded before has another layout.
    """
    variables = list(variables)
    if optimizer._built is None:
        _build(optimizer, variables)
    else:
        _check_order(optimizer, variables)
    run, built = optimizer._run, optimizer._built
    if run.pending is not None:
        # If it is refused, it stays, so that no later call goes on as if it had been loaded.
        # A LossScaleOptimizer builds within a compiled step, which cannot read on the host.
        with backend.outside_compiled_step():
            saved, terms = run.pending
            checkpoint.give(optimizer, built, saved, terms, optimizer._link.resting)
            if built.gradient_state is not None:
                built.gradient_state.set_late()
        run.pending = None


def _build(optimizer: Any, variables: list[Any]) -> None:
    link, run = optimizer._link, optimizer._run
    built, catalog = make(optimizer, optimizer._declared, link, variables)
    keep(optimizer, built)
    link.catalog = catalog
    if built.run_length is not None and run.total_steps is not None:
        built.run_length.set(run.total_steps)
    run.freeze(run.frozen_groups, built)


def make(
    optimizer: Any, declared: Declared, link: Link, variables: list[Any]
) -> tuple[BuiltOptimizer, Any]:
    """Makes the groups and all state for variables; leaves nothing behind if that fails.

    Args:
        optimizer: The optimizer that owns the state.
        declared: What the user declared.
        link: Its model.
        variables: The trainable variables, in order.

    Returns:
        The built state, and the catalog of variables that the plan was resolved over.

    Raises:
        ValueError: If the plan cannot be made, or a layout map does not fit the state.
    """
    tracked = len(compat.tracked_variables(optimizer))
    try:
        plan, catalog = link.resolve(declared, variables)
        _warn_of_changes(link.shown, plan)
        built = _make_state(optimizer, link, plan, variables)
        _warn_of_low_precision(plan)
        _warn_of_regularizers(plan, variables)
    except BaseException:
        untrack(optimizer, compat.tracked_variables(optimizer)[tracked:])
        raise
    return built, catalog


def _make_state(optimizer: Any, link: Link, plan: Plan, variables: list[Any]) -> BuiltOptimizer:
    run = optimizer._run
    with beside(optimizer, variables):
        built = BuiltOptimizer(
            plan, variables, link.model, lambda: optimizer._link.model, link.gradient_rule
        )
        if built.run_length is not None and not may_know_length(optimizer, link, optimizer._built):
            raise ValueError(run_length.NO_MODEL)
        for planned in plan.groups:
            if planned.group.rule is not None:
                instances.claim_instance(planned.group.rule, optimizer, planned.group.where)
        built.make_variables(optimizer)
        built.digest = checkpoint.protect(optimizer, built)
        if run.measured:
            built.measurements = Measurements(run.measured, built.groups)
    checkpoint.place(checkpoint.entries_of(optimizer, built))
    built.plan = planning.with_state_bytes(plan, built.state_bytes())
    built.set_scalars(run.current)
    return built


@contextlib.contextmanager
def beside(optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Places new state on the devices that the variables are on."""
    with checkpoint.beside_weights(), backend.on_devices_of([optimizer.iterations, *variables]):
        yield


def keep(optimizer: Any, built: BuiltOptimizer) -> None:
    """Makes `built` what an optimizer steps with, and tells Keras of its variables."""
    compat.replace_built_variables(optimizer, built.variables)
    optimizer._fingerprint.stand_for(built.digest)
    optimizer._built = built
    optimizer._run.last_step = None
    backend.track(optimizer, checkpoint.entries_of(optimizer, built))


def note_unbuilt(optimizer: Any) -> Callable[[], None]:
    """Returns a function that takes back a build that follows, and what came of it."""
    tracked = len(compat.tracked_variables(optimizer))

    def undo() -> None:
        untrack(optimizer, compat.tracked_variables(optimizer)[tracked:])
        compat.replace_built_variables(optimizer, [])
        optimizer._fingerprint.stand_for(checkpoint.NOT_BUILT)
        backend.track(optimizer, {})
        optimizer._built = None

    return undo


def untrack(optimizer: Any, variables: Sequence[Any]) -> None:
    """Takes variables out of an optimizer's `variables`."""
    for variable in variables:
        compat.untrack(optimizer, variable)


def may_know_length(optimizer: Any, link: Link, built: BuiltOptimizer | None) -> bool:
    """Whether schedules that end with the run may learn how long it is."""
    if optimizer._run.total_steps is not None or link.reference is not None:
        return True
    if built is None:
        # A file may hold it.
        return link.records is not None
    return built.run_length is None or built.run_length.look()


# The order of variables --------------------------------------------------------------------------


def positions_of(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Returns the places of variables among those that an optimizer was built with.

    Raises:
        ValueError: If it was not built with one of them.
    """
    positions = compat.positions_of(optimizer, variables)
    unknown = [v for v, position in zip(variables, positions, strict=True) if position is None]
    if unknown:
        raise ValueError(
            "Every variable must be one the optimizer was built with. Received: unknown "
            f"{text.listing([optimizer._link.name_of(v) for v in unknown])}. They became "
            "trainable, or were added, after the optimizer was built, or belong to another model. "
            "Call `optimizer.rebuild(model)`, which keeps the state of every variable that stays."
        )
    return [position for position in positions if position is not None]


def _are_in_order(positions: Sequence[Any]) -> bool:
    """Whether variables at `positions` may come by their order, on a backend that goes by it."""
    return not backend.BY_ORDER or list(positions) == sorted(positions)


def _check_order(optimizer: Any, variables: Sequence[Any]) -> None:
    link, built = optimizer._link, optimizer._built
    if not may_know_length(optimizer, link, built):
        raise ValueError(run_length.NO_MODEL)
    if not _are_in_order(positions_of(optimizer, variables)):
        raise ValueError(
            "`fit` on JAX passes values in the order of the model's trainable variables, "
            "and the optimizer must have been built in that order. Received: an optimizer "
            f"built with {link.name_of(built.variables[0])} first, for a model "
            f"with {link.name_of(variables[0])} first. Build it with "
            "`optimizer.build(model.trainable_variables)`."
        )


# Warnings ----------------------------------------------------------------------------------------


def _warn_of_changes(shown: Plan | None, plan: Plan) -> None:
    """Warns if the plan differs from the one that the user saw."""
    difference = None if shown is None else shown.compare(plan)
    if difference:
        warnings.warn(
            "The plan differs from the one last shown, because the model changed:\n  "
            + "\n  ".join(difference.first(5)),
            stacklevel=5,
        )


def _warn_of_low_precision(plan: Plan) -> None:
    """Warns about decay and updates that a variable's precision swallows."""
    low = [v.path for v in plan.variables if v.dtype in _LOW_PRECISION]
    if not low:
        return
    still = [v.path for planned in plan.groups for v in planned.variables if _rests(planned, v)]
    resting = (
        " In Keras' Adam, AdamW, Nadam and Lamb, a `beta_2` that bfloat16 rounds to 1 leaves "
        f"these weights where they are: {text.listing(still)}. Give them a `beta_2` of at "
        'most 0.99, or `rule="radam"`.'
    )
    warnings.warn(
        f"Weights in {'/'.join(_LOW_PRECISION)} lose updates and decay smaller than their "
        f"rounding step: {text.listing(low)}. Use a `mixed_` dtype policy, which keeps "
        f"float32 weights.{resting if still else ''}",
        stacklevel=5,
    )


def _rests(planned: Any, variable: Any) -> bool:
    """Whether a rule of Keras has a bias correction of 0 for a variable, at every step."""
    rule = planned.group.rule
    if rule is None or variable.dtype != "bfloat16" or rule.label not in _WITH_BETA_2:
        return False
    beta_2 = rule.given.get("beta_2", 0.999)
    # Half a step of bfloat16 below 1.
    return isinstance(beta_2, (int, float)) and beta_2 >= 1.0 - 2.0**-9


def _warn_of_regularizers(plan: Plan, variables: Sequence[Any]) -> None:
    """Warns about decay beside a regularizer."""
    twice = [
        v.path
        for v in plan.variables
        if v.decayed and getattr(variables[v.position], "regularizer", None) is not None
    ]
    if twice:
        warnings.warn(
            f"These weights have a regularizer and decay as well: {text.listing(twice)}. Both "
            "act. Drop the regularizer, or exclude them with `exclude_from_decay`.",
            stacklevel=5,
        )
