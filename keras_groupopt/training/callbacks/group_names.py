"""The `groups=` of callbacks: names of groups that move."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from keras_groupopt.base import text


def check_names(groups: Any, *, where: str) -> tuple[Any, ...] | None:
    """Returns `groups` as a tuple that is not empty; `None` stays `None`."""
    if isinstance(groups, str):
        raise TypeError(
            f"`groups` must be a list of names. Received: groups={groups!r} in {where}. Write "
            f"`groups=[{groups!r}]`."
        )
    names = None if groups is None else tuple(groups)
    if names == ():
        raise ValueError(f"`groups` must hold a name. Received: groups=[] in {where}.")
    return names


def check_moves(name: Any, known: Collection[str], moving: Sequence[str], *, where: str) -> None:
    """Refuses a name that no group has, or a frozen one.

    Args:
        name: The name given.
        known: The names of all groups.
        moving: The names of the groups that are not frozen.
        where: The name of the callback.

    Raises:
        ValueError: If `name` is not in `moving`.
    """
    if name in moving:
        return
    if name in known:
        raise ValueError(
            f'`groups` must hold names of groups that move. Received: "{name}" in {where}, which '
            "is frozen."
        )
    hint = text.nearest(name, known, ' The nearest is "{}".')
    listed = ", ".join(f'"{group}"' for group in moving) or "there are none"
    raise ValueError(
        f"`groups` must hold names of groups that move: {listed}. Received: {name!r} in "
        f"{where}.{hint}"
    )
