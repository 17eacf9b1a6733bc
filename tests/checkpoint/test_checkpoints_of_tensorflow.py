"""`tf.train.Checkpoint` holds all state of an optimizer, and restores it in any order."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from models import arrays, assert_equal, compiled, dense, fit, state

import keras_groupopt as kgo

pytestmark = pytest.mark.backends("tensorflow", reason="tf.train.Checkpoint")

WHOLE = {
    "rule": "nadam",
    "ema": kgo.EMA(0.5),
    "gradient_accumulation_steps": 3,
    "weight_decay": 0.5,
    "anchor": "initial",
}


def model_of(wrap):
    groups = [kgo.Group("head", "head", rule="adam", learning_rate_ratio=0.5)]
    return compiled(dense(), *groups, wrap=wrap, **WHOLE)


def checkpoint_of(model):
    import tensorflow as tf

    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


@pytest.mark.parametrize(
    ("wrap", "built"),
    [
        (lambda inner: inner, "before"),
        (lambda inner: inner, "by the first step"),
        (kgo.LossScaleOptimizer, "after"),
        (keras.optimizers.LossScaleOptimizer, "by the first step"),
    ],
)
def test_a_run_goes_on_bit_for_bit(wrap, built, tmp_path):
    # 8 micro-batches, so the third window is open.
    source = fit(model_of(wrap), batch_size=4)
    path = checkpoint_of(source).save(tmp_path / "run")
    model = model_of(wrap)
    if built == "before":
        model.optimizer.build(model.trainable_variables)
    status = checkpoint_of(model).restore(path)
    if built == "after":
        model.optimizer.build(model.trainable_variables)
    if built != "by the first step":
        status.assert_existing_objects_matched()
        assert_equal(state(model), state(source))
    assert_equal(fit(model, batch_size=4), fit(source, batch_size=4))
    status.assert_consumed()
    with kgo.averaged_weights(model), kgo.averaged_weights(source):
        assert_equal(model, source)


def test_state_of_groups_that_are_gone_is_not_held(tmp_path):
    model = fit(model_of(lambda inner: inner))
    model.optimizer.rebuild(model, [])
    path = checkpoint_of(model).save(tmp_path / "run")
    other = compiled(dense(), **WHOLE)
    status = checkpoint_of(other).restore(path)
    assert_equal(fit(other), fit(model))
    status.assert_consumed()
    assert np.any(arrays(other.optimizer.variables)[-1])
