"""The options of a group after the optimizer has filled in those that are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_groupopt.base.checks import check_number
from keras_groupopt.plan.group import Anchor, Group
from keras_groupopt.plan.plan import Defaults
from keras_groupopt.plan.plan_dict import describe_scalar
from keras_groupopt.schedules.from_base import FromBase


def effective_group(group: Group, defaults: Defaults) -> Group:
    """Returns `group` with `defaults` for the options it leaves out, and its rate as a ratio.

    Raises:
        ValueError: If the group's rate is a number and the base rate is not a number > 0, or an
            anchor is given without a decay.
    """
    if group.frozen:
        return group
    ratio, rate = group.learning_rate_ratio, group.learning_rate
    if isinstance(rate, float):
        ratio, rate = _as_ratio(rate, group, defaults.learning_rate), None
    has_clipping = group.clipnorm or group.global_clipnorm or group.clipvalue
    decay = defaults.weight_decay if group.weight_decay is None else group.weight_decay
    has_decay = decay is not None and decay != 0
    if not has_decay:
        _check_no_anchor(group.anchor, f"anchor in {group.where} with weight_decay={decay!r}")
    exclusion = group.exclude_from_decay
    return dataclasses.replace(
        group,
        rule=defaults.rule if group.rule is None else group.rule,
        learning_rate=rate,
        learning_rate_ratio=1.0 if ratio is None else ratio,
        weight_decay=decay if has_decay else None,
        anchor=(group.anchor or defaults.anchor or Anchor("zero")) if has_decay else None,
        exclude_from_decay=defaults.exclude_from_decay if exclusion is None else exclusion,
        clipnorm=group.clipnorm if has_clipping else defaults.clipnorm,
        clipvalue=group.clipvalue if has_clipping else defaults.clipvalue,
    )


def check_declared(groups: Sequence[Group], defaults: Defaults) -> None:
    """Checks what does not depend on the model, before there is one.

    Raises:
        ValueError: If a group's rate is a number and the base rate is not a number > 0, or an
            anchor is given without a decay.
    """
    effective = [effective_group(group, defaults) for group in groups]
    for group in effective:
        rate, base = group.learning_rate, defaults.learning_rate
        if isinstance(rate, FromBase) and isinstance(base, float):
            check_number(f"{rate!r} of {base:g}", float(rate.function(base)), where=group.where)
    anchor = defaults.anchor
    decays = defaults.weight_decay or any(group.weight_decay is not None for group in effective)
    if anchor is not None and not decays:
        _check_no_anchor(anchor, f'anchor="{anchor.kind}" without decay')


def _check_no_anchor(anchor: Anchor | None, received: str) -> None:
    if anchor is not None and anchor.kind != "zero":
        raise ValueError(
            f"`anchor` must come with a `weight_decay` > 0. Received: {received}. Without decay "
            "nothing pulls toward the anchor."
        )


def _as_ratio(rate: float, group: Group, base: Any) -> float:
    if not isinstance(base, float):
        rule = group.rule
        raise ValueError(
            "`learning_rate` of a group must not be a number beside a base rate that is a "
            f"schedule or a function. Received: learning_rate={rate:g} in {group.where}, base "
            f"{describe_scalar(base)}. Either give `learning_rate_ratio=`, which follows the base, "
            f"or `learning_rate=kgo.constant({rate:g})`, which does not."
            + (
                f' The rate comes from the instance given as rule: `kgo.rule("{rule.label}", ...)` '
                "has no rate."
                if rule is not None and rule.instance is not None
                else ""
            )
        )
    if base == 0:
        raise ValueError(
            "The base `learning_rate` must be > 0 if a group has a rate. Received: "
            f"learning_rate=0 with learning_rate={rate:g} in {group.where}. The rate of a group is "
            "the base rate times a ratio, and 0 times any ratio is 0."
        )
    return rate / base
