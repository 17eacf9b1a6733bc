"""One optimizer step as the training loop of each backend takes it, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

Weights = Callable[[], list[np.ndarray]]


def prepare(
    optimizer: Any, model: Any, gradients: Sequence[np.ndarray], *, eager: bool = False
) -> tuple[Callable[[], None], Weights]:
    """Returns a step that waits for its result, and a function that reads the weights.

    Args:
        optimizer: A built optimizer.
        model: The model it was built with. Its weights are moved on TensorFlow and torch; on
            JAX, where `fit` takes values out of the model, each call moves values of its own.
        gradients: One per trainable variable. They enter as arguments, so nothing about them is
            known to a compiler.
        eager: On TensorFlow, runs the operations one by one, as with `run_eagerly=True`.
    """
    make = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[keras.backend.backend()]
    return make(optimizer, model, gradients, eager)


def can_run_eagerly() -> bool:
    """Whether `prepare(..., eager=True)` differs from the usual step."""
    return keras.backend.backend() == "tensorflow"


def _tensorflow(optimizer: Any, model: Any, gradients: Any, eager: bool) -> Any:
    import tensorflow as tf

    # It takes one step per contender for one function that is traced again and again.
    tf.get_logger().setLevel("ERROR")
    variables = model.trainable_variables
    values = [tf.constant(gradient) for gradient in gradients]

    def apply(received: list[Any]) -> None:
        optimizer.apply(received, variables)

    compiled = apply if eager else tf.function(apply)

    def step() -> None:
        compiled(values)
        tf.test.experimental.sync_devices()

    return step, lambda: _read(variables)


def _jax(optimizer: Any, model: Any, gradients: Any, eager: bool) -> Any:
    import jax

    # As in Keras' trainer: the state goes in and out in one order, and is donated. In another
    # order the compiler cannot reuse the memory and copies every array.
    def apply(state: Any, received: Any) -> Any:
        trainable, rest, own = state
        trainable, own = optimizer.stateless_apply(own, received, trainable)
        return trainable, rest, own

    def values(variables: Any) -> list[Any]:
        return [jax.numpy.array(variable.value, copy=True) for variable in variables]

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple(values(group) for group in groups)
    received = [jax.numpy.asarray(gradient) for gradient in gradients]
    compiled = apply if eager else jax.jit(apply, donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = compiled(state, received)
        jax.block_until_ready(state)

    return step, lambda: [np.array(value) for value in state[0]]


def _torch(optimizer: Any, model: Any, gradients: Any, eager: bool) -> Any:
    import torch

    variables = model.trainable_variables
    received = [
        torch.as_tensor(g, device=v.value.device) for g, v in zip(gradients, variables, strict=True)
    ]
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def step() -> None:
        # Keras' trainer applies gradients without recording them.
        with torch.no_grad():
            optimizer.apply(received, variables)
        wait()

    return step, lambda: _read(variables)


def _read(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def prepare_addition(gradients: Sequence[np.ndarray]) -> Callable[[], None]:
    """Returns a step that only adds gradients to sums of their shapes, as fast as it goes."""
    make = {"tensorflow": _add_tensorflow, "jax": _add_jax, "torch": _add_torch}
    return make[keras.backend.backend()](gradients)


def _add_tensorflow(gradients: Any) -> Callable[[], None]:
    import tensorflow as tf

    values = [tf.constant(gradient) for gradient in gradients]
    sums = [tf.Variable(tf.zeros_like(value)) for value in values]

    @tf.function
    def add(received: list[Any]) -> None:
        for total, value in zip(sums, received, strict=True):
            total.assign_add(value)

    def step() -> None:
        add(values)
        tf.test.experimental.sync_devices()

    return step


def _add_jax(gradients: Any) -> Callable[[], None]:
    import jax

    values = [jax.numpy.asarray(gradient) for gradient in gradients]
    sums = [jax.numpy.zeros_like(value) for value in values]
    add = jax.jit(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], donate_argnums=0)

    def step() -> None:
        nonlocal sums
        sums = add(sums, values)
        jax.block_until_ready(sums)

    return step


def _add_torch(gradients: Any) -> Callable[[], None]:
    import torch

    values = [torch.as_tensor(gradient) for gradient in gradients]
    sums = [torch.zeros_like(value) for value in values]
    return lambda: torch._foreach_add_(sums, values)
