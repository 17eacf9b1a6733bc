"""A rate that never changes, beside a base rate that does."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base.checks import check_number
from keras_groupopt.schedules.base import Schedule


@keras.saving.register_keras_serializable(package="keras_groupopt")
class ConstantRate(Schedule):
    """The same rate at every optimizer step: `learning_rate(t) = rate`.

    Args:
        rate: The rate per optimizer step, a finite number >= 0.

    Raises:
        ValueError: If `rate` is negative or not finite.

    Example:
    >>> import keras_groupopt as kgo
    >>> round(float(kgo.ConstantRate(1e-4)(1000)), 6)
    0.0001
    """

    arguments = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = check_number("rate", rate, where="ConstantRate")

    def at(self, step: Any) -> Any:
        """Returns the rate, whatever the step."""
        return keras.ops.convert_to_tensor(self.rate, dtype="float32")

    def end(self) -> int:
        """Returns 0: the value never changes."""
        return 0

    def length(self) -> None:
        """Returns `None`: it suits a run of any length."""


def constant(rate: float) -> ConstantRate:
    """Returns a fixed rate for `Group(learning_rate=...)` beside a scheduled base rate.

    Args:
        rate: The rate per optimizer step, a finite number >= 0.

    Returns:
        A schedule that does not follow the base.

    Raises:
        ValueError: If `rate` is negative or not finite.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.Group("head", "head", learning_rate=kgo.constant(1e-4)).learning_rate.rate
    0.0001
    """
    return ConstantRate(rate)
