"""Several devices: what works, and what is refused before a wrong step is taken."""

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

MIRRORED = """
import tensorflow as tf
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    try:
        train()
    except NotImplementedError as error:
        print("refused:", error)
"""


@pytest.mark.backends("tensorflow", reason="only TensorFlow has MirroredStrategy")
def test_several_replicas_are_refused_before_a_step(new_process):
    assert "refused: GroupedOptimizer must run on one replica" in new_process(MODEL + MIRRORED)
