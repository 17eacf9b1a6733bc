"""A model as a document, and what queries choose in it."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import keras
import numpy as np
import pytest
from catalogs import catalog, chosen
from chosen_gradients import weights
from keras import layers

import keras_groupopt as kgo
from keras_groupopt.selectors import Selector
from keras_groupopt.selectors.layer_paths import describe_model, describe_variables


def towers() -> keras.Model:
    """Two towers that share a layer, and a head; one layer has no weights."""
    shared = layers.Dense(3, name="shared")
    left = keras.Sequential([keras.Input((3,)), shared, layers.Dense(3)], name="left")
    right = keras.Sequential([keras.Input((3,)), shared, layers.BatchNormalization()], name="right")
    x = keras.Input((3,))
    y = layers.Dropout(0.1)(layers.Add()([left(x), right(x)]))
    return keras.Model(x, layers.Dense(2, name="head")(y))


def test_every_variable_stands_at_each_of_its_places():
    model = towers()
    root = ElementTree.fromstring(kgo.to_xml(model))
    places = {place: info for info in describe_model(model) for place in info.places}
    elements = {element.get("path"): element for element in root.iter("variable")}
    assert len(list(root.iter("variable"))) == len(elements) == len(places) == 12
    for path, info in places.items():
        said = {"path": path, "name": info.name, "shape": str(info.shape), "rank": str(info.rank)}
        said |= {"dtype": info.dtype, "trainable": str(info.trainable).lower()}
        said |= {} if path == info.path else {"same_as": info.path}
        assert elements[path].attrib == said
    assert [(e.tag, e.get("path")) for e in root.iter() if e.tag != "variable"] == [
        *(("model", None), ("Sequential", "left"), ("Dense", "left/shared")),
        *(("Dense", "left/dense"), ("Sequential", "right"), ("Dense", "right/shared")),
        *(("BatchNormalization", "right/batch_normalization"), ("Dense", "head")),
    ]


def test_each_element_is_found_by_its_path():
    model = towers()
    among = describe_model(model)
    for element in list(ElementTree.fromstring(kgo.to_xml(model)).iter())[1:]:
        path = element.get("path")
        assert chosen(kgo.xpath(f"//*[@path='{path}']"), among) == chosen(path, among)


def test_odd_names_are_escaped():
    odd = "a<b>&\"'\n"
    cls = type("My Layer<1>", (layers.Dense,), {})
    model = keras.Sequential([keras.Input((2,)), cls(2, name=odd), cls(2, name="nul\0")])
    odd_layer, nul = ElementTree.fromstring(kgo.to_xml(model))
    assert (odd_layer.tag, odd_layer.get("name")) == ("My_Layer_1_", odd)
    assert nul.get("name") == "nul\ufffd"  # which XML cannot write
    among = describe_model(model)
    assert chosen(kgo.xpath("//My_Layer_1_[1]"), among) == [f"{odd}/kernel", f"{odd}/bias"]
    assert chosen(kgo.xpath("//*[@name = 'nul\ufffd']/*[1]"), among) == ["nul\0/kernel"]


def test_a_query_trains_what_it_finds():
    model = towers()
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group("towers", kgo.xpath("/model/Sequential//variable"), frozen=True)],
        model=model,
        rule="sgd",
        exclude_from_decay=kgo.xpath("//variable[@rank = 1]"),
        weight_decay=0.1,
    )
    before = weights(model)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(np.ones((4, 3)), np.zeros((4, 2)), epochs=1, verbose=0)
    after = weights(model)
    trained = [info.path for info in describe_model(model) if info.trainable]
    moved = [path for path in trained if not np.array_equal(before[path], after[path])]
    assert moved == ["head/kernel", "head/bias"]
    assert [v.path for v in optimizer.plan["default"].variables if v.decayed] == ["head/kernel"]


def test_a_query_without_the_extra_says_how_to_get_it(monkeypatch):
    config = kgo.xpath("//Dense").get_config()
    monkeypatch.setitem(sys.modules, "elementpath", None)
    with pytest.raises(ImportError, match=r"pip install keras-groupopt\[xpath\]"):
        kgo.xpath("//Dense")
    loaded = Selector.from_config(config)
    assert loaded.get_config() == config
    with pytest.raises(ImportError, match=r"query='//Dense'"):
        loaded.resolve(catalog("head/kernel"))


def test_a_query_needs_a_model():
    with pytest.raises(ValueError, match="Pass `model=`"):
        kgo.xpath("//Dense").resolve(describe_variables(towers().weights))
