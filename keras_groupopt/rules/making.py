"""From a declared rule to a new optimizer for one group, and back."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_groupopt.base import compat
from keras_groupopt.base.checks import check_finite, check_fraction, check_number, check_share
from keras_groupopt.plan.rule_spec import LIFTED, WHOLE_ONLY, RuleSpec
from keras_groupopt.rules import fields
from keras_groupopt.rules.registry import RULES, rule_class, type_of


def make_rule(
    rule: RuleSpec, learning_rate: float | Callable[[], Any], where: str, share: float = 0.0
) -> Any:
    """Returns a new optimizer for `rule`, without decay or clipping.

    Args:
        rule: The rule.
        learning_rate: Its rate.
        where: The group's name, for errors.
        share: Which value arguments that are schedules have: the one at this share of their length.

    Raises:
        ValueError: If the class does not take an argument.
        TypeError: If an argument has the wrong type.
    """
    cls = rule_class(rule, where)
    if cls in RULES:
        known = RULES[cls]
        cls = (fields.scheduled(rule) and known.if_scheduled) or known.stand_in or cls
    numbers = fields.with_numbers(rule, share)
    if rule.config is not None:
        optimizer = cls.from_config({**numbers, "learning_rate": learning_rate})
    else:
        try:
            optimizer = cls(learning_rate=learning_rate, **numbers)
        except (TypeError, ValueError) as error:
            message = (
                f"`rule` must get arguments that {cls.__name__} takes. Received: {rule!r} in "
                f"{where}: {error} {_hint_for_arguments(cls, rule)}"
            )
            raise type(error)(message.rstrip()) from error
    for name in [n for n in vars(optimizer) if n in LIFTED or n.endswith("weight_decay")]:
        setattr(optimizer, name, None)
    return optimizer


def check_rule(rule: RuleSpec, where: str) -> None:
    """Makes a rule to check that its class takes its arguments, schedules among them.

    Raises:
        ValueError: If an argument is out of range, or if a schedule drives nothing.
        TypeError: If an argument has the wrong type, or is a schedule but must be a number.
    """
    parameters = parameters_of(cls := rule_class(rule, where))
    schedules = fields.scheduled(rule)
    for share in fields.SHARES if schedules else (0.0,):
        try:
            make_rule(rule, 0.0, where, share)
            if compat.is_keras_own(cls):
                _check_numbers_of_keras(fields.with_numbers(rule, share), parameters, where)
        except ValueError as error:
            if not share:
                raise
            raise ValueError(
                "A schedule must stay in the range of what it drives. Received: "
                f"{', '.join(schedules)} in {where}, at {share:.0%} of its length: {error}"
            ) from error
    fields.check_fields(rule, lambda: make_rule(rule, 0.0, where), parameters, where)


def _check_numbers_of_keras(
    arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], where: str
) -> None:
    """Refuses numbers that Keras' own rules accept without a word, but cannot train with."""
    for name, value in arguments.items():
        default = parameters[name].default if name in parameters else None
        # The rate is the group's, which may be a schedule.
        if (
            name == "learning_rate"
            or value is None
            or isinstance(default, bool)
            or not isinstance(default, (int, float))
        ):
            continue
        if name == "momentum":
            check_share(name, value, where=where)
        elif name == "rho" or ("beta" in name.split("_") and not name.endswith("decay")):
            check_fraction(name, value, where=where)
        elif name.startswith("epsilon"):
            check_number(name, value, where=where)
        else:
            check_finite(name, value, where=where)


def check_variables(rule: RuleSpec | None, variables: Sequence[Any], where: str) -> None:
    """Refuses variables that a rule cannot move.

    A rule that takes only some shapes has a class method `check_shapes(shapes, where)`.

    Args:
        rule: The rule of a group.
        variables: The planned variables of the group.
        where: The group, for the error.

    Raises:
        ValueError: If there is such a variable.
    """
    if rule is None:
        return
    for variable in variables:
        if variable.dtype.startswith("complex"):
            raise ValueError(
                "A variable that trains must hold real numbers: norms, moments and averages are "
                f"of real gradients. Received: {variable.path} of dtype {variable.dtype} in "
                f"{where}, whose rule is {rule.label!r}. Freeze it, or hold its real and imaginary "
                "parts in two variables."
            )
    check = getattr(rule_class(rule, where), "check_shapes", None)
    if check is not None:
        check([(variable.path, variable.shape) for variable in variables], where)


def rule_of(instance: Any) -> RuleSpec:
    """Returns the algorithm of an optimizer, built or not, as a rule without a rate.

    Decay, clipping and options that only the whole optimizer can have are left out.
    """
    config = config_of(instance)
    arguments = explicit_arguments(config, instance)
    outside = {"learning_rate", *LIFTED, *WHOLE_ONLY}
    return RuleSpec(
        type_of(instance),
        {name: value for name, value in arguments.items() if not name.endswith("weight_decay")},
        {name: value for name, value in config.items() if name not in outside},
    )


def config_of(instance: Any) -> dict[str, Any]:
    """Returns the config of an optimizer."""
    with warnings.catch_warnings():
        # A function as rate warns in its config, but the rate is taken from the instance itself.
        warnings.simplefilter("ignore")
        return dict(instance.get_config())


def explicit_arguments(config: dict[str, Any], instance: Any) -> dict[str, Any]:
    """Returns the arguments in `config` that differ from the class' defaults."""
    parameters = parameters_of(type_of(instance))
    hidden = {"name", "learning_rate", *LIFTED, *WHOLE_ONLY}
    return {
        name: value
        for name, value in config.items()
        if name in parameters and name not in hidden and parameters[name].default != value
    }


def parameters_of(cls: Any) -> dict[str, inspect.Parameter]:
    """Returns the constructor's parameters; on torch, Keras' `__new__` hides them."""
    parameters = dict(inspect.signature(cls.__init__).parameters)
    parameters.pop("self", None)
    return parameters


def _hint_for_arguments(cls: type, rule: RuleSpec) -> str:
    known = list(parameters_of(cls))
    hints = [
        f"`{name}` is not one of them; did you mean `{near[0]}`?"
        for name in rule.arguments
        if name not in known and (near := difflib.get_close_matches(name, known, n=1))
    ]
    return " ".join(hints)
