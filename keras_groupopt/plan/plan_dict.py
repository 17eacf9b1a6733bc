"""A plan as plain JSON."""

from __future__ import annotations

from typing import Any

from keras_groupopt.base.checks import is_schedule
from keras_groupopt.plan.averages import describe as describe_average
from keras_groupopt.plan.views.figures import CLIPPING_OPTIONS, PLAN_FORMAT
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.selectors import Selector


def plan_dict(plan: Any) -> dict[str, Any]:
    """Returns a plan as plain JSON: `format`, `provisional`, `options` and `groups`."""
    defaults = plan.defaults
    return {
        "format": PLAN_FORMAT,
        "provisional": plan.provisional,
        "options": {
            "learning_rate": describe_scalar(defaults.learning_rate),
            "global_clipnorm": defaults.global_clipnorm,
            "gradient_accumulation_steps": defaults.gradient_accumulation_steps,
            "ema": describe_average(defaults.ema),
            "on_nonfinite": defaults.on_nonfinite,
            "unclaimed": defaults.unclaimed,
            "overlap": defaults.overlap,
            **({"waiting": _waiting(plan)} if plan.waiting else {}),
        },
        "groups": [_group_dict(planned, defaults) for planned in plan.groups],
    }


def _waiting(plan: Any) -> str:
    return ", ".join(f"{group.name} ({group.selector.describe()})" for group in plan.waiting)


def describe_scalar(value: Any) -> str | float | None:
    """Returns a number as it is, and a schedule or function by its name."""
    if value is None or isinstance(value, (int, float)):
        return value
    if is_schedule(value):
        return type(value).__name__
    if isinstance(value, FromBase):
        return repr(value)
    return f"{getattr(value, '__name__', type(value).__name__)}()"


def _group_dict(planned: Any, defaults: Any) -> dict[str, Any]:
    group, rule = planned.group, planned.group.rule
    exclusion = group.exclude_from_decay
    places = [variable.ratio_index for variable in planned.variables]
    ratios = [1.0 if p is None else describe_scalar(defaults.ratios[p].value) for p in places]
    return {
        "name": group.name,
        "selector": "" if group.selector is None else group.selector.describe(),
        "rule": None if rule is None else rule.label,
        "rule_arguments": {} if rule is None else {k: _plain(v) for k, v in rule.arguments.items()},
        "learning_rate": None if group.frozen else _rate_text(group, defaults, ratios),
        "learning_rate_ratio": describe_scalar(group.learning_rate_ratio),
        "weight_decay": describe_scalar(group.weight_decay),
        "anchor": None if group.anchor is None else group.anchor.kind,
        "exclude_from_decay": exclusion.describe() if isinstance(exclusion, Selector) else None,
        "frozen": group.frozen,
        **{limit: getattr(group, limit) for limit in CLIPPING_OPTIONS},
        "variables": [
            {
                **{key: value for key, value in v.record.items() if key != "ratio_index"},
                "ratio": ratio,
                "anchored": v.anchored,
                "state_bytes": v.state_bytes,
            }
            for v, ratio in zip(planned.variables, ratios, strict=True)
        ],
    }


def _rate_text(group: Any, defaults: Any, ratios: list[Any]) -> str:
    rate = defaults.learning_rate if group.learning_rate is None else group.learning_rate
    text = f"{rate:g}" if isinstance(rate, float) else str(describe_scalar(rate))
    return text + _times([describe_scalar(group.learning_rate_ratio)]) + _times(ratios)


def _times(ratios: list[Any]) -> str:
    """Returns ` × 0.5`, or ` × 0.1…1` for several ratios, or nothing if all are 1."""
    numbers = sorted(ratio for ratio in ratios if isinstance(ratio, float))
    named = dict.fromkeys(str(ratio) for ratio in ratios if not isinstance(ratio, float))
    if not named and set(numbers) <= {1.0}:
        return ""
    ends = dict.fromkeys(f"{number:.4g}" for number in (*numbers[:1], *numbers[-1:]))
    return " × " + ", ".join([*(["…".join(ends)] if ends else []), *named])


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return describe_scalar(value) if is_schedule(value) else repr(value)
