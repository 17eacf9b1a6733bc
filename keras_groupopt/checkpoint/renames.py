"""Names that changed since state was saved."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from keras_groupopt.checkpoint.keys import parse
from keras_groupopt.step import averages
from keras_groupopt.step.state_keys import RULE

GROUP = "group:"


def check_renames(renames: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the renames, after checking what can be checked without a file.

    Raises:
        TypeError: If it is not a dict of strings.
        ValueError: If a group is renamed to a layer path, or the other way round.
    """
    if renames is None:
        return {}
    if not isinstance(renames, Mapping) or not all(
        isinstance(name, str) for pair in renames.items() for name in pair
    ):
        raise TypeError(
            "`renames` must be a dict from saved names to present names. Received: "
            f"renames={renames!r}."
        )
    for old, new in renames.items():
        if old.startswith(GROUP) != new.startswith(GROUP):
            raise ValueError(
                "`renames` must map layer paths to layer paths, and groups to groups. Received: "
                f'{{{old!r}: {new!r}}}. A group is written "{GROUP}<name>" on both sides.'
            )
    return {old.strip("/"): new.strip("/") for old, new in renames.items()}


def rename(manifest: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, str]:
    """Returns the saved key of each key under present names.

    If a renamed key gets the name of another saved key, the renamed one is used.

    Args:
        manifest: The saved manifest.
        renames: Prefixes of layer paths, and `group:` names, with their present names.
    """
    keys = {key: new_key(key, renames) for key in manifest["state"]}
    same = {new: key for key, new in keys.items() if new == key}
    return {**same, **{new: key for key, new in keys.items() if new != key}}


def new_key(key: str, renames: Mapping[str, str]) -> str:
    """Returns a saved key under present names."""
    name = parse(key)
    statistic = averages.statistics_path(key)
    if statistic is not None:
        return averages.statistics_key(new_path(statistic, renames))
    group = None if name.group is None else new_group(name.group, renames)
    owner = name.owner
    if owner is not None and owner != RULE:
        owner = new_path(owner, renames)
    return str(name._replace(group=group, owner=owner))


def new_group(group: str, renames: Mapping[str, str]) -> str:
    """Returns the present name of a group."""
    return renames.get(GROUP + group, GROUP + group).removeprefix(GROUP)


def new_path(path: str, renames: Mapping[str, str]) -> str:
    """Returns the present layer path, by the longest prefix that is renamed."""
    old = _prefix_in(path, renames)
    return path if old is None else renames[old] + path[len(old) :]


def _prefix_in(path: str, renames: Mapping[str, str]) -> str | None:
    levels = path.split("/")
    for depth in range(len(levels), 0, -1):
        prefix = "/".join(levels[:depth])
        if prefix in renames:
            return prefix
    return None


def check_used(
    renames: Mapping[str, str], manifest: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Refuses a rename of a name that does not exist, which is a typing error.

    Args:
        renames: The renames.
        manifest: The saved manifest.
        expected: The manifest of the optimizer that reads.

    Raises:
        ValueError: If a saved or a present name does not exist.
    """
    for old, new in renames.items():
        for name, groups, what in (
            (old, manifest["groups"], "saved"),
            (new, expected["groups"], "present"),
        ):
            known = list(_names(groups, name.startswith(GROUP)))
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                raise ValueError(
                    f"`renames` must name {what} groups or layers. Received: {name!r} in "
                    f"{{{old!r}: {new!r}}}, which is no {what} one. No state was loaded. "
                    f"{'The nearest are' if near else 'There are'}: "
                    f"{', '.join(near or known[:5])}."
                )


def _names(groups: Mapping[str, Any], is_group: bool) -> Iterable[str]:
    if is_group:
        return [GROUP + group for group in groups]
    found: dict[str, None] = {}
    for group in groups.values():
        for path in group["variables"]:
            levels = path.split("/")
            for depth in range(1, len(levels) + 1):
                found["/".join(levels[:depth])] = None
    return found
