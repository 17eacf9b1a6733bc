"""Divide weights and the optimizer's state over devices with JAX, and compare with one device.

    python examples/distributed/jax_model_parallel.py

The weights of a layer are divided over the axis `model`, and batches over the axis `batch`. The
forward pass does not need the optimizer state, so the state is divided over both axes (as in ZeRO).
Without accelerators it uses the CPU as 4 virtual devices.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
from _task import fit, make_model, numbers, options, report

STATE = "(momentums|@anchor|@average|@accumulator)"


def distribution() -> keras.distribution.ModelParallel:
    """Returns a mesh of devices, and the layout of weights and state on it."""
    half = len(keras.distribution.list_devices()) // 2
    mesh = keras.distribution.DeviceMesh((half, 2), ["batch", "model"])
    layouts = keras.distribution.LayoutMap(mesh)
    # Entries for weights match the paths of Keras. All other weights are on each device.
    layouts[r"conv2d(_[1-9])?/kernel"] = (None, None, None, "model")
    # Entries for state match its keys: group/layer path/slot.
    layouts[rf"backbone/resnet8/conv2d_[1-9]/kernel/{STATE}"] = (None, None, "batch", "model")
    layouts[rf"head/head/kernel/{STATE}"] = ("batch",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def main() -> None:
    """Trains on one device and then on all of them."""
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
