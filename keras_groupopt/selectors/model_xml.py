"""A model as an XML document, to read and to try `xpath` queries on."""

from __future__ import annotations

from xml.etree import ElementTree

import keras

from keras_groupopt.selectors.document import to_tree
from keras_groupopt.selectors.layer_paths import describe_model


def to_xml(model: keras.Model) -> str:
    """Returns a model's layers and variables as the XML document that `kgo.xpath` searches.

    A layer is an element named after its class, with the attributes `name` and `path`, and contains
    the layers in it. A variable is an element `variable` with `name`, `path`, `rank`, `shape`
    (`"(3, 4)"`), `dtype` and `trainable` (`"true"` or `"false"`). A shared layer appears in each of
    its places; in the further places its variables have `same_as`, their canonical path. The names
    are those of layer paths, so automatic names are the same in every process. Layers without
    variables are left out.

    Args:
        model: A Keras model (or layer) that is built.

    Returns:
        The document as indented text.

    Raises:
        TypeError: If `model` is not a Keras model or layer.
        ValueError: If `model` is not built.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> print(kgo.to_xml(model))
    <model>
      <Dense name="head" path="head">
        <variable name="kernel" path="head/kernel" rank="2" shape="(4, 2)" dtype="float32"
          trainable="true" />
        <variable name="bias" path="head/bias" rank="1" shape="(2,)" dtype="float32"
          trainable="true" />
      </Dense>
    </model>
    """
    root, _ = to_tree(describe_model(model))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")
