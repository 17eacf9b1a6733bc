"""A ratio that is 0 until a step, then what it is for good."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.arguments import check_number

__all__ = ["UnfreezeAt"]


@keras.saving.register_keras_serializable(package="keras_groupopt")
class UnfreezeAt(keras.optimizers.schedules.LearningRateSchedule):
    """A ratio that holds variables still until an optimizer step: 0 if t < step, then `ratio`.

    At ratio 0 weights do not move and do not decay. The rule's moments follow their gradients, so
    that the first step that counts is no cold start.

    Args:
        step: The first optimizer step (from 0) that moves them, a whole number >= 0.
        ratio: The ratio from there on, a finite number >= 0. Default 1.

    Raises:
        TypeError: If `step` is no whole number.
        ValueError: If a number is negative or not finite.

    Example:
    >>> import keras_groupopt as kgo
    >>> schedule = kgo.UnfreezeAt(100, 0.5)
    >>> [float(schedule(step)) for step in (0, 99, 100, 1000)]
    [0.0, 0.0, 0.5, 0.5]
    """

    def __init__(self, step: int, ratio: float = 1.0) -> None:
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"`step` must be a whole number >= 0. Received: step={step!r}.")
        self.step = int(check_number("step", step, where="UnfreezeAt"))
        self.ratio = check_number("ratio", ratio, where="UnfreezeAt")

    def __call__(self, step: Any) -> Any:
        """Returns the ratio at an optimizer step, a float32 scalar."""
        started = keras.ops.convert_to_tensor(step) >= self.step
        return keras.ops.cast(started, "float32") * self.ratio

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"step": self.step, "ratio": self.ratio}

    def __repr__(self) -> str:
        return f"UnfreezeAt({self.step}, {self.ratio:g})"
