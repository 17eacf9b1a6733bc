"""Variables: their values, paths and layouts over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.backend.common import stateless_scope
from keras.src.backend.common.variables import get_autocast_scope


def layout_of(variable: Any) -> Any:
    """Returns how a variable is laid out over devices, or `None`.

    `add_variable_from_reference` copies the layout, but only for slots of the variable's dtype.
    """
    return getattr(variable, "_layout", None)


def set_layout(variable: Any, layout: Any) -> None:
    """Lays a variable out over devices; Keras asks for a layout only while it makes a variable."""
    variable._layout = layout
    variable.assign(variable.value)


def layout_map_of(distribution: keras.distribution.ModelParallel) -> Any:
    """Returns the layout map that a distribution was made with, which has no getter.

    In Keras 3.10 the public `get_tensor_layout` matches a pattern anywhere in a path, and so
    applies entries for weights to their state.
    """
    return distribution._layout_map


def set_path(variable: keras.Variable, path: str) -> None:
    """Gives a variable a path that is the same in every process.

    `path` has no setter. Keras names an optimizer's step counter after the optimizer's automatic
    name, and Nadam's running product after nothing: `set_state_tree` would skip both.
    """
    variable._path = path


def overwritten_by_gradient(variable: Any) -> bool:
    """Returns whether the gradient is the variable's next value, as for scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def is_readable(variable: Any) -> bool:
    """Returns whether a variable's own value can be read.

    It cannot in a stateless scope, while `fit` on JAX holds the value, and if TensorFlow makes the
    variable at the first call of the step that is being compiled. `value` would fail.
    """
    if stateless_scope.in_stateless_scope() or is_purged(variable):
        return False
    initialized = getattr(getattr(variable, "_value", variable), "is_initialized", None)
    return initialized is None or bool(initialized())


def is_purged(variable: keras.Variable) -> bool:
    """Returns whether `fit` on JAX holds the variable's value at the moment: `value` would fail."""
    return getattr(variable, "_value", variable) is None


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Returns the backend's tensors of variables, in any scope.

    `variable.value` looks up scopes each time, which takes most of a step on many small variables.
    """
    if not stateless_scope.in_stateless_scope() and get_autocast_scope() is None:
        values = [getattr(variable, "_value", None) for variable in variables]
        if all(value is not None for value in values):
            return values
    return [variable.value for variable in variables]


class ScopeWithin(keras.StatelessScope):
    """A stateless scope with values for some variables, within a scope with values for others.

    Keras' scopes do not see the scope around them, and the present scope has no public getter.
    """

    def __init__(self, state_mapping: Any) -> None:
        super().__init__(state_mapping=state_mapping)
        self._around = stateless_scope.get_stateless_scope()

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value of a variable in these scopes, or `None` if they have none."""
        own = super().get_current_value(variable)
        if own is not None or self._around is None:
            return own
        return self._around.get_current_value(variable)
