"""Lists in messages: the first few items, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 5


def listing(items: Sequence[str]) -> str:
    """Returns the first items in one line, with `…` if there are more."""
    return ", ".join(items[:SHOWN]) + (" …" if len(items) > SHOWN else "")


def first_lines(lines: Sequence[str]) -> str:
    """Returns the first lines, indented, and how many more there are."""
    more = len(lines) - SHOWN
    return "\n  ".join(lines[:SHOWN]) + (f"\n  … and {more} more" if more > 0 else "")
