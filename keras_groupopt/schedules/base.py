"""The base class of schedules: a value computed from the optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import keras
from keras import ops

from keras_groupopt.base.arguments import set_checked
from keras_groupopt.base.checks import is_schedule
from keras_groupopt.schedules.horizon import (
    end_of,
    is_fit,
    known_steps,
    length_of,
    needs_horizon,
    steps_in_force,
)
from keras_groupopt.schedules.serialization import deserialize_scalar, serialize_scalar

# `registered` looks to type checkers like an import from elsewhere.
__all__ = ["Schedule", "Wrapping", "registered"]

Tensor = Any


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A value over optimizer steps: the base class of these schedules and of your own.

    A subclass lists its constructor's arguments in the class attribute `arguments`, sets an
    attribute for each, and computes the value in `at(step)` with `keras.ops`, without a Python `if`
    on the step. The base class then does calling and saving. If the subclass has an argument
    `total_steps`, which may be `"fit"`, `total()` returns the number of steps. A schedule can drive
    a rate, a ratio, a decay or a momentum.

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

    def __post_init__(self) -> None:
        """Checks the arguments of a schedule that is a dataclass."""
        set_checked(self, dataclasses.fields(self), vars(self))

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`, an int32 scalar, as a float scalar."""
        raise NotImplementedError(f"{type(self).__name__} must define `at(step)`.")

    def __call__(self, step: Any) -> Tensor:
        """Returns the value at an optimizer step, a float32 scalar."""
        return ops.cast(self.at(ops.cast(step, "int32")), "float32")

    def inner(self) -> Sequence[Any]:
        """Returns the schedules among its arguments."""
        values = (getattr(self, name) for name in self.arguments)
        lists = (value if isinstance(value, (list, tuple)) else [value] for value in values)
        return [value for values in lists for value in values if is_schedule(value)]

    def needs_horizon(self) -> bool:
        """Returns whether it ends with the run, whose length only `fit` knows."""
        return is_fit(getattr(self, "total_steps", None)) or any(map(needs_horizon, self.inner()))

    def total(self) -> Any:
        """Returns `total_steps` as an int, or as an int32 scalar if the run's length is a tensor.

        Raises:
            ValueError: If it is `"fit"` and there is no run.
        """
        total = steps_in_force(getattr(self, "total_steps", None), type(self).__name__)
        # If the length is a tensor, a run that is too short cannot raise an error.
        return total if isinstance(total, int) else ops.maximum(ops.cast(total, "int32"), 1)

    def end(self) -> int | None:
        """Returns the step after which the value is constant, or `None` if it never is."""
        return known_steps(getattr(self, "total_steps", None))

    def length(self) -> int | None:
        """Returns the number of steps it is made for, or `None` if it suits any run."""
        return self.end()

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments as plain JSON.

        Raises:
            ValueError: If an argument is a function that is not registered with Keras.
        """
        where = type(self).__name__
        return {name: _plain(getattr(self, name), f"{name} of {where}") for name in self.arguments}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Schedule:
        """Returns the schedule that `get_config` described."""
        return cls(**{name: _from_plain(value, cls.__name__) for name, value in config.items()})


class Wrapping(Schedule):
    """The base class of schedules that end when a schedule among their arguments does."""

    def _of_inner(self, function: Callable[[Any], int | None]) -> int | None:
        """Returns what `function`, the end or the length, is of the inner schedule."""
        raise NotImplementedError

    def end(self) -> int | None:
        """Returns the step after which the value is constant, or `None` if it never is."""
        return self._of_inner(end_of)

    def length(self) -> int | None:
        """Returns the number of steps it is made for, or `None` if it suits any run."""
        return self._of_inner(length_of)


if TYPE_CHECKING:
    # Type checkers know what `dataclass` does to a constructor.
    from dataclasses import dataclass as registered
else:

    def registered(cls: type) -> type:
        """Makes a schedule a dataclass and registers it. Its fields become its `arguments`."""
        cls = dataclasses.dataclass(eq=False, repr=False)(cls)
        cls.arguments = tuple(argument.name for argument in dataclasses.fields(cls))
        return keras.saving.register_keras_serializable(package="keras_groupopt")(cls)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    return serialize_scalar(value, where) if callable(value) else value


def _from_plain(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_from_plain(item, where) for item in value]
    return deserialize_scalar(value, where)
