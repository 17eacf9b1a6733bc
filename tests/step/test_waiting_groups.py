"""Groups of layers that are frozen when the plan is made: they wait until the layers train."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from models import arrays, compiled, dense, fit

import keras_groupopt as kgo


@pytest.mark.parametrize("way", ["rebuilt", "loaded"])
def test_a_group_of_frozen_layers_waits_and_takes_effect_once_they_train(way, tmp_path):
    model = dense()
    model.get_layer("enc").trainable = False
    groups = [
        kgo.Group("enc", "enc", learning_rate_ratio=0.5, anchor="initial", weight_decay=0.5),
        kgo.Group("head", "head", rule="adam"),
    ]
    fit(compiled(model, *groups, rule="sgd", learning_rate=0.1))
    assert [group.name for group in model.optimizer.plan.waiting] == ["enc"]
    assert [planned.name for planned in model.optimizer.plan.groups] == ["head"]
    assert 'Waiting for frozen layers: enc (path("enc"))' in str(model.optimizer.plan)
    with pytest.raises(KeyError, match=r"\"enc\" waits: .*`optimizer\.rebuild\(model\)`"):
        model.optimizer.set_weight_decay("enc", 0.1)
    if way == "loaded":
        model.save(tmp_path / "run.keras")
        model = fit(keras.saving.load_model(tmp_path / "run.keras"))
        assert [group.name for group in model.optimizer.plan.waiting] == ["enc"]
    before = arrays(model.get_layer("enc").weights)
    model.get_layer("enc").trainable = True
    report = model.optimizer.rebuild(model)
    assert {"head/head/kernel/momentums", "head/head/kernel/velocities"} <= set(report.kept)
    assert {key.split("/")[0] for key in report.fresh if key[0] != "@"} == {"enc"}
    fit(model)
    assert [planned.name for planned in model.optimizer.plan.groups] == ["enc", "head"]
    assert not np.array_equal(arrays(model.get_layer("enc").weights)[0], before[0])


def test_a_group_of_weights_that_no_layer_would_train_is_still_an_error():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm")])
    model.get_layer("norm").trainable = False
    with pytest.raises(ValueError, match="matches only variables that are not trainable"):
        _ = kgo.GroupedOptimizer({"means": kgo.variable_name("moving_mean")}, model=model).plan
