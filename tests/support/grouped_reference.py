"""The whole optimizer once more, in NumPy and float64: what one step of all groups should do.

Written from the meanings of decay and clipping, with the rules of `references.py`. What it does
not re-derive:

* which variable belongs to which group, and which are decayed: the caller says so;
* layer paths, plans, configurations, checkpoints;
* the gradients, the loss scale, accumulation and the reduction over replicas: it takes the mean
  gradient of the whole batch, dense, with the repeated rows of an embedding summed;
* averages of the weights, and steps skipped for a gradient that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from references import SGD, Array, Rule, decayed, norm


@dataclass(frozen=True)
class ReferenceGroup:
    """What `grouped_step` needs to know of a group.

    Numbers may be functions of the optimizer step, counted from 0, as schedules are.

    Args:
        variables: Names of the group's variables.
        rule: Makes the rule of one variable.
        learning_rate_ratio: Factor on the base rate, or on the group's own curve.
        learning_rate: The group's own curve, instead of the base.
        weight_decay: λ.
        anchor: Array per variable; what is missing is pulled toward zero.
        decayed: Names of those that are decayed; `None`: all.
        clipnorm: Limit on the norm of each gradient.
        global_clipnorm: Limit on the norm of the group's gradients together.
        clipvalue: Limit on the size of each value of the gradients.
        frozen: Nothing happens to the group.
    """

    variables: Sequence[str]
    rule: Callable[[], Rule] = SGD
    learning_rate_ratio: float | Callable[[int], float] = 1.0
    learning_rate: Callable[[int], float] | None = None
    weight_decay: float | Callable[[int], float] = 0.0
    anchor: Mapping[str, Array] | None = None
    decayed: Collection[str] | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None
    frozen: bool = False


def make_rules(groups: Sequence[ReferenceGroup]) -> dict[str, Rule]:
    """One rule per variable: the state that `grouped_step` carries."""
    return {name: group.rule() for group in groups for name in group.variables}


def grouped_step(
    weights: Mapping[str, Array],
    gradients: Mapping[str, Array | None],
    groups: Sequence[ReferenceGroup],
    rules: Mapping[str, Rule],
    step: int,
    learning_rate: float | Callable[[int], float],
    global_clipnorm: float | None = None,
    constraints: Mapping[str, Callable[[Array], Array]] | None = None,
) -> dict[str, Array]:
    """One optimizer step of all groups.

    Each group's own clipping, then one norm over the gradients of all groups. Then per variable,
    at η = base(step) · ratio(step): decay toward the anchor, the rule, the constraint. The rule is
    given the decayed weights, as in Keras; only rules that read the weights (LAMB, Adafactor, Ftrl)
    can tell. A variable that is frozen or has no gradient counts in no norm, does not move and
    does not decay.

    Args:
        weights: Array per variable name.
        gradients: Gradient or `None` per variable name.
        groups: The groups; each variable is in one of them.
        rules: From `make_rules`; changed in place.
        step: Optimizer steps made so far, the argument of schedules.
        learning_rate: The base rate.
        global_clipnorm: Limit on the norm of all gradients together.
        constraints: Function per name of a constrained variable.

    Returns:
        The new weights.
    """
    present: dict[str, Array] = {}
    for group in groups:
        if not group.frozen:
            found = {n: gradients[n] for n in group.variables if gradients[n] is not None}
            present.update(_clipped_by_group(group, found))
    if global_clipnorm is not None:
        present = dict(zip(present, clipped(global_clipnorm, *present.values()), strict=True))

    result = {name: np.array(w, "float64") for name, w in weights.items()}
    for group in groups:
        curve = learning_rate if group.learning_rate is None else group.learning_rate
        rate = _at(curve, step) * _at(group.learning_rate_ratio, step)
        strength = _at(group.weight_decay, step)
        for name in () if group.frozen else group.variables:
            w, g = result[name], present.get(name)
            if g is not None and (group.decayed is None or name in group.decayed):
                w = decayed(w, rate, strength, (group.anchor or {}).get(name, 0.0))
            w = rules[name].step(w, g, rate)
            if g is not None and constraints and name in constraints:
                w = constraints[name](w)
            result[name] = w
    return result


def clipped(limit: float, *arrays: Array) -> list[Array]:
    """The arrays, shortened together to a length of at most `limit`."""
    length = norm(*arrays)
    scale = min(1.0, limit / length) if length > 0 else 1.0
    return [np.asarray(a, "float64") * scale for a in arrays]


def _clipped_by_group(group: ReferenceGroup, gradients: dict[str, Array]) -> dict[str, Array]:
    limits = (group.clipnorm, group.global_clipnorm, group.clipvalue)
    assert sum(limit is not None for limit in limits) <= 1, "Keras allows one kind of clipping"
    if group.clipnorm is not None:
        return {n: clipped(group.clipnorm, g)[0] for n, g in gradients.items()}
    if group.global_clipnorm is not None:
        together = clipped(group.global_clipnorm, *gradients.values())
        return dict(zip(gradients, together, strict=True))
    if group.clipvalue is not None:
        return {n: np.clip(g, -group.clipvalue, group.clipvalue) for n, g in gradients.items()}
    return {n: np.asarray(g, "float64") for n, g in gradients.items()}


def _at(value: float | Callable[[int], float], step: int) -> float:
    return float(value(step) if callable(value) else value)
