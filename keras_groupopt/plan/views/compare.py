"""The differences between two plans, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from keras_groupopt.plan.views.figures import Plan, Record, check_format, value_text

# Variables are paired by path. Optimizer memory follows from the rest and is unknown before build.
_NOT_COMPARED = ("path", "state_bytes")
_DECAY_OPTIONS = ("decayed", "anchored")
# If more variables than this changed in the same way, they share one line.
_FEW = 3
# The kinds of changes, in the order in which they are listed.
KINDS = (
    "groups_removed",
    "groups_added",
    "variables_removed",
    "variables_added",
    "variables_moved",
    "variables_changed",
    "decay_changed",
    "groups_changed",
    "options_changed",
)


class Change(NamedTuple):
    """One difference between two plans.

    Args:
        kind: One of `KINDS`.
        subject: What changed: a group, as `group "head"`, the path of a variable, or `plan`.
        option: The changed option. For a variable that was removed, added or moved it is
            `"group"`, for a group that was removed or added it is `None`.
        old: The old value; `None` if there was none.
        new: The new value; `None` if there is none.
    """

    kind: str
    subject: str
    option: str | None
    old: Any
    new: Any

    @property
    def text(self) -> str:
        """What happened to the subject, such as `added to group "head"`."""
        happened = self.kind.partition("_")[2]
        if self.option is None:
            return happened
        if self.option != "group":
            return f"{self.option} {_text(self.old)} → {_text(self.new)}"
        places = {
            "removed": f'from group "{self.old}"',
            "added": f'to group "{self.new}"',
            "moved": f'from group "{self.old}" to "{self.new}"',
        }
        return f"{happened} {places[happened]}"

    def __str__(self) -> str:
        return f"{self.subject}{' ' if self.option is None else ': '}{self.text}"


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """All differences between two plans. It is false if there are none.

    It compares what a plan decides: options, groups, and in which group and how each variable
    trains. It ignores the order of groups and variables, the memory figures and whether paths are
    provisional, since no update depends on them.

    The changes of one kind are attributes too: `groups_removed`, `groups_added`,
    `variables_removed`, `variables_added`, `variables_moved` (to another group),
    `variables_changed` (name, shape or dtype), `decay_changed` (decayed or anchored),
    `groups_changed` (options of groups in both plans) and `options_changed` (of the optimizer).

    Args:
        changes: The differences, sorted by kind. Default: none.
    """

    changes: tuple[Change, ...] = ()

    def __getattr__(self, name: str) -> tuple[Change, ...]:
        if name not in KINDS:
            raise AttributeError(f"`PlanDifference` has no attribute {name!r}.")
        return tuple(change for change in self.changes if change.kind == name)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(self.lines()) if self else "The plans are equal."

    def lines(self) -> Iterator[str]:
        """Yields one line per difference. Many variables that changed in one way share a line."""
        alike: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            alike.setdefault((change.kind, change.text), []).append(change)
        for (kind, text), changes in alike.items():
            if len(changes) <= _FEW or not kind.startswith(("variables", "decay")):
                yield from map(str, changes)
            else:
                paths = ", ".join(change.subject for change in changes[:_FEW])
                yield f"{len(changes):,} variables: {text} ({paths}, …)"

    def first(self, count: int) -> list[str]:
        """Returns the first `count` lines, and one that tells how many follow, for errors.

        Args:
            count: How many differences to show, at least 1.

        Example:
        >>> plan = {"format": 1, "options": {"a": 1, "b": 1, "c": 1}, "groups": []}
        >>> compare(plan, plan | {"options": {"a": 2, "b": 2, "c": 2}}).first(2)
        ['plan: a 1 → 2', 'plan: b 1 → 2', 'and 1 more']
        """
        lines = list(self.lines())
        left_out = len(lines) - count
        return lines[:count] + ([f"and {left_out:,} more"] if left_out > 0 else [])


def compare(old: Plan, new: Plan) -> PlanDifference:
    """Finds every difference between two plans.

    Variables are paired by path. If several have the same path, as provisional paths may, equal
    ones are paired first.

    Args:
        old: What `Plan.to_dict()` returned before.
        new: What it returns now.

    Returns:
        The differences, in the order of `KINDS`.

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
    changes = [*_of_groups(old, new), *_of_variables(old, new)]
    changes += _of_options("options_changed", "plan", old["options"], new["options"])
    return PlanDifference(tuple(sorted(changes, key=lambda change: KINDS.index(change.kind))))


def _of_groups(old: Plan, new: Plan) -> Iterator[Change]:
    before, after = ({group["name"]: group for group in plan["groups"]} for plan in (old, new))
    for name in dict.fromkeys([*before, *after]):
        subject = f'group "{name}"'
        if name not in after:
            yield Change("groups_removed", subject, None, name, None)
        elif name not in before:
            yield Change("groups_added", subject, None, None, name)
        else:
            options = _group_options(before[name]), _group_options(after[name])
            yield from _of_options("groups_changed", subject, *options)


def _of_variables(old: Plan, new: Plan) -> Iterator[Change]:
    for path, (old_group, old_options), (new_group, new_options) in _unequal(old, new):
        if new_group is None:
            yield Change("variables_removed", path, "group", old_group, None)
        elif old_group is None:
            yield Change("variables_added", path, "group", None, new_group)
        else:
            if old_group != new_group:
                yield Change("variables_moved", path, "group", old_group, new_group)
            for change in _of_options("variables_changed", path, old_options, new_options):
                is_decay = change.option in _DECAY_OPTIONS
                yield change._replace(kind="decay_changed") if is_decay else change


def _of_options(kind: str, subject: str, old: Record, new: Record) -> Iterator[Change]:
    for option in dict.fromkeys([*old, *new]):
        before, after = _plain(old.get(option)), _plain(new.get(option))
        if before != after:
            yield Change(kind, subject, option, before, after)


# The group and the options of a variable.
_Entry = tuple[str | None, dict[str, Any]]


def _unequal(old: Plan, new: Plan) -> Iterator[tuple[str, _Entry, _Entry]]:
    """Pairs variables by path, without those that are equal in both plans."""
    missing: _Entry = (None, {})
    old_entries, new_entries = _entries(old), _entries(new)
    for path in dict.fromkeys([*old_entries, *new_entries]):
        before, after = [], list(new_entries.get(path, ()))
        for entry in old_entries.get(path, ()):
            if entry in after:
                after.remove(entry)
            else:
                before.append(entry)
        for pair in zip_longest(before, after, fillvalue=missing):
            yield path, *pair


def _entries(plan: Plan) -> dict[str, list[_Entry]]:
    entries: dict[str, list[_Entry]] = {}
    for group in plan["groups"]:
        for variable in group["variables"]:
            options = {k: _plain(v) for k, v in variable.items() if k not in _NOT_COMPARED}
            entries.setdefault(variable["path"], []).append((group["name"], options))
    return entries


def _group_options(group: Record) -> dict[str, Any]:
    """Returns the options of a group, with its rule and the rule's arguments as one text."""
    options = {key: group[key] for key in group if key not in ("name", "variables")}
    given = sorted(options.pop("rule_arguments").items())
    arguments = ", ".join(f"{key}={_text(_plain(value))}" for key, value in given)
    return options | {"rule": f"{group['rule']}({arguments})"}


def _plain(value: Any) -> Any:
    """Replaces tuples by lists, so that a plan equals itself read back from JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _text(value: Any) -> str:
    """Writes a value in full, so that two different values do not read alike."""
    return repr(value) if value is None or isinstance(value, bool) else value_text(value)
