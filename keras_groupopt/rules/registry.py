"""From a declared `RuleSpec` to a fresh optimizer for one group, and to JSON and back."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_groupopt.base import compat
from keras_groupopt.plan.group import FOREIGN_OPTIMIZER, LIFTED, WHOLE_ONLY, Group, RuleSpec
from keras_groupopt.rules import checks, fields
from keras_groupopt.rules.adabelief import AdaBelief
from keras_groupopt.rules.adafactor import Adafactor
from keras_groupopt.rules.adan import Adan
from keras_groupopt.rules.lars import LARS
from keras_groupopt.rules.muon import Muon
from keras_groupopt.rules.nadamw import NAdamW
from keras_groupopt.rules.radam import RAdam
from keras_groupopt.rules.rmsprop import RMSprop
from keras_groupopt.rules.schedule_free_adamw import ScheduleFreeAdamW
from keras_groupopt.rules.sgd import SGD

# Where Keras has a rule of the same name, ours is meant; `lookahead.py` adds its own.
OWN_RULES: dict[str, type] = {
    "adabelief": AdaBelief,
    "adafactor": Adafactor,
    "adan": Adan,
    "lars": LARS,
    "muon": Muon,
    "nadamw": NAdamW,
    "radam": RAdam,
    "schedulefreeadamw": ScheduleFreeAdamW,
}
# Rules of Keras whose step cannot take an argument that is a tensor, and what stands for them then.
SCHEDULABLE: dict[type, type] = {
    keras.optimizers.RMSprop: RMSprop,
    keras.optimizers.SGD: SGD,
}
_WRAPPERS = ("lossscaleoptimizer", "multioptimizer", "optimizer")

_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def rule_names() -> dict[str, type]:
    """Returns every name that `rule=` knows, with its class: ours, then Keras'."""
    names = dict(OWN_RULES)
    for name in dir(keras.optimizers):
        cls = getattr(keras.optimizers, name)
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer):
            names.setdefault(name.lower(), cls)
    return {name: cls for name, cls in names.items() if name not in _WRAPPERS}


def rule_class(rule: RuleSpec, where: str) -> Any:
    """Returns the optimizer class of `rule`.

    Raises:
        ValueError: If the name is unknown, or the class wraps other optimizers.
        TypeError: If it is no Keras optimizer.
    """
    target = rule.target
    if isinstance(target, str):
        known = rule_names()
        key = target.lower().replace("_", "")
        cls = known.get(key) or keras.saving.get_registered_object(target)
        if cls is None:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(
                f"`rule` must be the name of an optimizer. Received: rule={target!r} in {where}. "
                f"{hint}The names are: {', '.join(sorted(known))}."
            )
    else:
        cls = target if isinstance(target, type) else type(target)
    if not (isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)):
        raise TypeError(
            "`rule` must be a `keras.optimizers.Optimizer`. Received: "
            f"{cls.__module__}.{cls.__qualname__} in {where}. {FOREIGN_OPTIMIZER}"
        )
    if cls is keras.optimizers.Optimizer:
        raise ValueError(
            "`rule` must be an optimizer that has an algorithm. Received: the base class "
            f"keras.optimizers.Optimizer in {where}. The names are: "
            f"{', '.join(sorted(rule_names()))}."
        )
    if hasattr(cls, "inner_optimizer") or cls.__name__.lower() in _WRAPPERS or _is_grouped(cls):
        raise ValueError(
            f"`rule` must not itself wrap optimizers. Received: {cls.__name__} in {where}. "
            "Declare its parts as groups of one GroupedOptimizer."
        )
    return cls


def _is_grouped(cls: type) -> bool:
    return any(base.__name__ == "GroupedOptimizer" for base in cls.__mro__)


def lift_instance(group: Group) -> Group:
    """Returns `group` with what its optimizer instance brings moved to where it is declared.

    The instance's rate, decay, `clipnorm` and `clipvalue` become the group's; a rule's explicit
    `weight_decay`, `clipnorm` and `clipvalue` do too.

    Raises:
        ValueError: If something is given on both, if an option only the whole optimizer can mean
            is set on the instance, or if the instance has state of its own.
    """
    rule = group.rule
    if rule is None:
        return group
    rule_class(rule, group.where)
    if not rule.is_instance:
        moved = {n: v for n, v in rule.arguments.items() if n in LIFTED and v is not None}
        kept = {n: v for n, v in rule.arguments.items() if n not in LIFTED}
        _check_not_twice(group, moved)
        _check_decays(rule.arguments, group)
        group = dataclasses.replace(group, rule=dataclasses.replace(rule, arguments=kept), **moved)
        check_rule(group.rule, group.where)
        return group
    instance = rule.target
    for name, place in WHOLE_ONLY.items():
        if getattr(instance, name, None):
            raise ValueError(
                f"`{name}` must not be set on an optimizer given as rule. Received: "
                f"{name}={getattr(instance, name)!r} on {rule.label} in {group.where}. Set it on "
                f"{place}."
            )
    if instance.built:
        raise ValueError(
            "An optimizer given as rule must be new. Received: an optimizer with state of its "
            f"own, {rule.label}, in {group.where}. Its state would be lost: give a new instance, "
            f'or `kgo.rule("{rule.label}", ...)`.'
        )
    if compat.has_decay_exclusion(instance):
        raise ValueError(
            "`exclude_from_weight_decay` must not be called on an optimizer given as rule. "
            f"Received: {rule.label} in {group.where}. Use `Group(exclude_from_decay=...)`."
        )
    config = _config_of(instance)
    moved = {name: config[name] for name in LIFTED if config.get(name) is not None}
    declared = compat.declared_learning_rate(instance)
    if group.learning_rate is not None or (
        group.learning_rate_ratio is not None and not callable(declared)
    ):
        raise ValueError(
            "The rate of a group must be given once. Received: a rate on the group and one on the "
            f'instance {rule.label} in {group.where}. Use `kgo.rule("{rule.label}", ...)`, '
            "which has no rate."
        )
    _check_not_twice(group, moved)
    _check_decays(config, group)
    moved["learning_rate"] = declared
    plain = RuleSpec(type_of(instance), _explicit_arguments(config, instance), config, instance)
    check_rule(plain, group.where)
    return dataclasses.replace(group, rule=plain, **moved)


def check_rule(rule: RuleSpec, where: str) -> None:
    """Makes a rule once, to see that its class takes its arguments, schedules among them.

    Raises:
        ValueError: If it does not, or if a schedule drives nothing.
        TypeError: If a schedule stands where the rule needs a number.
    """
    cls = rule_class(rule, where)
    parameters = _parameters(cls)
    given = rule.arguments if rule.config is None else rule.config
    scheduled = fields.scheduled(rule)
    for share in fields.SHARES if scheduled else (0.0,):
        numbers = fields.with_numbers(given, share)
        try:
            tried = dataclasses.replace(
                rule, **{"arguments" if rule.config is None else "config": numbers}
            )
            make_rule(tried, 0.0, where)
            if compat.is_keras_own(cls):
                checks.numbers_of_keras(numbers, parameters, where)
        except ValueError as error:
            if not share:
                raise
            names = ", ".join(scheduled)
            raise ValueError(
                f"A schedule must stay in the range of what it drives. Received: {names} in "
                f"{where}, at {share:.0%} of its length: {error}"
            ) from error
    fields.check_fields(rule, lambda: make_rule(rule, 0.0, where), parameters, where)


def rule_of(instance: Any) -> RuleSpec:
    """Returns the algorithm of an optimizer, built or not, as a rule without a rate.

    Decay, clipping and what only the whole optimizer can mean are left out.
    """
    config = _config_of(instance)
    arguments = _explicit_arguments(config, instance)
    outside = {"learning_rate", *LIFTED, *WHOLE_ONLY}
    return RuleSpec(
        type_of(instance),
        {name: value for name, value in arguments.items() if not name.endswith("weight_decay")},
        {name: value for name, value in config.items() if name not in outside},
    )


def check_shapes(
    rule: RuleSpec | None, shapes: list[tuple[str, tuple[int, ...]]], where: str
) -> None:
    """Refuses variables that a rule cannot move.

    A rule class that has such variables says so in a class method `check_shapes(shapes, where)`.

    Args:
        rule: The rule of a group.
        shapes: The path and the shape of each variable of the group.
        where: The group, for the error.

    Raises:
        ValueError: If there is one.
    """
    if rule is not None:
        check = getattr(rule_class(rule, where), "check_shapes", None)
        if check is not None:
            check(shapes, where)


def type_of(instance: Any) -> type:
    """Returns the class a user wrote, where another stands for it.

    Keras puts a subclass of its own in its place on torch, and we do on TensorFlow.
    """
    cls: type = type(instance)
    while "stands_for" in vars(cls):
        cls = vars(cls)["stands_for"]
    if not compat.is_keras_own(cls):
        # A user's class may have the name of its base.
        return cls
    known = rule_names().get(cls.__name__.lower())
    return known if known is not None and issubclass(cls, known) else cls


def _explicit_arguments(config: dict[str, Any], instance: Any) -> dict[str, Any]:
    """Returns the arguments in `config` that differ from the class' defaults."""
    parameters = _parameters(type_of(instance))
    hidden = {"name", "learning_rate", *LIFTED, *WHOLE_ONLY}
    return {
        name: value
        for name, value in config.items()
        if name in parameters and name not in hidden and parameters[name].default != value
    }


def _config_of(instance: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        # The rate is taken from the instance itself; a function as rate warns in its config.
        warnings.simplefilter("ignore")
        return dict(instance.get_config())


def _check_not_twice(group: Group, moved: dict[str, Any]) -> None:
    for name, value in moved.items():
        if getattr(group, name) is not None:
            raise ValueError(
                f"`{name}` must be given once. Received: {name}={getattr(group, name)!r} on "
                f"{group.where} and {name}={value!r} on its rule. Leave one out."
            )


def _check_decays(config: Any, group: Group) -> None:
    """Refuses decays under other names that a rule would apply beside the group's own."""
    main = config.get("weight_decay")
    for name, value in config.items():
        if name != "weight_decay" and name.endswith("weight_decay") and value not in (None, main):
            raise ValueError(
                f"`{name}` must not be set on a rule: a group has one decay. Received: "
                f"{name}={value!r} in {group.where}. Use `Group(weight_decay=...)`, and a second "
                "group where another decay is wanted."
            )


def make_rule(rule: RuleSpec, learning_rate: float | Callable[[], Any], where: str) -> Any:
    """Returns a new optimizer for `rule` at `learning_rate`, without decay or clipping.

    Raises:
        ValueError: If the class does not take an argument.
    """
    cls = rule_class(rule, where)
    if fields.scheduled(rule):
        cls = SCHEDULABLE.get(cls, cls)
    if rule.config is not None:
        numbers = fields.with_numbers(rule.config)
        optimizer = cls.from_config({**numbers, "learning_rate": learning_rate})
    else:
        numbers = fields.with_numbers(rule.arguments)
        try:
            optimizer = cls(learning_rate=learning_rate, **numbers)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"`rule` must get arguments that {cls.__name__} takes. Received: {rule!r} in "
                f"{where}: {error} {_argument_hint(cls, rule)}"
            ) from error
    for name in [n for n in vars(optimizer) if n in LIFTED or n.endswith("weight_decay")]:
        setattr(optimizer, name, None)
    return optimizer


def _parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """Returns the constructor's parameters; on torch, Keras' `__new__` hides them."""
    parameters = dict(inspect.signature(cls.__init__).parameters)
    parameters.pop("self", None)
    return parameters


def _argument_hint(cls: type, rule: RuleSpec) -> str:
    known = list(_parameters(cls))
    hints = [
        f"`{name}` is not one of them; did you mean `{near[0]}`?"
        for name in rule.arguments
        if name not in known and (near := difflib.get_close_matches(name, known, n=1))
    ]
    return " ".join(hints)


def claim_instance(rule: RuleSpec, owner: Any, where: str) -> None:
    """Notes that `owner` was built with an instance, and refuses a second live owner.

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
        ValueError: If it is.
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
