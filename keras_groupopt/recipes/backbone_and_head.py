"""A pretrained backbone that moves slowly below a new head."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.plan.group import Group
from keras_groupopt.recipes.parts import candidates, found_head, resolved, selector_for
from keras_groupopt.selectors import Selector
from keras_groupopt.selectors.layer_paths import describe_model

__all__ = ["backbone_and_head"]


def backbone_and_head(
    model: keras.Model, ratio: float = 0.1, *, head: Any = None, **backbone: Any
) -> list[Group]:
    """Returns two groups: the backbone, at a fraction of the base rate, and the head.

    The head is what owns weights after the last pooling, flattening or picking of one position, in
    the graph of layers; where there is none, the last kernel, or what follows a nested model that
    has most of the weights.

    Args:
        model: A built Keras model: functional or Sequential, or with `head` any.
        ratio: The backbone's rate over the base rate, a number >= 0 or a schedule. Default 0.1.
        head: The head, where it is not the one that would be found: a selector, path, layer or list
            of these.
        backbone: Further arguments of the backbone's `kgo.Group`, such as `anchor="initial"`.

    Returns:
        The groups "backbone" and "head". Every variable is in one.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the head can't be told, shares weights with the backbone, or leaves it none
            that is trainable.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> body = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="body")
    >>> model = keras.Sequential([body, keras.layers.Dense(2, name="new")])
    >>> [(group.name, group.selector) for group in kgo.recipes.backbone_and_head(model)]
    [('backbone', layer("body")), ('head', layer("new"))]
    """
    catalog = describe_model(model)
    top = found_head(model, catalog) if head is None else resolved(head, catalog, "head")
    if not top:
        shown = "no head in its graph of layers" if head is None else f"head={head!r}"
        raise ValueError(
            f"`head` must say what the head is. Received: model named {model.name!r}, with "
            f"{shown}. Candidates are {candidates(catalog)}."
        )
    rest = catalog.everything - top
    for name, positions in (("backbone", rest), ("head", top)):
        if not any(catalog[at].trainable for at in positions):
            raise ValueError(
                f"The {name} must have trainable variables. Received: model named {model.name!r}, "
                f"whose {name} has none, with head {selector_for(catalog, top).describe()}. "
                "Unfreeze it first; a ratio of 0 holds it still."
            )
    below = selector_for(catalog, rest)
    selector = selector_for(catalog, top)
    options = backbone if backbone.get("frozen") else {"learning_rate_ratio": ratio, **backbone}
    return [Group("backbone", _shorter(below, ~selector), **options), Group("head", selector)]


def _shorter(listed: Selector, complement: Selector) -> Selector:
    return min(listed, complement, key=lambda selector: len(selector.describe()))
