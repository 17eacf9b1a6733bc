"""Parts of lists of tensors that torch's functions on lists take at once.

A chain of foreach functions passes over memory once for each. If a block fits into the cache, only
the first function reads it from memory. Large variables are therefore cut into such blocks, and
small ones share one. What happens to an element does not depend on which other variables are in
the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Tensor = Any

# The values in a block. A processor's cache holds few blocks. A GPU wants few launches.
BLOCK_SIZES = {"cpu": 1 << 20, "cuda": 1 << 26}


def by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the places of tensors that a function on lists can take together."""
    groups: dict[tuple[Any, Any], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return list(groups.values())


class Block(NamedTuple):
    """Variables, or a part of one, that are moved at once.

    Attributes:
        places: The places of the variables in the list.
        part: The values of the part; `None` for whole variables.
    """

    places: list[int]
    part: slice | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what belongs to the block, of tensors parallel to the variables.

        What has no elements of its own, such as a mark, belongs to all parts.
        """
        found = [tensors[place] for place in self.places]
        if self.part is None:
            return found
        return [t if t is None or t.dim() == 0 else t.view(-1)[self.part] for t in found]


def blocks_of(weights: Sequence[Tensor], places: Sequence[int]) -> Iterator[Block]:
    """Yields the blocks of the weights at some places, all on one device."""
    size = BLOCK_SIZES[weights[places[0]].device.type]
    together: list[int] = []
    count = 0
    for place in places:
        values = weights[place].numel()
        if values > size:
            for first in range(0, values, size):
                yield Block([place], slice(first, first + size))
            continue
        if count + values > size:
            yield Block(together)
            together, count = [], 0
        together.append(place)
        count += values
    if together:
        yield Block(together)
