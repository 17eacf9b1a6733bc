"""A step as Keras' training loop takes it on JAX: compiled, its state donated."""

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
    """Two sets of gradients. They enter as arguments, so no compiler knows anything of them."""

    def __init__(self, sets: Sequence[Sequence[np.ndarray]], variables: Sequence[Any]) -> None:
        self.sets = [
            [
                jax.numpy.asarray(gradient, variable.dtype)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            for gradients in sets
        ]


def fresh() -> None:
    """Forgets what an earlier contender traced and compiled."""
    jax.clear_caches()


def devices() -> list[str]:
    """Returns the names of the accelerators there are."""
    return [device.device_kind for device in jax.devices() if device.platform != "cpu"]


def prepare(make: Callable[[], Any], setting: Setting) -> Prepared:
    """Returns the step of a Keras optimizer, ours or theirs."""
    model, watch = setting.model, measuring.Stopwatch()
    optimizer = make()
    watch.part("build", lambda: optimizer.build(model.trainable_variables))

    # As in Keras' trainer: the state goes in and out in one order, and is donated. In another
    # order the compiler cannot reuse the memory and copies every array.
    def apply(state: Any, received: Any) -> Any:
        trainable, rest, own = state
        trainable, own = optimizer.stateless_apply(own, received, trainable)
        return trainable, rest, own

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple(values(group) for group in groups)
    return start(apply, state, setting, watch, models.nbytes(optimizer.variables))


def values(variables: Sequence[Any]) -> list[Any]:
    """Returns copies, which a step may take for its own."""
    return [jax.numpy.array(variable.value, copy=True) for variable in variables]


def start(
    apply: Callable[[Any, Any], Any],
    state: tuple[Any, ...],
    setting: Setting,
    watch: measuring.Stopwatch,
    state_bytes: int,
) -> Prepared:
    """Traces, compiles and takes the first step, and returns those that follow.

    Args:
        apply: From a state, whose first entry is the weights, and gradients to such a state.
        state: What it starts from; it is given away.
        setting: The mode and the gradients.
        watch: Notes the parts of the start-up.
        state_bytes: Of the state without the weights.
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
    """The gradients added to sums in float32, and nothing else."""
    sums = [jax.numpy.zeros(g.shape, "float32") for g in setting.feed.sets[0]]

    def add(state: Any, received: Any) -> Any:
        return ([total + value for total, value in zip(state[0], received, strict=True)],)

    found = start(add, (sums,), setting, measuring.Stopwatch(), 0)
    return Prepared(found.step, found.start_up)
