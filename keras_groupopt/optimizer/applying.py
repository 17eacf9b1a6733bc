"""How Keras steps an optimizer: `apply` and what belongs to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.distribution import distribute_tensor

from keras_groupopt import backend
from keras_groupopt.base import compat, text
from keras_groupopt.optimizer import values
from keras_groupopt.optimizer.building import positions_of
from keras_groupopt.optimizer.run import LastStep, require_built
from keras_groupopt.step import averages, one_step, run_length
from keras_groupopt.step.built import BuiltOptimizer

Tensor = Any


@backend.as_written
def apply(
    optimizer: Any,
    grads: Sequence[Tensor],
    trainable_variables: Sequence[Any] | None = None,
    sample_count: Any = None,
) -> None:
    """Does one optimizer step, or takes in one micro-batch if gradients are accumulated.

    Args:
        grads: One gradient per variable, of its shape; `None` for a variable without a gradient.
        trainable_variables: Their variables. The first call builds the optimizer with them;
            later calls may leave some out, which is as if they had no gradient. Default: all
            variables it was built with.
        sample_count: The samples (or tokens) that `grads` is the mean over, a number >= 0 or a
            scalar tensor. With it, micro-batches of different sizes weigh as in one batch. In
            a replica of a TensorFlow strategy: those of this replica. Default: `None`, which
            weighs all micro-batches alike.

    Raises:
        FloatingPointError: With `on_nonfinite="raise"`, if a gradient is not finite and the step
            is not compiled.
        NotImplementedError: Under a strategy of TensorFlow that the class does not name.
        ValueError: If a variable is unknown or comes twice, counts or shapes differ, or every
            gradient is `None`; under a strategy, if model or optimizer were made outside of its
            scope.
    """
    grads = list(grads)
    if not grads:
        return
    positions = take_in(optimizer, grads, trainable_variables)
    built, run = optimizer._built, optimizer._run
    run.last_step = LastStep(frozenset(positions), optimizer._link.train_function())
    # `torch.compile` cannot read an annotation here.
    missing, skipped = [], []  # type: ignore[var-annotated]

    told = run_length.of_fit(optimizer._link.model, optimizer.gradient_accumulation_steps)
    if told is not None and run.is_training:
        values.compare_run_length(optimizer, told if run.done < told else run.done + told)

    def step_on_device(sums: list[Tensor | None], samples: Tensor | None) -> None:
        with keras.name_scope(optimizer.name):
            missing[:], is_skipped = _step(optimizer, samples).take(sums, positions)
            skipped[:] = [is_skipped]

    # Not the gradients' variables, which may be those of one device.
    known = [built.variables[position] for position in positions]
    one_step.on_each_device(step_on_device, grads, known, sample_count, optimizer.variables)
    _warn_of_missing(built, missing)
    if any(skipped) and run.is_training:
        values.note_skipped(optimizer)


def take_in(
    optimizer: Any, grads: Sequence[Tensor], trainable_variables: Sequence[Any] | None
) -> list[int]:
    """Checks what a step received, and builds the optimizer if it is not built.

    Args:
        optimizer: The optimizer.
        grads: The gradients.
        trainable_variables: Their variables; `None` for all it was built with.

    Returns:
        The places of the variables among those that the optimizer was built with.

    Raises:
        ValueError: If a variable is unknown or comes twice, or counts or shapes differ.
    """
    if trainable_variables is None:
        if optimizer._built is None:
            raise ValueError(
                "`apply` needs variables until the optimizer is built. Received: gradients "
                "only. Call `optimizer.build(model.trainable_variables)` first."
            )
        variables = optimizer._built.variables
    else:
        variables = list(trainable_variables)
        if optimizer._built is None or optimizer._run.pending is not None:
            backend.once_per_step(lambda: optimizer.build(variables))
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one gradient per variable. Received: "
            f"{len(grads)} gradients for {len(variables)} variables."
        )
    positions = positions_of(optimizer, variables)
    built = optimizer._built
    _check_gradients(built, grads, positions)
    if built.is_anything_due:
        backend.once_per_step(lambda: built.capture_due(stepping=True))
    return positions


def _check_gradients(
    built: BuiltOptimizer, grads: Sequence[Tensor], positions: Sequence[int]
) -> None:
    """Refuses two gradients for one variable, and gradients that would be broadcast."""
    seen: set[int] = set()
    for gradient, position in zip(grads, positions, strict=True):
        own = built.places[position][1]
        if position in seen:
            raise ValueError(
                "`trainable_variables` must hold each variable once. Received: "
                f"{own.path} more than once. Add its gradients up."
            )
        seen.add(position)
        if gradient is None or backend.has_shape(gradient, own.planned.shape):
            continue
        shape = tuple(own.variable.shape)
        if not backend.has_shape(gradient, shape):
            raise ValueError(
                "A gradient must have the shape of its variable. Received: a gradient of shape "
                f"{tuple(np.shape(gradient))} for {own.path} of shape {shape}."
            )


def changing_variables(optimizer: Any) -> list[Any]:
    """Returns what a step may change of an optimizer's `variables`: all but its fingerprint."""
    return [v for v in optimizer.variables if v is not optimizer._fingerprint]


def flush(optimizer: Any) -> bool:
    """Does the optimizer step of a window of micro-batches that is not full, if there is one.

    The mean is over the micro-batches that came. Call it outside a compiled step, as
    `kgo.FlushAccumulation` does at the end of each epoch.

    Returns:
        Whether there was a step to do.

    Raises:
        ValueError: If the optimizer is not built.
    """
    built = require_built(optimizer, "flush")
    if built.window is None:
        return False
    built.window.weighted = None
    if not backend.on_host(built.window.count):
        return False
    window, variables = built.window, [*changing_variables(optimizer), *built.variables]
    backend.over_replicas(lambda none: _step(optimizer, None).flush(window), [], variables)
    return True


def _step(optimizer: Any, sample_count: Tensor | None) -> one_step.Step:
    return one_step.Step(
        optimizer._built,
        lambda: ops.cast(optimizer.learning_rate, "float32"),
        changing_variables(optimizer),
        optimizer.loss_scale_factor,
        sample_count,
    )


def _warn_of_missing(built: BuiltOptimizer, missing: list[str]) -> None:
    if not missing or tuple(missing) in built.warned:
        return
    built.warned |= {tuple(missing)}
    whole = "" if built.window is None else " if none comes in the whole window"
    warnings.warn(
        f"No gradient for {text.listing(missing)}: these variables neither move nor decay{whole}.",
        stacklevel=3,
    )


# Steps on values ---------------------------------------------------------------------------------


def stateless_apply(
    optimizer: Any,
    optimizer_variables: Sequence[Tensor],
    grads: Sequence[Tensor],
    trainable_variables: Sequence[Tensor],
    sample_count: Any = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Does one step on values instead of variables (JAX and torch).

    Args:
        optimizer_variables: Values of `optimizer.variables`, in order.
        grads: One gradient per value of `trainable_variables`.
        trainable_variables: Values of the variables the optimizer was built with, in order,
            without those whose `trainable` is now `False`.
        sample_count: As in `apply`. Default: `None`.

    Returns:
        The new values of `trainable_variables` and of `optimizer_variables`.

    Raises:
        ValueError: If the optimizer is not built, or counts differ.
    """
    return apply_to_values(
        optimizer,
        optimizer,
        (optimizer_variables, grads, trainable_variables),
        lambda variables: optimizer.apply(grads, variables, **given(sample_count)),
    )


def given(sample_count: Any) -> dict[str, Any]:
    """Returns the argument of `apply`, if there is one: a subclass may have Keras' signature."""
    return {} if sample_count is None else {"sample_count": sample_count}


def apply_to_values(
    optimizer: Any,
    grouped: Any,
    received: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    step: Callable[[list[Any]], None],
) -> tuple[list[Tensor], list[Tensor]]:
    """Does a step on values instead of variables.

    Args:
        optimizer: The optimizer whose variables the values stand for.
        grouped: It, or the `GroupedOptimizer` inside it.
        received: What `stateless_apply` of Keras takes.
        step: Does the step on variables.

    Returns:
        The new values of the trainable variables and of the optimizer's.

    Raises:
        ValueError: If the optimizer is not built, or counts differ.
    """
    optimizer_values, _, trainable_values = received
    built, model = grouped._built, grouped._link.model
    if built is None or not backend.STATELESS:
        # Keras says why.
        return keras.optimizers.Optimizer.stateless_apply(grouped, *received)
    variables, own = built.variables, optimizer.variables
    if len(trainable_values) != len(variables):
        variables = [variable for variable in variables if variable.trainable]
    counts = (len(trainable_values), len(optimizer_values))
    if counts != (len(variables), len(own)):
        if model is not None:
            # If it is the model's variables that changed, this names them.
            positions_of(grouped, model.trainable_variables)
        raise ValueError(
            "`stateless_apply` must get one value per variable. Received: "
            f"{counts[0]} trainable and {counts[1]} optimizer values, for {len(variables)} "
            f"and {len(own)} variables. If variables became trainable, or were added, after "
            "the optimizer was built, call `optimizer.rebuild(model)`, which keeps the state "
            "of every variable that stays."
        )
    mapping = [
        *zip(variables, backend.private_copies(trainable_values), strict=True),
        *zip(own, backend.private_copies(optimizer_values), strict=True),
    ]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        step(variables)
    return _values_in(scope, variables), _values_in(scope, own)


def _values_in(scope: keras.StatelessScope, variables: Sequence[Any]) -> list[Tensor]:
    """Returns the values of variables in a scope, laid out over devices as the variables are.

    A compiler that is free to choose takes another layout, and the next step is compiled again.
    """
    found = []
    for variable in variables:
        value, layout = scope.get_current_value(variable), compat.layout_of(variable)
        found.append(value if layout is None else distribute_tensor(value, layout))
    return found


# The end of `fit` --------------------------------------------------------------------------------


def finalize_variable_values(optimizer: Any, var_list: Sequence[Any]) -> None:
    """Reports, at the end of `fit`, what the compiled step could not; does what `use_ema` asks.

    A compiled step cannot warn, for example, that it went on after the end of a schedule.

    Args:
        var_list: The model's trainable variables now.

    Raises:
        FloatingPointError: If compiled steps were skipped, as `on_nonfinite` and
            `max_skipped_steps` say.
    """
    built, link, run = optimizer._built, optimizer._link, optimizer._run
    if built is None:
        return
    if not compat.is_readable(optimizer.iterations):
        # After a failed `fit` the compiled step still owns the values. If the optimizer has no
        # model, that step could not name the variables that were added.
        positions_of(optimizer, list(var_list))
        return
    if optimizer.use_ema:
        ended = {id(variable) for variable in var_list}
        pairs = [pair for pair in optimizer._average_pairs() if id(pair[1]) in ended]
        averages.copy_into_weights(pairs)
    if run.is_training or optimizer.on_nonfinite == "raise":
        optimizer._check_finite()
    if run.is_training:
        values.report_skipped(optimizer)
        # A further `fit` of the same compiled step could not warn.
        values.note_progress(optimizer)
        values.check_run_length(optimizer, run.done)
    last = run.last_step
    if last is None or last.is_in_another(getattr(link.model, "train_function", None)):
        # No step ran, or the model was compiled since the last one.
        return
    changed = last.changed(positions_of(optimizer, list(var_list)))
    if changed:
        paths = [v.path for v in built.plan.variables if v.position in changed]
        warnings.warn(
            "`trainable` changed after the model was compiled, and the compiled step does "
            f"not know: {text.listing(paths)}. Call "
            "`model.compile(optimizer=model.optimizer, ...)` again after such a change.",
            stacklevel=2,
        )
