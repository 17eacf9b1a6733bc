"""Declarations: what a user says about one part of a model.

A `Group` is a frozen record. It holds no variables and no state; `plan.resolve` turns groups into
a `Plan`, and `GroupedOptimizer.build` turns a plan into state.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.base.checks import check_clipping, check_scalar, is_schedule
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.selectors import Selector, as_selector

DEFAULT_GROUP = "default"

# What only the whole optimizer can mean, and where it is said instead.
WHOLE_ONLY = {
    "global_clipnorm": "GroupedOptimizer(global_clipnorm=...) for one norm over all groups, "
    "or Group(global_clipnorm=...) for a norm over this group",
    "use_ema": "GroupedOptimizer, which owns averages",
    "gradient_accumulation_steps": "GroupedOptimizer, which owns accumulation",
    "loss_scale_factor": "GroupedOptimizer(loss_scale_factor=...)",
}
LIFTED = ("weight_decay", "clipnorm", "clipvalue")

FOREIGN_OPTIMIZER = (
    "An optimizer of torch, optax or another Keras (`tf_keras`) has a different interface."
)
_FOREIGN_STEPS = ("apply_gradients", "step", "update")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RuleSpec:
    """The algorithm of a group, without a rate of its own. Made by `kgo.rule`.

    Args:
        target: A name, an optimizer class, or an optimizer instance.
        arguments: The explicit arguments; what they leave out keeps the class' default, except
            decay and clipping, which are then off.
        config: The full config, for a rule that was given as an instance.
        instance: That instance.
    """

    target: Any
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    instance: Any = dataclasses.field(default=None, compare=False)

    @property
    def is_instance(self) -> bool:
        """Whether the rule is an optimizer instance whose rate and decay are still on it."""
        return not isinstance(self.target, (str, type))

    @property
    def label(self) -> str:
        """The rule's short name, as shown in plans: `"radam"`."""
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
            or an optimizer class, third-party ones included.
        **arguments: Arguments of the class, without a rate. Those that are quantities (`beta_1`,
            `momentum`) may be schedules over optimizer steps. `weight_decay`, `clipnorm` and
            `clipvalue` become the group's.

    Returns:
        A `RuleSpec`. Only explicit arguments count: Keras' AdamW default of 0.004 is not a decay.

    Raises:
        ValueError: If an argument is a rate, or one that only the whole optimizer can mean.
        TypeError: If `target` is neither a name nor a class.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.rule("lion", beta_1=0.95)
    rule('lion', beta_1=0.95)
    """
    if not isinstance(target, (str, type)):
        raise TypeError(
            "`target` must be the name of an optimizer or an optimizer class. Received: "
            f"target={target!r}. An optimizer instance goes into `Group(rule=...)` as it is."
        )
    label = target if isinstance(target, str) else target.__name__
    if "learning_rate" in arguments:
        raise ValueError(
            "`rule` must not have a learning rate. Received: "
            f"learning_rate={arguments['learning_rate']!r} in rule({label!r}). The rate of a "
            "group is the base rate times its ratio: use `Group(learning_rate_ratio=...)` or "
            "`Group(learning_rate=...)`."
        )
    if "name" in arguments:
        raise ValueError(
            f"`rule` must not have a name. Received: name={arguments['name']!r} in "
            f"rule({label!r}). Groups have names."
        )
    for name, place in WHOLE_ONLY.items():
        if arguments.get(name):
            raise ValueError(
                f"`{name}` must not be set on a rule. Received: {name}={arguments[name]!r} in "
                f"rule({label!r}). Set it on {place}."
            )
    return RuleSpec(target, dict(arguments))


def as_rule(value: Any, *, where: str) -> RuleSpec | None:
    """Returns `value` (a name, a class, a `RuleSpec` or an optimizer instance) as a `RuleSpec`."""
    if value is None or isinstance(value, RuleSpec):
        return value
    if isinstance(value, (str, type)):
        return rule(value)
    if hasattr(value, "apply") and hasattr(value, "get_config"):
        return RuleSpec(value)
    must = (
        "`rule` must be the name of an optimizer, an optimizer class, `kgo.rule(...)` or an "
        "optimizer instance."
    )
    if any(hasattr(value, method) for method in _FOREIGN_STEPS):
        cls = type(value)
        raise TypeError(
            f"{must} Received: an object of type {cls.__module__}.{cls.__qualname__} in {where}. "
            f"{FOREIGN_OPTIMIZER}"
        )
    raise TypeError(f"{must} Received: rule={value!r} in {where}.")


@dataclasses.dataclass(frozen=True)
class Anchor:
    """What decay pulls toward.

    Args:
        kind: `"zero"`, `"initial"` (the weights when the optimizer is built) or `"given"`.
        source: Where given weights come from: a mapping from layer path to array, a sequence of
            arrays in the order of the group's variables, or a file's path. `None` when they are
            known only from saved state.
    """

    kind: str
    source: Any = None


def as_anchor(value: Any, *, where: str) -> Anchor | None:
    """Returns `value` as an `Anchor`, or `None` if it is `None`."""
    if value is None or isinstance(value, Anchor):
        return value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        if value in ("zero", "initial"):
            return Anchor(value)
        if value.endswith((".keras", ".weights.h5")):
            return Anchor("given", value)
    elif isinstance(value, (Mapping, Sequence)) or hasattr(value, "shape"):
        return Anchor("given", [value] if hasattr(value, "shape") else value)
    raise ValueError(
        '`anchor` must be "zero", "initial", arrays (a dict from layer path to array, or a list '
        "in the order of the group's variables), or the path of a `.keras` or `.weights.h5` "
        f"file. Received: anchor={value!r} in {where}."
    )


def as_exclusion(value: Any) -> Selector | tuple[()] | None:
    """Returns `value` as a selector; `None` inherits, an empty sequence excludes nothing."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and not value:
        return ()
    return as_selector(value, argument="exclude_from_decay")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Group:
    """One part of a model, and how it is trained.

    The rate of a group is `learning_rate(t) * learning_rate_ratio(t)`, with `t` counted in
    optimizer steps. What is `None` is taken from the optimizer.

    Args:
        name: The group's name, in plans, logs (`learning_rate_<name>`) and state keys.
        selector: Which variables: a path pattern (`"mobilenetv2/**/kernel"`; a layer's path
            claims all below it), a layer, a `Selector`, or a list of these. Without one the
            group must be called `"default"`: it configures whatever no other group claims.
        rule: The algorithm: a name, an optimizer class, `kgo.rule(...)`, or an optimizer
            instance, which brings its own rate, decay and clipping.
        learning_rate_ratio: A number >= 0 or a schedule, times the base rate. Default 1.
        learning_rate: A rate of the group's own, per step. A number beside a base number becomes
            the ratio; a schedule is the group's own curve and does not follow the base;
            `kgo.from_base(function)` follows it as the function says.
        weight_decay: The coefficient of decoupled decay, a number >= 0 or a schedule.
        anchor: What decay pulls toward: `"zero"`, `"initial"` (L2-SP), arrays or a file.
        exclude_from_decay: A selector of variables that are not decayed; `()` excludes none.
        clipnorm: Limit of each variable's gradient norm.
        global_clipnorm: Limit of the gradient norm over this group.
        clipvalue: Limit of each gradient element's magnitude.
        frozen: Whether the group's variables stay bit-identical: no state, no decay, no part in
            the norm.

    Raises:
        ValueError: If a number is negative or not finite, two clipping limits are set, or two
            arguments contradict each other.
        TypeError: If a selector, rule or number is of the wrong type.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.Group("backbone", "resnet/**/kernel", learning_rate_ratio=0.1, anchor="initial").name
    'backbone'

    Reference:
        L2-SP: Li et al. 2018, arXiv:1802.01483.
    """

    name: str
    selector: Any = None
    rule: Any = None
    learning_rate_ratio: Any = None
    learning_rate: Any = None
    weight_decay: Any = None
    anchor: Any = None
    exclude_from_decay: Any = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        where = self.where
        if not isinstance(self.name, str) or not self.name.strip() or "/" in self.name:
            raise ValueError(
                "`name` of a group must be a non-empty string without `/`. Received: "
                f"name={self.name!r}. It is part of the keys of saved state."
            )
        if self.name.startswith("@"):
            raise ValueError(
                "`name` of a group must not start with `@`. Received: "
                f"name={self.name!r}. Keys of saved state that do are the optimizer's own."
            )
        if self.selector is None and self.name != DEFAULT_GROUP:
            raise ValueError(
                f"`selector` must be given. Received: {where} without a selector. Only the group "
                f'"{DEFAULT_GROUP}", which takes what no other group claims, has none.'
            )
        put = _setter(self)
        if self.selector is not None:
            try:
                put("selector", as_selector(self.selector))
            except (TypeError, ValueError) as error:
                raise type(error)(f"In {where}: {error}") from error
        put("rule", as_rule(self.rule, where=where))
        put(
            "learning_rate_ratio",
            check_scalar("learning_rate_ratio", self.learning_rate_ratio, where=where),
        )
        if not isinstance(self.learning_rate, FromBase):
            put("learning_rate", check_scalar("learning_rate", self.learning_rate, where=where))
        if isinstance(self.learning_rate, float) and self.learning_rate_ratio is not None:
            raise ValueError(
                "Only one of `learning_rate` and `learning_rate_ratio` must be set. Received: "
                f"learning_rate={self.learning_rate!r} and "
                f"learning_rate_ratio={self.learning_rate_ratio!r} in {where}. A number as the "
                "rate of a group is the base rate times a ratio."
            )
        put("weight_decay", check_scalar("weight_decay", self.weight_decay, where=where))
        put("anchor", as_anchor(self.anchor, where=where))
        try:
            put("exclude_from_decay", as_exclusion(self.exclude_from_decay))
        except (TypeError, ValueError) as error:
            raise type(error)(f"In {where}: {error}") from error
        limits = check_clipping(self.clipnorm, self.global_clipnorm, self.clipvalue, where=where)
        for name, limit in zip(("clipnorm", "global_clipnorm", "clipvalue"), limits, strict=True):
            put(name, limit)
        if self.frozen not in (False, True):
            raise TypeError(
                f"`frozen` must be True or False. Received: frozen={self.frozen!r} in {where}."
            )
        if self.frozen:
            self._check_frozen()

    def __repr__(self) -> str:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # Not by equality: a decay of 0 is said.
        said = (
            f"{name}={value!r}"
            for name, value in own.items()
            if value is not None and value is not False
        )
        return f"Group({', '.join(said)})"

    @property
    def where(self) -> str:
        """How errors name this group."""
        return f'group "{self.name}"'

    def _check_frozen(self) -> None:
        for name in (field.name for field in dataclasses.fields(self)):
            if name in ("name", "selector", "frozen"):
                continue
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` must not be set on a frozen group. Received: {self.where} with "
                    f"frozen=True and {name}. A frozen group never moves."
                )


def _setter(group: Group) -> Any:
    """Writes to a frozen dataclass while it is being made."""

    def put(name: str, value: Any) -> None:
        object.__setattr__(group, name, value)

    return put


def as_groups(groups: Any) -> tuple[Group, ...]:
    """Returns a list of groups, or a dict from name to group or selector, as a tuple.

    Raises:
        ValueError: If two groups have one name, or a key differs from its group's name.
        TypeError: If an item is no group.
    """
    if groups is None:
        return ()
    if isinstance(groups, Group):
        groups = [groups]
    if isinstance(groups, Mapping):
        items = []
        for name, value in groups.items():
            if isinstance(value, Group):
                if value.name != name:
                    raise ValueError(
                        "The key of a group must be its name. Received: key "
                        f"{name!r} for {value.where}."
                    )
                items.append(value)
            else:
                items.append(Group(name, value))
    elif isinstance(groups, Sequence) and not isinstance(groups, str):
        items = list(groups)
    else:
        raise TypeError(
            "`groups` must be a list of `kgo.Group` or a dict from name to group or selector. "
            f"Received: groups={reprlib.repr(groups)}.{_hint_for_groups(groups)}"
        )
    seen: set[str] = set()
    for group in items:
        if not isinstance(group, Group):
            raise TypeError(
                "`groups` must hold `kgo.Group` objects. Received: "
                f"{reprlib.repr(group)} of type {type(group).__name__}. Write "
                "`kgo.Group(name, selector)`."
            )
        if group.name in seen:
            raise ValueError(
                f'Group names must be unique. Received: two groups called "{group.name}". '
                "Rename one, or join their selectors with `|`."
            )
        seen.add(group.name)
    return tuple(items)


def _hint_for_groups(value: Any) -> str:
    if isinstance(value, str):
        return f" A rule is given as `rule={value!r}`, a part as `kgo.Group(name, {value!r})`."
    if hasattr(value, "trainable_variables"):
        return " The model is given as `model=`."
    return ""
