"""The rate of a group as a function of the base rate."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class FromBase:
    """A rate computed from the base rate at each optimizer step. `kgo.from_base` makes it.

    Args:
        function: Takes the base rate, returns the rate of the group.
    """

    function: Callable[[Any], Any]

    def __repr__(self) -> str:
        return f"from_base({getattr(self.function, '__name__', self.function)})"


def from_base(function: Callable[[Any], Any]) -> FromBase:
    """Makes a group's rate a function of the base rate, for `Group(learning_rate=...)`.

    At each optimizer step `t` the rate is

        function(learning_rate(t)) · learning_rate_ratio(t)

    so it follows schedules and callbacks that change the base rate. Use it for what a ratio cannot
    express: a floor, a ceiling, a power. A plain ratio is `Group(learning_rate_ratio=...)`.

    Args:
        function: Takes the base rate per optimizer step, a float32 scalar tensor, and returns the
            rate of the group. It must use `keras.ops` and must not branch on the value. To be saved
            with the optimizer it must be registered with
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
    if not callable(function) or hasattr(function, "get_config"):
        raise TypeError(
            "`function` must be a function of the base rate. Received: "
            f"from_base({function!r}). Pass a schedule as `Group(learning_rate=schedule)` and a "
            "number as `Group(learning_rate_ratio=number)`."
        )
    return FromBase(check_one_argument("function", function, where="from_base"))


def check_one_argument(name: str, function: Any, *, where: str) -> Any:
    """Returns `function` if it can be called with one argument.

    Raises:
        TypeError: If it is not a function, or does not take one argument.
    """
    must = f"`{name}` must be a function of one argument. Received: {name}={function!r} in {where}"
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{must}.")
    try:
        inspect.signature(function).bind(0.0)
    except ValueError:  # A function written in C may have no signature.
        pass
    except TypeError as error:
        raise TypeError(f"{must}: {error}.") from error
    return function
