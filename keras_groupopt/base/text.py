"""Names and lists in messages: the nearest name, the first few items, and how many more."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

SHOWN = 5


def untaken(name: str, taken: Collection[str], mark: str = "_") -> str:
    """Returns `name`, or if it is taken, `name` with a mark and the next number from 2 on.

    Example:
    >>> untaken("head", ("head", "head_2"))
    'head_3'
    """
    numbered = (f"{name}{mark}{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def nearest(name: Any, known: Iterable[str], form: str) -> str:
    """Returns the known name that is most like `name` within `form`, or nothing if none is.

    Example:
    >>> nearest("haed", ("body", "head"), " (nearest: {})")
    ' (nearest: head)'
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return form.format(near[0]) if near else ""


def listing(items: Sequence[str]) -> str:
    """Returns the first items in one line, with `…` if there are more."""
    return ", ".join(items[:SHOWN]) + (" …" if len(items) > SHOWN else "")


def first_lines(lines: Sequence[str]) -> str:
    """Returns the first lines, indented, and how many more there are."""
    more = len(lines) - SHOWN
    return "\n  ".join(lines[:SHOWN]) + (f"\n  … and {more} more" if more > 0 else "")
