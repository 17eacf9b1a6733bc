"""What can be read and set while an optimizer runs: rates, decay, anchors, averages."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.checks import check_count, check_number
from keras_groupopt.optimizer.run import require_built
from keras_groupopt.schedules.horizon import horizon
from keras_groupopt.step import nonfinite, run_length
from keras_groupopt.step.averages import Averages

Tensor = Any

# Rates -------------------------------------------------------------------------------------------


def set_learning_rate(optimizer: Any, learning_rate: Any) -> None:
    """Sets the base rate.

    Raises:
        TypeError: If it was declared as a schedule or a function, or is set to one.
        ValueError: If it is negative or not finite.
    """
    variable = compat.rate_variable(optimizer)
    if variable is None:
        raise TypeError(
            "The base `learning_rate` is a schedule or a function and cannot be set. "
            f"Received: learning_rate={learning_rate!r}. Make the optimizer with a number "
            "to set it while training."
        )
    if callable(learning_rate):
        raise TypeError(
            "The base `learning_rate` must be set to a number. Received: "
            f"learning_rate={learning_rate!r}. Make the optimizer with the schedule."
        )
    if not ops.is_tensor(learning_rate) and not isinstance(learning_rate, keras.Variable):
        learning_rate = check_number("learning_rate", learning_rate, where="GroupedOptimizer")
    variable.assign(learning_rate)


def learning_rates(optimizer: Any) -> dict[str, Tensor]:
    """The present rate of each group that moves, by name; float32 scalars.

    The rate of a variable is that of its group times its ratio in `ratios`.
    """
    built = require_built(optimizer, "learning_rates")
    base = ops.cast(optimizer.learning_rate, "float32")
    at = ops.convert_to_tensor(optimizer.iterations)
    with built.in_run():
        return {group.name: built.rate_of(group, base, at) for group in built.moving_groups}


def learning_rate_ratios(optimizer: Any) -> dict[str, Tensor]:
    """The present ratio of each group that moves, by name; float32 scalars."""
    at = ops.convert_to_tensor(optimizer.iterations)
    return {
        group.name: group.scalars["learning_rate_ratio"].at(at)
        for group in require_built(optimizer, "learning_rate_ratios").moving_groups
    }


def set_learning_rate_ratio(optimizer: Any, group: str, ratio: float) -> None:
    """Sets the ratio of a group, from the next step on, without a retrace.

    Args:
        group: The group's name.
        ratio: A finite number >= 0.

    Raises:
        KeyError: If there is no such group.
        TypeError: If the ratio was declared as a schedule.
        ValueError: If `ratio` is negative or not finite, or the group is frozen.
    """
    _set_scalar(optimizer, group, "learning_rate_ratio", ratio)


def set_weight_decay(optimizer: Any, group: str, weight_decay: float) -> None:
    """Sets the decay coefficient of a group that decays, without a retrace.

    Args:
        group: The group's name.
        weight_decay: A finite number >= 0.

    Raises:
        KeyError: If there is no such group.
        TypeError: If the decay was declared as a schedule.
        ValueError: If it is negative or not finite, or the group was built without decay.
    """
    _set_scalar(optimizer, group, "weight_decay", weight_decay)


def _set_scalar(optimizer: Any, name: str, scalar: str, value: float) -> None:
    group = require_built(optimizer, f"set_{scalar}")[name]
    if scalar not in group.scalars:
        raise ValueError(
            f'`{scalar}` of group "{name}" cannot be set: it was declared '
            f"{'frozen' if group.frozen else 'without it'}. Received: {scalar}={value!r}."
        )
    group.scalars[scalar].set(value)


# The run -----------------------------------------------------------------------------------------


def total_steps(optimizer: Any) -> Any:
    """The optimizer steps of the run, for schedules with `total_steps="fit"`; an integer.

    It is 0 until it is known: the first `fit` that trains tells it, and it is kept and saved. In
    the first epoch it is known from `on_train_begin` on.
    Set it if there is no `fit`, or to let a further `fit` stretch the schedules.
    """
    built, told = optimizer._built, told_steps(optimizer)
    if built is None:
        return told or 0
    length = built.run_length
    if length is None:
        return optimizer._run.total_steps or 0
    return length.variable if told is None or length.look() else told


def told_steps(optimizer: Any) -> int | None:
    """Returns the optimizer steps that were set, or that the present `fit` told, if any."""
    run, model = optimizer._run, optimizer._link.model
    told = run_length.of_fit(model, optimizer.gradient_accumulation_steps)
    is_past = run.past_history is not None and run.past_history is getattr(model, "history", None)
    return run.total_steps or (None if is_past else told)


def set_total_steps(optimizer: Any, total_steps: int) -> None:
    """Sets the optimizer steps of the run.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is smaller than 1, or no schedule of a built optimizer needs it.
    """
    total = check_count("total_steps", total_steps, 1, where="GroupedOptimizer")
    optimizer._run.total_steps = total
    if optimizer._built is None:
        return
    if optimizer._built.run_length is None:
        raise ValueError(
            '`total_steps` is for schedules with total_steps="fit". Received: '
            f"total_steps={total_steps!r} for an optimizer without one."
        )
    optimizer._built.run_length.set(total)


def compare_run_length(optimizer: Any, end: int) -> None:
    """Warns of schedules that end before the run, once for each end of it.

    Args:
        optimizer: A built `GroupedOptimizer`.
        end: The optimizer step at which the run ends.
    """
    run = optimizer._run
    if end != run.compared_end:
        run.compared_end = end
        with horizon(run.kept_total):
            run_length.warn_if_shorter(optimizer._built.plan, end, run.warned_short)


def note_progress(optimizer: Any) -> None:
    """Notes how far the run is, which a compiled step cannot read."""
    built, run = optimizer._built, optimizer._run
    run.done = backend.on_host(optimizer.iterations)
    if built.run_length is not None:
        run.kept_total = backend.on_host(built.run_length.variable) or None


def check_run_length(optimizer: Any, end: int) -> None:
    """Warns, once for each, about schedules made for fewer steps than the run has.

    Args:
        optimizer: A built `GroupedOptimizer`.
        end: The optimizer step at which the run ends.
    """
    built = require_built(optimizer, "check_run_length")
    total = None if built.run_length is None else backend.on_host(built.run_length.variable)
    with horizon(total or None):
        run_length.warn_if_shorter(built.plan, end, optimizer._run.warned_short)


# Steps that were skipped, and windows -------------------------------------------------------------


def skipped_steps(optimizer: Any) -> Any:
    """The steps, or micro-batches, skipped because gradients were not finite; an integer."""
    guard = None if optimizer._built is None else optimizer._built.guard
    return 0 if guard is None else guard.skipped


def first_nonfinite_group(optimizer: Any) -> str | None:
    """The first group at fault in the last step that was skipped; `None` if none was.

    Reads a value from the device.
    """
    built = optimizer._built
    if built is None or built.guard is None:
        return None
    number = backend.on_host(built.guard.first)
    return None if number == nonfinite.NONE else str(built.groups[number].name)


def check_finite(optimizer: Any) -> None:
    """Raises if compiled steps were skipped since the last call and that is an error.

    Reads a value from the device.

    Raises:
        FloatingPointError: If one was, with `on_nonfinite="raise"`; if too many were in a row, with
            `"skip"`. It names the first group at fault.
    """
    built, group = optimizer._built, first_nonfinite_group(optimizer)
    if group is None:
        return
    if optimizer.on_nonfinite == "raise":
        built.guard.first.assign(nonfinite.NONE)
        raise FloatingPointError(nonfinite.message(group))
    built.guard.look(built.taken(), group)


def note_skipped(optimizer: Any) -> None:
    """Warns of the first step of a run that was skipped, and raises if too many were in a row."""
    built, group = optimizer._built, str(first_nonfinite_group(optimizer))
    built.guard.look(built.taken(), group, was_skipped=True)
    built.guard.warn(group)


def report_skipped(optimizer: Any) -> None:
    """Warns of the steps that were skipped since the last call. Reads a value from the device."""
    group = first_nonfinite_group(optimizer)
    if group is not None:
        optimizer._built.guard.warn(group, is_over=True)


def micro_batches(optimizer: Any) -> Any:
    """The micro-batches in the open window of gradient accumulation; an integer."""
    window = None if optimizer._built is None else optimizer._built.window
    return 0 if window is None else window.count


# Averages and anchors ----------------------------------------------------------------------------


def average_pairs(optimizer: Any) -> list[tuple[Any, Any]]:
    """Returns each average with the variable that it averages, both Keras variables.

    Raises:
        ValueError: If the optimizer is not built, or keeps no averages.
    """
    _averages(optimizer, "_average_pairs")
    optimizer._built.capture_due()
    pairs: list[tuple[Any, Any]] = optimizer._built.average_pairs()
    return pairs


def average_momentum(optimizer: Any) -> Tensor:
    """`β_t` of the next average, a float32 scalar: 0 if it will be a copy of the weights.

    Raises:
        ValueError: If the optimizer is not built, or keeps no averages.
    """
    averages = _averages(optimizer, "average_momentum")
    return averages.momentum_at(ops.convert_to_tensor(optimizer.iterations))


def _averages(optimizer: Any, asked: str) -> Averages:
    averages = require_built(optimizer, asked).averages
    if averages is None:
        raise ValueError(
            f"`{asked}` needs an optimizer with averages. Received: one without. Make it "
            "with `GroupedOptimizer(ema=kgo.EMA(0.999))`."
        )
    return averages


def capture_anchors(optimizer: Any) -> None:
    """Takes the present weights as the anchors of all anchored groups."""
    built = require_built(optimizer, "capture_anchors")
    built.anchors_are_due = False
    for group in built.groups:
        group.capture_anchors()


def anchor_drift(optimizer: Any) -> dict[str, Tensor]:
    """Returns `‖w − anchor‖` per group that has a stored anchor; float32 scalars."""
    built = require_built(optimizer, "anchor_drift")
    built.capture_due()
    return {group.name: group.drift() for group in built.groups if group.anchored}
