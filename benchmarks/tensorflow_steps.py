"""Steps as in the training loop of Keras on TensorFlow: in a graph, compiled, or eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import measuring
import models
import numpy as np
import tensorflow as tf
from prepared import Prepared, Setting

MODES = ("graph", "compiled", "eager")
USUAL_MODES = ("graph", "compiled")

# TensorFlow would warn that one function is traced for each contender.
tf.get_logger().setLevel("ERROR")


class Feed:
    """Two sets of gradients, passed as arguments so that no compiler knows their values."""

    def __init__(self, sets: Sequence[Sequence[np.ndarray]], variables: Sequence[Any]) -> None:
        self.sets = [
            [
                tf.cast(tf.constant(gradient), variable.dtype)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            for gradients in sets
        ]


def fresh() -> None:
    """Does nothing: contenders do not share traced or compiled functions."""


def devices() -> list[str]:
    """Returns the names of the accelerators."""
    return [device.name for device in tf.config.list_logical_devices("GPU")]


def prepare(make: Callable[[], Any], setting: Setting) -> Prepared:
    """Prepares the step of a Keras optimizer."""
    variables, watch = setting.model.trainable_variables, measuring.Stopwatch()
    optimizer = make()
    watch.part("build", lambda: optimizer.build(variables))

    def apply(received: list[Any]) -> None:
        optimizer.apply(received, variables)

    def weights() -> list[np.ndarray]:
        return [
            np.array(keras.ops.convert_to_numpy(variable), dtype="float32")
            for variable in variables
        ]

    return start(apply, setting, watch, weights, models.nbytes(optimizer.variables))


def start(
    apply: Callable[[list[Any]], None],
    setting: Setting,
    watch: measuring.Stopwatch,
    weights: Callable[[], list[np.ndarray]] | None,
    state_bytes: int,
) -> Prepared:
    """Traces, compiles and takes the first step, and returns the prepared step."""
    sets, count, function = setting.feed.sets, 0, apply
    if setting.mode != "eager":
        compiled = True if setting.mode == "compiled" else None
        function = tf.function(apply, jit_compile=compiled)
        watch.part("trace", lambda: function.get_concrete_function(sets[0]))

    def work() -> None:
        function(sets[count % 2])
        tf.test.experimental.sync_devices()

    def step() -> tuple[float, float]:
        nonlocal count
        took = measuring.timed(work)
        count += 1
        return took

    # TensorFlow compiles a function when it is first called.
    watch.part("first_call", step)
    return Prepared(step, watch.seconds, weights, state_bytes)


def addition(setting: Setting) -> Prepared:
    """Prepares a step that only adds the gradients to sums in float32."""
    sums = [tf.Variable(tf.zeros(g.shape, "float32")) for g in setting.feed.sets[0]]

    def add(received: list[Any]) -> None:
        for total, value in zip(sums, received, strict=True):
            total.assign_add(tf.cast(value, "float32"))

    return start(add, setting, measuring.Stopwatch(), None, 0)
