"""Rates that fall from the head to the input."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base.checks import check_factor, check_share
from keras_groupopt.recipes.parts import parts_of, selector_for
from keras_groupopt.selectors import Selector

__all__ = ["layerwise_decay"]


def layerwise_decay(
    model: keras.Model,
    decay: float = 0.75,
    *,
    head: Any = None,
    blocks: Any = None,
    min_ratio: float = 0.0,
) -> list[tuple[Selector, float]]:
    """Returns ratios that fall with the distance from the head, for `ratios=`.

    With n parts below the head, numbered from 0 at the input: ratio_k = decay ** (n − k), and 1 for
    the head. That is the scale that timm gives its layers. Without a head the last part has 1.

    Depth comes from the layer graph, not from names. The stem (patches, tokens, position
    embeddings) has the smallest ratio, and so has what stands in no graph. A residual or
    inception block is one part, as is a layer with several kernels (a transformer block). An
    attention and the dense layers after it, each around a shortcut of its own, are one. What stands
    between blocks counts with the later one, what follows the last with that. A model without
    blocks has one part per kernel. The head is what has weights after the last pooling, flattening
    or picking of one position; without one, the last kernel. Nested models are opened. Frozen
    layers have their place too, so that nothing shifts when they are unfrozen; a frozen branch
    beside what is trained has none.

    Args:
        model: A built Keras model: functional, Sequential, or with `blocks` any.
        decay: Ratio of one part to the next, in (0, 1]. Default 0.75.
        head: The head, where it is not the one that would be found: a selector, path, layer or list
            of these; `()` for none.
        blocks: The blocks in order from the input, each a selector, path, layer or list of these,
            where the graph shows none or others. What is in none, and not the head, is the stem.
        min_ratio: Least ratio, in [0, 1]. Default 0.

    Returns:
        Pairs (selector, ratio), from the input to the head. Each weight of the model is in one.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of its range, the model shows no order of blocks, or `blocks`
            overlap.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> names = ("stem", "middle", "head")
    >>> layers = [keras.layers.Dense(2, name=name) for name in names]
    >>> model = keras.Sequential([keras.Input((2,)), *layers])
    >>> kgo.recipes.layerwise_decay(model, 0.5)
    [(layer("stem"), 0.25), (layer("middle"), 0.5), (layer("head"), 1.0)]

    Reference:
        Clark et al., ELECTRA, 2020, arXiv:2003.10555; Bao et al., BEiT, 2021, arXiv:2106.08254.
    """
    decay = check_factor("decay", decay, where="layerwise_decay")
    min_ratio = check_share("min_ratio", min_ratio, where="layerwise_decay")
    parts = parts_of(model, head, blocks)
    every = [*parts.below, *([parts.head] if parts.head else [])]
    return [
        (selector_for(parts.catalog, part), max(min_ratio, decay ** (len(every) - 1 - k)))
        for k, part in enumerate(every)
    ]
