"""A value computed by a function of one's own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_groupopt.base.checks import check_number
from keras_groupopt.schedules.base import Schedule
from keras_groupopt.schedules.serialization import is_registered

Tensor = Any


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Lambda(Schedule):
    """A value times what a function makes of the optimizer step: learning_rate · function(t).

    torch: `LambdaLR(lr_lambda=function)` of an optimizer with `lr=learning_rate`.

    Args:
        function: A function of the step, an int32 scalar tensor, written in `keras.ops` without a
            Python `if` on the step. To be saved it must be registered with
            `keras.saving.register_keras_serializable`.
        learning_rate: What the function's value is multiplied by, a finite number >= 0. Default 1.

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

    arguments = ("function", "learning_rate")

    def __init__(self, function: Callable[[Any], Any], learning_rate: float = 1.0) -> None:
        self.function = check_function("function", function, "Lambda")
        self.learning_rate = check_number("learning_rate", learning_rate, where="Lambda")

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return self.learning_rate * ops.cast(self.function(step), "float32")

    def end(self) -> None:
        """Returns `None`: nothing is known of the function."""


def check_function(name: str, function: Any, where: str) -> Any:
    """Returns a function of one argument, and warns if it could not be saved.

    Raises:
        TypeError: If it is no function, or does not take one argument.
    """
    rule = f"`{name}` must be a function of one argument"
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{rule}. Received: {name}={function!r} in {where}.")
    try:
        inspect.signature(function).bind(0)
    except ValueError:  # a function in C may have no signature
        pass
    except TypeError as error:
        raise TypeError(f"{rule}. Received: {name}={function!r} in {where}: {error}.") from error
    if not is_registered(function):
        warnings.warn(
            "A model with this schedule cannot be saved whole (`model.save`, ModelCheckpoint), "
            f"because `{name}` of {where} is the function {function!r}, which is not registered. "
            "Decorate it with `@keras.saving.register_keras_serializable()`.",
            stacklevel=3,
        )
    return function
