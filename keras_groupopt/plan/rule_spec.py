"""The update rule of a group, without a rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_groupopt.base.checks import is_schedule

# Options that belong to the whole optimizer, and where to set them.
WHOLE_ONLY = {
    "global_clipnorm": "GroupedOptimizer(global_clipnorm=...) for one norm over all groups, "
    "or Group(global_clipnorm=...) for a norm over this group",
    "use_ema": "GroupedOptimizer, which owns averages",
    "gradient_accumulation_steps": "GroupedOptimizer, which owns accumulation",
    "loss_scale_factor": "GroupedOptimizer(loss_scale_factor=...)",
}
# Options of a rule that become options of its group.
LIFTED = ("weight_decay", "clipnorm", "clipvalue")

FOREIGN_OPTIMIZER = (
    "An optimizer of torch, optax or another Keras (`tf_keras`) has a different interface."
)
_FOREIGN_STEPS = ("apply_gradients", "step", "update")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RuleSpec:
    """The algorithm of a group, without a rate. `kgo.rule` makes it.

    Args:
        target: A name, an optimizer class, or an optimizer instance.
        arguments: The explicit arguments. The others have the default of the class, except decay
            and clipping, which are off. Default: none.
        config: The full config of a rule that was given as an instance. Default: none.
        instance: The instance. Default: none.
    """

    target: Any
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    instance: Any = dataclasses.field(default=None, compare=False)

    @property
    def is_instance(self) -> bool:
        """Whether the rule is an optimizer instance that still has its rate and decay."""
        return not isinstance(self.target, (str, type))

    @property
    def given(self) -> Mapping[str, Any]:
        """The arguments that the rule is made with: its full config, if it has one."""
        return self.arguments if self.config is None else self.config

    @property
    def label(self) -> str:
        """The rule's short name in plans, such as `"radam"`."""
        if isinstance(self.target, str):
            return self.target.lower()
        cls = self.target if isinstance(self.target, type) else type(self.target)
        return cls.__name__.lower()

    def __repr__(self) -> str:
        target = repr(self.target) if isinstance(self.target, str) else self.label
        arguments = "".join(
            f", {name}={type(value).__name__}(...)" if is_schedule(value) else f", {name}={value!r}"
            for name, value in self.arguments.items()
        )
        return f"rule({target}{arguments})"


def rule(target: str | type, **arguments: Any) -> RuleSpec:
    """Names an algorithm and its arguments, for `Group(rule=...)`.

    Args:
        target: The name of a Keras optimizer or of a rule of this package (`"radam"`, `"lion"`),
            or an optimizer class, including third-party classes.
        **arguments: Arguments of the class, without a rate. Quantities (`beta_1`, `momentum`) may
            be schedules over optimizer steps. `weight_decay`, `clipnorm` and `clipvalue` become
            those of the group.

    Returns:
        A `RuleSpec`. Only explicit arguments count: the default decay of Keras' AdamW, 0.004, is
        not used.

    Raises:
        ValueError: If an argument is a rate, or an option of the whole optimizer.
        TypeError: If `target` is neither a name nor a class.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.rule("lion", beta_1=0.95)
    rule('lion', beta_1=0.95)
    """
    if not isinstance(target, (str, type)):
        raise TypeError(
            "`target` must be the name of an optimizer or an optimizer class. Received: "
            f"target={target!r}. Pass an optimizer instance directly: `Group(rule=instance)`."
        )
    label = target if isinstance(target, str) else target.__name__
    refused = {name: f"Set it on {place}." for name, place in WHOLE_ONLY.items()}
    refused["name"] = "Groups have names."
    refused["learning_rate"] = (
        "The rate of a group is the base rate times its ratio: use "
        "`Group(learning_rate_ratio=...)` or `Group(learning_rate=...)`."
    )
    for name, advice in refused.items():
        if name in arguments and (arguments[name] or name not in WHOLE_ONLY):
            raise ValueError(
                f"`{name}` must not be set on a rule. Received: {name}={arguments[name]!r} in "
                f"rule({label!r}). {advice}"
            )
    return RuleSpec(target, dict(arguments))


def as_rule(value: Any, where: str) -> RuleSpec | None:
    """Returns a name, a class, a `RuleSpec` or an optimizer instance as a `RuleSpec`.

    Raises:
        TypeError: If it is of another type.
    """
    if value is None or isinstance(value, RuleSpec):
        return value
    if isinstance(value, (str, type)):
        return rule(value)
    if hasattr(value, "apply") and hasattr(value, "get_config"):
        return RuleSpec(value)
    cls, received, advice = type(value), f"rule={value!r}", ""
    if any(hasattr(value, method) for method in _FOREIGN_STEPS):
        received = f"an object of type {cls.__module__}.{cls.__qualname__}"
        advice = f" {FOREIGN_OPTIMIZER}"
    raise TypeError(
        "`rule` must be the name of an optimizer, an optimizer class, `kgo.rule(...)` or an "
        f"optimizer instance. Received: {received} in {where}.{advice}"
    )
