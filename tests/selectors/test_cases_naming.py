"""Reported faults of models that change after `compile`, and of the names of variables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from chosen_gradients import fit, groups_of, mean_output, towers, train, weights
from models import arrays, assert_equal, sgd

import keras_groupopt as kgo

pytestmark = pytest.mark.every_backend
ON_TENSORFLOW = os.environ["KERAS_BACKEND"] == "tensorflow"
ON_JAX = os.environ["KERAS_BACKEND"] == "jax"
REFUSED = "Every variable must be one the optimizer was built with. Received: unknown {}"


# `trainable` changed after compile -------------------------------------------------------------


def test_a_layer_frozen_later_is_left_alone_once_the_model_is_compiled_again():
    """TensorFlow went on training it, torch stopped, JAX raised."""
    model = towers("a", "b")
    optimizer = sgd(None, {"a": "a"})
    train(model, optimizer)
    model.get_layer("a").trainable = False
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model)
    assert weights(model) == {"a/kernel": -1.0, "b/kernel": -2.0}
    model.get_layer("a").trainable = True
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model)
    assert weights(model) == {"a/kernel": -2.0, "b/kernel": -3.0}


def test_a_layer_frozen_later_without_compile_is_left_alone_or_a_warning_names_it():
    model = towers("a", "b")
    train(model, sgd(model, {"a": "a"}))
    model.get_layer("a").trainable = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model)
    said = [str(warning.message) for warning in caught]
    said = [text for text in said if text.startswith("`trainable` changed after the model was")]
    # The graph that TensorFlow compiled does not know of the change: a warning names the paths.
    assert len(said) == ON_TENSORFLOW
    for text in said:
        assert "does not know: a/kernel" in text
        assert "model.compile(optimizer=model.optimizer" in text
    assert weights(model)["a/kernel"] == (-2.0 if ON_TENSORFLOW else -1.0)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_frozen_as_a_whole_and_compiled_again_raises_no_warning():
    model = towers("a", "b")
    train(model, sgd(model))
    model.trainable = False
    model.compile(optimizer=model.optimizer, loss=mean_output)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`trainable` changed")
        fit(model)
    assert weights(model) == {"a/kernel": -1.0, "b/kernel": -1.0}


ONE_WEIGHT = {"units": 1, "use_bias": False, "kernel_initializer": "zeros"}


class TwoHeads(keras.Model):
    """A model whose second head makes its weights when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(name="first", **ONE_WEIGHT)
        self.second = keras.layers.Dense(name="second", **ONE_WEIGHT)
        self.use_second = False

    def build(self, shape):
        self.first.build(shape)

    def call(self, x):
        return self.first(x) + self.second(x) if self.use_second else self.first(x)


def half_frozen() -> keras.Model:
    model = towers("a", "b")
    model.get_layer("a").trainable = False
    return model


def one_dense() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(name="d", **ONE_WEIGHT)])


def two_heads() -> keras.Model:
    model = TwoHeads()
    model.build((None, 1))
    return model


def use_second(model: Any) -> None:
    model.use_second = True
    model(np.ones((1, 1)))  # makes the weights


# The model, what happens after a fit, and what is refused then.
LATER: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "a layer unfrozen": (
        half_frozen,
        lambda model: setattr(model.get_layer("a"), "trainable", True),
        "a/kernel",
    ),
    "LoRA": (
        one_dense,
        lambda model: model.get_layer("d").enable_lora(2),
        "d/lora_kernel_a, d/lora_kernel_b",
    ),
    "a layer added": (
        one_dense,
        lambda model: model.add(keras.layers.Dense(name="late", **ONE_WEIGHT)),
        "late/kernel",
    ),
    "weights made late": (two_heads, use_second, "second/kernel"),
}


@pytest.mark.parametrize("case", LATER)
def test_what_trains_only_later_is_refused_though_the_model_was_not_compiled_again(case):
    """TensorFlow trained without it and said nothing, or a KeyError showed an internal number."""
    make, change, late = LATER[case]
    model = make()
    train(model, sgd(model))
    change(model)
    before = weights(model)
    message = REFUSED.format(rf"{late}\..*or were added.*Call `optimizer\.rebuild\(model\)`")
    with pytest.raises(ValueError, match=message):
        fit(model)
    for path in late.split(", "):
        np.testing.assert_array_equal(weights(model)[path], before[path])


# One optimizer, two models ---------------------------------------------------------------------


def test_an_optimizer_built_for_one_model_refuses_another_on_every_backend():
    """JAX accepted it without a word: the arrays of both models have the same shapes."""
    first, second = towers("a", "b"), towers("a", "b")
    optimizer = sgd()
    train(first, optimizer)
    second.compile(optimizer=optimizer, loss=mean_output)
    with pytest.raises(ValueError, match=REFUSED.format("a/kernel, b/kernel.*another model")):
        fit(second)
    # On JAX a step gets arrays, not variables: the end of `fit` is what can tell.
    if not ON_JAX:
        assert weights(second) == {"a/kernel": 0.0, "b/kernel": 0.0}
        assert int(optimizer.iterations) == 1
    assert weights(first) == {"a/kernel": -1.0, "b/kernel": -1.0}
    fit(first)
    assert weights(first) == {"a/kernel": -2.0, "b/kernel": -2.0}


# Names of variables ----------------------------------------------------------------------------


@pytest.mark.backends("tensorflow", reason="only TensorFlow has variables beside Keras'")
@pytest.mark.parametrize("rule", ["sgd", "adam", "radam"])
def test_variables_of_a_tensorflow_module_may_have_slashes_and_equal_names(rule):
    """A slot named after such a variable was refused."""
    import tensorflow as tf

    names = ("my_net/kernel", "my_net/kernel", None)
    variables = [tf.Variable([[1.0, 2.0]], name=name) for name in names]
    plain = kgo.Group("plain", "Variable", weight_decay=0.1, anchor="initial")
    optimizer = sgd(None, [plain], rule=rule, weight_decay=0.5, global_clipnorm=1.0)

    @tf.function
    def step():
        optimizer.apply([tf.zeros_like(v) for v in variables], variables)

    optimizer.build(variables)
    step()
    assert groups_of(optimizer) == {
        "plain": ["Variable"],
        "default": ["my_net@1/kernel", "my_net@2/kernel"],
    }
    for variable, expected in zip(variables, ([0.5, 1.0], [0.5, 1.0], [1.0, 2.0]), strict=True):
        np.testing.assert_allclose(variable, [expected])


def test_what_is_no_variable_is_refused_by_its_type():
    tensor = keras.ops.ones((2,))
    with pytest.raises(TypeError, match=r"must be Keras variables.*Received: an object of type \w"):
        kgo.GroupedOptimizer().apply([tensor], [tensor])


def test_names_of_groups_may_hold_any_character_but_a_slash_or_at_the_start_an_at(tmp_path):
    names = ["with space", "ünïcode", "a.b-c_d", "an@chor", "%s {x} \\"]
    model = towers("t1", "t2", "t3", "t4", "t5")
    groups = [
        kgo.Group(name, f"t{ratio}", rule="adam", learning_rate_ratio=float(ratio))
        for ratio, name in enumerate(names, 1)
    ]
    optimizer = sgd(model, groups, learning_rate=0.1)
    moved = [-0.1 * ratio for ratio in range(1, 6)]
    assert list(train(model, optimizer).values()) == pytest.approx(moved, rel=1e-4)
    model.save(tmp_path / "names.keras")
    loaded = keras.models.load_model(tmp_path / "names.keras")
    assert groups_of(loaded.optimizer) == groups_of(optimizer)
    assert_equal(arrays(optimizer.variables), arrays(loaded.optimizer.variables))
