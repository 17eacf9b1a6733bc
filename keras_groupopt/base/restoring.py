"""Values of variables that are put back after something else was there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from keras import ops


def remember(variables: Iterable[Any]) -> Callable[[], None]:
    """Returns a function that gives variables the values they have now."""
    values = [(variable, ops.copy(ops.convert_to_tensor(variable))) for variable in variables]

    def put_back() -> None:
        for variable, value in values:
            variable.assign(value)

    return put_back


def finish(put_back: Callable[[], None]) -> None:
    """Puts something back, and starts over if that is interrupted, as by a second Ctrl-C."""
    try:
        put_back()
    except BaseException:
        put_back()
        raise
