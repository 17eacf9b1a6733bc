"""The interface of a piece of state that a built optimizer keeps, and how it makes variables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

from keras_groupopt.base import compat


class Kept:
    """A piece of state: variables that are saved, and what goes with them.

    A built optimizer calls these for each piece, in one order. All do nothing by default.
    """

    def make_variables(self, owner: Any) -> None:
        """Makes the variables.

        Args:
            owner: The outer optimizer, which owns them.
        """

    def entries(self) -> dict[str, Any]:
        """Returns the variables to save, by key."""
        return {}

    def note_clipping(self, came: Mapping[Any, Sequence[Any]], scale: Any) -> None:
        """Takes note of the clipping of an optimizer step, before weights move.

        Args:
            came: Per built group that has some, pairs of a variable and its gradient before
                any clipping.
            scale: The factor of the clip over all groups, a scalar; `None` without one.
        """

    def after_load(self, loaded: Collection[str], iterations: int) -> None:
        """Settles what follows from loaded state.

        Args:
            loaded: The keys whose values were loaded. All others start fresh.
            iterations: The optimizer steps that were made when the state was saved.
        """

    def remember(self) -> Callable[[], None]:
        """Returns a function that puts back what is not among the optimizer's variables."""
        return lambda: None


def add_scalar(owner: Any, name: str, dtype: str, initializer: Any = "zeros") -> Any:
    """Makes a scalar among an optimizer's own variables.

    Args:
        owner: The optimizer.
        name: The variable's name.
        dtype: The variable's dtype.
        initializer: The variable's first value. Default: 0.
    """
    return owner.add_variable(
        shape=(),
        initializer=initializer,
        dtype=dtype,
        aggregation="only_first_replica",
        name=name,
    )


def add_beside(owner: Any, weight: Any, name: str, initializer: Any = "zeros") -> Any:
    """Makes a variable of the shape and layout of a weight, and of at least float32.

    Args:
        owner: The optimizer that owns it.
        weight: The weight.
        name: The variable's name.
        initializer: The variable's first value. Default: 0.
    """
    return owner.add_variable(
        shape=weight.shape,
        initializer=initializer,
        dtype=wide_dtype(weight),
        layout=compat.layout_of(weight),
        name=name,
    )


def wide_dtype(variable: Any) -> str:
    """Returns the dtype of sums and averages beside a variable: at least float32."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return "float32" if dtype in ("float16", "bfloat16") else str(dtype)
