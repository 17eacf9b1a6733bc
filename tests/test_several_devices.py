"""Several devices on JAX; `test_mirrored_strategy.py` has those of TensorFlow."""

from __future__ import annotations

import pytest

MODEL = """
import keras, numpy as np
import keras_groupopt as kgo

def train(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, name="enc"), keras.layers.Dense(2, name="head")]
    )
    group = kgo.Group("enc", "enc", learning_rate_ratio=0.5, weight_decay=0.1, anchor="initial")
    options = {"rule": "adam", "global_clipnorm": 0.1, **options}
    optimizer = kgo.GroupedOptimizer([group], model=model, **options)
    model.compile(optimizer=optimizer, loss="mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    model.fit(x, x[:, :2] ** 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
    found = [*model.get_weights(), *(v for v in optimizer.variables if v.shape)]
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(each)) for each in found])
"""

PARALLEL = """
rows = ({}, {"gradient_accumulation_steps": 3, "ema": kgo.EMA(0.5)})
alone = [train(**options) for options in rows]
keras.distribution.set_distribution(keras.distribution.DataParallel())
for options, expected in zip(rows, alone):
    print("difference:", float(np.abs(train(**options) - expected).max()))
"""


@pytest.mark.backends("jax", reason="keras.distribution runs on JAX")
def test_two_devices_give_the_numbers_of_one(new_process):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    printed = new_process(MODEL + PARALLEL, env=flags)
    differences = [float(each) for each in printed.split("difference:")[1:]]
    assert len(differences) == 2
    assert max(differences) < 1e-6
