"""Train on several devices with JAX, each with a share of every batch; compare with one.

    python examples/distributed/jax_data_parallel.py

Without accelerators it makes 4 virtual devices of the CPU.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
from _task import fit, make_model, numbers, options, report


def main() -> None:
    """Train on one device, then on all."""
    batches = options(__doc__).batches
    alone = fit(make_model(), batches)
    # Set before anything is made: variables are laid out when they are.
    with keras.distribution.DataParallel().scope():
        model = fit(make_model(), batches)
    devices = len(model.weights[0].value.addressable_shards)
    report(numbers(model), numbers(alone), f"{devices} devices")


if __name__ == "__main__":
    main()
