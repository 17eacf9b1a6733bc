"""Cuts a graph at the nodes that every path passes through."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """The nodes between two cuts, or one node that is a cut, which every path passes through."""

    nodes: list[int]
    is_cut: bool


def cut(nodes: Sequence[int], before: Mapping[int, Collection[int]]) -> list[Run]:
    """Returns the nodes of a graph as runs, in order.

    Args:
        nodes: The nodes, each after those it depends on.
        before: For each node the nodes it depends on, all of them in `nodes`.

    Example:
    >>> diamond = {0: [], 1: [0], 2: [0], 3: [1, 2]}
    >>> [run.nodes for run in cut([0, 1, 2, 3], diamond)]
    [[0], [1, 2], [3]]
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
    for at, node in enumerate(nodes):
        passing += change[at]
        if passing and runs and not runs[-1].is_cut:
            runs[-1].nodes.append(node)
        else:
            runs.append(Run([node], is_cut=not passing))
    return runs


def components(nodes: Sequence[int], before: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Returns the connected components of a graph, each in order.

    Example:
    >>> components([0, 1, 2], {0: [], 1: [], 2: [0]})
    [[0, 2], [1]]
    """
    found: list[set[int]] = []
    for node in nodes:
        joined = {node, *before[node]}.intersection(nodes)
        touching = [part for part in found if part & joined]
        found = [part for part in found if part not in touching]
        found.append(joined.union(*touching))
    return sorted(sorted(part) for part in found)
