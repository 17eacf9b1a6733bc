"""Bindings: the group and field that each schedule drives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_groupopt.base.checks import is_schedule
from keras_groupopt.schedules.from_base import FromBase


class ScheduleBinding(NamedTuple):
    """A schedule, and the field that it drives.

    Args:
        group: The name of the group, or `None` for all groups.
        field: The field: `"learning_rate"`, `"weight_decay"`, `"rule.beta_1"`, `"ratios[2]"`,
            `"ema.momentum"`, `"SAM.rho"`.
        schedule: The schedule, or the function that returns the base rate.
    """

    group: str | None
    field: str
    schedule: Any

    def __str__(self) -> str:
        name = getattr(self.schedule, "__name__", type(self.schedule).__name__)
        return f"{self.group or 'all groups'}: {self.field} follows {name}"


def schedule_bindings(plan: Any) -> Iterator[ScheduleBinding]:
    """Yields one binding per schedule: each group's first, then those shared by all groups."""
    for planned in plan.groups:
        if not planned.group.frozen:
            yield from _of_group(planned, plan.defaults)
    momentum = getattr(plan.defaults.ema, "momentum", None)
    if is_schedule(momentum):
        yield ScheduleBinding(None, "ema.momentum", momentum)
    for field, value in plan.gradient_rule.items():
        if is_schedule(value):
            yield ScheduleBinding(None, field, value)


def _of_group(planned: Any, defaults: Any) -> Iterator[ScheduleBinding]:
    group = planned.group
    own, base = group.learning_rate, defaults.learning_rate
    follows = own is None or isinstance(own, FromBase)
    fields = {
        "learning_rate": base if follows else own,
        "learning_rate_ratio": group.learning_rate_ratio,
        "weight_decay": group.weight_decay if any(v.decayed for v in planned.variables) else None,
    }
    fields |= {f"rule.{name}": value for name, value in group.rule.given.items()}
    places = sorted({v.ratio_index for v in planned.variables if v.ratio_index is not None})
    fields |= {f"ratios[{place}]": defaults.ratios[place].value for place in places}
    for field, value in fields.items():
        if is_schedule(value) or (field == "learning_rate" and callable(value)):
            yield ScheduleBinding(group.name, field, value)


def check_drives(plan: Any) -> None:
    """Checks that each declared schedule drives something.

    Raises:
        ValueError: If one does not.
    """
    defaults = plan.defaults
    declared = [
        ("learning_rate", defaults.learning_rate, "every group has its own rate"),
        ("weight_decay", defaults.weight_decay, "no group that uses it has a variable that decays"),
    ]
    declared += [
        (f"rule: {name}", value, "every group has its own rule")
        for name, value in defaults.rule.arguments.items()
    ]
    declared += [
        (
            f"ratios[{ratio.place}] ({ratio.selector.describe()})",
            ratio.value,
            "all its variables are frozen, or another ratio has them",
        )
        for ratio in defaults.ratios
    ]
    driving = {id(binding.schedule) for binding in schedule_bindings(plan)}
    for name, schedule, reason in declared:
        scheduled = callable(schedule) if name == "learning_rate" else is_schedule(schedule)
        if scheduled and id(schedule) not in driving:
            raise ValueError(
                f"A schedule must drive something. Received: {type(schedule).__name__} as "
                f"`{name}` of GroupedOptimizer, but {reason}. Leave it out."
            )
