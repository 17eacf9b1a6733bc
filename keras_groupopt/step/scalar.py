"""Scalars that may be a number or a schedule over optimizer steps.

A number lives in a variable once the optimizer is built, so that changing it neither retraces a
compiled step nor is lost when state is saved. A schedule is evaluated at the current step.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base.checks import check_number, is_schedule
from keras_groupopt.plan import sampled_rates
from keras_groupopt.plan.plan_dict import describe_scalar
from keras_groupopt.step.kept import add_scalar

sampled_rates.set_compiler(backend.compiled)


class Scalar:
    """One hyperparameter of one group: its declaration and, when it is a number, its variable.

    Args:
        name: The hyperparameter's name, for errors.
        declared: A number or a schedule.
        where: The group's name, for errors.
    """

    def __init__(self, name: str, declared: Any, where: str) -> None:
        self.name = name
        self.declared = declared
        self.where = where
        self.variable: Any = None

    @property
    def is_schedule(self) -> bool:
        """Whether it is computed from the step and cannot be set."""
        return is_schedule(self.declared)

    def build(self, owner: Any, prefix: str) -> None:
        """Makes the variable of a number among an optimizer's own."""
        if not self.is_schedule:
            initializer = keras.initializers.Constant(self.declared)
            self.variable = add_scalar(owner, f"{prefix}_{self.name}", "float32", initializer)

    def at(self, step: Any) -> Any:
        """Returns the value at `step`, a float32 scalar tensor."""
        if self.variable is not None:
            return ops.convert_to_tensor(self.variable)
        return ops.cast(self.declared(step), "float32")

    def set(self, value: Any) -> None:
        """Sets the current value of a number.

        Raises:
            TypeError: If it is a schedule.
            ValueError: If `value` is negative or not finite.
        """
        refuse_to_set_schedule(self.name, self.declared, value, self.where)
        self.variable.assign(check_number(self.name, value, where=self.where))


def refuse_to_set_schedule(name: str, declared: Any, value: Any, where: str) -> None:
    """Refuses a number in the place of a schedule.

    Raises:
        TypeError: If `declared` is a schedule.
    """
    if is_schedule(declared):
        raise TypeError(
            f"`{name}` of {where} is a schedule and cannot be set. Received: "
            f"{value!r}; the schedule is {describe_scalar(declared)}. Declare a number "
            "to set it while training."
        )
