"""Values that change at single steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import NUMBER, POSITIVE, checked_by, count
from keras_groupopt.base.checks import check_count, message
from keras_groupopt.schedules.arithmetic import powered
from keras_groupopt.schedules.base import Schedule, registered

Tensor = Any


@registered
class Step(Schedule):
    """Multiplies the value by a factor after every `decay_steps` optimizer steps.

    At step t: initial_learning_rate · decay_rate ^ ⌊t / decay_steps⌋.

    torch: `StepLR(step_size=decay_steps, gamma=decay_rate)`. Keras' `ExponentialDecay(...,
    staircase=True)` is the same rule.

    Args:
        initial_learning_rate: The value at step 0, a finite number >= 0.
        decay_steps: Optimizer steps from one factor to the next, an integer >= 1.
        decay_rate: The factor, a finite number > 0. Default: 0.1.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Step(1.0, decay_steps=30, decay_rate=0.5)
    >>> [float(schedule(step)) for step in (0, 29, 30, 60)]
    [1.0, 1.0, 0.5, 0.25]
    """

    initial_learning_rate: float = field(metadata=NUMBER)
    decay_steps: int = field(metadata=count(1))
    decay_rate: float = field(default=0.1, metadata=POSITIVE)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return self.initial_learning_rate * powered(self.decay_rate, step // self.decay_steps)


def check_milestones(name: str, value: Any, *, where: str, least: int = 0) -> list[int]:
    """Returns steps as a list of increasing integers >= 1.

    Raises:
        TypeError: If it is not a sequence of integers.
        ValueError: If there are fewer than `least`, or they do not increase.
    """
    must = "increasing optimizer steps >= 1"
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(message(name, value, f"{must}, in a list", where))
    steps = [check_count(name, step, 1, where=where) for step in value]
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(message(name, value, must, where))
    if len(steps) < least:
        raise ValueError(message(name, value, f"{must}, at least one", where))
    return steps


@registered
class MultiStep(Schedule):
    """Multiplies the value by a factor at each of the given optimizer steps.

    At step t: initial_learning_rate · decay_rate ^ (number of milestones <= t).

    torch: `MultiStepLR(milestones, gamma=decay_rate)`. Keras' `PiecewiseConstantDecay` takes each
    value separately, and its values change one step after their boundary.

    Args:
        initial_learning_rate: The value at step 0, a finite number >= 0.
        milestones: Optimizer steps, increasing integers >= 1.
        decay_rate: The factor, a finite number >= 0. Default: 0.1.

    Raises:
        ValueError: If a number is out of range, or `milestones` is empty or does not increase.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.MultiStep(1.0, milestones=[30, 80], decay_rate=0.5)
    >>> [float(schedule(step)) for step in (29, 30, 79, 80)]
    [1.0, 0.5, 0.5, 0.25]
    """

    initial_learning_rate: float = field(metadata=NUMBER)
    milestones: Sequence[int] = field(
        metadata=checked_by(functools.partial(check_milestones, least=1))
    )
    decay_rate: float = field(default=0.1, metadata=NUMBER)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        passed = ops.sum(ops.cast(step >= ops.convert_to_tensor(self.milestones, "int32"), "int32"))
        values = [
            self.initial_learning_rate * self.decay_rate**changes
            for changes in range(len(self.milestones) + 1)
        ]
        return ops.take(ops.convert_to_tensor(values, "float32"), passed)

    def end(self) -> int:
        """Returns the last milestone."""
        return self.milestones[-1]

    def length(self) -> None:
        """Returns `None`, since it suits a run of any length."""


@registered
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
