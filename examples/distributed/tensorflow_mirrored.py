"""Train on several devices with TensorFlow, each with a share of every batch, and compare with one.

    python examples/distributed/tensorflow_mirrored.py

Without GPUs it uses the CPU as 2 logical devices.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from _task import fit, make_model, numbers, options, report


def devices() -> list[str]:
    """Returns the GPUs or two devices of the CPU. Call it before TensorFlow has started."""
    if gpus := tf.config.list_physical_devices("GPU"):
        return [f"GPU:{number}" for number, _ in enumerate(gpus)]
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return ["CPU:0", "CPU:1"]


def main() -> None:
    """Trains on one device and then on all of them."""
    batches = options(__doc__).batches
    strategy = tf.distribute.MirroredStrategy(devices())
    alone = fit(make_model(), batches)
    # Make model and optimizer in the scope, so that each device gets a copy of each variable.
    with strategy.scope():
        model = make_model()
    fit(model, batches)
    several = f"{strategy.num_replicas_in_sync} devices"
    report(numbers(model), numbers(alone), several)


if __name__ == "__main__":
    main()
