"""The training operation of TensorFlow with its clipping by the global norm."""

from __future__ import annotations

from typing import Any

import measuring
import numpy as np
import tensorflow as tf
import tensorflow_steps
from prepared import (
    BETA_1,
    BETA_2,
    CLIPNORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Prepared,
    Setting,
)

EPSILON_NOTE = ""


def resource_apply_adam(setting: Setting) -> Prepared:
    """Prepares decay, clipping and `ResourceApplyAdam` on plain variables."""
    watch = measuring.Stopwatch()
    weights = [tf.Variable(variable.value) for variable in setting.model.trainable_variables]
    if any(weight.dtype != tf.float32 for weight in weights):
        # The operation computes in the dtype of the weights, and beta_2 is 1 in bfloat16.
        raise NotImplementedError("ResourceApplyAdam needs float32 weights")

    def make() -> list[Any]:
        slots = [[tf.Variable(tf.zeros_like(weight)) for weight in weights] for _ in range(2)]
        return [*slots, [tf.Variable(beta) for beta in (BETA_1, BETA_2)]]

    first, second, powers = watch.part("build", make)

    def apply(received: list[Any]) -> None:
        received, _ = tf.clip_by_global_norm(received, CLIPNORM)
        for weight, m, v, gradient in zip(weights, first, second, received, strict=True):

            def cast(value: Any, dtype: Any = weight.dtype) -> Any:
                return tf.cast(value, dtype)

            weight.assign_sub(weight * cast(LEARNING_RATE * WEIGHT_DECAY))
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=cast(powers[0]),
                beta2_power=cast(powers[1]),
                lr=cast(LEARNING_RATE),
                beta1=cast(BETA_1),
                beta2=cast(BETA_2),
                epsilon=cast(setting.epsilon),
                grad=gradient,
            )
        for power, beta in zip(powers, (BETA_1, BETA_2), strict=True):
            power.assign(power * beta)

    def read() -> list[np.ndarray]:
        return [np.array(weight.numpy(), dtype="float32") for weight in weights]

    kept = [*first, *second, *powers]
    state_bytes = sum(int(np.prod(kind.shape)) * kind.dtype.size for kind in kept)
    return tensorflow_steps.start(apply, setting, watch, read, state_bytes)


# Description and preparation of each peer, by name.
PEERS = {
    "resource_apply_adam": (
        "tf.raw_ops.ResourceApplyAdam with decay, one group",
        resource_apply_adam,
    )
}
