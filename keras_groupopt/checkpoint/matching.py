"""Decides which saved array goes to which variable of an optimizer. No other module does.

renames      Saved keys get their present names.
same layout  If a key, shape, dtype or rule differs, a strict load is refused.
kept         A key takes the array of the same group, path and slot, if shape and dtype agree.
moved        If a load is not strict, a key may take the array of the same path and slot in another
             group.
fresh        All other keys of the optimizer are fresh, and all other saved keys are dropped.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras_groupopt.base import text
from keras_groupopt.checkpoint import keys
from keras_groupopt.checkpoint import renames as renaming
from keras_groupopt.checkpoint.declared import scalars_to_keep
from keras_groupopt.step import state_keys


@dataclasses.dataclass
class Report:
    """What a load did with saved state, by the keys under which state is saved.

    Keys read `group/layer path/slot`, or `@name` and `@name/group` for numbers of the optimizer.
    Every key of the optimizer is in `kept` or `fresh`. Every saved key is in `dropped`, or its
    value went to a kept key.

    Attributes:
        kept: Keys of this optimizer whose value came from the saved state. Default: none.
        fresh: Keys of this optimizer that keep the value they had. Default: none.
        dropped: Saved keys that were not used. Default: none.
        renamed: The saved name of each kept key that had another one. Default: none.
        status: `"nothing loaded"`, `"waits for the build"`, `"loaded"` or `"refused"`. Default:
            `"nothing loaded"`.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer(model=model, rule="sgd")
    >>> optimizer.build(model.trainable_variables)
    >>> report = optimizer.load_state_dict(optimizer.state_dict())
    >>> report.status, report.kept  # doctest: +NORMALIZE_WHITESPACE
    ('loaded', ['@iterations', '@learning_rate', '@skipped_steps', '@first_nonfinite_group',
     '@learning_rate_ratio/default', 'default/@rule/@iterations'])
    """

    kept: list[str] = dataclasses.field(default_factory=list)
    fresh: list[str] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    status: str = "nothing loaded"

    def fill(self, other: Report) -> None:
        """Takes over what another report says."""
        vars(self).update(vars(other))

    def __str__(self) -> str:
        if self.status == "waits for the build":
            return (
                "Optimizer state: waits for the build, at the first step or by "
                "`optimizer.build(model.trainable_variables)`. This report is filled then."
            )
        lines = [
            f"Optimizer state: {self.status}. {len(self.kept)} kept, {len(self.fresh)} fresh, "
            f"{len(self.dropped)} dropped."
        ]
        moved = [f"{key} (saved as {saved})" for key, saved in self.renamed.items()]
        for title, names in (
            ("kept under another name", moved),
            ("fresh", self.fresh),
            ("dropped", self.dropped),
        ):
            if names:
                lines.append(f"{title}:\n  {text.first_lines(names)}")
        return "\n".join(lines)


def match(
    manifest: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    strict: bool,
    renames: Mapping[str, str],
    resting: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, str], Report]:
    """Returns the saved key for each key of an optimizer that has one, and a report.

    Args:
        manifest: The saved manifest.
        expected: The manifest of the optimizer that reads.
        strict: Whether another layout is refused. If not, a variable whose path is now in another
            group keeps what agrees in name, shape and dtype, if the groups' rules are of one
            class.
        renames: What `check_renames` returned.
        resting: Records of variables frozen when the optimizer was saved, whose state is left
            out if the optimizer that reads was built without them.

    Raises:
        ValueError: With the first differences, if `strict` and the layout is another one; or if
            a rename names nothing.
    """
    renaming.check_used(renames, manifest, expected)
    saved = _Saved(manifest, renames)
    if strict:
        _refuse_differences(list(_differences(saved, expected, resting)))
    overruled = scalars_to_keep(saved.declared, _of_what_was_there(saved, expected))
    pairs = {}
    for key in expected["state"]:
        name = keys.parse(key)
        left = key in overruled or not _is_of_same_rule(name, saved, expected)
        found = None if left else _source(name, saved, expected, moves=not strict)
        if found is not None:
            pairs[key] = saved.names[found]
    for key in _of_rules_that_start_over(expected, pairs):
        pairs.pop(key, None)
    used = set(pairs.values())
    return pairs, Report(
        kept=list(pairs),
        fresh=[key for key in expected["state"] if key not in pairs],
        dropped=[key for key in manifest["state"] if key not in used],
        renamed={key: old for key, old in pairs.items() if key != old},
        status="loaded",
    )


class _Saved:
    """A saved manifest under present names."""

    def __init__(self, manifest: Mapping[str, Any], renames: Mapping[str, str]) -> None:
        self.names = renaming.rename(manifest, renames)
        self.specs = {key: manifest["state"][old] for key, old in self.names.items()}
        self.groups = {
            renaming.new_group(name, renames): group for name, group in manifest["groups"].items()
        }
        self.declared = {
            renaming.new_key(key, renames): value for key, value in manifest["declared"].items()
        }
        # The group that each variable was in, by its present path.
        self.home = {
            renaming.new_path(path, renames): name
            for name, group in self.groups.items()
            for path in group["variables"]
        }
        for key in map(keys.parse, self.specs):
            if key.owner not in (None, state_keys.RULE):
                self.home.setdefault(str(key.owner), str(key.group))

    def rule_class(self, group: str | None) -> Any:
        return self.groups[group]["class"] if group in self.groups else None


def _of_what_was_there(saved: _Saved, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the declared scalars of those groups, and of that gradient rule, that were saved.

    The scalars of a new group are not compared, since nothing was declared before.
    """
    return {
        key: value
        for key, value in expected["declared"].items()
        if (keys.parse(key).group is None or keys.parse(key).group in saved.groups)
        and key != state_keys.GRADIENT_RULE
        and _is_of_same_rule(keys.parse(key), saved, expected)
    }


def _is_of_same_rule(key: keys.Key, saved: _Saved, expected: Mapping[str, Any]) -> bool:
    """Whether a key is not of a gradient rule, or was saved for the present gradient rule.

    The `rho` of another gradient rule means something else.
    """
    return not key.is_of_gradient_rule or (
        saved.declared.get(state_keys.GRADIENT_RULE)
        == expected["declared"].get(state_keys.GRADIENT_RULE)
    )


def _of_rules_that_start_over(
    expected: Mapping[str, Any], pairs: Mapping[str, str]
) -> Iterator[str]:
    """Yields the keys that a rule keeps as a whole, if no slot of its group is kept.

    Bias correction needs slots and a counter that belong together.
    """
    names = {key: keys.parse(key) for key in expected["state"]}
    for group in expected["groups"]:
        own = {key: name for key, name in names.items() if name.group == group and name.owner}
        slots = [
            key for key, name in own.items() if name.owner != state_keys.RULE and not name.is_own
        ]
        if slots and not any(key in pairs for key in slots):
            yield from (key for key, name in own.items() if name.owner == state_keys.RULE)


def _source(key: keys.Key, saved: _Saved, expected: Mapping[str, Any], moves: bool) -> str | None:
    """Returns the saved key whose array `key` takes, under present names, or `None`."""
    for group in _groups_to_look_in(key, saved, expected, moves):
        found = str(key._replace(group=group))
        present_class = expected["groups"].get(key.group, {}).get("class")
        same_class = saved.rule_class(group) == present_class
        of_the_rule = key.owner is not None and (key.owner == state_keys.RULE or not key.is_own)
        if (
            found in saved.specs
            and _agree(saved.specs[found], expected["state"][str(key)])
            and (same_class or not of_the_rule)
        ):
            return found
    return None


def _groups_to_look_in(
    key: keys.Key, saved: _Saved, expected: Mapping[str, Any], moves: bool
) -> Iterator[str | None]:
    yield key.group
    if not moves or key.owner is None:
        return
    if key.owner != state_keys.RULE:
        if key.owner in saved.home:
            yield saved.home[key.owner]
    elif key.group not in saved.groups:
        # A new group goes on from the group that its variables came from.
        for path in expected["groups"][key.group]["variables"]:
            if path in saved.home:
                yield saved.home[path]


def _agree(saved: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether shapes and dtypes agree. Any two dtypes of integers do: backends count in others."""
    integers = all(str(spec[1]).startswith("int") for spec in (saved, wanted))
    return list(saved[0]) == list(wanted[0]) and (saved[1] == wanted[1] or integers)


def _refuse_differences(differences: list[str]) -> None:
    if differences:
        raise ValueError(
            "The saved optimizer state must have the layout of this optimizer. No state was "
            f"loaded. First differences:\n  {text.first_lines(differences)}"
            "\nMake the groups as they were, or keep what matches with `with "
            "kgo.resuming(strict=False, renames={...}) as report:` around the load."
        )


def _differences(
    saved: _Saved, expected: Mapping[str, Any], resting: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    old, new = _moving(saved.groups), _moving(expected["groups"])
    for group in {**old, **new}:
        if group not in new:
            yield f'group "{group}" is saved, but not in this optimizer'
        elif group not in old:
            yield f'group "{group}" is in this optimizer, but not saved'
        elif old[group]["class"] != new[group]["class"]:
            yield (
                f'group "{group}": saved with rule {old[group]["rule"]}, now {new[group]["rule"]}'
            )
    wanted = expected["state"]
    absent = {f"{record['group']}/{record['path']}" for record in resting}
    missing, extra = _required(wanted, saved.specs), _required(saved.specs, wanted)
    extra = [key for key in extra if key.rpartition("/")[0] not in absent]
    for key in missing:
        near = difflib.get_close_matches(key, extra, n=1)
        yield f"{key} is not saved" + (f" (nearest: {near[0]})" if near else "")
    for key in extra:
        yield f"{key} is saved, but not in this optimizer"
    for key, spec in wanted.items():
        if key in saved.specs and not _agree(saved.specs[key], spec):
            found = saved.specs[key]
            yield f"{key}: saved as {found[1]}{found[0]}, now {spec[1]}{list(spec[0])}"


def _moving(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the groups that have a rule. Frozen groups have none, and no state."""
    return {name: group for name, group in groups.items() if group["rule"] is not None}


def _required(state: Iterable[str], other: Container[str]) -> list[str]:
    """Returns the keys that another state lacks although it must have them."""
    return [key for key in state if key not in other and not keys.parse(key).is_optional]
