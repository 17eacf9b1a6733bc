"""A ratio that is 0 until a step and constant from then on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import NUMBER, count
from keras_groupopt.schedules.base import Schedule, registered

Tensor = Any


@registered
@dataclass(eq=False, repr=False)
class UnfreezeAt(Schedule):
    """A ratio that holds variables still until an optimizer step: 0 if t < step, then `ratio`.

    At ratio 0 weights do not move and do not decay. The rule still updates its moments from their
    gradients, so the first step that moves the weights does not start from empty moments.

    Args:
        step: The first optimizer step (from 0) that moves them, an integer >= 0.
        ratio: The ratio from that step on, a finite number >= 0. Default: 1.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is negative or not finite.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.UnfreezeAt(100, 0.5)
    >>> [float(schedule(step)) for step in (0, 99, 100, 1000)]
    [0.0, 0.0, 0.5, 0.5]
    """

    step: int = field(metadata=count(0))
    ratio: float = field(default=1.0, metadata=NUMBER)

    def at(self, step: Tensor) -> Tensor:
        """Returns the ratio at `step`."""
        return ops.cast(step >= self.step, "float32") * self.ratio

    def end(self) -> int:
        """Returns the step at which the ratio changes."""
        return self.step

    def length(self) -> None:
        """Returns `None`, since it suits a run of any length."""

    def __repr__(self) -> str:
        return f"UnfreezeAt({self.step}, {self.ratio:g})"
