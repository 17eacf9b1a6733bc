"""The stem, the blocks in order, and the head of a model, from its graph of layers.

The graph is cut at each call that every path passes through. The calls between two cuts are a block
if one of them owns a kernel: a residual branch, an inception module. A layer with several kernels,
such as a transformer block, is a block too.

- The calls before the first block are the stem: patches, tokens, position embeddings.
- Calls between two blocks belong to the later one (a downsampling convolution), calls after the
  last block to that one (the last norm). An inverted bottleneck without a shortcut, and several
  kernels in a row between two blocks, are blocks too.
- An attention and the dense layers after it, each with its own shortcut, are one block.
- Without blocks each kernel begins a part, and norms belong to the kernel before them.
- The head is the calls with weights after the last pooling, flattening or selection of one
  position. If there is none, it is the last kernel, or the calls after a nested model that has most
  of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from keras_groupopt.recipes.graph import Call, ancestors, calls_of, descendants
from keras_groupopt.recipes.pieces import Piece, Reader, longest

# A second head has at most this many kernels on one path.
_LONGEST_SIDE_HEAD = 3


def structure_of(
    model: keras.Model, is_head: Callable[[Any], bool] | None = None
) -> tuple[list[list[Any]], list[Any]]:
    """Finds stem, blocks and head of a model that has a graph.

    Args:
        model: The model.
        is_head: Whether a layer belongs to the head. Default: the head is found.

    Returns:
        The layers with weights of each part below the head, from input to output, and the layers
        with weights of the head, if there is one.

    Raises:
        NoOrderError: If there are many kernels between two cuts, or in one layer.
    """
    calls = calls_of(model)
    kept = _without_side_branches(calls)
    if is_head is not None:
        head = {i for i in kept if calls[i].weights and is_head(calls[i].operation)}
    else:
        head = _after_last_drop(calls, kept)
    pieces, head = _read(calls, kept, head, model if is_head is None and not head else None)
    parts = [_layers(calls, part) for part in Reader(calls).parts(pieces)]
    return [part for part in parts if part], _layers(calls, sorted(head))


def head_of(model: keras.Model) -> list[Any]:
    """Finds the layers with weights of a model's head, without those that are also below it.

    Args:
        model: A model that has a graph.

    Raises:
        NoOrderError: If no call pools positions, and the graph shows no order of blocks.
    """
    calls = calls_of(model)
    kept = _without_side_branches(calls)
    head = _after_last_drop(calls, kept) or _read(calls, kept, set(), model)[1]
    below = {id(owner) for owner in _layers(calls, kept - head)}
    return [owner for owner in _layers(calls, sorted(head)) if id(owner) not in below]


def _read(
    calls: Sequence[Call], kept: set[int], head: set[int], model: keras.Model | None
) -> tuple[list[Piece], set[int]]:
    """Returns the pieces below the head, and the head. It is found if `model` is given."""
    trunk = kept - head
    # Calls without weights that only lead to a head, such as a pooling, are not in the trunk.
    ends = descendants(calls, [i for i in trunk if calls[i].drops_rank])
    trunk -= ends - ancestors(calls, [i for i in trunk if calls[i].weights])
    reader = Reader(calls)
    pieces = reader.read(sorted(trunk))
    if model is not None:
        pieces, last = reader.without_head(pieces, _nested_with_most_weights(model))
        head = set(last)
    return pieces, head


def _layers(calls: Sequence[Call], indices: Iterable[int]) -> list[Any]:
    owners = {id(calls[i].operation): calls[i].operation for i in indices if calls[i].weights}
    return list(owners.values())


def _without_side_branches(calls: Sequence[Call]) -> set[int]:
    """Returns the calls without side branches.

    A side branch has no trainable call before or after it, such as a frozen teacher, or no weights
    before it, such as a mask, or it leads to no output.
    """
    weighted = [i for i, call in enumerate(calls) if call.weights and call.is_used]
    trained = [i for i in weighted if calls[i].operation.trainable_weights] or weighted
    tied = ancestors(calls, trained) | descendants(calls, trained)
    return {i for i in tied & descendants(calls, weighted) if calls[i].is_used}


def _after_last_drop(calls: Sequence[Call], kept: set[int]) -> set[int]:
    """Returns the calls after the last one that removes the positions of a tensor."""
    drops = {i for i in kept if calls[i].drops_rank}
    wide = {i for i in kept if max(map(len, calls[i].outputs), default=0) > 2}
    after = (descendants(calls, drops) - drops - ancestors(calls, wide)) & kept
    has_weights = any(calls[i].weights for i in after)
    leaves_some = any(calls[i].kernels for i in kept - after)
    return after | _side_heads(calls, kept, after) if has_weights and leaves_some else set()


def _side_heads(calls: Sequence[Call], kept: set[int], head: set[int]) -> set[int]:
    """Returns the calls of a small second head, such as an output per token."""
    beside = kept - ancestors(calls, head)
    return beside if longest(calls, beside) <= _LONGEST_SIDE_HEAD else set()


def _nested_with_most_weights(model: keras.Model) -> Any:
    children = [child for child in model.layers if isinstance(child, keras.Model)]
    size = {id(child): child.count_params() for child in children}
    total = model.count_params()
    return next((child for child in children if 2 * size[id(child)] >= total > 0), None)
