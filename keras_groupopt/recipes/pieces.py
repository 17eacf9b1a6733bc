"""The order of calls: pieces between the cuts of a graph, joined to a stem and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_groupopt.recipes.cuts import Run, components, cut
from keras_groupopt.recipes.graph import Call, descendants

# No known block has more kernels on one path, or in one layer. More kernels hide an order.
_LONGEST_BLOCK = 10
_LARGEST_LAYER = 16


class NoOrderError(ValueError):
    """A graph that shows no order of blocks. The message tells in which place."""


@dataclass
class Piece:
    """Calls that belong together.

    Args:
        calls: Their indices, in order.
        is_block: Whether it is a block. Default: False.
        has_kernel: Whether it is a cut that owns a kernel. Default: False.
        is_branch: Whether there are paths around it. Default: False.
    """

    calls: list[int]
    is_block: bool = False
    has_kernel: bool = False
    is_branch: bool = False


def longest(calls: Sequence[Call], inside: Iterable[int]) -> int:
    """Returns the number of kernels on the longest path."""
    length: dict[int, int] = {}
    for index in sorted(inside):
        before = [length[i] for i in calls[index].before if i in length]
        length[index] = max(before, default=0) + min(calls[index].kernels, 1)
    return max(length.values(), default=0)


class Reader:
    """Finds the order of calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def read(self, nodes: Sequence[int]) -> list[Piece]:
        """Returns the calls `nodes` as pieces, in order."""
        among = set(nodes)
        before = {node: self._calls[node].before & among for node in nodes}
        pieces: list[Piece] = []
        runs = cut(nodes, before)
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            if run.is_cut:
                pieces.append(self._single(run.nodes[0]))
            elif run is runs[0]:
                pieces += self._towers(run.nodes, before)
            else:
                pieces.append(self._between(run.nodes, following))
        return pieces

    def _single(self, index: int) -> Piece:
        call = self._calls[index]
        if call.kernels > _LARGEST_LAYER:
            raise NoOrderError(
                f"{call.kernels} kernels in {call.operation.name!r}, a layer without a graph"
            )
        return Piece([index], call.kernels > 1, call.kernels > 0)

    def _between(self, inside: list[int], following: Run | None) -> Piece:
        """Returns a block, or a piece that only makes factors for another path."""
        if not any(self._calls[i].kernels for i in inside):
            return Piece(inside)
        if longest(self._calls, inside) > _LONGEST_BLOCK:
            owners = [self._calls[i].operation.name for i in inside if self._calls[i].kernels]
            raise NoOrderError(
                f"{len(owners)} layers with kernels from {owners[0]!r} to {owners[-1]!r}, "
                "which other paths go around"
            )
        is_gate = following is not None and self._is_gate(inside, following.nodes[0])
        return Piece(inside, not is_gate, is_branch=True)

    def _is_gate(self, inside: list[int], join: int) -> bool:
        """Whether `inside` makes factors for a path around it, as squeeze and excitation does."""
        call = self._calls[join]
        if type(call.operation).__name__ != "Multiply":
            return False
        weighted = descendants(self._calls, [i for i in inside if self._calls[i].weights])
        return bool(call.before - weighted - set(inside)) or bool(
            (call.before & set(inside)) - weighted
        )

    def _towers(self, nodes: list[int], before: Any) -> list[Piece]:
        """Returns the calls from several inputs as towers, which are aligned at their ends.

        Tokens next to one kernel, and embeddings that are added, belong to the stem.
        """
        branches = components(nodes, before)
        lengths = [longest(self._calls, branch) for branch in branches]
        if max(lengths) < 2:
            return [Piece(nodes, False, max(lengths) > 0)]
        if len(branches) == 1:
            return [self._between(nodes, None)]
        towers = [self.parts(self.read(branch)) for branch in branches]
        return [
            Piece([i for tower in towers if back <= len(tower) for i in tower[-back]], True)
            for back in range(max(map(len, towers)), 0, -1)
        ]

    def without_head(self, pieces: list[Piece], big: Any) -> tuple[list[Piece], list[int]]:
        """Splits off the head of a model in which no call removes the positions."""
        last = pieces[-1].calls if pieces and pieces[-1].is_block else []
        used = {before for index in last for before in self._calls[index].before}
        if len(set(last) - used) > 1:
            # There are several outputs, each with its own kernels.
            return pieces[:-1], last
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

    def parts(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Joins pieces to parts: the stem, then one part per block."""
        if not any(piece.is_block or self._is_depthwise(piece) for piece in pieces):
            return self._chain(pieces)
        split: list[Piece] = []
        for is_block, group in itertools.groupby(pieces, lambda piece: piece.is_block):
            run = list(group)
            is_last = run[-1] is pieces[-1]
            split += run if is_block else self._split(run, first=not split, last=is_last)
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

    def _chain(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Returns one part per kernel. Weights before the first kernel are the stem."""
        parts: list[list[int]] = [[]]
        for piece in pieces:
            if piece.has_kernel and any(self._calls[i].weights for i in parts[-1]):
                parts.append([])
            parts[-1] += piece.calls
        return parts

    def _split(self, chain: list[Piece], *, first: bool, last: bool) -> list[Piece]:
        """Finds blocks without a shortcut in the pieces between two blocks."""
        kernels = [at for at, piece in enumerate(chain) if piece.has_kernel]
        inverted = [at for at in kernels if self._is_depthwise(chain[at])]
        if not inverted:
            joined = Piece([i for piece in chain for i in piece.calls])
            joined.is_block = len(kernels) > 1 and not first and not last
            return [joined] if chain else []
        starts = {
            at
            for before, at in itertools.pairwise(kernels)
            if all(self._is_linear(piece) for piece in chain[before:at])
        } or set(inverted)
        if first and kernels[1:2] == inverted[:1]:
            starts.add(inverted[0])
        found: list[Piece] = []
        for at, piece in enumerate(chain):
            if at in starts or not found:
                found.append(Piece([]))
            found[-1].calls += piece.calls
            found[-1].is_block |= at in inverted
        return found

    def _merged(self, pieces: list[Piece]) -> list[Piece]:
        """Joins each attention with the dense layers that follow it, with their own shortcut.

        Norms between and after them belong to the same block.
        """
        found: list[Piece] = []
        attention: Piece | None = None
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

    def _attends(self, piece: Piece) -> bool:
        return any(self._calls[i].has_attention for i in piece.calls)

    def _is_dense_branch(self, piece: Piece) -> bool:
        dense = all(self._calls[i].is_dense for i in piece.calls)
        return piece.is_branch and piece.is_block and dense and not self._attends(piece)

    def _is_depthwise(self, piece: Piece) -> bool:
        return piece.has_kernel and self._calls[piece.calls[0]].is_depthwise

    def _is_linear(self, piece: Piece) -> bool:
        return len(piece.calls) == 1 and self._calls[piece.calls[0]].is_linear
