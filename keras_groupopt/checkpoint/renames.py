"""Names that changed since state was saved."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from keras_groupopt.checkpoint.keys import parse
from keras_groupopt.step import averages
from keras_groupopt.step.state_keys import RULE

GROUP = "group:"


def check_renames(renames: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the renames, after the checks that need no file.

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

    If a rename gives a key the name of another saved key, the renamed key is used.

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
    for prefix in reversed(_prefixes(path)):
        if prefix in renames:
            return renames[prefix] + path[len(prefix) :]
    return path


def _prefixes(path: str) -> list[str]:
    """Returns the layer paths above a path and itself: `a`, `a/b` and `a/b/c` for `a/b/c`."""
    return list(itertools.accumulate(path.split("/"), "{}/{}".format))


def check_used(
    renames: Mapping[str, str], manifest: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Refuses a rename from or to a name that does not exist, which is likely a typing error.

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
    paths = [path for group in groups.values() for path in group["variables"]]
    return dict.fromkeys(prefix for path in paths for prefix in _prefixes(path))
