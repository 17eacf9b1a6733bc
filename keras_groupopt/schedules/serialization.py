"""Scalars in a config: numbers, schedules, and functions by their registered name."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base.checks import is_schedule
from keras_groupopt.schedules.from_base import FromBase


def serialize_scalar(value: Any, where: str) -> Any:
    """Returns plain JSON for a number, a schedule, or a registered function.

    Raises:
        ValueError: If it is a function that is not registered with Keras.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    if is_schedule(value):
        return keras.saving.serialize_keras_object(value)
    if isinstance(value, FromBase):
        return {"from_base": registered_function_name(value.function, where)}
    return {"function": registered_function_name(value, where)}


def deserialize_scalar(value: Any, where: str) -> Any:
    """Returns what `serialize_scalar` was given."""
    if not isinstance(value, dict):
        return value
    if "function" in value:
        return registered_function(value["function"], where)
    if "from_base" in value:
        return FromBase(registered_function(value["from_base"], where))
    return keras.saving.deserialize_keras_object(value)


def is_registered(function: Any) -> bool:
    """Whether a function is registered with Keras, and so can be saved by name."""
    name = keras.saving.get_registered_name(function)
    return keras.saving.get_registered_object(name) is function


def registered_function_name(function: Any, where: str = "a selector") -> str:
    """Returns the name a function is registered under.

    Raises:
        ValueError: If it is not registered.
    """
    if not is_registered(function):
        raise ValueError(
            f"A function as {where} must be registered to be saved. Received: {function!r}. "
            "Decorate it with `@keras.saving.register_keras_serializable()`."
        )
    return str(keras.saving.get_registered_name(function))


def registered_function(name: str, where: str = "a selector") -> Any:
    """Returns the function registered under `name`.

    Raises:
        ValueError: If there is no such function.
    """
    function = keras.saving.get_registered_object(name)
    if function is None:
        raise ValueError(
            f'The function "{name}", saved as {where}, must be registered before loading. '
            "Import the module that decorates it with "
            "`@keras.saving.register_keras_serializable()`."
        )
    return function
