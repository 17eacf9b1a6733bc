"""A converter from torch's parameter groups, a list of dicts, to a `GroupedOptimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_groupopt import selectors
from keras_groupopt.base.checks import check_number, is_schedule
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.plan.group import Group
from keras_groupopt.plan.rule_spec import as_rule
from keras_groupopt.recipes.converters.rule_keys import RuleKeys, as_list
from keras_groupopt.selectors import Selector, as_selector, layer_paths

# Arguments of `GroupedOptimizer` that come from the groups.
_SET_HERE = {"self", "groups", "model", "rule"}
_SET_HERE |= {"learning_rate", "weight_decay", "exclude_from_decay"}


def from_param_groups(
    param_groups: Any, model: Any, rule: Any = "adamw", **arguments: Any
) -> GroupedOptimizer:
    """Turns a list of parameter groups for a torch optimizer into a `GroupedOptimizer`.

    `torch.optim.AdamW(param_groups, lr=1e-3, weight_decay=0.05)` becomes
    `kgo.from_param_groups(param_groups, model, "adamw", lr=1e-3, weight_decay=0.05)`. The defaults
    are those of torch, such as an `eps` of 1e-8 and AdamW's decay of 0.01.

    | torch | here |
    | --- | --- |
    | `lr` of the optimizer | `learning_rate`, the base |
    | `lr` of a group | its `learning_rate_ratio`: the `lr` over the base |
    | `lr_scale` of a group (timm) | its `learning_rate_ratio`; with `lr` a further factor |
    | `weight_decay` | `weight_decay` of all variables: `exclude_from_decay=()` |
    | `betas`, `eps`, RMSprop's `alpha` | `beta_1`, `beta_2`; `epsilon`; `rho` |
    | `eps` of Adagrad and RMSprop | its square: Keras adds `epsilon` to the mean square itself |
    | `momentum`, `nesterov`, `amsgrad`, `centered`, … | the rule's argument of that name |
    | `name` | the group's name, else `group_0`, `group_1`, … |
    | `foreach`, `fused`, `capturable`, `differentiable` | nothing, since they affect only speed |
    | `initial_lr`, `param_names` | nothing |

    Except in AdamW, torch adds the decay to the gradient, while here it never enters a moment. For
    SGD without momentum that is the same. For other rules a decay needs
    `decoupled_weight_decay=True`, which selects the decay of this package. While the rate changes,
    SGD's momentum contains earlier rates, as in Keras. Keras adds `eps` in another place (under the
    root in RMSprop and Adagrad, before the bias correction in Adam), which matters if gradients are
    as small as `eps`.

    Args:
        param_groups: Dicts with `params` and the keys above, or a list of parameters for one group.
            Parameters are Keras variables, layers, layer paths or selectors. On the torch backend
            they may also be the parameters of the model, so the `param_groups` of a torch optimizer
            work. A group without parameters is left out.
        model: The model to train.
        rule: The algorithm: a name, a class, or `kgo.rule(...)`. Default: `"adamw"`.
        arguments: The arguments of the torch optimizer, as in the table, for groups that leave them
            out. `lr` may be a schedule. Without `lr` the base is the largest `lr` if each group has
            one, else torch's default. Arguments of `GroupedOptimizer` for all groups, such as
            `global_clipnorm`, are accepted too. The default of `unclaimed` is `"error"`. torch does
            not train variables that are in no group, which is `"freeze"`.

    Returns:
        A `GroupedOptimizer`, not built. Compile the model with it. To load a torch optimizer's
        state use `kgo.load_torch_state`.

    Raises:
        TypeError: If a group or a parameter is of the wrong type.
        ValueError: If a key is unknown, `dampening`, `lr_decay` or `maximize` is set, a decay
            would enter moments, a tensor is not a weight of `model`, or the groups do not fit it.

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
            f"rule={rule!r}. Pass its numbers as in torch: "
            '`kgo.from_param_groups(param_groups, model, "adamw", lr=1e-3)`.'
        )
    keys = RuleKeys(chosen, where)
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
    defaults = {**keys.defaults, **_largest_rate(entries.values()), **arguments}
    if "lr" not in defaults:
        raise ValueError(f"`lr` must be given, since torch has no default for {chosen.label}.")
    members = _Members(model)
    groups = []
    for name, entry in entries.items():
        selector = members.selector(entry.get("params"), f'group "{name}"')
        if selector is not None:
            rate = _rate(entry, defaults["lr"], f'group "{name}"')
            others = keys.group_arguments(name, entry, defaults)
            groups.append(Group(name, selector, **rate, **others))
    if not groups:
        raise ValueError(
            f"`param_groups` must have parameters. Received: {len(entries)} groups without any."
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
    # Resolve the plan now, so that groups that do not fit the model raise an error here.
    assert optimizer.plan is not None
    return optimizer


def _entries(param_groups: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the dicts by the names of their groups."""
    if hasattr(param_groups, "param_groups"):
        raise TypeError(
            "`param_groups` must be a list of dicts. Received: an optimizer, "
            f"{type(param_groups).__name__}. Pass its `param_groups`."
        )
    items = as_list(param_groups)
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
    """Returns the largest rate as the base, if each group has a number as its rate."""
    rates = [entry.get("lr") for entry in entries]
    if any(rate is None or is_schedule(rate) for rate in rates):
        return {}
    return {"lr": max(check_number("lr", rate, where="param_groups") for rate in rates)}


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
            f"`kgo.constant({rate!r})`, which does not follow the schedule."
        )
    if scale is not None:
        rate *= check_number("lr_scale", scale, where=where)
    return {} if rate == base else {"learning_rate": rate}


class _Members:
    """Turns `params` into selectors of a model's variables."""

    def __init__(self, model: Any) -> None:
        infos = layer_paths.describe_model(model).infos
        self._paths = {info.identity: info.path for info in infos}
        if keras.backend.backend() == "torch":
            # The parameter itself, since a copy is not trained.
            known = [variable for variable in model.variables if id(variable) in self._paths]
            self._paths |= {id(variable.value): self._paths[id(variable)] for variable in known}

    def selector(self, params: Any, where: str) -> Selector | None:
        """Returns the selector of a group, or `None` if it is empty.

        Raises:
            TypeError: If a parameter is of another type.
            ValueError: If a tensor is not a weight of the model.
        """
        if params is None:
            raise ValueError(f"`params` must be given. Received: {where} without it.")
        paths: list[str] = []
        rest: list[Any] = []
        for item in as_list(params):
            if id(item) in self._paths:
                paths.append(self._paths[id(item)])
            elif isinstance(item, keras.Variable):
                raise ValueError(
                    f"`params` must be weights of `model`. Received: {item.path} in {where}, which "
                    "is not."
                )
            elif hasattr(item, "shape"):
                raise ValueError(
                    "`params` must be Keras variables, layers, layer paths or selectors; on the "
                    "torch backend also parameters of `model`. Received: a tensor of shape "
                    f"{list(item.shape)} in {where} that is not a weight of `model`, on the "
                    f"{keras.backend.backend()} backend. Pass the variable or its layer path."
                )
            else:
                rest.append(item)
        parts = [selectors.variables(*dict.fromkeys(paths))] if paths else []
        parts += [as_selector(rest, f"params of {where}")] if rest else []
        return as_selector(parts) if parts else None
