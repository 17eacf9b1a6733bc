"""A group's rate as a function of the base rate."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class FromBase:
    """A rate computed from the base rate at each optimizer step. Made by `kgo.from_base`.

    Args:
        function: From the base rate to the group's.
    """

    function: Callable[[Any], Any]

    def __repr__(self) -> str:
        return f"from_base({getattr(self.function, '__name__', self.function)})"


def from_base(function: Callable[[Any], Any]) -> FromBase:
    """Makes a group's rate a function of the base rate, for `Group(learning_rate=...)`.

    At each optimizer step `t` the rate is

        function(learning_rate(t)) · learning_rate_ratio(t)

    so it follows schedules and callbacks that move the base, in a way that no ratio says: a floor,
    a ceiling, a power. A ratio alone is `Group(learning_rate_ratio=...)`.

    Args:
        function: Takes the base rate per optimizer step, a float32 scalar tensor, and returns the
            group's, computed with `keras.ops` and without branches on the value. To be saved with
            the optimizer it has to be registered by
            `@keras.saving.register_keras_serializable()`.

    Returns:
        A rate for `Group(learning_rate=...)`.

    Raises:
        TypeError: If `function` does not take one argument.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> @keras.saving.register_keras_serializable("guide")
    ... def at_most(base):
    ...     return keras.ops.minimum(base, 1e-4)
    >>> kgo.Group("backbone", "backbone", learning_rate=kgo.from_base(at_most)).learning_rate
    from_base(at_most)
    """
    if not callable(function) or isinstance(function, type) or hasattr(function, "get_config"):
        raise TypeError(
            "`function` must be a function of the base rate. Received: "
            f"from_base({function!r}). A schedule is given as `Group(learning_rate=schedule)`, a "
            "number as `Group(learning_rate_ratio=number)`."
        )
    try:
        inspect.signature(function).bind(0.0)
    except ValueError:  # a function in C may have no signature
        pass
    except TypeError as error:
        raise TypeError(
            f"`function` must take one argument, the base rate. Received: from_base({function!r}): "
            f"{error}."
        ) from error
    return FromBase(function)
