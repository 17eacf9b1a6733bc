"""A recipe for a pretrained backbone that trains slowly below a new head."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.plan.group import Group
from keras_groupopt.recipes.parts import candidates, found_head, resolved, selector_for
from keras_groupopt.selectors.layer_paths import describe_model


def backbone_and_head(
    model: keras.Model, ratio: float = 0.1, *, head: Any = None, **backbone: Any
) -> list[Group]:
    """Returns two groups: the backbone, at a fraction of the base rate, and the head.

    The head is the layers with weights after the last pooling, flattening or selection of one
    position in the graph of layers. If there is none, it is the last kernel, or the layers after a
    nested model that has most of the weights.

    Args:
        model: A built Keras model: functional or Sequential, or any model if `head` is given.
        ratio: The backbone's rate over the base rate, a number >= 0 or a schedule. Default: 0.1.
        head: The head: a selector, path, layer or list of these. Default: the one that is found.
        backbone: Further arguments of the backbone's `kgo.Group`, such as `anchor="initial"`.

    Returns:
        The groups "backbone" and "head". Every variable is in one of them.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the head cannot be found, or one of the two has no trainable variables.

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
            f"`head` must select a head. Received: model named {model.name!r}, with {shown}. "
            f"Candidates are {candidates(catalog)}."
        )
    rest = catalog.everything - top
    for name, positions in (("backbone", rest), ("head", top)):
        if not any(catalog[at].trainable for at in positions):
            raise ValueError(
                f"The {name} must have trainable variables. Received: model named {model.name!r}, "
                f"whose {name} has none, with head {selector_for(catalog, top).describe()}. "
                "Unfreeze it first. A ratio of 0 keeps it still."
            )
    below = selector_for(catalog, rest)
    selector = selector_for(catalog, top)
    options = backbone if backbone.get("frozen") else {"learning_rate_ratio": ratio, **backbone}
    # Choose the one that is shorter to read.
    below = min(below, ~selector, key=lambda choice: len(choice.describe()))
    return [Group("backbone", below, **options), Group("head", selector)]
