"""Lists in messages: the first few items, and how many more there are."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

SHOWN = 5


def untaken(name: str, taken: Collection[str], mark: str = "_") -> str:
    """Returns `name`, or if it is taken, `name` with a mark and the next number from 2 on.

    Example:
    >>> untaken("head", ("head", "head_2"))
    'head_3'
    """
    numbered = (f"{name}{mark}{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def listing(items: Sequence[str]) -> str:
    """Returns the first items in one line, with `…` if there are more."""
    return ", ".join(items[:SHOWN]) + (" …" if len(items) > SHOWN else "")


def first_lines(lines: Sequence[str]) -> str:
    """Returns the first lines, indented, and how many more there are."""
    more = len(lines) - SHOWN
    return "\n  ".join(lines[:SHOWN]) + (f"\n  … and {more} more" if more > 0 else "")
