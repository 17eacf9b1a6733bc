"""Cuts a graph at the nodes that every path passes through."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """The nodes between two cuts, or one node that is a cut.

    Args:
        nodes: The nodes, in order.
        is_cut: Whether every path passes through it.
        opens: Whether it is the first run.
    """

    nodes: tuple[int, ...]
    is_cut: bool
    opens: bool


def cut(nodes: Sequence[int], before: Mapping[int, Collection[int]]) -> list[Run]:
    """Returns the nodes of a graph as runs, in order.

    Args:
        nodes: The nodes, each after those it depends on.
        before: For each node the nodes it depends on, all of them in `nodes`.

    Example:
    >>> diamond = {0: [], 1: [0], 2: [0], 3: [1, 2]}
    >>> [run.nodes for run in cut([0, 1, 2, 3], diamond)]
    [(0,), (1, 2), (3,)]
    """
    place = {node: at for at, node in enumerate(nodes)}
    edges = [(place[other], place[node]) for node in nodes for other in before[node]]
    sources = [place[node] for node in nodes if not before[node]]
    used = {a for a, _ in edges}
    sinks = [at for at in range(len(nodes)) if at not in used]
    edges += [(-1, at) for at in sources if len(sources) > 1]
    edges += [(at, len(nodes)) for at in sinks if len(sinks) > 1]
    # The number of edges that pass over each node.
    change = [0] * (len(nodes) + 2)
    for a, b in edges:
        change[a + 1] += 1
        change[b] -= 1
    runs: list[Run] = []
    passing = 0
    inside: list[int] = []
    for at, node in enumerate(nodes):
        passing += change[at]
        if passing:
            inside.append(node)
            continue
        if inside:
            runs.append(Run(tuple(inside), False, not runs))
            inside = []
        runs.append(Run((node,), True, not runs))
    if inside:
        runs.append(Run(tuple(inside), False, not runs))
    return runs


def components(nodes: Sequence[int], before: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Returns the connected components of a graph, each in order.

    Example:
    >>> components([0, 1, 2], {0: [], 1: [], 2: [0]})
    [[0, 2], [1]]
    """
    group = {node: node for node in nodes}

    def top(node: int) -> int:
        while group[node] != node:
            node = group[node]
        return node

    for node in nodes:
        for other in before[node]:
            if other in group:
                group[top(node)] = top(other)
    found: dict[int, list[int]] = {}
    for node in nodes:
        found.setdefault(top(node), []).append(node)
    return list(found.values())
