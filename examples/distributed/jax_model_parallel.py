"""Divide large weights, and the optimizer's state further, over devices with JAX; compare with one.

    python examples/distributed/jax_model_parallel.py

A layer's weights are divided over the axis `model`, and batches over the axis `batch`. State of
the optimizer is needed in one place only, so it is divided over both (as in ZeRO). Without
accelerators it makes 4 virtual devices of the CPU.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
from _task import fit, make_model, numbers, options, report

STATE = "(momentums|@anchor|@average|@accumulator)"


def distribution() -> keras.distribution.ModelParallel:
    """Return a mesh of devices, and what lies where on it."""
    half = len(keras.distribution.list_devices()) // 2
    mesh = keras.distribution.DeviceMesh((half, 2), ["batch", "model"])
    layouts = keras.distribution.LayoutMap(mesh)
    # Weights by Keras' paths. What no entry matches is on every device.
    layouts[r"conv2d(_[1-9])?/kernel"] = (None, None, None, "model")
    # State by its keys: group/layer path/slot.
    layouts[rf"backbone/resnet8/conv2d_[1-9]/kernel/{STATE}"] = (None, None, "batch", "model")
    layouts[rf"head/head/kernel/{STATE}"] = ("batch",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def main() -> None:
    """Train on one device, then on all."""
    batches = options(__doc__).batches
    alone = fit(make_model(), batches)
    with distribution().scope():
        model = fit(make_model(), batches)
    state = [variable.value for variable in model.optimizer.variables]
    held = sum(value.addressable_shards[0].data.nbytes for value in state)
    print(f"optimizer state on each device: {held} of {sum(v.nbytes for v in state)} bytes")
    devices = len(state[0].addressable_shards)
    report(numbers(model), numbers(alone), f"{devices} devices")


if __name__ == "__main__":
    main()
