"""From the lists of dicts that torch's optimizers take to a `GroupedOptimizer`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_groupopt import selectors
from keras_groupopt.base.checks import check_number, check_scalar, is_schedule
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.plan.group import LIFTED, WHOLE_ONLY, Group, RuleSpec, as_rule
from keras_groupopt.rules.registry import rule_class
from keras_groupopt.selectors import Selector, as_selector, layer_paths

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
# What torch's optimizer of the same algorithm does where nothing is said.
_TORCH_DEFAULTS: dict[str, dict[str, Any]] = {
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6},
    "adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "adam": _ADAM,
    "adamax": {**_ADAM, "lr": 2e-3},
    "adamw": {**_ADAM, "weight_decay": 1e-2},
    "nadamw": {**_ADAM, "lr": 2e-3},
    "radam": _ADAM,
    "rmsprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8},
    "sgd": {"lr": 1e-3},
}
# torch adds the decay of these to the gradient, from where it enters their state.
_COUPLED = ("adadelta", "adagrad", "adam", "adamax", "nadam", "radam", "rmsprop", "sgd")
# RMSprop calls it rho in Keras.
_ALPHA = ("rmsprop", "rho")
# Keras adds epsilon to the mean square, torch to its root.
_BELOW_ROOT = ("adagrad", "rmsprop")
_ABOUT_GROUPS = ("lr", "lr_scale", "weight_decay", "decoupled_weight_decay")
# Speed, or a copy of what is said elsewhere.
_IGNORED = ("capturable", "differentiable", "foreach", "fused", "initial_lr", "param_names")
_MUST_BE_OFF = {
    "dampening": "There is no counterpart to it.",
    "lr_decay": "Give a schedule as the optimizer's `lr`: "
    "`keras.optimizers.schedules.InverseTimeDecay`.",
    "maximize": "Negate the loss.",
}
_OURS = {"epsilon": "eps", "learning_rate": "lr", "learning_rate_ratio": "lr_scale"}
_SET_HERE = (
    "self",
    "groups",
    "model",
    "rule",
    "learning_rate",
    "weight_decay",
    "exclude_from_decay",
)


def from_param_groups(
    param_groups: Any, model: Any, rule: Any = "adamw", **arguments: Any
) -> GroupedOptimizer:
    """Turns a list of parameter groups, as torch's optimizers take it, into a `GroupedOptimizer`.

    `torch.optim.AdamW(param_groups, lr=1e-3, weight_decay=0.05)` becomes
    `kgo.from_param_groups(param_groups, model, "adamw", lr=1e-3, weight_decay=0.05)`. What is said
    nowhere is as in torch, such as an `eps` of 1e-8 and AdamW's decay of 0.01.

    | torch | here |
    | --- | --- |
    | `lr` of the optimizer | `learning_rate`, the base |
    | `lr` of a group | its `learning_rate_ratio`: the `lr` over the base |
    | `lr_scale` of a group (timm) | its `learning_rate_ratio`; beside `lr` a factor more |
    | `weight_decay` | `weight_decay`, of all variables: `exclude_from_decay=()` |
    | `betas`, `eps`, RMSprop's `alpha` | `beta_1`, `beta_2`; `epsilon`; `rho` |
    | `eps` of Adagrad and RMSprop | its square: Keras adds `epsilon` to the mean square itself |
    | `momentum`, `nesterov`, `amsgrad`, `centered`, … | the rule's argument of that name |
    | `name` | the group's name, else `group_0`, `group_1`, … |
    | `foreach`, `fused`, `capturable`, `differentiable` | nothing: they are about speed |
    | `initial_lr`, `param_names` | nothing |

    torch adds the decay of all but AdamW to the gradient, and here it never enters a moment. For
    plain SGD that is the same; elsewhere a decay needs `decoupled_weight_decay=True`, which says
    that the decay of this package is meant. While the rate changes, SGD's momentum keeps earlier
    rates, as in Keras; and Keras adds `eps` in a place of its own (under the root in RMSprop and
    Adagrad, before the bias correction in Adam), which shows where gradients are as small.

    Args:
        param_groups: Dicts with `params` and the keys above; or a list of parameters, as one group.
            Parameters are Keras variables, layers, layer paths or selectors. On the torch backend
            also the parameters of the model themselves, and so `param_groups` of a torch optimizer
            of them. A group without parameters is left out.
        model: The model to train.
        rule: The algorithm: a name, a class, or `kgo.rule(...)`.
        arguments: torch's arguments of the optimizer, as in the table, for groups that do not say;
            `lr` may be a schedule. Without `lr` the base is the largest `lr`, if each group has
            one, else torch's default. Those of `GroupedOptimizer` for the whole, such as
            `global_clipnorm`, hold too. `unclaimed` is `"error"` unless given; torch leaves alone
            what is in no group, as does `"freeze"`.

    Returns:
        A `GroupedOptimizer`, not built. Compile the model with it. For a torch optimizer's state
        see `kgo.load_torch_state`.

    Raises:
        TypeError: If a group or a parameter is of the wrong type.
        ValueError: If a key is unknown, `dampening`, `lr_decay` or `maximize` is set, a decay
            would enter moments, a tensor is no weight of `model`, or the groups do not fit it.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.from_param_groups(
    ...     [{"params": model.get_layer("backbone").trainable_variables, "lr": 1e-4},
    ...      {"params": "head", "weight_decay": 0, "name": "head"}],
    ...     model, "adamw", lr=1e-3, weight_decay=0.05)
    >>> [(part.name, part.group.learning_rate_ratio) for part in optimizer.plan.groups]
    [('group_0', 0.1), ('head', 1.0)]
    """
    where = "from_param_groups"
    chosen = as_rule(rule, where=where)
    if chosen is None or chosen.is_instance:
        raise TypeError(
            "`rule` must be a name, a class or `kgo.rule(...)`. Received: "
            f"rule={rule!r}. Its numbers are given as torch takes them: "
            '`kgo.from_param_groups(param_groups, model, "adamw", lr=1e-3)`.'
        )
    keys = _Keys(chosen, where)
    of_whole = [
        name
        for name in inspect.signature(GroupedOptimizer.__init__).parameters
        if name not in _SET_HERE
    ]
    options = {name: arguments.pop(name) for name in of_whole if name in arguments}
    keys.check(arguments, where, of_whole)
    entries = _entries(param_groups)
    for name, entry in entries.items():
        keys.check(entry, f'group "{name}"', ["params", "name"])
    defaults = {
        **_TORCH_DEFAULTS.get(chosen.label, {}),
        **_largest_rate(entries.values()),
        **arguments,
    }
    if "lr" not in defaults:
        raise ValueError(
            f"`lr` must be given. Received: no lr; torch has no default for {chosen.label}."
        )
    members = _Members(model)
    groups = []
    for name, entry in entries.items():
        selector = members.selector(entry.get("params"), f'group "{name}"')
        if selector is not None:
            groups.append(Group(name, selector, **keys.group_arguments(name, entry, defaults)))
    if not groups:
        raise ValueError(
            "`param_groups` must have parameters. Received: "
            f"{len(entries)} groups, and no parameter in them."
        )
    optimizer = GroupedOptimizer(
        groups,
        model=model,
        rule=keys.rule(defaults),
        learning_rate=defaults["lr"],
        weight_decay=keys.decay(defaults, where) or None,
        exclude_from_decay=(),
        **{"unclaimed": "error", **options},
    )
    # Resolved now, so that what does not fit the model is said now.
    assert optimizer.plan is not None
    return optimizer


def _entries(param_groups: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the dicts by the names of their groups."""
    if hasattr(param_groups, "param_groups"):
        raise TypeError(
            "`param_groups` must be a list of dicts. Received: an optimizer, "
            f"{type(param_groups).__name__}. Pass its `param_groups`."
        )
    items = _as_list(param_groups)
    dicts = [item for item in items if isinstance(item, Mapping)]
    if not dicts:
        dicts = [{"params": items}]
    elif len(dicts) < len(items):
        raise TypeError(
            "`param_groups` must hold dicts, or parameters only. Received: "
            f"{len(dicts)} dicts among {len(items)} items."
        )
    found: dict[str, Mapping[str, Any]] = {}
    for index, entry in enumerate(dicts):
        name = entry.get("name", f"group_{index}")
        if not isinstance(name, str):
            raise TypeError(
                f"`name` of a group must be a string. Received: name={name!r} for group {index}."
            )
        if name in found:
            raise ValueError(
                f"`name` of a group must be unique. Received: name={name!r} twice. Rename one."
            )
        found[name] = entry
    return found


def _largest_rate(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the largest rate as the base, where each group has a number of its own."""
    rates = [entry.get("lr") for entry in entries]
    if any(rate is None or is_schedule(rate) for rate in rates):
        return {}
    return {"lr": max(check_number("lr", rate, where="param_groups") for rate in rates)}


class _Keys:
    """The keys that a rule's groups may have, and what they become."""

    def __init__(self, rule: RuleSpec, where: str) -> None:
        hidden = {"self", "kwargs", "learning_rate", "name", *LIFTED, *WHOLE_ONLY}
        parameters = inspect.signature(rule_class(rule, where).__init__).parameters
        names = [n for n in parameters if n not in hidden and not n.startswith("ema_")]
        self._given = rule
        # Keras' SGD refuses the 0 that is torch's default.
        self._floats = {name for name in names if isinstance(parameters[name].default, float)}
        self._betas = [name for name in names if name.startswith("beta_") and name[5:].isdigit()]
        self._others = {
            "eps" if name == "epsilon" else "alpha" if (rule.label, name) == _ALPHA else name: name
            for name in names
            if name not in self._betas
        }
        self._about_rule = [*(["betas"] if self._betas else []), *self._others]

    def check(self, entry: Mapping[str, Any], where: str, others: Sequence[str]) -> None:
        """Refuses unknown keys, and what has no counterpart.

        Raises:
            ValueError: If there is one.
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
            near = [_OURS[key]] if key in _OURS else difflib.get_close_matches(key, known, n=1)
            if key in self._betas:
                near = ["betas"]
            hint = f"Did you mean `{near[0]}`? " if near else ""
            raise ValueError(
                f"Each key must be one that {self._given.label} can take. Received: "
                f"{key}={value!r} in {where}. {hint}The keys are: {', '.join(known)}."
            )

    def group_arguments(
        self, name: str, entry: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns what a group says, as arguments of `Group`."""
        where, merged = f'group "{name}"', {**defaults, **entry}
        found = _rate(entry, defaults["lr"], where)
        if self._arguments(merged) != self._arguments(defaults):
            found["rule"] = self.rule(merged)
        decay = self.decay(merged, where)
        if decay != self.decay(defaults, where, checked=False):
            found["weight_decay"] = decay
        return found

    def rule(self, entry: Mapping[str, Any]) -> RuleSpec:
        """Returns the rule with an entry's numbers."""
        return dataclasses.replace(self._given, arguments=self._arguments(entry))

    def _arguments(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: entry[key] for key, name in self._others.items() if key in entry}
        for name in self._floats & set(found):
            if isinstance(found[name], int):
                found[name] = float(found[name])
        # What is centred may round to below zero: there the larger epsilon stays.
        if self._given.label in _BELOW_ROOT and "epsilon" in found and not entry.get("centered"):
            found["epsilon"] = check_number("eps", found["epsilon"], where="param_groups") ** 2
        if "betas" in entry and self._betas:
            betas = _as_list(entry["betas"])
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
            ValueError: If torch would bring it into moments.
        """
        decay = check_scalar("weight_decay", entry.get("weight_decay"), where=where) or 0.0
        label = self._given.label
        coupled = not entry.get("decoupled_weight_decay", label not in _COUPLED)
        plain = label == "sgd" and not self._arguments(entry).get("momentum")
        if checked and decay and coupled and not plain:
            raise ValueError(
                f"`weight_decay` must be decoupled. Received: weight_decay={decay!r} of {label} in "
                f"{where}, which torch adds to the gradient, from where it enters the rule's "
                "state. Set `decoupled_weight_decay=True` to decay the weights themselves, or give "
                f"the layers a regularizer of `keras.regularizers.L2({decay!r} / 2)`."
            )
        return decay


def _rate(entry: Mapping[str, Any], base: Any, where: str) -> dict[str, Any]:
    rate, scale = entry.get("lr"), entry.get("lr_scale")
    if rate is None or is_schedule(rate):
        found = {"learning_rate": rate, "learning_rate_ratio": scale}
        return {name: value for name, value in found.items() if value is not None}
    rate = check_number("lr", rate, where=where)
    if callable(base):
        raise ValueError(
            "`lr` of a group must not be a number beside a schedule. Received: "
            f"lr={rate!r} in {where}. Give `lr_scale`, its ratio to the schedule, or "
            f"`kgo.constant({rate!r})`, which does not follow it."
        )
    if scale is not None:
        rate *= check_number("lr_scale", scale, where=where)
    return {} if rate == base else {"learning_rate": rate}


class _Members:
    """From what stands in `params` to selectors of a model's variables."""

    def __init__(self, model: Any) -> None:
        infos = layer_paths.describe_model(model).infos
        by_identity = {id(variable): variable for variable in model.variables}
        self._paths: dict[int, str] = {}
        for info in infos:
            variable = by_identity.get(info.identity)
            self._paths[info.identity] = info.path
            if variable is not None and keras.backend.backend() == "torch":
                # The very parameter: a copy of it would be trained by nobody.
                self._paths[id(variable.value)] = info.path

    def selector(self, params: Any, where: str) -> Selector | None:
        """Returns the selector of a group, or `None` where it is empty.

        Raises:
            TypeError: If a parameter is nothing that names weights.
            ValueError: If a tensor is no weight of the model.
        """
        if params is None:
            raise ValueError(f"`params` must be given. Received: {where} without it.")
        paths: list[str] = []
        rest: list[Any] = []
        for item in _as_list(params):
            if id(item) in self._paths:
                paths.append(self._paths[id(item)])
            elif isinstance(item, keras.Variable):
                raise ValueError(
                    f"`params` must be weights of `model`. Received: {item.path} in {where}, which "
                    "is none."
                )
            elif hasattr(item, "shape"):
                raise ValueError(
                    "`params` must be Keras variables, layers, layer paths or selectors; on the "
                    "torch backend also parameters of `model`. Received: a tensor of shape "
                    f"{list(item.shape)} in {where} that is no weight of it, on the "
                    f"{keras.backend.backend()} backend. Name the variable or its layer path."
                )
            else:
                rest.append(item)
        parts = [selectors.variables(*dict.fromkeys(paths))] if paths else []
        parts += [as_selector(rest, f"params of {where}")] if rest else []
        return as_selector(parts) if parts else None


def _as_list(value: Any) -> list[Any]:
    """Returns an iterable as a list, and a single parameter as a list of it."""
    single = isinstance(value, (str, Mapping, Selector)) or hasattr(value, "shape")
    if single or hasattr(value, "trainable_variables") or not isinstance(value, Iterable):
        return [value]
    return list(value)
