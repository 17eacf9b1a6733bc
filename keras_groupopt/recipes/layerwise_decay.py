"""A recipe for rates that fall from the head to the input."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base.checks import check_factor, check_share
from keras_groupopt.recipes.parts import parts_of
from keras_groupopt.selectors import Selector


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
    the head. timm scales its layers in the same way. Without a head the last part has ratio 1.

    The order of the parts comes from the graph of layers, not from names:

    - The stem (patches, tokens, position embeddings) has the smallest ratio, as have weights that
      are not in the graph.
    - A residual or inception block is one part, as is a layer with several kernels (a transformer
      block). An attention and the dense layers after it, each with its own shortcut, are one part.
    - Layers between blocks belong to the later block, layers after the last block to that one.
    - A model without blocks has one part per kernel.
    - The head is the layers with weights after the last pooling, flattening or selection of one
      position. If there is none, it is the last kernel.
    - Nested models are opened. Frozen layers count, so that unfreezing them does not change the
      other ratios; a frozen branch next to the trained layers does not count.

    Args:
        model: A built Keras model: functional or Sequential, or any model if `blocks` is given.
        decay: The ratio of one part to the next, in (0, 1]. Default: 0.75.
        head: The head: a selector, path, layer or list of these, or `()` for none. Default: the one
            that is found.
        blocks: The blocks in order from the input, each a selector, path, layer or list of these.
            Weights that are neither in a block nor in the head are the stem. Default: those that
            are found.
        min_ratio: The smallest ratio, in [0, 1]. Default: 0.

    Returns:
        Pairs (selector, ratio), from the input to the head. Each weight of the model is in one.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, the model shows no order of blocks, or `blocks`
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
    selectors = parts_of(model, head, blocks).selectors()
    distances = reversed(range(len(selectors)))
    return [
        (selector, max(min_ratio, decay**distance))
        for selector, distance in zip(selectors, distances, strict=True)
    ]
