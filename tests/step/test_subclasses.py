"""A subclass of an optimizer overrides what Keras' protocol and the public methods name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import compiled, dense, fit

import keras_groupopt as kgo


class Counting(kgo.GroupedOptimizer):
    """Overrides `apply` with Keras' signature, and `rebuild`."""

    calls: tuple[str, ...] = ()

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls += ("apply",)
        super().apply(grads, trainable_variables)

    def rebuild(self, model: Any, groups: Any = None) -> Any:
        self.calls += ("rebuild",)
        return super().rebuild(model, groups)


class Outer(kgo.LossScaleOptimizer):
    calls: tuple[str, ...] = ()

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls += ("apply",)
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("wrap", [lambda inner: inner, kgo.LossScaleOptimizer, Outer])
def test_an_apply_with_the_signature_of_keras_trains(wrap):
    model = dense()
    inner = Counting(model=model, learning_rate=0.1)
    optimizer = wrap(inner)
    model.compile(optimizer=optimizer, loss="mse")
    before = model.get_weights()
    fit(model)
    assert not np.array_equal(before[0], model.get_weights()[0])
    assert "apply" in inner.calls
    assert not isinstance(optimizer, Outer) or "apply" in optimizer.calls


def test_add_group_calls_the_rebuild_of_a_subclass():
    model = dense()
    model.get_layer("enc").trainable = False
    optimizer = Counting(model=model, learning_rate=0.1)
    model.compile(optimizer=optimizer, loss="mse")
    fit(model)
    model.get_layer("enc").trainable = True
    optimizer.add_group(kgo.Group("enc", "enc"))
    assert "rebuild" in optimizer.calls


@pytest.mark.parametrize("build", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_count_of_weights_is_refused_by_a_loss_scale_built_or_not(count, build):
    model = compiled(dense(), wrap=kgo.LossScaleOptimizer)
    optimizer = model.optimizer
    if build:
        optimizer.build(model.trainable_variables)
    before = [keras.ops.convert_to_numpy(variable) for variable in optimizer.variables]
    with pytest.raises(ValueError, match="values for"):
        optimizer.set_weights([np.float32(7.0)] * count)
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
