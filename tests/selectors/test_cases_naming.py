"""Reported faults of models that change after `compile`, and of the names of variables."""

from __future__ import annotations

import os
import warnings

import keras
import numpy as np
import pytest
from chosen_gradients import fit, groups_of, mean_output, no_gradient, towers, train, weights

import keras_groupopt as kgo

ON_TENSORFLOW = os.environ["KERAS_BACKEND"] == "tensorflow"
ON_JAX = os.environ["KERAS_BACKEND"] == "jax"
REFUSED = "Every variable must be one the optimizer was built with. Received: unknown {}"


def sgd(model: keras.Model | None, groups=(), **options) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(
        groups, model=model, **{"rule": "sgd", "learning_rate": 1.0} | options
    )


# `trainable` changed after compile -------------------------------------------------------------


@pytest.mark.parametrize("with_model", [True, False], ids=["model=", "no model"])
def test_a_layer_frozen_later_is_left_alone_once_the_model_is_compiled_again(with_model):
    """TensorFlow went on training it, torch stopped, JAX raised."""
    model = towers("a", "b")
    optimizer = sgd(model if with_model else None, {"a": "a"})
    train(model, optimizer)
    model.get_layer("a").trainable = False
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model)
    assert weights(model) == {"a/kernel": -1.0, "b/kernel": -2.0}
    model.get_layer("a").trainable = True
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model)
    assert weights(model) == {"a/kernel": -2.0, "b/kernel": -3.0}


def test_a_layer_frozen_later_without_compile_is_left_alone_or_said():
    model = towers("a", "b")
    train(model, sgd(model, {"a": "a"}))
    model.get_layer("a").trainable = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model)
    said = [str(warning.message) for warning in caught]
    said = [text for text in said if text.startswith("`trainable` changed after the model was")]
    # The graph that TensorFlow compiled knows nothing of it: there it is said, with the paths.
    assert len(said) == ON_TENSORFLOW
    for text in said:
        assert "does not know: a/kernel" in text
        assert "model.compile(optimizer=model.optimizer" in text
    assert weights(model)["a/kernel"] == (-2.0 if ON_TENSORFLOW else -1.0)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_frozen_as_a_whole_and_compiled_again_is_not_said_to_have_changed():
    model = towers("a", "b")
    train(model, sgd(model))
    model.trainable = False
    model.compile(optimizer=model.optimizer, loss=mean_output)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`trainable` changed")
        fit(model)
    assert weights(model) == {"a/kernel": -1.0, "b/kernel": -1.0}


@pytest.mark.parametrize("compiled_again", [True, False], ids=["compiled again", "not compiled"])
def test_a_layer_unfrozen_later_is_refused_by_its_path_on_every_backend(compiled_again):
    """TensorFlow trained without it and said nothing."""
    model = towers("a", "b")
    model.get_layer("a").trainable = False
    optimizer = sgd(model)
    train(model, optimizer)
    model.get_layer("a").trainable = True
    if compiled_again:
        model.compile(optimizer=optimizer, loss=mean_output)
    message = REFUSED.format(r"a/kernel\..*Call `optimizer\.rebuild\(model\)`")
    with pytest.raises(ValueError, match=message):
        fit(model)
    assert weights(model)["a/kernel"] == 0.0
    new = sgd(model)
    model.compile(optimizer=new, loss=mean_output)
    before = weights(model)
    fit(model)
    assert weights(model) == {path: value - 1.0 for path, value in before.items()}


def lora_model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="d")])


def fit_lora(model: keras.Model) -> None:
    model.fit(np.ones((1, 4)), np.ones((1, 4)), verbose=0)


def test_lora_enabled_after_fit_is_refused_by_the_paths_of_the_adapters():
    """TensorFlow trained the old graph, and the adapters stayed as they were."""
    model = lora_model()
    model.compile(optimizer=sgd(model), loss=no_gradient)
    fit_lora(model)
    model.get_layer("d").enable_lora(2)
    with pytest.raises(ValueError, match=REFUSED.format("d/lora_kernel_a, d/lora_kernel_b")):
        fit_lora(model)
    optimizer = sgd(model, {"adapters": "**/lora_*"}, weight_decay=0.5)
    model.compile(optimizer=optimizer, loss=no_gradient)
    before = weights(model)
    fit_lora(model)
    after = weights(model)
    np.testing.assert_allclose(after["d/lora_kernel_a"], before["d/lora_kernel_a"] / 2, rtol=1e-6)
    np.testing.assert_array_equal(after["d/kernel"], before["d/kernel"])


def test_a_layer_added_to_a_sequential_model_after_fit_is_refused_by_its_path():
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="first"),
        ]
    )
    train(model, sgd(model))
    model.add(keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="late"))
    message = REFUSED.format(r"late/kernel\..*or were added, after the optimizer was built")
    with pytest.raises(ValueError, match=message):
        fit(model)
    assert weights(model)["late/kernel"] == 1.0
    model.compile(optimizer=sgd(model, {"late": "late"}), loss=mean_output)
    fit(model, 0.0)


# One optimizer, two models ---------------------------------------------------------------------


@pytest.mark.parametrize("with_model", [True, False], ids=["model=", "no model"])
def test_an_optimizer_built_for_one_model_refuses_another_on_every_backend(with_model):
    """JAX accepted it without a word: the arrays of both models have the same shapes."""
    first, second = towers("a", "b"), towers("a", "b")
    optimizer = sgd(first if with_model else None)
    train(first, optimizer)
    second.compile(optimizer=optimizer, loss=mean_output)
    with pytest.raises(ValueError, match=REFUSED.format("a/kernel, b/kernel.*another model")):
        fit(second)
    assert weights(first) == {"a/kernel": -1.0, "b/kernel": -1.0}
    with pytest.raises(ValueError, match="variables that this optimizer was built with"):
        optimizer.bind(second)
    fit(first)
    assert weights(first) == {"a/kernel": -2.0, "b/kernel": -2.0}


@pytest.mark.xfail(
    ON_JAX, reason="on JAX a step gets arrays, not variables: the end of `fit` is what can tell"
)
def test_the_other_model_is_left_as_it_was():
    first, second = towers("a", "b"), towers("a", "b")
    optimizer = sgd(first)
    train(first, optimizer)
    second.compile(optimizer=optimizer, loss=mean_output)
    with pytest.raises(ValueError, match="another model"):
        fit(second)
    assert weights(second) == {"a/kernel": 0.0, "b/kernel": 0.0}
    assert int(optimizer.iterations) == 1


# Names of variables ----------------------------------------------------------------------------


@pytest.mark.backends("tensorflow", reason="only TensorFlow has variables beside Keras'")
@pytest.mark.parametrize("rule", ["sgd", "adam", "radam"])
def test_variables_of_a_tensorflow_module_may_have_slashes_and_equal_names(rule):
    """A slot named after such a variable was refused."""
    import tensorflow as tf

    variables = [
        tf.Variable([[1.0, 2.0]], name="my_net/kernel"),
        tf.Variable([[1.0, 2.0]], name="my_net/kernel"),
        tf.Variable([[1.0, 2.0]]),
    ]
    optimizer = sgd(
        None,
        [kgo.Group("plain", "Variable", weight_decay=0.1, anchor="initial")],
        rule=rule,
        weight_decay=0.5,
        global_clipnorm=1.0,
    )

    @tf.function
    def step():
        optimizer.apply([tf.zeros_like(v) for v in variables], variables)

    optimizer.build(variables)
    step()
    assert groups_of(optimizer) == {
        "plain": ["Variable"],
        "default": ["my_net@1/kernel", "my_net@2/kernel"],
    }
    np.testing.assert_allclose(variables[0], [[0.5, 1.0]])
    np.testing.assert_allclose(variables[1], [[0.5, 1.0]])
    np.testing.assert_array_equal(variables[2], [[1.0, 2.0]])


def test_what_is_no_variable_is_refused_by_its_type():
    tensor = keras.ops.ones((2,))
    with pytest.raises(TypeError, match=r"must be Keras variables.*Received: an object of type \w"):
        kgo.GroupedOptimizer().apply([tensor], [tensor])


def test_names_of_groups_may_hold_any_character_but_a_slash_or_at_the_start_an_at(tmp_path):
    names = ["with space", "ünïcode", "a.b-c_d", "an@chor", "%s {x} \\"]
    model = towers(*[f"t{index}" for index in range(len(names))])
    optimizer = sgd(
        model,
        [
            kgo.Group(name, f"t{index}", rule="adam", learning_rate_ratio=index + 1.0)
            for index, name in enumerate(names)
        ],
        learning_rate=0.1,
    )
    moved = train(model, optimizer)
    expected = {
        f"t{index}/kernel": pytest.approx(-0.1 * (index + 1), rel=1e-4) for index in range(5)
    }
    assert moved == expected
    model.save(tmp_path / "names.keras")
    loaded = keras.models.load_model(
        tmp_path / "names.keras", custom_objects={"mean_output": mean_output}
    )
    assert groups_of(loaded.optimizer) == groups_of(optimizer)
    for mine, theirs in zip(optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(theirs)
        )
