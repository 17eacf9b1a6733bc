"""A ratio that is 0 until a step, then what it is for good."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_groupopt.base.checks import check_count, check_number
from keras_groupopt.schedules.base import Schedule

Tensor = Any


@keras.saving.register_keras_serializable(package="keras_groupopt")
class UnfreezeAt(Schedule):
    """A ratio that holds variables still until an optimizer step: 0 if t < step, then `ratio`.

    At ratio 0 weights do not move and do not decay. The rule's moments follow their gradients, so
    that the first step that counts is no cold start.

    Args:
        step: The first optimizer step (from 0) that moves them, a whole number >= 0.
        ratio: The ratio from there on, a finite number >= 0. Default 1.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is negative or not finite.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.UnfreezeAt(100, 0.5)
    >>> [float(schedule(step)) for step in (0, 99, 100, 1000)]
    [0.0, 0.0, 0.5, 0.5]
    """

    arguments = ("step", "ratio")

    def __init__(self, step: int, ratio: float = 1.0) -> None:
        self.step = check_count("step", step, 0, where="UnfreezeAt")
        self.ratio = check_number("ratio", ratio, where="UnfreezeAt")

    def at(self, step: Tensor) -> Tensor:
        """Returns the ratio at `step`."""
        return ops.cast(step >= self.step, "float32") * self.ratio

    def end(self) -> int:
        """Returns the step from which on the value stays."""
        return self.step

    def length(self) -> None:
        """Returns `None`: it suits a run of any length."""

    def __repr__(self) -> str:
        return f"UnfreezeAt({self.step}, {self.ratio:g})"
