"""Counts of the optimizer steps in which clipping shortened a group's gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_groupopt as kgo

LIMITS = {
    "clipnorm": {"clipnorm": 1.5},
    "global": {"global_clipnorm": 1.5},
    "value": {"clipvalue": 1.5},
}


def built_model(**options):
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, name="a"), keras.layers.Dense(1, name="b")]
    )
    options = {"count_clipped_steps": True, "rule": "sgd", "learning_rate": 0.5, **options}
    model.compile(optimizer=kgo.GroupedOptimizer(model=model, **options), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def step(model, of_a, of_b):
    values = (of_a, 0.0, of_b, 0.0)
    gradients = [
        keras.ops.full(v.shape, value)
        for v, value in zip(model.trainable_variables, values, strict=True)
    ]
    model.optimizer.apply(gradients, model.trainable_variables)


def counts(model):
    return {name: int(count) for name, count in model.optimizer.clipped_steps.items()}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_a_step_counts_for_the_group_whose_own_clipping_shortens_its_gradients(limit):
    model = built_model(groups=[kgo.Group("a", "a", **limit), kgo.Group("b", "b")])
    for of_a in (1.0, 2.0, 3.0):
        step(model, of_a, 4.0)
    assert counts(model) == {"a": 2, "b": 0}


def test_the_clip_over_all_groups_counts_for_each_that_has_a_gradient():
    model = built_model(groups=[kgo.Group("a", "a")], global_clipnorm=4.0)
    for of_b in (1.0, 4.0, 5.0):
        step(model, 3.0, of_b)
    assert counts(model) == {"a": 2, "default": 2}


def test_micro_batches_count_once_and_skipped_steps_do_not():
    model = built_model(global_clipnorm=1.0, gradient_accumulation_steps=2)
    for value in (2.0, 2.0, np.nan, 0.5, 0.5):
        step(model, value, 0.0)
    assert counts(model) == {"default": 1}


def test_counts_are_saved_and_start_at_0_with_a_file_without_them(tmp_path):
    model = built_model(global_clipnorm=1.0)
    step(model, 2.0, 0.0)
    model.save(tmp_path / "new.keras")
    built_model(count_clipped_steps=False).save(tmp_path / "old.keras")
    assert counts(keras.models.load_model(tmp_path / "new.keras")) == {"default": 1}
    resumed = built_model(global_clipnorm=1.0)
    kgo.load_weights(resumed, tmp_path / "new.keras")
    assert counts(resumed) == {"default": 1}
    fresh = built_model(global_clipnorm=1.0)
    kgo.load_weights(fresh, tmp_path / "old.keras")
    assert counts(fresh) == {"default": 0}


def test_the_logger_shows_counts_and_nothing_is_kept_without_the_option():
    x = np.full((4, 1), 8.0, "float32")
    for counted in (True, False):
        model = built_model(global_clipnorm=0.25, count_clipped_steps=counted)
        logs = model.fit(x, -x, batch_size=2, verbose=0, callbacks=[kgo.GroupLogger()]).history
        assert ("clipped_steps_default" in logs) == counted
        assert not counted or logs["clipped_steps_default"] == [2]
        assert bool(counts(model)) == counted
