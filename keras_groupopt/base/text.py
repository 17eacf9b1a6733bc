"""Lists in messages: the first few, and that there are more; and the nearest of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

SHOWN = 5


def listing(items: Sequence[str]) -> str:
    """Returns the first items in one line, with `…` where there are more."""
    return ", ".join(items[:SHOWN]) + (" …" if len(items) > SHOWN else "")


def first_lines(lines: Sequence[str]) -> str:
    """Returns the first lines, indented, and how many more there are."""
    more = len(lines) - SHOWN
    return "\n  ".join(lines[:SHOWN]) + (f"\n  … and {more} more" if more > 0 else "")


def no_such_group(name: object, known: Iterable[str], moving: Iterable[str], where: str) -> str:
    """Returns the error for a name in `groups=` that is of no group, with the nearest that is."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f' The nearest is "{near[0]}".' if near else ""
    listed = ", ".join(f'"{group}"' for group in moving) or "there are none"
    return (
        f"`groups` must hold names of groups that move: {listed}. Received: {name!r} in "
        f"{where}.{hint}"
    )
