"""What variables are called when there is no model to look at: by Keras' own path."""

from __future__ import annotations

import keras
import path_cases
import pytest
from catalogs import chosen
from keras import layers

from keras_groupopt import selectors
from keras_groupopt.selectors.layer_paths import describe_variables

each_case = pytest.mark.parametrize("case", path_cases.CASES, ids=lambda case: case.name)


def built(layer: keras.Layer, shape: tuple[int | None, ...] = (None, 4)) -> keras.Layer:
    layer.build(shape)
    return layer


@each_case
def test_the_catalog_is_in_the_order_of_the_variables_whatever_was_made_before(case):
    model = case.make()
    catalog = describe_variables(model.trainable_variables)
    assert catalog.provisional
    assert len(set(catalog.paths)) == len(catalog)
    assert [info.identity for info in catalog] == [id(v) for v in model.trainable_variables]
    assert [info.shape for info in catalog] == [tuple(v.shape) for v in model.trainable_variables]
    # There a name by hand equals an automatic one in this process only, and so do Keras' paths.
    if "by_hand_that_is_also" not in case.name:
        first = describe_variables(case.make().weights)
        path_cases.shift_automatic_names()
        assert describe_variables(case.make().weights).infos == first.infos


def test_automatic_names_are_counted_below_each_parent():
    path_cases.shift_automatic_names()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    loose = [keras.Variable(0.0), keras.Variable(0.0)]
    assert describe_variables([*model.weights, *loose]).paths == (
        *("sequential/dense/kernel", "sequential/dense/bias"),
        *("sequential/dense_1/kernel", "sequential/dense_1/bias"),
        *("variable", "variable_1"),
    )


def test_names_by_hand_stay_as_they_are():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, name="stage_2"), layers.Dense(2, name="dense_0")],
        name="net",
    )
    kernels = [weight for weight in model.weights if weight.name == "kernel"]
    assert describe_variables(kernels).paths == ("net/stage_2/kernel", "net/dense_0/kernel")


def test_the_layers_of_a_custom_class_are_counted_too():
    class Whirl(layers.Dense):
        pass

    kernels = [built(Whirl(2)).kernel for _ in range(3)]
    assert describe_variables(kernels[1:]).paths == ("whirl/kernel", "whirl_1/kernel")


def test_layers_that_keras_gives_one_path_are_told_apart():
    towers = [built(layers.Dense(2, name="stem")) for _ in range(2)]
    catalog = describe_variables([weight for tower in towers for weight in tower.weights])
    assert catalog.paths == ("stem@1/kernel", "stem@1/bias", "stem@2/kernel", "stem@2/bias")
    with pytest.raises(ValueError, match="'stem@1/kernel', 'stem@1/bias', 'stem@2/kernel'"):
        selectors.path("stem").resolve(catalog)


def test_variables_that_keras_gives_one_path_are_told_apart():
    loose = [keras.Variable(0.0, name="scale") for _ in range(2)]
    assert describe_variables(loose).paths == ("scale@1", "scale@2")


def test_a_layer_is_found_by_its_weights_without_a_model():
    backbone = path_cases.backbone("backbone")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2, name="head")(backbone(inputs)))
    catalog = describe_variables(model.trainable_variables)
    assert chosen(selectors.layer(backbone), catalog) == [
        *("stem/kernel", "stem/bias", "dense/kernel", "dense/bias"),
        *("dense_1/kernel", "dense_1/bias"),
    ]
    with pytest.raises(ValueError, match="pass `model=`"):
        selectors.path("backbone").resolve(catalog)


def test_no_variables_make_an_empty_catalog():
    assert len(describe_variables([])) == 0
