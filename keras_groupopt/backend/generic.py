"""The operations in `keras.ops`, for any backend: what the other files are checked against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from keras import ops

from keras_groupopt.backend.fused_step import FusedStep
from keras_groupopt.backend.keras_momentum import rmsprop_step as rmsprop_step
from keras_groupopt.backend.keras_momentum import sgd_step as sgd_step

Tensor = Any
_Function = TypeVar("_Function", bound=Callable[..., Any])


def over_replicas(
    function: Callable[[list[Tensor]], None],
    gradients: Sequence[Tensor],
    variables: Sequence[Any],
    largest: Sequence[bool] = (),
) -> None:
    """Runs `function` on the gradients of the whole batch, once on each device.

    Args:
        function: Takes the gradients; assigns to some of `variables` and to nothing else.
        gradients: Those of the part of the batch that is at hand, without `None`.
        variables: Every Keras variable that `function` reads or assigns.
        largest: Per gradient, whether the largest over all parts counts, not the sum.
    """
    function(list(gradients))


def has_shape(gradient: Tensor, shape: Sequence[int]) -> bool:
    """Returns whether a gradient has a shape, as far as that is known."""
    found = gradient.shape if hasattr(gradient, "shape") else np.shape(gradient)
    return tuple(found) == tuple(shape)


def track(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Lets the backend's own checkpoints hold an optimizer's state, by key, and nothing older."""


def is_initialized(variable: Any) -> bool:
    """Returns whether a Keras variable has its first value."""
    return True


def sum_over_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of the whole batch from those of one replica's part of it."""
    return list(gradients)


def outside_strategy(function: Callable[[], None]) -> None:
    """Runs `function`, which makes variables for itself alone, out of any strategy."""
    function()


def as_written(function: _Function) -> _Function:
    """Returns a function that no backend rewrites before it traces it."""
    return function


def trace(step: Callable[[Tensor], None]) -> None:
    """Tries a function of a step counter that assigns to variables nobody else has.

    Where steps are always compiled it is traced, which does not run it.
    """
    step(ops.convert_to_tensor(0, dtype="int32"))


def without_reduction(rule: Any) -> Any:
    """Lets a rule take gradients that have been summed over replicas."""
    return rule


def once_per_step(function: Callable[[], None]) -> None:
    """Runs `function` once for all replicas, outside of a step that is being compiled."""
    function()


def on_devices_of(variables: Sequence[Any]) -> AbstractContextManager[Any]:
    """Returns a context in which variables are made on the devices that `variables` are on."""
    return contextlib.nullcontext()


def outside_compiled_step() -> AbstractContextManager[Any]:
    """Returns a context in which variables may be made while a step is being compiled."""
    return contextlib.nullcontext()


def without_gradients() -> AbstractContextManager[Any]:
    """Returns a context in which nothing is recorded for gradients."""
    return contextlib.nullcontext()


def random_states() -> list[Any]:
    """Returns the states of the backend's own random generators, which layers draw from."""
    return []


def restore_random_states(states: Sequence[Any]) -> None:
    """Sets what `random_states` returned."""


def copies(variable: Any) -> list[np.ndarray]:
    """Returns the value of a variable on each device that has its own, as arrays."""
    # By copy, as torch gives its own memory.
    return [np.array(ops.convert_to_numpy(variable))]


def set_copies(variable: Any, values: Sequence[np.ndarray]) -> None:
    """Gives a variable what `copies` returned."""
    # By copy, as some backends take an array's memory over.
    variable.assign(np.array(values[0]))


def buffers(model: Any) -> list[Any]:
    """Returns what layers of the backend's own keep beside variables of Keras."""
    return []


def set_buffer(buffer: Any, value: Any) -> None:
    """Gives a buffer a value, an array."""


def is_gone(variable: Any) -> bool:
    """Whether a step that was just made has taken a variable's value, and not given one back."""
    return False


def compiled(schedule: Any) -> Callable[[int], Tensor]:
    """Returns a schedule in the form that is fast to call at many steps on the host."""
    return lambda step: schedule(step)


def private_copies(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns values that an update cannot write through to the caller's."""
    return list(values)


def as_computable(gradient: Tensor | None) -> Tensor | None:
    """Returns a gradient as a tensor that arithmetic takes."""
    return gradient


def combine_repeated_rows(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with each row once; a dense gradient as a tensor."""
    return gradient if ops.is_tensor(gradient) else ops.convert_to_tensor(gradient)


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm over all gradients, a float32 scalar."""
    squares = [ops.sum(ops.square(ops.cast(gradient, "float32"))) for gradient in gradients]
    return ops.sqrt(ops.sum(ops.stack(squares)))


def distance(values: Sequence[Tensor], variables: Sequence[Any]) -> Tensor:
    """Returns `‖v − w‖` over values and variables of their shapes, a float32 scalar.

    Args:
        values: Tensors, which may be written to.
        variables: Variables.
    """
    squares = [
        ops.sum(ops.square(ops.cast(value, "float32") - ops.cast(variable, "float32")))
        for value, variable in zip(values, variables, strict=True)
    ]
    return ops.sqrt(ops.sum(ops.stack(squares)))


def largest(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the largest absolute value of an element of any gradient, a float32 scalar."""
    zero = ops.zeros((), "float32")
    found = [
        ops.cast(ops.max(ops.abs(gradient)), "float32")
        for gradient in gradients
        if 0 not in tuple(gradient.shape)
    ]
    return ops.max(ops.stack([zero, *found]))


def scale(gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Returns each gradient times `factor`, in the gradient's dtype."""
    return [ops.multiply(gradient, ops.cast(factor, gradient.dtype)) for gradient in gradients]


def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Returns `gradient` with each element in `[-limit, limit]`."""
    return ops.clip(gradient, -limit, limit)


def decay_to_zero(variables: Sequence[Any], factor: Tensor) -> None:
    """Does `w ← w − factor · w` for each variable, in place."""
    for variable in variables:
        variable.assign(variable - variable * ops.cast(factor, variable.dtype))


def decay_to_anchor(variables: Sequence[Any], anchors: Sequence[Any], factor: Tensor) -> None:
    """Does `w ← w − factor · (w − a)` for each variable and its anchor, in place."""
    for variable, anchor in zip(variables, anchors, strict=True):
        difference = ops.cast(variable, anchor.dtype) - anchor
        step = ops.cast(factor, anchor.dtype) * difference
        variable.assign(variable - ops.cast(step, variable.dtype))


def accumulate(
    accumulators: Sequence[Any], gradients: Sequence[Tensor], weight: Tensor | None, keep: Any
) -> None:
    """Does `a ← a + weight · g` for each accumulator and its gradient, in place.

    Args:
        accumulators: Float32 or float64 variables.
        gradients: Tensors of their shapes.
        weight: A scalar; `None` for 1.
        keep: A boolean scalar: whether to add at all; `None` for yes.
    """
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        added = ops.cast(gradient, accumulator.dtype)
        if weight is not None:
            added = added * ops.cast(weight, accumulator.dtype)
        if keep is not None:
            added = ops.where(keep, added, ops.zeros_like(added))
        # Keras' `+` on TensorFlow may take it for adding a bias, which an empty tensor cannot be.
        accumulator.assign(accumulator - ops.negative(added))


def average(averages: Sequence[Any], variables: Sequence[Any], share: Tensor, copies: bool) -> None:
    """Does `v ← v + share · (w − v)` for each average and its variable, in place.

    Args:
        averages: Float32 or float64 variables.
        variables: Variables of their shapes.
        share: A float32 scalar in [0, 1].
        copies: Whether `share` may be 1, where `v` is to become `w` exactly.
    """
    for mean, variable in zip(averages, variables, strict=True):
        value = ops.cast(variable, mean.dtype)
        part = ops.cast(share, mean.dtype)
        moved = mean - part * (mean - value)
        mean.assign(ops.where(part >= 1, value, moved) if copies else moved)


def dense(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with the rows it leaves out; a dense gradient as it is."""
    return gradient


def dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Returns the inner product over all tensors, a float32 scalar."""
    products = [
        ops.sum(ops.cast(a, "float32") * ops.cast(b, "float32"))
        for a, b in zip(first, second, strict=True)
    ]
    return ops.sum(ops.stack(products))


def add_scaled(first: Sequence[Tensor], second: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Returns `a + factor · b` for each pair, in the dtype of `a`."""
    return [
        a + ops.cast(factor, a.dtype) * ops.cast(b, a.dtype)
        for a, b in zip(first, second, strict=True)
    ]


def fused_step(kind: str) -> FusedStep | None:
    """Returns the step of a rule on a list of variables, by its name; `None` where none is."""
    return None


def has_replicas() -> bool:
    """Whether this runs in one of several replicas."""
    return False


def shares_of_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns what replicas sum up to `gradients`, of which each has the whole."""
    return list(gradients)


def loss_of_all(loss: Tensor) -> Tensor:
    """Returns the loss that a replica's gradient is of, without its share of the batch."""
    return loss


def are_fusible(gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[bool]:
    """Returns for each gradient and its variable whether a fused step takes them."""
    return [False] * len(gradients)


def assign_on_replicas(variables: Sequence[Any], values: Sequence[Tensor], only_if: Tensor) -> None:
    """Assigns values that are the same on all replicas, if a boolean scalar holds."""
    for variable, value in zip(variables, values, strict=True):
        wide = ops.cast(value, variable.dtype)
        variable.assign(ops.where(only_if, wide, ops.convert_to_tensor(variable)))


def where_lists(
    predicate: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]
) -> list[Tensor]:
    """Returns `first` where a boolean scalar holds, else `second`."""
    return [ops.where(predicate, a, b) for a, b in zip(first, second, strict=True)]
