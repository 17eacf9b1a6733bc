"""What differs between two plans, as data and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, NamedTuple

from keras_groupopt.plan.views.figures import Plan, Record, check_format, value_text

# Optimizer memory follows from the rest and is unknown before build.
_MEASURED = frozenset({"state_bytes"})
_DECAY_MASK = frozenset({"decayed", "anchored"})
# Up to here every variable of a change gets a line of its own, beyond it they share one.
_FEW = 3


class Change(NamedTuple):
    """One option of `subject` (a group, a variable path, or `plan`) with another value."""

    subject: str
    option: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.subject}: {self.option} {_text(self.old)} → {_text(self.new)}"


class Placement(NamedTuple):
    """A variable that is in one plan only, with the group it is in."""

    path: str
    group: str


class Move(NamedTuple):
    """A variable that is in another group than before."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """All differences between two plans; false when there is none.

    What a plan decides is compared: its options, groups, and where and how each variable trains.
    The order of groups and variables, the memory figures and whether paths are provisional are
    not, since no update depends on them.

    Args:
        groups_removed: Names of groups in the old plan only.
        groups_added: Names of groups in the new plan only.
        variables_removed: Variables in the old plan only.
        variables_added: Variables in the new plan only.
        variables_moved: Variables in another group.
        variables_changed: Variables of another shape, dtype or name.
        decay_changed: Variables newly in or out of decay or anchoring.
        groups_changed: Options of groups that are in both plans.
        options_changed: Options of the whole, such as the base rate.
    """

    groups_removed: tuple[str, ...] = ()
    groups_added: tuple[str, ...] = ()
    variables_removed: tuple[Placement, ...] = ()
    variables_added: tuple[Placement, ...] = ()
    variables_moved: tuple[Move, ...] = ()
    variables_changed: tuple[Change, ...] = ()
    decay_changed: tuple[Change, ...] = ()
    groups_changed: tuple[Change, ...] = ()
    options_changed: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return "\n".join(self.lines()) if self else "The plans are equal."

    def lines(self) -> Iterator[str]:
        """Yields one line a difference; many variables changed alike share a line."""
        yield from (f'group "{name}" removed' for name in self.groups_removed)
        yield from (f'group "{name}" added' for name in self.groups_added)
        yield from _shared_lines(
            (f'removed from group "{variable.group}"', variable.path)
            for variable in self.variables_removed
        )
        yield from _shared_lines(
            (f'added to group "{variable.group}"', variable.path)
            for variable in self.variables_added
        )
        yield from _shared_lines(
            (f'moved from group "{move.old}" to "{move.new}"', move.path)
            for move in self.variables_moved
        )
        yield from map(str, self.variables_changed)
        yield from _shared_lines(
            (f"{change.option} {_text(change.old)} → {_text(change.new)}", change.subject)
            for change in self.decay_changed
        )
        yield from map(str, self.groups_changed)
        yield from map(str, self.options_changed)

    def first(self, count: int) -> list[str]:
        """The first `count` lines, and one that says how many follow, for error messages.

        Args:
            count: How many differences to show, at least 1.

        Example:
        >>> PlanDifference(groups_added=("a", "b", "c")).first(2)
        ['group "a" added', 'group "b" added', 'and 1 more']
        """
        lines = list(self.lines())
        left_out = len(lines) - count
        return lines[:count] + ([f"and {left_out:,} more"] if left_out > 0 else [])


def compare(old: Plan, new: Plan) -> PlanDifference:
    """Finds every difference between two plans.

    Variables are paired by path. Where several share one, as provisional paths may, equal ones are
    paired first.

    Args:
        old: What `Plan.to_dict()` returned before.
        new: What it returns now.

    Returns:
        The differences, in the order a reader wants them: groups, variables, options.

    Raises:
        ValueError: If one of the two has another format number.

    Example:
    >>> def plan(rate):
    ...     return {"format": 1, "options": {"learning_rate": rate}, "groups": []}
    >>> bool(compare(plan("0.001"), plan("0.001")))
    False
    >>> print(compare(plan("0.001"), plan("0.01")))
    plan: learning_rate 0.001 → 0.01
    """
    check_format(old, "old")
    check_format(new, "new")
    old_groups = {group["name"]: group for group in old["groups"]}
    new_groups = {group["name"]: group for group in new["groups"]}
    removed: list[Placement] = []
    added: list[Placement] = []
    moved: list[Move] = []
    changed: list[Change] = []
    for path, before, after in _paired_variables(old, new):
        if after is None and before is not None:
            removed.append(Placement(path, before[0]))
        elif before is None and after is not None:
            added.append(Placement(path, after[0]))
        elif before is not None and after is not None:
            if before[0] != after[0]:
                moved.append(Move(path, before[0], after[0]))
            changed.extend(_changes(path, before[1], after[1]))
    return PlanDifference(
        groups_removed=tuple(name for name in old_groups if name not in new_groups),
        groups_added=tuple(name for name in new_groups if name not in old_groups),
        variables_removed=tuple(removed),
        variables_added=tuple(added),
        variables_moved=tuple(moved),
        variables_changed=tuple(item for item in changed if item.option not in _DECAY_MASK),
        decay_changed=tuple(item for item in changed if item.option in _DECAY_MASK),
        groups_changed=tuple(
            change
            for name in old_groups
            if name in new_groups
            for change in _changes(
                f'group "{name}"',
                _group_options(old_groups[name]),
                _group_options(new_groups[name]),
            )
        ),
        options_changed=tuple(_changes("plan", old["options"], new["options"])),
    )


# A variable as (group, what is said of it): all that two plans can differ in for one path.
_Entry = tuple[str, dict[str, Any]]


def _entries(plan: Plan) -> dict[str, list[_Entry]]:
    entries: dict[str, list[_Entry]] = {}
    for group in plan["groups"]:
        for variable in group["variables"]:
            said = {
                key: _plain(value)
                for key, value in variable.items()
                if key != "path" and key not in _MEASURED
            }
            entries.setdefault(variable["path"], []).append((group["name"], said))
    return entries


def _paired_variables(old: Plan, new: Plan) -> Iterator[tuple[str, _Entry | None, _Entry | None]]:
    """Pairs variables by path, leaving out those that are equal in both plans."""
    old_entries, new_entries = _entries(old), _entries(new)
    for path in dict.fromkeys([*old_entries, *new_entries]):
        before, after = [], list(new_entries.get(path, ()))
        for entry in old_entries.get(path, ()):
            if entry in after:
                after.remove(entry)
            else:
                before.append(entry)
        for old_entry, new_entry in zip_longest(before, after):
            yield path, old_entry, new_entry


def _group_options(group: Record) -> dict[str, Any]:
    """The options of a group, with its rule and the arguments of it as one text."""
    apart = {"name", "variables", "rule_arguments"}
    options = {key: value for key, value in group.items() if key not in apart}
    given = sorted(group["rule_arguments"].items())
    arguments = ", ".join(f"{key}={_text(_plain(value))}" for key, value in given)
    return options | {"rule": f"{group['rule']}({arguments})"}


def _changes(subject: str, old: Record, new: Record) -> Iterator[Change]:
    for option in dict.fromkeys([*old, *new]):
        before, after = _plain(old.get(option)), _plain(new.get(option))
        if before != after:
            yield Change(subject, option, before, after)


def _plain(value: Any) -> Any:
    """Lists for tuples, so that a plan equals itself read back from JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _text(value: Any) -> str:
    """A value in full: two that differ must not read alike."""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return repr(value) if value is None or isinstance(value, bool) else value_text(value)


def _shared_lines(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines for (what happened, path), with more than a few of one kind put together."""
    paths_of: dict[str, list[str]] = {}
    for what, path in items:
        paths_of.setdefault(what, []).append(path)
    for what, paths in paths_of.items():
        if len(paths) <= _FEW:
            yield from (f"{path}: {what}" for path in paths)
        else:
            yield f"{len(paths):,} variables: {what} ({', '.join(paths[:_FEW])}, …)"
