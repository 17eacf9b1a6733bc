"""The declaration of a group: one part of a model and how to train it.

A `Group` is a frozen record without variables or state. `plan.resolve` turns groups into a `Plan`,
and `GroupedOptimizer.build` turns a plan into state.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.base.checks import (
    answer_unknown,
    check_clipping,
    check_scalar,
    check_switch,
    errors_in,
)
from keras_groupopt.plan.rule_spec import as_rule
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.selectors import Selector, as_selector

DEFAULT_GROUP = "default"
# The arguments of a frozen group.
_KEPT = ("name", "selector", "frozen")


@dataclasses.dataclass(frozen=True)
class Anchor:
    """The weights that decay pulls toward.

    Args:
        kind: `"zero"`, `"initial"` (the weights before the first step) or `"given"`.
        source: The given weights: a mapping from layer path to array, a sequence of arrays in the
            order of the group's variables, or the path of a file. `None` if only saved state has
            them. Default: `None`.
    """

    kind: str
    source: Any = None


def as_anchor(value: Any, where: str) -> Anchor | None:
    """Returns `value` as an `Anchor`, or `None` if it is `None`.

    Raises:
        ValueError: If it does not name or hold weights.
    """
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
    """Returns `value` as a selector, `None` to inherit, or `()` to exclude nothing."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and not value:
        return ()
    return as_selector(value, argument="exclude_from_decay")


@answer_unknown(
    {
        **dict.fromkeys(("lr_ratio", "lr_scale", "lr_mult"), "learning_rate_ratio"),
        **dict.fromkeys(("params", "variables", "layers", "layer"), "selector"),
        **dict.fromkeys(("optimizer", "algorithm"), "rule"),
        "lr": "learning_rate",
        "wd": "weight_decay",
        "max_grad_norm": "global_clipnorm",
        "trainable": "frozen",
    }
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Group:
    """One part of a model, and how to train it.

    The rate of a group is `learning_rate(t) * learning_rate_ratio(t)`, where `t` counts optimizer
    steps. Options that are `None` are taken from the optimizer.

    Args:
        name: The group's name in plans, logs (`learning_rate_<name>`) and state keys.
        selector: The group's variables: a path pattern (`"mobilenetv2/**/kernel"`; the path of a
            layer claims all variables below it), a layer, a `Selector`, or a list of these. A group
            without a selector must be called `"default"` and gets the variables that no other group
            claims. Default: none.
        rule: The algorithm: a name, an optimizer class, `kgo.rule(...)`, or an optimizer instance,
            which brings its own rate (a number or a schedule), decay and clipping. Default: that of
            the optimizer.
        learning_rate_ratio: A number >= 0 or a schedule that multiplies the base rate. Default: 1.
        learning_rate: A separate rate for the group, per step. If it and the base rate are numbers,
            it becomes the ratio. A schedule does not follow the base rate;
            `kgo.from_base(function)` is computed from it. Default: the base rate.
        weight_decay: The coefficient of decoupled decay, a number >= 0 or a schedule. Default: that
            of the optimizer.
        anchor: The weights that decay pulls toward: `"zero"`, `"initial"` (L2-SP: the weights
            before the first step), arrays or a file. Default: that of the optimizer.
        exclude_from_decay: A selector of variables that are not decayed; `()` excludes none.
            Default: that of the optimizer.
        clipnorm: The limit of each variable's gradient norm. Default: that of the optimizer, if the
            group has no clipping.
        global_clipnorm: The limit of the gradient norm over this group. Default: none.
        clipvalue: The limit of each gradient element's magnitude. Default: that of the optimizer,
            if the group has no clipping.
        frozen: Whether the group's variables stay bit-identical. They then have no state and no
            decay, and do not count in the gradient norm. Default: False.

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
        self._check_name()
        where = self.where
        checked: dict[str, Any] = {}
        with errors_in(where):
            if self.selector is not None:
                checked["selector"] = as_selector(self.selector)
            checked["exclude_from_decay"] = as_exclusion(self.exclude_from_decay)
        checked["rule"] = as_rule(self.rule, where)
        for name in ("learning_rate_ratio", "learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, FromBase) or name != "learning_rate":
                checked[name] = check_scalar(name, value, where=where)
        checked["anchor"] = as_anchor(self.anchor, where)
        limits = check_clipping(self.clipnorm, self.global_clipnorm, self.clipvalue, where=where)
        checked |= zip(("clipnorm", "global_clipnorm", "clipvalue"), limits, strict=True)
        check_switch("frozen", self.frozen, where=where)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_contradictions()

    def _check_name(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or "/" in self.name:
            raise ValueError(
                "`name` of a group must be a non-empty string without `/`. Received: "
                f"name={self.name!r}. It is part of the keys of saved state."
            )
        if self.name.startswith("@"):
            raise ValueError(
                "`name` of a group must not start with `@`. Received: "
                f"name={self.name!r}. Such keys of saved state belong to the optimizer itself."
            )

    def _check_contradictions(self) -> None:
        if self.selector is None and self.name != DEFAULT_GROUP:
            raise ValueError(
                f"`selector` must be given. Received: {self.where} without a selector. Only the "
                f'group "{DEFAULT_GROUP}", which gets the unclaimed variables, needs no selector.'
            )
        if isinstance(self.learning_rate, float) and self.learning_rate_ratio is not None:
            raise ValueError(
                "Only one of `learning_rate` and `learning_rate_ratio` must be set. Received: "
                f"learning_rate={self.learning_rate!r} and "
                f"learning_rate_ratio={self.learning_rate_ratio!r} in {self.where}. A number as "
                "the rate of a group is the base rate times a ratio."
            )
        options = (field.name for field in dataclasses.fields(self))
        given = [name for name in options if getattr(self, name) is not None and name not in _KEPT]
        if self.frozen and given:
            raise ValueError(
                f"`{given[0]}` must not be set on a frozen group. Received: {self.where} with "
                f"frozen=True and {given[0]}. A frozen group never moves."
            )

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # Compare by identity: `weight_decay=0` must be shown.
        shown = (f"{k}={v!r}" for k, v in values.items() if v is not None and v is not False)
        return f"Group({', '.join(shown)})"

    @property
    def where(self) -> str:
        """The name of this group in errors."""
        return f'group "{self.name}"'


def as_groups(groups: Any) -> tuple[Group, ...]:
    """Returns a list of groups, or a dict from name to group or selector, as a tuple.

    Raises:
        ValueError: If two groups have the same name, or a key differs from its group's name.
        TypeError: If an item is not a group.
    """
    if groups is None:
        return ()
    if isinstance(groups, Group):
        groups = [groups]
    if isinstance(groups, Mapping):
        items = []
        for name, value in groups.items():
            group = value if isinstance(value, Group) else Group(name, value)
            if group.name != name:
                raise ValueError(
                    f"The key of a group must be its name. Received: key {name!r} for "
                    f"{group.where}."
                )
            items.append(group)
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
        return f" Pass a rule as `rule={value!r}`, or variables as `kgo.Group(name, {value!r})`."
    if hasattr(value, "trainable_variables"):
        return " Pass the model as `model=`."
    return ""
