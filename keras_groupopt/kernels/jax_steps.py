"""Steps of whole lists on JAX: a rule's own update, traced once for all variables of a kind.

Most of what a step costs before it runs is tracing the same operations for one variable after
another. An inner compiled function holds those of one, and is called for each; XLA puts it in the
place of the calls, so the numbers are those of the rule and a compiled step is no slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_groupopt import _compat
from keras_groupopt.kernels import generic
from keras_groupopt.kernels.list_step import FusedStep, ListStep

Tensor = Any


def fused_step(kind: str) -> FusedStep | None:
    """Returns the step of a rule on a list of variables, by its name."""
    return _step


def are_fusible(gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[bool]:
    """Returns for each gradient and its variable whether a fused step takes them.

    Only where a step is being traced: elsewhere each kind of variables would be compiled by itself.
    """
    return [isinstance(gradient, jax.core.Tracer) for gradient in gradients]


def _step(step: ListStep) -> None:
    values = _compat.values_of(step.variables)
    slots = list(zip(*map(_compat.values_of, step.slots), strict=True)) or [()] * len(values)
    # The step of a rule may depend on its counter, which the scope within would look up as well.
    scalars = (step.rate, step.scale, step.decay, step.rule.iterations.value)
    for place, (variable, value) in enumerate(zip(step.variables, values, strict=True)):
        gradient, anchor = step.gradients[place], step.anchors[place]
        decayed = step.decay is not None and step.decayed[place]
        pulled = anchor.value if decayed and anchor is not None else None
        received = (gradient, value, slots[place], pulled)
        kind = (decayed, *map(_kind_of, jax.tree.leaves(received)))
        if kind not in step.made:
            step.made[kind] = jax.jit(_update_of(step, place, decayed))
        moved, state = step.made[kind](*scalars, *received)
        variable.assign(moved)
        for slot, new in zip(step.slots, state, strict=True):
            slot[place].assign(new)


def _kind_of(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype


def _update_of(step: ListStep, place: int, decayed: bool) -> Callable[..., Any]:
    """Returns what a step does to one variable and all like it, as a function of values."""
    rule, variable, anchor = step.rule, step.variables[place], step.anchors[place]
    slots = [slot[place] for slot in step.slots]
    apart = getattr(rule, "apart", contextlib.nullcontext)

    def update(
        rate: Tensor,
        scale: Tensor | None,
        decay: Tensor | None,
        iterations: Tensor,
        gradient: Tensor,
        value: Tensor,
        state: Sequence[Tensor],
        pulled: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        mapping = [(rule.iterations, iterations), (variable, value)]
        mapping += zip(slots, state, strict=True)
        if pulled is not None:
            mapping.append((anchor, pulled))
        with _compat.ScopeWithin(mapping) as scope, apart():
            if decayed and pulled is None:
                generic.shrink([variable], decay)
            elif decayed:
                generic.pull([variable], [anchor], decay)
            if scale is not None:
                gradient = generic.scale([gradient], scale)[0]
            # Not what may stand in its place for a rule of several rates.
            type(rule).update_step(rule, gradient, variable, rate)
            return (
                scope.get_current_value(variable),
                [scope.get_current_value(slot) for slot in slots],
            )

    return update
