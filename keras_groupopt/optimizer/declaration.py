"""What a user declares, checked."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.base.checks import check_number, is_schedule
from keras_groupopt.plan.effective import check_declared
from keras_groupopt.plan.group import Group
from keras_groupopt.plan.plan import Defaults
from keras_groupopt.rules import instances, making
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.schedules.serialization import is_registered
from keras_groupopt.selectors import Selector


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a user declared.

    Args:
        groups: The groups.
        defaults: What holds for groups that do not say it themselves.
    """

    groups: tuple[Group, ...]
    defaults: Defaults

    @property
    def clips(self) -> bool:
        """Whether any limit on gradients is declared."""
        limits = ("clipnorm", "global_clipnorm", "clipvalue")
        declared = (*self.groups, self.defaults)
        return any(getattr(one, name) is not None for one in declared for name in limits)


def declare(groups: Sequence[Group], defaults: Defaults) -> Declared:
    """Returns groups and defaults, after checking that they fit each other.

    Raises:
        ValueError: If they contradict each other.
    """
    instances.check_instances_differ(groups)
    lifted = tuple(instances.lift_arguments(group) for group in groups)
    check_declared(lifted, defaults)
    _warn_of_unserializable(lifted, defaults)
    return Declared(lifted, defaults)


def check_base(learning_rate: Any, groups: Sequence[Any]) -> Any:
    """Returns the base rate: a float, a schedule or a function."""
    shape = None if is_schedule(learning_rate) else getattr(learning_rate, "shape", None)
    if isinstance(learning_rate, (list, tuple, Mapping)) or shape:
        names = ", ".join(group.name for group in groups)
        raise ValueError(
            "`learning_rate` must be one base rate. Received: "
            f"{len(learning_rate)} rates for {len(groups)} groups ({names}). Give each group its "
            "rate by `Group(learning_rate_ratio=...)` or `Group(learning_rate=...)`."
        )
    if callable(learning_rate):
        _check_callable(learning_rate)
        return learning_rate
    return check_number("learning_rate", learning_rate, where="GroupedOptimizer")


def _check_callable(learning_rate: Any) -> None:
    """Refuses, before there is a step, what Keras could not call."""
    if isinstance(learning_rate, type):
        raise TypeError(
            "`learning_rate` must be a number, a schedule or a function without arguments. "
            f"Received: the class {learning_rate.__name__} in GroupedOptimizer. Make an instance "
            f"of it: `{learning_rate.__name__}(...)`."
        )
    if is_schedule(learning_rate):
        return
    try:
        inspect.signature(learning_rate).bind()
    except ValueError:  # a function in C may have no signature
        return
    except TypeError as error:
        raise TypeError(
            "`learning_rate` as a function must take no arguments. Received: "
            f"{learning_rate!r} in GroupedOptimizer: {error}. To compute the rate from the step, "
            "subclass `keras.optimizers.schedules.LearningRateSchedule`."
        ) from error


def check_default_rule(rule: Any) -> Any:
    """Returns the rule of groups that name none, after checking that it is only a rule."""
    if rule is None:
        raise TypeError("`rule` must be given. Received: rule=None in GroupedOptimizer.")
    if rule.is_instance:
        raise ValueError(
            "`rule` of GroupedOptimizer must not be an instance, which has its own rate and "
            f"belongs to one group. Received: {rule.label}. Use "
            f'`rule=kgo.rule("{rule.label}", ...)` with `learning_rate=`.'
        )
    lifted = sorted(set(rule.arguments) & {"weight_decay", "clipnorm", "clipvalue"})
    if lifted:
        raise ValueError(
            f"`{lifted[0]}` must be given to GroupedOptimizer itself. Received: {rule!r} as its "
            f"default rule. Use `GroupedOptimizer({lifted[0]}=...)`."
        )
    making.check_rule(rule, "GroupedOptimizer")
    return rule


def _warn_of_unserializable(groups: Sequence[Group], defaults: Defaults) -> None:
    """Warns, before hours of training, about what the first checkpoint could not save."""
    rate = defaults.learning_rate
    reasons = []
    if callable(rate) and not hasattr(rate, "get_config") and not is_registered(rate):
        reasons.append(f"the base learning rate is the function {rate!r}")
    for group in groups:
        own = group.learning_rate
        if isinstance(own, FromBase) and not is_registered(own.function):
            reasons.append(f"`learning_rate` of {group.where} is {own!r}")
    named = [
        (f"`{name}` of {group.where}", getattr(group, name))
        for group in groups
        for name in ("selector", "exclude_from_decay")
    ]
    named += [(f"the selector of {ratio.where}", ratio.selector) for ratio in defaults.ratios]
    named.append(("`exclude_from_decay`", defaults.exclude_from_decay))
    reasons += [
        f"{name} is {selector.describe()}"
        for name, selector in named
        if isinstance(selector, Selector) and not selector.is_serializable()
    ]
    if reasons:
        warnings.warn(
            "A model with this optimizer cannot be saved whole (`model.save`, ModelCheckpoint), "
            f"because {'; '.join(reasons)}. Decorate the function with "
            "`@keras.saving.register_keras_serializable()`.",
            stacklevel=4,
        )
