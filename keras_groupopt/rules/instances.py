"""Optimizer instances as rules: what they bring goes to the group, and each has one owner."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from keras_groupopt.base import compat
from keras_groupopt.plan.group import Group
from keras_groupopt.plan.rule_spec import LIFTED, WHOLE_ONLY, RuleSpec
from keras_groupopt.rules.making import check_rule, config_of, explicit_arguments
from keras_groupopt.rules.registry import rule_class, type_of

_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def lift_arguments(group: Group) -> Group:
    """Returns `group` with its rule's decay and clipping as its own, and a rule that is checked.

    An optimizer instance as rule also brings its rate.

    Raises:
        ValueError: If something is given on both, if an option that only the whole optimizer can
            have is set on an instance, or if an instance has state of its own.
    """
    rule = group.rule
    if rule is None:
        return group
    rule_class(rule, group.where)
    given = config_of(rule.target) if rule.is_instance else rule.arguments
    lifted = {name: given[name] for name in LIFTED if given.get(name) is not None}
    if rule.is_instance:
        _check_instance(rule, group)
    _check_decays(group, given, lifted)
    if rule.is_instance:
        lifted["learning_rate"] = compat.declared_learning_rate(rule.target)
        arguments = explicit_arguments(given, rule.target)
        rule = RuleSpec(type_of(rule.target), arguments, given, rule.target)
    else:
        kept = {name: value for name, value in given.items() if name not in LIFTED}
        rule = dataclasses.replace(rule, arguments=kept)
    group = dataclasses.replace(group, rule=rule, **lifted)
    check_rule(rule, group.where)
    return group


def _check_instance(rule: RuleSpec, group: Group) -> None:
    for name, place in WHOLE_ONLY.items():
        if getattr(rule.target, name, None):
            raise ValueError(
                f"`{name}` must not be set on an optimizer given as rule. Received: "
                f"{name}={getattr(rule.target, name)!r} on {rule.label} in {group.where}. Set it "
                f"on {place}."
            )
    if rule.target.built:
        raise ValueError(
            "An optimizer given as rule must be new. Received: an optimizer with state of its "
            f"own, {rule.label}, in {group.where}. Its state would be lost: give a new instance, "
            f'or `kgo.rule("{rule.label}", ...)`.'
        )
    if compat.has_decay_exclusion(rule.target):
        raise ValueError(
            "`exclude_from_weight_decay` must not be called on an optimizer given as rule. "
            f"Received: {rule.label} in {group.where}. Use `Group(exclude_from_decay=...)`."
        )
    is_scheduled = callable(compat.declared_learning_rate(rule.target))
    if group.learning_rate is not None or (
        group.learning_rate_ratio is not None and not is_scheduled
    ):
        raise ValueError(
            "The rate of a group must be given once. Received: a rate on the group and one on the "
            f'instance {rule.label} in {group.where}. Use `kgo.rule("{rule.label}", ...)`, '
            "which has no rate."
        )


def _check_decays(group: Group, given: Any, lifted: dict[str, Any]) -> None:
    """Refuses what the group and its rule both set, and a second decay under another name."""
    for name, value in lifted.items():
        if getattr(group, name) is not None:
            raise ValueError(
                f"`{name}` must be given once. Received: {name}={getattr(group, name)!r} on "
                f"{group.where} and {name}={value!r} on its rule. Leave one out."
            )
    for name, value in given.items():
        if name.endswith("weight_decay") and value not in (None, given.get("weight_decay")):
            raise ValueError(
                f"`{name}` must not be set on a rule: a group has one decay. Received: "
                f"{name}={value!r} in {group.where}. Use `Group(weight_decay=...)`, and a second "
                "group where another decay is wanted."
            )


def claim_instance(rule: RuleSpec, owner: Any, where: str) -> None:
    """Records that `owner` was built with an instance, and refuses a second live owner.

    Raises:
        ValueError: If another live optimizer was built with the instance.
    """
    if rule.instance is None:
        return
    current = _owners.get(rule.instance)
    if current is not None and current() not in (None, owner):
        raise ValueError(
            "An optimizer instance must be the rule of one group of one optimizer. Received: "
            f"{rule.label} in {where}, already used by another GroupedOptimizer. Give each its "
            f'own, or use `kgo.rule("{rule.label}", ...)`.'
        )
    _owners[rule.instance] = weakref.ref(owner)


def check_instances_differ(groups: Any) -> None:
    """Refuses one optimizer instance as the rule of two groups.

    Raises:
        ValueError: If two groups have the same instance.
    """
    seen: dict[int, str] = {}
    for group in groups:
        if group.rule is None or not group.rule.is_instance:
            continue
        first = seen.setdefault(id(group.rule.target), group.name)
        if first != group.name:
            raise ValueError(
                "An optimizer instance must be the rule of one group. Received: one "
                f'{group.rule.label} in the groups "{first}" and "{group.name}". Give each its '
                f'own, or use `kgo.rule("{group.rule.label}", ...)`.'
            )
