"""Train on several devices with JAX, each with a share of every batch, and compare with one.

    python examples/distributed/jax_data_parallel.py

Without accelerators it uses the CPU as 4 virtual devices.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
from _task import fit, make_model, numbers, options, report


def main() -> None:
    """Trains on one device and then on all of them."""
    batches = options(__doc__).batches
    alone = fit(make_model(), batches)
    # Set it before you make the model: variables are placed on devices when they are made.
    with keras.distribution.DataParallel().scope():
        model = fit(make_model(), batches)
    devices = len(model.weights[0].value.addressable_shards)
    report(numbers(model), numbers(alone), f"{devices} devices")


if __name__ == "__main__":
    main()
