"""The variables of a catalog as an XML document, which `to_xml` prints and `xpath` searches.

The root element `model` has one element per layer, named after its class, and one element
`variable` per variable. A shared layer or variable appears in each of its places.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo

MODEL = "model"
VARIABLE = "variable"

_NO_NAME = re.compile(r"[^\w.-]")
# XML 1.0 cannot write other characters, not even escaped.
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_tree(
    catalog: VariableCatalog,
) -> tuple[ElementTree.Element, list[tuple[ElementTree.Element, int]]]:
    """Returns the document, and the elements of variables with the positions of the variables.

    Siblings are in the order of the catalog.

    Args:
        catalog: The variables of a model.
    """
    root = ElementTree.Element(MODEL)
    layers = {"": root}
    variables = []
    for position, info in enumerate(catalog):
        for place in info.places:
            parent = root
            levels = place.split("/")
            for level in range(1, len(levels)):
                path = "/".join(levels[:level])
                if path not in layers:
                    layer = catalog.layers_by_path[path]
                    attributes = {"name": _text(layer.name), "path": _text(path)}
                    tag = element_name(layer.class_names[0] if layer.class_names else "Layer")
                    layers[path] = ElementTree.SubElement(parent, tag, attributes)
                parent = layers[path]
            attributes = _attributes(info, place)
            variables.append((ElementTree.SubElement(parent, VARIABLE, attributes), position))
    return root, variables


def element_name(class_name: str) -> str:
    """Returns the element name of a class: its own name, without characters that XML forbids.

    Example:
    >>> element_name("Conv2D"), element_name("my layer")
    ('Conv2D', 'my_layer')
    """
    name = _NO_NAME.sub("_", class_name)
    return name if re.match(r"[^\W\d]", name) else f"_{name}"


def _attributes(info: VariableInfo, place: str) -> dict[str, str]:
    attributes = {
        "name": _text(place.rpartition("/")[2]),
        "path": _text(place),
        "rank": str(info.rank),
        "shape": str(info.shape),
        "dtype": info.dtype,
        "trainable": "true" if info.trainable else "false",
    }
    return attributes if place == info.path else {**attributes, "same_as": _text(info.path)}


def _text(text: str) -> str:
    return _NO_TEXT.sub("\ufffd", text)
