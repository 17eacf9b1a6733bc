"""Loads the state of a torch optimizer, as plain arrays, into a built optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt.base import text
from keras_groupopt.base.checks import wrong_type
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.recipes.converters import weight_axes
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.built_variable import BuiltVariable

_MOMENTS = {"exp_avg": "momentums", "exp_avg_sq": "velocities"}

# For each rule: torch's name of a state, and the slot for it.
_SLOTS: dict[str, dict[str, str]] = {
    "adadelta": {"square_avg": "accumulated_grads", "acc_delta": "accumulated_delta_vars"},
    "adagrad": {"sum": "accumulators"},
    "adam": {**_MOMENTS, "max_exp_avg_sq": "velocity_hats"},
    "adamw": {**_MOMENTS, "max_exp_avg_sq": "velocity_hats"},
    "adamax": {"exp_avg": "m", "exp_inf": "u"},
    "radam": _MOMENTS,
    "rmsprop": {
        "square_avg": "velocities",
        "momentum_buffer": "momentums",
        "grad_avg": "average_gradients",
    },
    "sgd": {"momentum_buffer": "momentums"},
}
# torch stores a sum of gradients, Keras a sum of updates, which contains the rate as a factor.
_TIMES_RATE = {("sgd", "momentum_buffer"): -1.0, ("rmsprop", "momentum_buffer"): 1.0}


def load_torch_state(
    optimizer: Any,
    state_dict: Mapping[str, Any],
    paths: Mapping[str, str | None] | Sequence[str | None],
    *,
    transpose: bool | Mapping[str, bool] | None = None,
    strict: bool = True,
) -> None:
    """Gives a built optimizer the moments and the step of a torch optimizer.

    Rates, betas, epsilon (1e-8 in torch, 1e-7 in Keras) and decay remain those of `optimizer`.
    Declare them as in torch, with `exclude_from_decay=()` if biases decayed. Keras stores the
    momentum of SGD and RMSprop times the rate, for which the current rate of the group is used.
    Keras' Adam adds epsilon before the bias correction, torch after it, so the next steps agree if
    epsilon is small compared with √v. torch need not be installed.

    Args:
        optimizer: A built `GroupedOptimizer`, also inside a `LossScaleOptimizer`.
        state_dict: The result of the torch optimizer's `state_dict()`. Its tensors may be torch
            tensors on any device or NumPy arrays.
        paths: The layer path of each parameter. `None` leaves the parameter out. A dict from
            parameter names needs a torch optimizer made from `named_parameters()`. A list is in the
            order of the torch optimizer's parameters.
        transpose: Whether to transpose weights, such as square kernels, that fit with and without.
            torch stores Linear as (out, in) and convolutions as (out, in, height, width). A dict
            from layer path to bool decides for each weight. Weights that fit in one order of axes
            need nothing. Default: none is decided.
        strict: Whether every variable of `optimizer` must get its state. Otherwise the other
            variables keep their state. Default: True.

    Raises:
        ValueError: If a parameter, variable, state or shape cannot be mapped, an order of axes is
            not decided, or parameters are at different steps. The message lists them, and nothing
            is assigned.
        TypeError: If `optimizer` is not a `GroupedOptimizer`.

    Example:
    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer(model=model, rule="adam")
    >>> optimizer.build(model.trainable_variables)
    >>> def saved(shape):
    ...     return {"step": 7, "exp_avg": np.ones(shape), "exp_avg_sq": np.ones(shape)}
    >>> state = {"state": {0: saved((2, 3)), 1: saved((2,))}, "param_groups": [{"params": [0, 1]}]}
    >>> kgo.load_torch_state(optimizer, state, ["head/kernel", "head/bias"])
    >>> int(optimizer.iterations)
    7
    """
    optimizer = unwrap(optimizer)
    if not isinstance(optimizer, GroupedOptimizer):
        raise wrong_type("optimizer", optimizer, "a GroupedOptimizer")
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        held = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else "no dict"
        raise ValueError(
            "`state_dict` must be the result of a torch optimizer's `state_dict()`, with `state` "
            f"and `param_groups`. Received: {held[:200]}. Pass the "
            "optimizer's entry of a checkpoint."
        )
    built = optimizer._require_built("load_torch_state")
    targets = {own.path: (part, own) for part in built.moving_groups for own in part.members}
    decided = transpose if isinstance(transpose, Mapping) else dict.fromkeys(targets, transpose)
    loading = _Loading(targets, decided)
    states = {str(key): value for key, value in state_dict["state"].items()}
    for number, path in _paths_by_number(state_dict, paths).items():
        if path is not None:
            loading.take(path, states.get(str(number), {}))
    if strict:
        loading.wrong += [
            f"{path}: no parameter is mapped to it" for path in targets if path not in loading.seen
        ]
    if len(set(loading.steps.values())) > 1:
        first = {step: path for path, step in reversed(loading.steps.items())}
        loading.wrong.append(
            "parameters at different steps: "
            + ", ".join(f"{path} at {step}" for step, path in sorted(first.items()))
        )
    if loading.wrong:
        raise ValueError(
            "Every torch state must have one place in the optimizer. No state was loaded. "
            f"Received:\n  {text.first_lines(loading.wrong)}"
        )
    for step in list(loading.steps.values())[:1]:
        optimizer.iterations.assign(step)
        for part in {id(part): part for part in loading.seen.values()}.values():
            part.rule.iterations.assign(step)
    rates = optimizer.learning_rates
    for name, variable, value, sign in loading.found:
        rate = 1.0 if sign is None else sign * float(keras.ops.convert_to_numpy(rates[name]))
        variable.assign(value * rate)


def _paths_by_number(state_dict: Mapping[str, Any], paths: Any) -> dict[Any, str | None]:
    """Returns the layer path of each parameter number.

    Raises:
        ValueError: If names are unknown, or counts differ.
    """
    groups = state_dict["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if isinstance(paths, Mapping):
        names = [name for group in groups for name in group.get("param_names", ())]
        if len(names) != len(numbers):
            raise ValueError(
                "`paths` as a dict needs the parameter names in `state_dict`, which has no "
                "`param_names`. Make the torch optimizer from `module.named_parameters()`, or pass "
                "the list `[paths[name] for name, _ in module.named_parameters()]`, in the order "
                "of the optimizer's parameters."
            )
        missing = [f"{name}: not in `paths`" for name in names if name not in paths]
        missing += [f"{name}: in `paths`, but no parameter" for name in paths if name not in names]
        if missing:
            raise ValueError(
                "`paths` must name every parameter of the torch optimizer; `None` leaves one out. "
                f"No state was loaded. Received:\n  {text.first_lines(missing)}"
            )
        paths = [paths[name] for name in names]
    if len(paths) != len(numbers):
        raise ValueError(
            "`paths` must have one entry per parameter of the torch optimizer; `None` leaves one "
            f"out. Received: {len(paths)} paths for {len(numbers)} parameters."
        )
    return dict(zip(numbers, paths, strict=True))


class _Loading:
    """The states that are to be assigned, and the errors.

    Args:
        targets: The group and the variable at each path.
        transpose: Whether to transpose weights, by path.
    """

    def __init__(
        self,
        targets: Mapping[str, tuple[BuiltGroup, BuiltVariable]],
        transpose: Mapping[str, bool | None],
    ) -> None:
        self.targets = targets
        self.transpose = transpose
        # The groups of the paths that have a parameter.
        self.seen: dict[str, BuiltGroup] = {}
        self.steps: dict[str, int] = {}
        # Group, state variable, value, and the sign of the rate that multiplies the value.
        self.found: list[tuple[str, Any, np.ndarray, float | None]] = []
        self.wrong = [
            f"{path}: in `transpose`,{self._nearest(path)}"
            for path in transpose
            if path not in targets
        ]

    def take(self, path: str, state: Mapping[str, Any]) -> None:
        """Adds the state of the parameter at `path`."""
        if path not in self.targets:
            self.wrong.append(f"{path}: mapped to,{self._nearest(path)}")
            return
        if path in self.seen:
            self.wrong.append(f"{path}: two parameters are mapped to it")
            return
        part, own = self.targets[path]
        self.seen[path] = part
        rule, slots = str(part.planned.group.rule.label), own.slots
        if rule not in _SLOTS:
            self.wrong.append(
                f"{path}: the rule {rule} has no known counterpart in torch; these have "
                f"one: {', '.join(_SLOTS)}"
            )
            return
        names = _SLOTS[rule]
        for name, value in state.items():
            if name == "step":
                self.steps[path] = int(_as_array(value))
            elif value is not None and slots.get(names.get(name, "")) is None:
                self.wrong.append(f"{path}: {name} has no slot in {rule}")
        wanted = {slot: name for name, slot in names.items() if slot in slots}
        for slot in slots:
            value = state.get(wanted.get(slot, ""))
            if value is None:
                self.wrong.append(
                    f"{path}: no state for {slot} of {rule} "
                    "(torch has none for parameters without gradients: pass `None` as their "
                    "path and `strict=False`)"
                )
                continue
            name, value = wanted[slot], _as_array(value)
            place = f"{path}: {name} of shape {list(value.shape)}"
            try:
                fitting = weight_axes.to_keras(
                    value, tuple(slots[slot].shape), self.transpose.get(path)
                )
            except ValueError:
                self.wrong.append(f"{place} fits transposed and not transposed; set `transpose`")
                continue
            if fitting is None:
                self.wrong.append(f"{place} does not fit {list(slots[slot].shape)}")
            else:
                sign = _TIMES_RATE.get((rule, name))
                self.found.append((part.name, slots[slot], fitting, sign))

    def _nearest(self, path: str) -> str:
        return " but no variable that moves" + text.nearest(path, self.targets, " (nearest: {})")


def _as_array(value: Any) -> np.ndarray:
    """Returns an array or a torch tensor as a NumPy array, without importing torch."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = value.float() if "bfloat16" in str(value.dtype) else value
        value = value.numpy()
    return np.asarray(value)
