"""The operations on sparse gradients (`tf.IndexedSlices`), and conditionals, on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_groupopt.backend import generic
from keras_groupopt.backend.fused_tensorflow import are_fusible as are_fusible
from keras_groupopt.backend.fused_tensorflow import fused_step as fused_step
from keras_groupopt.backend.tensorflow_replicas import assign_on_replicas as assign_on_replicas
from keras_groupopt.backend.tensorflow_replicas import has_replicas as has_replicas
from keras_groupopt.backend.tensorflow_replicas import loss_of_all as loss_of_all
from keras_groupopt.backend.tensorflow_replicas import on_devices_of as on_devices_of
from keras_groupopt.backend.tensorflow_replicas import once_per_step as once_per_step
from keras_groupopt.backend.tensorflow_replicas import over_replicas as over_replicas
from keras_groupopt.backend.tensorflow_replicas import raw
from keras_groupopt.backend.tensorflow_replicas import sum_over_replicas as sum_over_replicas
from keras_groupopt.backend.tensorflow_replicas import without_reduction as without_reduction

Tensor = Any
# What the names of tracked state begin with: no attribute does.
_STATE = "/"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_compiled_step() -> AbstractContextManager[Any]:
    """Returns a context in which variables may be made while a step is being compiled.

    An assignment made while tracing would be part of the step and run at every step.
    """
    return tf.init_scope()


def has_shape(gradient: Tensor, shape: Sequence[int]) -> bool:
    """Returns whether a gradient has a shape, as far as that is known.

    A value of several replicas has none: they may differ.
    """
    if isinstance(gradient, tf.distribute.DistributedValues):
        return True
    found = gradient.shape if hasattr(gradient, "shape") else np.shape(gradient)
    return bool(tf.TensorShape(found).is_compatible_with(shape))


def track(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Lets `tf.train.Checkpoint` hold an optimizer's state, by key, and nothing older.

    State that was restored before it was made is given here.
    """
    # Keras' list of all variables cannot be saved once one was taken out of it.
    optimizer._delete_tracking("_variables")
    for name in list(optimizer._unconditional_dependency_names):
        if name.startswith(_STATE):
            optimizer._delete_tracking(name)
    for key, variable in state.items():
        optimizer._track_trackable(variable, _STATE + key, overwrite=True)


def is_initialized(variable: Any) -> bool:
    """Returns whether a Keras variable has its first value.

    Variables that are made while a step is traced for the first time get theirs after it.
    """
    value = variable.value
    if not hasattr(value, "is_initialized"):
        return True
    with tf.init_scope():
        return bool(value.is_initialized())


def combine_repeated_rows(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with each row once; a dense gradient as a tensor.

    Norms and second moments of slices that repeat a row are not those of the gradient.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _values(gradient: Tensor) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient: Tensor, values: Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm over all gradients, a float32 scalar."""
    values = [_values(gradient) for gradient in gradients]
    if tf.__internal__.get_enclosing_xla_context() is not None:
        return tf.sqrt(tf.add_n(_squares_by_size(values)))
    return tf.sqrt(2.0 * tf.add_n([_half_square(own) for own in values]))


def _half_square(values: Tensor) -> Tensor:
    # One pass over memory, which sums in the dtype that it gets.
    if values.dtype in (tf.float32, tf.float64):
        return tf.cast(tf.nn.l2_loss(values), tf.float32)
    return tf.nn.l2_loss(tf.cast(values, tf.float32))


def _squares_by_size(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns sums of squares that XLA compiles faster, and runs faster on a processor.

    It adds up a tensor one value after the other. Squares of tensors of one size are first added
    up to one tensor, in one pass that uses the processor's vectors.
    """
    by_size: dict[Any, list[Tensor]] = {}
    for number, own in enumerate(values):
        size = own.shape.num_elements()
        flat = tf.reshape(tf.cast(own, tf.float32), [-1])
        by_size.setdefault(("unknown", number) if size is None else size, []).append(flat)
    return [
        tf.reduce_sum(tf.add_n([tf.square(own) for own in alike])) for alike in by_size.values()
    ]


def largest(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the largest absolute value of an element of any gradient, a float32 scalar."""
    # Of no elements the maximum is infinity with a minus.
    found = [tf.cast(tf.reduce_max(tf.abs(_values(g))), tf.float32) for g in gradients]
    return tf.reduce_max(tf.stack([tf.zeros((), tf.float32), *found]))


def scale(gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Returns each gradient times `factor`, in the gradient's dtype."""
    return [
        _with_values(gradient, _values(gradient) * tf.cast(factor, gradient.dtype))
        for gradient in gradients
    ]


def shares_of_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns what replicas sum up to `gradients`, of which each has the whole."""
    if not has_replicas():
        return list(gradients)
    return scale(gradients, 1.0 / tf.distribute.get_strategy().num_replicas_in_sync)


def copies(variable: Any) -> list[np.ndarray]:
    """Returns the value of a variable on each device; statistics differ between replicas."""
    if isinstance(variable.value, tf.distribute.DistributedValues):
        return [np.array(copy) for copy in variable.value.values]
    return generic.copies(variable)


def set_copies(variable: Any, values: Sequence[np.ndarray]) -> None:
    """Gives a variable what `copies` returned."""
    if isinstance(variable.value, tf.distribute.DistributedValues):
        for copy, value in zip(variable.value.values, values, strict=True):
            copy.assign(np.array(value))
        return
    generic.set_copies(variable, values)


def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Returns `gradient` with each element in `[-limit, limit]`."""
    return _with_values(gradient, tf.clip_by_value(_values(gradient), -limit, limit))


def decay_to_zero(variables: Sequence[Any], factor: Tensor) -> None:
    """Does `w ← w − factor · w` for each variable, in place."""
    for variable in variables:
        # A training loop of its own may bring variables of `tf.Module`.
        value = raw(variable)
        value.assign_sub(value * tf.cast(factor, value.dtype))


def accumulate(
    accumulators: Sequence[Any], gradients: Sequence[Tensor], weight: Tensor | None, keep: Any
) -> None:
    """Does `a ← a + weight · g`; rows that a sparse gradient does not name are not touched."""
    if keep is not None:
        # Masks would be passes over memory of their own.
        add = functools.partial(accumulate, accumulators, gradients, weight, None)
        traced_run_if(keep, add, accumulators)
        return
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        added = tf.cast(_values(gradient), accumulator.dtype)
        if weight is not None:
            added *= tf.cast(weight, accumulator.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            accumulator.value.scatter_add(tf.IndexedSlices(added, gradient.indices))
        else:
            accumulator.value.assign_add(added)


def average(averages: Sequence[Any], variables: Sequence[Any], share: Tensor, copies: bool) -> None:
    """Does `v ← v + share · (w − v)`; exactly `v ← w` where `share` is 1 and it `copies`."""
    for mean, variable in zip(averages, variables, strict=True):
        own = mean.value
        value = tf.cast(tf.convert_to_tensor(variable), own.dtype)
        part = tf.cast(share, own.dtype)
        if copies:
            own.assign(tf.where(part >= 1, value, own + part * (value - own)))
        else:
            own.assign_add(part * (value - own))


def outside_strategy(function: Callable[[], None]) -> None:
    """Runs `function`, which makes variables for itself alone, out of any strategy.

    A scope is its thread's, and cannot be left within.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def as_written(function: _Function) -> _Function:
    """Returns a function that AutoGraph leaves alone, which takes longer to rewrite it than to run.

    `fit` switches AutoGraph off; a training loop in a `tf.function` of its own does not.
    """
    left_alone: _Function = tf.autograph.experimental.do_not_convert(function)
    return left_alone


def trace(step: Callable[[Tensor], None]) -> None:
    """Traces a function of a step counter that assigns to variables nobody else has."""
    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((), tf.int32))


def concrete(predicate: Tensor) -> bool | None:
    """Returns a boolean scalar's value, or `None` while a step is being compiled."""
    return bool(predicate) if tf.executing_eagerly() else None


def traced_run_if(predicate: Tensor, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body` if `predicate` holds, within a step that is being compiled."""
    del variables

    def taken() -> Tensor:
        body()
        return tf.constant(True)

    tf.cond(predicate, taken, lambda: tf.constant(False))


def traced_cond(
    predicate: Tensor, then: Callable[[], list[Tensor]], otherwise: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Returns the tensors of one of two functions, within a step that is being compiled."""
    return list(
        tf.cond(predicate, lambda: list(map(dense, then())), lambda: list(map(dense, otherwise())))
    )


def dense(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with the rows it leaves out; a dense gradient as it is."""
    return tf.convert_to_tensor(gradient)


def where_lists(
    predicate: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]
) -> list[Tensor]:
    """Returns `first` where a boolean scalar holds, else `second`; a branch copies neither."""
    return traced_cond(predicate, lambda: list(first), lambda: list(second))
