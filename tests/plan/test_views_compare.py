"""The comparison of two plans: it misses nothing and reads as what happened."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_dicts import group, plan, small_plan, variable

from keras_groupopt.plan.views.compare import PlanDifference, compare


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The positions of all plain values in nested dicts and lists."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*at, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*at, i))]
    return [at]


def changed_at(plan: dict[str, Any], at: tuple[Any, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(plan)
    holder: Any = changed
    for key in at[:-1]:
        holder = holder[key]
    old = holder[at[-1]]
    if isinstance(old, bool):
        holder[at[-1]] = not old
    elif isinstance(old, int | float):
        holder[at[-1]] = old + 1
    else:
        holder[at[-1]] = f"{old} changed"
    return changed


DECISIONS = [
    at for at in leaves(small_plan()) if at[-1] not in ("format", "provisional", "state_bytes")
]


@pytest.mark.parametrize("at", DECISIONS, ids=lambda at: ".".join(map(str, at)))
def test_any_single_change_is_found_in_both_directions(at):
    old = small_plan()
    new = changed_at(old, at)
    for before, after in ((old, new), (new, old)):
        difference = compare(before, after)
        assert difference
        assert str(difference) != "The plans are equal."
        assert difference.first(1)


def test_every_option_of_a_plan_is_among_the_changes_tried():
    tried = {at[-1] for at in DECISIONS}
    rule_arguments = {"beta_1"}
    options = set(small_plan()["options"])
    assert tried >= options | (set(group("a")) - {"variables", "rule_arguments"}) | rule_arguments


@given(st.data())
def test_no_order_makes_a_difference(data):
    old, new = small_plan(), small_plan()
    new["groups"] = data.draw(st.permutations(new["groups"]))
    for record in new["groups"]:
        record["variables"] = data.draw(st.permutations(record["variables"]))
    assert not compare(old, new)


def test_memory_provenance_and_a_trip_through_json_make_no_difference():
    old = small_plan()
    old["groups"][0]["variables"][0]["shape"] = (3, 3, 3, 16)
    new = json.loads(json.dumps(small_plan() | {"provisional": True}))
    for record in new["groups"]:
        for item in record["variables"]:
            item["state_bytes"] = 1
    difference = compare(old, new)
    assert not difference
    assert PlanDifference() == difference
    assert str(difference) == "The plans are equal."
    assert difference.first(3) == []


def at(plan: dict[str, Any], group: int, variable: int | None = None) -> dict[str, Any]:
    found = plan["groups"][group]
    return found if variable is None else found["variables"][variable]


LION = {"rule_arguments": {"beta_1": 0.9, "use_ema": None}, "clipnorm": None}
EDITS = {
    "rename": (
        lambda new: at(new, 1).update(name="top"),
        [
            'group "head" removed',
            'group "top" added',
            'head/kernel: moved from group "head" to "top"',
            'head/bias: moved from group "head" to "top"',
        ],
    ),
    "move": (
        lambda new: at(new, 2)["variables"].append(at(new, 1)["variables"].pop()),
        ['head/bias: moved from group "head" to "stem"'],
    ),
    "drop": (lambda new: at(new, 1)["variables"].pop(1), ['head/bias: removed from group "head"']),
    "insert": (
        lambda new: at(new, 2)["variables"].append(variable("stem/lora")),
        ['stem/lora: added to group "stem"'],
    ),
    "reshape": (
        lambda new: at(new, 1, 0).update(shape=[64, 12], dtype="bfloat16"),
        ["head/kernel: shape (64, 10) → (64, 12)", "head/kernel: dtype float32 → bfloat16"],
    ),
    "undecay": (
        lambda new: at(new, 0, 0).update(decayed=False, anchored=False),
        [f"resnet8/conv/kernel: {name} True → False" for name in ("decayed", "anchored")],
    ),
    "redeclare": (
        lambda new: at(new, 1).update(LION),
        [
            'group "head": rule lion(beta_1=0.95) → lion(beta_1=0.9, use_ema=None)',
            'group "head": clipnorm 0.5 → None',
        ],
    ),
    "reconfigure": (
        lambda new: new["options"].update(global_clipnorm=None),
        ["plan: global_clipnorm 1 → None"],
    ),
}


@pytest.mark.parametrize(("edit", "lines"), EDITS.values(), ids=EDITS)
def test_a_difference_reads_as_what_happened(edit, lines):
    new = small_plan()
    edit(new)
    difference = compare(small_plan(), new)
    assert sorted(lines) == sorted(str(difference).splitlines())
    assert len(lines) == len(difference.first(100))


def test_many_variables_changed_alike_share_one_line():
    paths = [f"block/w{i}" for i in range(200)]
    old = plan(group("a", *map(variable, paths)), group("b"))
    new = plan(group("a"), group("b", *map(variable, paths)))
    difference = compare(old, new)
    assert len(difference.variables_moved) == 200
    assert difference.first(5) == [
        '200 variables: moved from group "a" to "b" (block/w0, block/w1, block/w2, …)'
    ]


def test_paths_that_occur_twice_are_paired_by_what_is_equal():
    first, second = variable("dense/kernel", (2, 2)), variable("dense/kernel", (5, 5))
    old, new = plan(group("a", first, second)), plan(group("a", second, first))
    assert not compare(old, new)
    new["groups"][0]["variables"][1] = variable("dense/kernel", (2, 9))
    assert str(compare(old, new)) == "dense/kernel: shape (2, 2) → (2, 9)"
    del new["groups"][0]["variables"][1]
    assert str(compare(old, new)) == 'dense/kernel: removed from group "a"'
