"""A value that a user's function computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import NUMBER, checked_by
from keras_groupopt.schedules.base import Schedule, registered
from keras_groupopt.schedules.from_base import check_one_argument
from keras_groupopt.schedules.serialization import is_registered

Tensor = Any


def check_function(name: str, function: Any, *, where: str) -> Any:
    """Returns a function of one argument, and warns if it cannot be saved.

    Raises:
        TypeError: If it is not a function, or does not take one argument.
    """
    check_one_argument(name, function, where=where)
    if not is_registered(function):
        warnings.warn(
            "A model with this schedule cannot be saved whole (`model.save`, ModelCheckpoint), "
            f"because `{name}` of {where} is the function {function!r}, which is not registered. "
            "Decorate it with `@keras.saving.register_keras_serializable()`.",
            # The warning points at the caller of the constructor, which is above `__init__`,
            # `__post_init__` and `set_checked`.
            stacklevel=5,
        )
    return function


FUNCTION = checked_by(check_function)


@registered
class Lambda(Schedule):
    """A number times a function of the optimizer step: learning_rate · function(t).

    torch: `LambdaLR(lr_lambda=function)` of an optimizer with `lr=learning_rate`.

    Args:
        function: Takes the step, an int32 scalar tensor. It must use `keras.ops` and must not
            branch on the step in Python. To be saved it must be registered with
            `keras.saving.register_keras_serializable`.
        learning_rate: The number, finite and >= 0. Default: 1.

    Raises:
        ValueError: If a number is out of range; when saved, if the function is not registered.
        TypeError: If `function` cannot be called with one argument.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> @keras.saving.register_keras_serializable(package="docs")
    ... def inverse(step):
    ...     return 1 / (1 + keras.ops.cast(step, "float32"))
    >>> float(kgo.schedules.Lambda(inverse, learning_rate=0.5)(3))
    0.125
    """

    function: Callable[[Any], Any] = field(metadata=FUNCTION)
    learning_rate: float = field(default=1.0, metadata=NUMBER)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return self.learning_rate * ops.cast(self.function(step), "float32")

    def end(self) -> None:
        """Returns `None`, since nothing is known about the function."""
