"""Conditionals on JAX, where a branch must take and return every value it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

Tensor = Any


def known(predicate: Tensor) -> bool | None:
    """Returns a boolean scalar's value, or `None` while a step is being compiled."""
    return None if isinstance(predicate, jax.core.Tracer) else bool(predicate)


def conditional(predicate: Tensor, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body` if `predicate` holds, within a step that is being compiled.

    The branch that is not taken returns what it was given, which XLA leaves in place.
    """

    def taken(values: list[Tensor]) -> list[Tensor]:
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            body()
        return [scope.get_current_value(variable) for variable in variables]

    values = [variable.value for variable in variables]
    results = jax.lax.cond(predicate, taken, lambda values: values, values)
    for variable, result in zip(variables, results, strict=True):
        variable.assign(result)
