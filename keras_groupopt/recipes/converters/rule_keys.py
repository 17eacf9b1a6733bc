"""The keys of torch's parameter groups, and the arguments of a rule that they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keras_groupopt.base import text
from keras_groupopt.base.checks import check_number, check_scalar
from keras_groupopt.plan.rule_spec import LIFTED, WHOLE_ONLY, RuleSpec
from keras_groupopt.rules.making import parameters_of
from keras_groupopt.rules.registry import rule_class
from keras_groupopt.selectors import Selector

_ABOUT_GROUPS = ("lr", "lr_scale", "weight_decay", "decoupled_weight_decay")
# Options for speed, or copies of other options.
_IGNORED = ("capturable", "differentiable", "foreach", "fused", "initial_lr", "param_names")
_MUST_BE_OFF = {
    "dampening": "Keras has no counterpart.",
    "lr_decay": "Pass a schedule as the optimizer's `lr`: "
    "`keras.optimizers.schedules.InverseTimeDecay`.",
    "maximize": "Negate the loss.",
}
_OURS = {"epsilon": "eps", "learning_rate": "lr", "learning_rate_ratio": "lr_scale"}


class _TorchRule(NamedTuple):
    """How torch's optimizer of the same algorithm differs.

    Args:
        defaults: Its default arguments.
        couples_decay: Whether it adds the decay to the gradient, so that it enters the state.
        eps_outside_root: Whether it adds epsilon to the root of the mean square, and Keras to the
            mean square itself.
        names: Our names of arguments with other names.
    """

    defaults: Mapping[str, Any] = {}
    couples_decay: bool = True
    eps_outside_root: bool = False
    names: Mapping[str, str] = {"eps": "epsilon"}


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_TORCH_RULES = {
    "adadelta": _TorchRule({"lr": 1.0, "rho": 0.9, "eps": 1e-6}),
    "adagrad": _TorchRule(
        {"lr": 1e-2, "initial_accumulator_value": 0.0, "eps": 1e-10}, eps_outside_root=True
    ),
    "adam": _TorchRule(_ADAM),
    "adamax": _TorchRule({**_ADAM, "lr": 2e-3}),
    "adamw": _TorchRule({**_ADAM, "weight_decay": 1e-2}, couples_decay=False),
    "nadam": _TorchRule(),
    "nadamw": _TorchRule({**_ADAM, "lr": 2e-3}, couples_decay=False),
    "radam": _TorchRule(_ADAM),
    "rmsprop": _TorchRule(
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8},
        eps_outside_root=True,
        names={"eps": "epsilon", "alpha": "rho"},
    ),
    "sgd": _TorchRule({"lr": 1e-3}),
}


class RuleKeys:
    """The keys that a rule's groups may have, and the arguments they become.

    Args:
        rule: The rule.
        where: The caller's name, for errors.
    """

    def __init__(self, rule: RuleSpec, where: str) -> None:
        hidden = {"kwargs", "learning_rate", "name", *LIFTED, *WHOLE_ONLY}
        parameters = parameters_of(rule_class(rule, where))
        names = [n for n in parameters if n not in hidden and not n.startswith("ema_")]
        self._given = rule
        self._torch = _TORCH_RULES.get(rule.label, _TorchRule(couples_decay=False))
        # torch's default of 0 is an int, which Keras' SGD refuses.
        self._floats = {name for name in names if isinstance(parameters[name].default, float)}
        self._betas = [name for name in names if name.startswith("beta_") and name[5:].isdigit()]
        keys = {name: key for key, name in self._torch.names.items()}
        self._others = {keys.get(name, name): name for name in names if name not in self._betas}
        self._about_rule = [*(["betas"] if self._betas else []), *self._others]

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The defaults of torch's optimizer."""
        return self._torch.defaults

    def check(self, entry: Mapping[str, Any], where: str, others: Sequence[str]) -> None:
        """Checks that each key is known and has a counterpart.

        Raises:
            ValueError: If one is unknown, or must be off and is not.
        """
        known = [*_ABOUT_GROUPS, *self._about_rule, *others]
        for key, value in entry.items():
            if key in _MUST_BE_OFF and value:
                raise ValueError(
                    f"`{key}` must not be set. Received: {key}={value!r} in {where}. "
                    f"{_MUST_BE_OFF[key]}"
                )
            if key in known or key in _IGNORED or key in _MUST_BE_OFF:
                continue
            meant = "betas" if key in self._betas else _OURS.get(key, key)
            hint = text.nearest(meant, known, "Did you mean `{}`? ")
            raise ValueError(
                f"Each key must be an argument of {self._given.label} or its groups. Received: "
                f"{key}={value!r} in {where}. {hint}The keys are: {', '.join(known)}."
            )

    def group_arguments(
        self, name: str, entry: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the entry of a group as arguments of `Group`, without those for its rate."""
        where, merged = f'group "{name}"', {**defaults, **entry}
        found: dict[str, Any] = {}
        if self._arguments(merged) != self._arguments(defaults):
            found["rule"] = self.rule(merged)
        decay = self.decay(merged, where)
        if decay != self.decay(defaults, where, checked=False):
            found["weight_decay"] = decay
        return found

    def rule(self, entry: Mapping[str, Any]) -> RuleSpec:
        """Returns the rule with the arguments of an entry."""
        return dataclasses.replace(self._given, arguments=self._arguments(entry))

    def _arguments(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: entry[key] for key, name in self._others.items() if key in entry}
        for name in self._floats & set(found):
            if isinstance(found[name], int):
                found[name] = float(found[name])
        # A centred mean square may round to below zero, so it keeps the larger epsilon.
        if self._torch.eps_outside_root and "epsilon" in found and not entry.get("centered"):
            found["epsilon"] = check_number("eps", found["epsilon"], where="param_groups") ** 2
        if "betas" in entry and self._betas:
            betas = as_list(entry["betas"])
            if len(betas) != len(self._betas):
                raise ValueError(
                    f"`betas` must be {len(self._betas)} numbers for {self._given.label}. "
                    f"Received: betas={entry['betas']!r}."
                )
            found |= zip(self._betas, betas, strict=True)
        return {**found, **self._given.arguments}

    def decay(self, entry: Mapping[str, Any], where: str, checked: bool = True) -> Any:
        """Returns the decay, or 0.

        Raises:
            ValueError: If the decay enters the rule's state in torch.
        """
        decay = check_scalar("weight_decay", entry.get("weight_decay"), where=where) or 0.0
        label = self._given.label
        coupled = not entry.get("decoupled_weight_decay", not self._torch.couples_decay)
        plain = label == "sgd" and not self._arguments(entry).get("momentum")
        if checked and decay and coupled and not plain:
            raise ValueError(
                f"`weight_decay` must be decoupled. Received: weight_decay={decay!r} of {label} in "
                f"{where}. torch adds it to the gradient, so it enters the rule's state. Set "
                "`decoupled_weight_decay=True` to decay the weights themselves, or give the layers "
                f"the regularizer `keras.regularizers.L2({decay!r} / 2)`."
            )
        return decay


def as_list(value: Any) -> list[Any]:
    """Returns an iterable as a list, and a single parameter as a list of it."""
    single = isinstance(value, (str, Mapping, Selector)) or hasattr(value, "shape")
    if single or hasattr(value, "trainable_variables") or not isinstance(value, Iterable):
        return [value]
    return list(value)
