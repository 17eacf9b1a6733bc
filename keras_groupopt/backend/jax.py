"""JAX: conditionals, whose branch must take and return every value it changes, and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp
from jax.experimental.sparse import JAXSparse

from keras_groupopt.backend import generic
from keras_groupopt.backend.fused_jax import are_fusible as are_fusible
from keras_groupopt.backend.fused_jax import fused_step as fused_step

Tensor = Any


def is_gone(variable: Any) -> bool:
    """Whether a variable's buffer was donated: `train_on_batch` then assigns one after another."""
    value = variable.value
    return not isinstance(value, jax.core.Tracer) and value.is_deleted()


def as_computable(gradient: Tensor | None) -> Tensor | None:
    """Returns a gradient as a dense array: JAX's sparse ones know neither norms nor `where`."""
    return gradient.todense() if isinstance(gradient, JAXSparse) else gradient


def combine_repeated_rows(gradient: Tensor) -> Tensor:
    """Returns a gradient as a dense array."""
    return generic.combine_repeated_rows(as_computable(gradient))


def trace(step: Callable[[Tensor], None]) -> None:
    """Traces a function of a step counter that assigns to variables nobody else has."""
    with keras.StatelessScope():
        jax.eval_shape(step, jax.ShapeDtypeStruct((), "int32"))


def concrete(predicate: Tensor) -> bool | None:
    """Returns a boolean scalar's value, or `None` while a step is being compiled."""
    return None if isinstance(predicate, jax.core.Tracer) else bool(predicate)


def compiled(schedule: Any) -> Callable[[int], Tensor]:
    """Compiles it, as JAX traces each condition of Keras' schedules anew where they are not.

    A schedule that asks for the step in Python is called as it is.
    """
    fast = jax.jit(lambda step: schedule(step))
    traceable = True

    def call(step: int) -> Tensor:
        nonlocal traceable
        if traceable:
            try:
                return fast(step)
            except jax.errors.JAXTypeError:
                traceable = False
        return schedule(step)

    return call


def traced_run_if(predicate: Tensor, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body` if `predicate` holds, within a step that is being compiled.

    As a loop of at most one turn: XLA carries the values of a loop in place, where it copies each
    value that a branch only passes on.
    """

    def turn(state: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        mapping = list(zip(variables, state[1], strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            body()
        return jnp.array(False), [scope.get_current_value(v) for v in variables]

    values = [variable.value for variable in variables]
    _, results = jax.lax.while_loop(lambda state: state[0], turn, (predicate, values))
    for variable, result in zip(variables, results, strict=True):
        variable.assign(result)


def traced_cond(
    predicate: Tensor, then: Callable[[], list[Tensor]], otherwise: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Returns the tensors of one of two functions, within a step that is being compiled."""
    return list(jax.lax.cond(predicate, then, otherwise))


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm over all gradients, a float32 scalar."""
    if not all(isinstance(gradient, jax.Array) for gradient in gradients):
        # Some are sparse.
        return generic.global_norm(gradients)
    # Keras' operations look at each argument, which for many variables is most of their tracing.
    squares = [jnp.sum(jnp.square(gradient.astype("float32"))) for gradient in gradients]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
