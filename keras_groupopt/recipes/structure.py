"""A model's depth, from its layer graph: stem, blocks in order, and head.

The graph is cut where every path passes through one call. What lies between two cuts and owns a
kernel is a block: a residual branch, an inception module. A layer that holds several kernels, such
as a transformer block, is one too.

- What comes before the first block is the stem: patches, tokens, position embeddings.
- What stands between two blocks counts with the later one (a downsampling convolution), after the
  last block with that (the last norm). Inverted bottlenecks without a shortcut, and several kernels
  in a row between two blocks, are blocks of their own.
- An attention and the dense layers after it, each around its own shortcut, are one block.
- Without any block each kernel begins a part, and norms count with the kernel before them.
- The head is what owns weights after the last pooling, flattening or picking of one position; where
  there is none, the last kernel, or what follows a nested model that has most of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_groupopt.recipes.cuts import Run, components, cut
from keras_groupopt.recipes.graph import Call, ancestors, calls_of, descendants

__all__ = ["NoOrderError", "Structure", "head_of", "structure_of"]

# No known block has more kernels on one path, or in one layer: what has hides an order.
_LONGEST_BLOCK = 10
_LARGEST_LAYER = 16
# Nor does a head beside the main one.
_LONGEST_SIDE_HEAD = 3


class NoOrderError(ValueError):
    """That a graph shows no order of blocks. The message says where."""


@dataclass(frozen=True)
class Structure:
    """What was found.

    Args:
        parts: The layers with weights of each part that is no head, from input to output.
        head: Those of the head; none if there is none.
    """

    parts: list[list[Any]]
    head: list[Any]


@dataclass
class _Piece:
    """Calls that belong together.

    Args:
        calls: Their indices, in order.
        is_block: Whether it is a part of its own.
        has_kernel: Whether one of them owns a kernel that all that passes goes through.
        is_branch: Whether other paths pass it by.
    """

    calls: list[int]
    is_block: bool = False
    has_kernel: bool = False
    is_branch: bool = False


def structure_of(model: keras.Model, is_head: Callable[[Any], bool] | None = None) -> Structure:
    """Finds stem, blocks and head of a model that has a graph.

    Args:
        model: The model.
        is_head: Whether a layer belongs to the head, where that was said.

    Raises:
        NoOrderError: If many kernels stand where other paths pass by, or in one layer.
    """
    calls = calls_of(model)
    kept = _without_side_branches(calls)
    if is_head is not None:
        head = {i for i in kept if calls[i].weights and is_head(calls[i].operation)}
    else:
        head = _after_last_drop(calls, kept)
    pieces, head = _read(calls, kept, head, model if is_head is None and not head else None)
    parts = [_layers(calls, part) for part in _Reader(calls).parts(pieces)]
    return Structure([part for part in parts if part], _layers(calls, sorted(head)))


def head_of(model: keras.Model) -> list[Any]:
    """Finds the layers with weights of a model's head, but for those that stand below it too.

    Args:
        model: A model that has a graph.

    Raises:
        NoOrderError: If nothing pools positions, and the graph shows no order of blocks.
    """
    calls = calls_of(model)
    kept = _without_side_branches(calls)
    head = _after_last_drop(calls, kept) or _read(calls, kept, set(), model)[1]
    below = {id(owner) for owner in _layers(calls, kept - head)}
    return [owner for owner in _layers(calls, sorted(head)) if id(owner) not in below]


def _read(
    calls: Sequence[Call], kept: set[int], head: set[int], model: keras.Model | None
) -> tuple[list[_Piece], set[int]]:
    """Returns the pieces below the head, and the head: of `model` where it has to be found."""
    trunk = kept - head
    # What only leads to a head, such as a pooling, would stand beside the trunk.
    ends = descendants(calls, [i for i in trunk if calls[i].drops_rank])
    trunk -= ends - ancestors(calls, [i for i in trunk if calls[i].weights])
    reader = _Reader(calls)
    pieces = reader.read(sorted(trunk))
    if model is not None:
        pieces, last = reader.without_head(pieces, _nested_with_most_weights(model))
        head = set(last)
    return pieces, head


def _layers(calls: Sequence[Call], indices: Iterable[int]) -> list[Any]:
    owners = {id(calls[i].operation): calls[i].operation for i in indices if calls[i].weights}
    return list(owners.values())


def _without_side_branches(calls: Sequence[Call]) -> set[int]:
    """Leaves out what nothing trainable is before or after, such as a frozen teacher.

    And what no weights come before, such as masks, and what leads to no output.
    """
    weighted = [i for i, call in enumerate(calls) if call.weights and call.is_used]
    trained = [i for i in weighted if calls[i].operation.trainable_weights] or weighted
    tied = ancestors(calls, trained) | descendants(calls, trained)
    return {i for i in tied & descendants(calls, weighted) if calls[i].is_used}


def _after_last_drop(calls: Sequence[Call], kept: set[int]) -> set[int]:
    """Returns the calls after which no tensor has positions, and before which one had."""
    drops = {i for i in kept if calls[i].drops_rank}
    wide = {i for i in kept if max(map(len, calls[i].outputs), default=0) > 2}
    after = (descendants(calls, drops) - drops - ancestors(calls, wide)) & kept
    has_weights = any(calls[i].weights for i in after)
    leaves_some = any(calls[i].kernels for i in kept - after)
    return after | _side_heads(calls, kept, after) if has_weights and leaves_some else set()


def _side_heads(calls: Sequence[Call], kept: set[int], head: set[int]) -> set[int]:
    """Returns the few calls that lead to another output than `head`, such as one per token."""
    beside = kept - ancestors(calls, head)
    return beside if _longest(calls, beside) <= _LONGEST_SIDE_HEAD else set()


def _longest(calls: Sequence[Call], inside: Iterable[int]) -> int:
    """Returns the number of kernels on the longest path."""
    length: dict[int, int] = {}
    for index in sorted(inside):
        before = [length[i] for i in calls[index].before if i in length]
        length[index] = max(before, default=0) + min(calls[index].kernels, 1)
    return max(length.values(), default=0)


def _nested_with_most_weights(model: keras.Model) -> Any:
    children = [child for child in model.layers if isinstance(child, keras.Model)]
    size = {id(child): child.count_params() for child in children}
    total = model.count_params()
    return next((child for child in children if 2 * size[id(child)] >= total > 0), None)


class _Reader:
    """Reads the order of calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def read(self, nodes: Sequence[int]) -> list[_Piece]:
        """Returns the pieces of the calls `nodes`, in order."""
        among = set(nodes)
        before = {node: self._calls[node].before & among for node in nodes}
        pieces: list[_Piece] = []
        runs = cut(nodes, before)
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            if run.is_cut:
                pieces.append(self._single(run.nodes[0]))
            elif run.opens:
                pieces += self._towers(run, before)
            else:
                pieces.append(self._between(run, following))
        return pieces

    def _single(self, index: int) -> _Piece:
        call = self._calls[index]
        if call.kernels > _LARGEST_LAYER:
            raise NoOrderError(
                f"{call.kernels} kernels in {call.operation.name!r}, a layer without a graph"
            )
        return _Piece([index], call.kernels > 1, call.kernels > 0)

    def _between(self, run: Run, following: Run | None) -> _Piece:
        """The calls between two cuts: a block, unless they only scale or shift what passes by."""
        inside = list(run.nodes)
        if not any(self._calls[i].kernels for i in inside):
            return _Piece(inside)
        if _longest(self._calls, inside) > _LONGEST_BLOCK:
            owners = [self._calls[i].operation.name for i in inside if self._calls[i].kernels]
            raise NoOrderError(
                f"{len(owners)} layers with kernels from {owners[0]!r} to {owners[-1]!r}, "
                "which other paths pass by"
            )
        is_gate = following is not None and self._is_gate(inside, following.nodes[0])
        return _Piece(inside, not is_gate, is_branch=True)

    def _is_gate(self, inside: list[int], join: int) -> bool:
        """Whether `inside` makes factors for what comes past it, as a squeeze and excitation."""
        call = self._calls[join]
        if type(call.operation).__name__ != "Multiply":
            return False
        weighted = descendants(self._calls, [i for i in inside if self._calls[i].weights])
        return bool(call.before - weighted - set(inside)) or bool(
            (call.before & set(inside)) - weighted
        )

    def _towers(self, run: Run, before: Any) -> list[_Piece]:
        """What several inputs come through: towers, which end level with each other.

        Tokens beside one kernel, and embeddings that are added up, are of the stem.
        """
        branches = components(run.nodes, before)
        lengths = [_longest(self._calls, branch) for branch in branches]
        if max(lengths) < 2:
            return [_Piece(list(run.nodes), False, max(lengths) > 0)]
        if len(branches) == 1:
            return [self._between(run, None)]
        towers = [self.parts(self.read(branch)) for branch in branches]
        return [
            _Piece([i for tower in towers if back <= len(tower) for i in tower[-back]], True)
            for back in range(max(map(len, towers)), 0, -1)
        ]

    def without_head(self, pieces: list[_Piece], big: Any) -> tuple[list[_Piece], list[int]]:
        """Splits off the head, where nothing drops the positions."""
        if pieces and pieces[-1].is_block and len(self._ends(pieces[-1])) > 1:
            # Several outputs, each with kernels of its own.
            return pieces[:-1], pieces[-1].calls
        blocks = [at for at, piece in enumerate(pieces) if piece.is_block]
        start = blocks[-1] + 1 if blocks else 0
        kernels = [at for at in range(start, len(pieces)) if pieces[at].has_kernel]
        nested = [
            at
            for at, piece in enumerate(pieces)
            if any(self._calls[i].child is big for i in piece.calls)
        ]
        if big is not None and nested and any(at > nested[-1] for at in kernels):
            first = max(start, nested[-1] + 1)
        elif kernels:
            first = kernels[-1]
        else:
            return pieces, []
        return pieces[:first], [i for piece in pieces[first:] for i in piece.calls]

    def _ends(self, piece: _Piece) -> list[int]:
        used = {i for index in piece.calls for i in self._calls[index].before}
        return [i for i in piece.calls if i not in used and len(piece.calls) > 1]

    def parts(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        """Joins pieces to parts: the stem, then one per block."""
        if not any(piece.is_block or self._is_depthwise(piece) for piece in pieces):
            return self._chain(pieces)
        split: list[_Piece] = []
        chain: list[_Piece] = []
        for piece in [*pieces, None]:
            if piece is not None and not piece.is_block:
                chain.append(piece)
                continue
            split += self._split(chain, first=not split, last=piece is None)
            split += [piece] if piece is not None else []
            chain = []
        parts: list[list[int]] = []
        waiting: list[int] = []
        seen_block = False
        for piece in self._merged(split):
            if not piece.is_block:
                waiting += piece.calls
                continue
            if not seen_block and any(self._calls[i].weights for i in waiting):
                parts.append(waiting)
                waiting = []
            parts.append([*waiting, *piece.calls])
            waiting, seen_block = [], True
        if parts:
            parts[-1] = [*parts[-1], *waiting]
        return parts

    def _chain(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        """One part per kernel; what has weights before the first is the stem."""
        parts: list[list[int]] = [[]]
        for piece in pieces:
            if piece.has_kernel and any(self._calls[i].weights for i in parts[-1]):
                parts.append([])
            parts[-1] += piece.calls
        return parts

    def _split(self, chain: list[_Piece], *, first: bool, last: bool) -> list[_Piece]:
        """Finds the blocks without shortcut in what stands between two blocks."""
        kernels = [at for at, piece in enumerate(chain) if piece.has_kernel]
        inverted = [at for at in kernels if self._is_depthwise(chain[at])]
        if not inverted:
            joined = _Piece([i for piece in chain for i in piece.calls])
            joined.is_block = len(kernels) > 1 and not first and not last
            return [joined] if chain else []
        starts = {
            at
            for before, at in itertools.pairwise(kernels)
            if all(self._is_linear(piece) for piece in chain[before:at])
        } or set(inverted)
        if first and kernels[1:2] == inverted[:1]:
            starts.add(inverted[0])
        found: list[_Piece] = []
        for at, piece in enumerate(chain):
            if at in starts or not found:
                found.append(_Piece([]))
            found[-1].calls += piece.calls
            found[-1].is_block |= at in inverted
        return found

    def _merged(self, pieces: list[_Piece]) -> list[_Piece]:
        """Joins each attention with the dense layers that follow around a shortcut of their own.

        Norms between the two, and after them, are theirs.
        """
        found: list[_Piece] = []
        attention: _Piece | None = None
        complete = False
        for piece in pieces:
            kernels = any(self._calls[i].kernels for i in piece.calls)
            if attention is not None and not kernels:
                attention.calls += piece.calls
            elif attention is not None and not complete and self._is_dense_branch(piece):
                attention.calls += piece.calls
                complete = True
            else:
                attention = piece if piece.is_branch and self._attends(piece) else None
                complete = False
                found.append(piece)
        return found

    def _attends(self, piece: _Piece) -> bool:
        return any(self._calls[i].has_attention for i in piece.calls)

    def _is_dense_branch(self, piece: _Piece) -> bool:
        dense = all(self._calls[i].is_dense for i in piece.calls)
        return piece.is_branch and piece.is_block and dense and not self._attends(piece)

    def _is_depthwise(self, piece: _Piece) -> bool:
        return piece.has_kernel and self._calls[piece.calls[0]].is_depthwise

    def _is_linear(self, piece: _Piece) -> bool:
        return len(piece.calls) == 1 and self._calls[piece.calls[0]].is_linear
