"""Values that change at single steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_groupopt.base.checks import check_count, check_number, check_positive
from keras_groupopt.schedules.arithmetic import powered
from keras_groupopt.schedules.base import Schedule

Tensor = Any


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Step(Schedule):
    """Multiplies the value by a factor once every so many optimizer steps.

    At step t: initial_learning_rate · decay_rate ^ ⌊t / decay_steps⌋.

    torch: `StepLR(step_size=decay_steps, gamma=decay_rate)`. Keras' `ExponentialDecay(...,
    staircase=True)` is the same rule.

    Args:
        initial_learning_rate: The value at step 0, a finite number >= 0.
        decay_steps: Optimizer steps from one factor to the next, an integer >= 1.
        decay_rate: The factor, a finite number > 0. Default 0.1.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Step(1.0, decay_steps=30, decay_rate=0.5)
    >>> [float(schedule(step)) for step in (0, 29, 30, 60)]
    [1.0, 1.0, 0.5, 0.25]
    """

    arguments = ("initial_learning_rate", "decay_steps", "decay_rate")

    def __init__(
        self, initial_learning_rate: float, decay_steps: int, decay_rate: float = 0.1
    ) -> None:
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where="Step"
        )
        self.decay_steps = check_count("decay_steps", decay_steps, 1, where="Step")
        self.decay_rate = check_positive("decay_rate", decay_rate, where="Step")

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return self.initial_learning_rate * powered(self.decay_rate, step // self.decay_steps)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class MultiStep(Schedule):
    """Multiplies the value by a factor at each of the given optimizer steps.

    At step t: initial_learning_rate · decay_rate ^ (number of milestones <= t).

    torch: `MultiStepLR(milestones, gamma=decay_rate)`. With Keras' `PiecewiseConstantDecay`, whose
    values are written out one by one, a change comes one step after its boundary.

    Args:
        initial_learning_rate: The value at step 0, a finite number >= 0.
        milestones: Optimizer steps, increasing integers >= 1.
        decay_rate: The factor, a finite number >= 0. Default 0.1.

    Raises:
        ValueError: If a number is out of range, or `milestones` is empty or does not increase.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.MultiStep(1.0, milestones=[30, 80], decay_rate=0.5)
    >>> [float(schedule(step)) for step in (29, 30, 79, 80)]
    [1.0, 0.5, 0.5, 0.25]
    """

    arguments = ("initial_learning_rate", "milestones", "decay_rate")

    def __init__(
        self, initial_learning_rate: float, milestones: Sequence[int], decay_rate: float = 0.1
    ) -> None:
        where = "MultiStep"
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where=where
        )
        self.milestones = check_milestones(milestones, where)
        self.decay_rate = check_number("decay_rate", decay_rate, where=where)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        passed = ops.sum(ops.cast(step >= ops.convert_to_tensor(self.milestones, "int32"), "int32"))
        values = [
            self.initial_learning_rate * self.decay_rate**count
            for count in range(len(self.milestones) + 1)
        ]
        return ops.take(ops.convert_to_tensor(values, "float32"), passed)

    def end(self) -> int:
        """Returns the last milestone."""
        return self.milestones[-1]

    def length(self) -> None:
        """Returns `None`: it suits a run of any length."""


def check_milestones(milestones: Any, where: str, count: int | None = None) -> list[int]:
    """Returns steps as a list of increasing integers >= 1, `count` of them where that is given.

    Raises:
        TypeError: If it is no sequence of integers.
        ValueError: If they do not increase, or are not that many.
    """
    rule = "`milestones` must be increasing optimizer steps >= 1"
    if isinstance(milestones, (str, bytes)) or not hasattr(milestones, "__len__"):
        raise TypeError(f"{rule}, in a list. Received: milestones={milestones!r} in {where}.")
    steps = [check_count("milestones", step, 1, where=where) for step in milestones]
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"{rule}. Received: milestones={milestones!r} in {where}.")
    if count is None and not steps:
        raise ValueError(f"{rule}, at least one. Received: milestones={milestones!r} in {where}.")
    if count is not None and len(steps) != count:
        raise ValueError(
            f"`milestones` must be one fewer than the schedules. Received: {len(steps)} milestones "
            f"for {count + 1} schedules in {where}. Each is the step where the next one begins."
        )
    return steps
