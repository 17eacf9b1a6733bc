"""Steps as in the training loop of Keras on JAX: compiled, with donated state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import measuring
import models
import numpy as np
from prepared import Prepared, Setting

MODES = ("compiled", "eager")
USUAL_MODES = ("compiled",)


class Feed:
    """Two sets of gradients, passed as arguments so that no compiler knows their values."""

    def __init__(self, sets: Sequence[Sequence[np.ndarray]], variables: Sequence[Any]) -> None:
        self.sets = [
            [
                jax.numpy.asarray(gradient, variable.dtype)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            for gradients in sets
        ]


def fresh() -> None:
    """Clears the functions that earlier contenders traced and compiled."""
    jax.clear_caches()


def devices() -> list[str]:
    """Returns the names of the accelerators."""
    return [device.device_kind for device in jax.devices() if device.platform != "cpu"]


def prepare(make: Callable[[], Any], setting: Setting) -> Prepared:
    """Prepares the step of a Keras optimizer."""
    model, watch = setting.model, measuring.Stopwatch()
    optimizer = make()
    watch.part("build", lambda: optimizer.build(model.trainable_variables))

    # As in Keras' trainer, the state is donated and returned in the same order. In another order
    # the compiler could not reuse the memory and would copy each array.
    def apply(state: Any, received: Any) -> Any:
        trainable, rest, own = state
        trainable, own = optimizer.stateless_apply(own, received, trainable)
        return trainable, rest, own

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple(values(group) for group in groups)
    return start(apply, state, setting, watch, models.nbytes(optimizer.variables))


def values(variables: Sequence[Any]) -> list[Any]:
    """Returns copies, which a step may donate."""
    return [jax.numpy.array(variable.value, copy=True) for variable in variables]


def start(
    apply: Callable[[Any, Any], Any],
    state: tuple[Any, ...],
    setting: Setting,
    watch: measuring.Stopwatch,
    state_bytes: int,
) -> Prepared:
    """Traces, compiles and takes the first step, and returns the prepared step.

    Args:
        apply: Returns the next state, given a state and gradients. The first entry of a state is
            the weights.
        state: The first state, which is donated.
        setting: The mode and the gradients.
        watch: Measures the parts of the start-up.
        state_bytes: The bytes of the state without the weights.
    """
    sets, count = setting.feed.sets, 0
    if setting.mode == "compiled":
        jitted = jax.jit(apply, donate_argnums=0)
        lowered = watch.part("trace", lambda: jitted.lower(state, sets[0]))
        apply = watch.part("compile", lowered.compile)

    def work() -> None:
        nonlocal state
        state = apply(state, sets[count % 2])
        jax.block_until_ready(state)

    def step() -> tuple[float, float]:
        nonlocal count
        took = measuring.timed(work)
        count += 1
        return took

    watch.part("first_call", step)

    def weights() -> list[np.ndarray]:
        return [np.array(value, dtype="float32") for value in jax.tree.leaves(state[0])]

    return Prepared(step, watch.seconds, weights, state_bytes)


def addition(setting: Setting) -> Prepared:
    """Prepares a step that only adds the gradients to sums in float32."""
    sums = [jax.numpy.zeros(g.shape, "float32") for g in setting.feed.sets[0]]

    def add(state: Any, received: Any) -> Any:
        return ([total + value for total, value in zip(state[0], received, strict=True)],)

    found = start(add, (sums,), setting, measuring.Stopwatch(), 0)
    return Prepared(found.step, found.start_up)
