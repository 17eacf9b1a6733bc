"""What every schedule here is: a value computed from the optimizer step, and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from keras_groupopt.base.checks import is_schedule
from keras_groupopt.schedules.horizon import is_fit, known_steps, needs_horizon, steps_in_force
from keras_groupopt.schedules.serialization import deserialize_scalar, serialize_scalar

Tensor = Any


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A value over optimizer steps: the base of these schedules, and of one of your own.

    A subclass names its constructor's arguments in `arguments`, sets an attribute for each, and
    computes the value in `at(step)` from `keras.ops`, without a Python `if` on the step. Calling and
    saving are then done. Of an argument called `total_steps`, which may be `"fit"`, `total()` is
    the number. It drives whatever takes a schedule: a rate, a ratio, a decay, a momentum.

    Args:
        arguments: A class attribute, the names of the constructor's arguments.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> @keras.saving.register_keras_serializable(package="docs")
    ... class InverseRoot(kgo.schedules.Schedule):
    ...     arguments = ("initial_learning_rate",)
    ...
    ...     def __init__(self, initial_learning_rate):
    ...         self.initial_learning_rate = initial_learning_rate
    ...
    ...     def at(self, step):
    ...         return self.initial_learning_rate / keras.ops.sqrt(keras.ops.cast(step + 1, "float32"))
    >>> float(InverseRoot(0.5)(3))
    0.25
    """  # noqa: E501 - one line of an example

    arguments: ClassVar[tuple[str, ...]] = ()

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`, an int32 scalar, as a float scalar."""
        raise NotImplementedError(f"{type(self).__name__} must define `at(step)`.")

    def __call__(self, step: Any) -> Tensor:
        """Returns the value at an optimizer step, a float32 scalar."""
        return ops.cast(self.at(ops.cast(step, "int32")), "float32")

    def inner(self) -> Sequence[Any]:
        """Returns the schedules that it is made of."""
        return ()

    def needs_horizon(self) -> bool:
        """Returns whether it ends with the run, which only `fit` knows."""
        return is_fit(getattr(self, "total_steps", None)) or any(map(needs_horizon, self.inner()))

    def total(self) -> Any:
        """Returns `total_steps` as an int, or as an int32 scalar where it is one in this run.

        Raises:
            ValueError: If it is `"fit"`, outside of a run.
        """
        total = steps_in_force(getattr(self, "total_steps", None), type(self).__name__)
        # A run that is too short for what comes first is refused only where it is a number.
        return total if isinstance(total, int) else ops.maximum(ops.cast(total, "int32"), 1)

    def end(self) -> int | None:
        """Returns the step from which on the value stays, or `None` where it never does."""
        return known_steps(getattr(self, "total_steps", None))

    def length(self) -> int | None:
        """Returns the steps it is made for, or `None` where it suits a run of any length."""
        return self.end()

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments as plain JSON.

        Raises:
            ValueError: If one is a function that is not registered with Keras.
        """
        where = type(self).__name__
        return {name: _plain(getattr(self, name), f"{name} of {where}") for name in self.arguments}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Schedule:
        """Returns the schedule that `get_config` described."""
        return cls(**{name: _from_plain(value, cls.__name__) for name, value in config.items()})


def as_schedule(name: str, value: Any, where: str) -> Any:
    """Returns `value` if it is a schedule.

    Raises:
        TypeError: If it is none.
    """
    if is_schedule(value):
        return value
    raise TypeError(
        f"`{name}` must be a schedule over optimizer steps. Received: {name}={value!r} in {where}. "
        "A fixed value is `kgo.constant(value)`, a function `kgo.schedules.Lambda(function)`."
    )


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    return serialize_scalar(value, where) if callable(value) else value


def _from_plain(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_from_plain(item, where) for item in value]
    return deserialize_scalar(value, where)
