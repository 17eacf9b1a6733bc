"""Schedules that rise and fall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import (
    NUMBER,
    POSITIVE,
    SWITCH,
    count,
    one_of,
)
from keras_groupopt.base.checks import message
from keras_groupopt.schedules.arithmetic import CURVES, piecewise, powered
from keras_groupopt.schedules.base import Schedule, registered
from keras_groupopt.schedules.functions import FUNCTION
from keras_groupopt.schedules.horizon import total

Tensor = Any


@registered
class OneCycle(Schedule):
    """Rises from a low value to a peak, then falls far below where it began: one cycle.

    With T = total_steps and p = warmup_fraction · T − 1: from initial_learning_rate at step 0 to
    peak_learning_rate at p, to end_learning_rate at T − 1. In three phases: down to
    initial_learning_rate at 2p, then to the end.

    torch: `OneCycleLR(max_lr=peak_learning_rate, total_steps, pct_start=warmup_fraction,
    anneal_strategy=curve, three_phase)`. The defaults of the other two values are those of its
    `div_factor` and `final_div_factor`. In torch one number as `max_lr` replaces the rate of every
    group, and their ratios are lost. Here a group's ratio multiplies the whole cycle.
    `OneCycle.momentum` returns the schedule that torch gives to the momentum.

    Args:
        peak_learning_rate: The highest value, a finite number >= 0.
        total_steps: The number of optimizer steps of the cycle, an integer >= 2, or `"fit"` for the
            length of the run.
        warmup_fraction: The share of the cycle in which the value rises, in [0, 1), or in [0, 0.5]
            with three phases. Default: 0.3.
        initial_learning_rate: The value at step 0. Default: `peak_learning_rate / 25`.
        end_learning_rate: The value at the end and after it. Default:
            `initial_learning_rate / 10000`.
        curve: The shape of each phase, `"cosine"` or `"linear"`. Default: `"cosine"`.
        three_phase: Whether the fall is as long as the rise and a third phase leads to the end.
            Default: False.

    Raises:
        ValueError: If a number is out of range; when called, if the run's length is not known.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.OneCycle(1.0, total_steps=11, initial_learning_rate=0.5,
    ...                                   end_learning_rate=0.0, warmup_fraction=6 / 11)
    >>> [round(float(schedule(step)), 6) for step in (0, 5, 10, 11)]
    [0.5, 1.0, 0.0, 0.0]

    Reference:
        Smith & Topin, Super-convergence, 2017, arXiv:1708.07120.
    """

    peak_learning_rate: float = field(metadata=NUMBER)
    total_steps: int | str = field(metadata=total(2))
    warmup_fraction: float = field(default=0.3, metadata=NUMBER)
    initial_learning_rate: Any = field(default=None, metadata=NUMBER)
    end_learning_rate: Any = field(default=None, metadata=NUMBER)
    curve: str = field(default="cosine", metadata=one_of(*CURVES))
    three_phase: bool = field(default=False, metadata=SWITCH)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_learning_rate is None:
            self.initial_learning_rate = self.peak_learning_rate / 25
        if self.end_learning_rate is None:
            self.end_learning_rate = self.initial_learning_rate / 10_000
        if self.warmup_fraction > 0.5 if self.three_phase else self.warmup_fraction >= 1:
            rule = "at most 0.5 in three phases" if self.three_phase else "less than 1"
            raise ValueError(message("warmup_fraction", self.warmup_fraction, rule, "OneCycle"))

    @classmethod
    def momentum(
        cls,
        total_steps: int | str,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        warmup_fraction: float = 0.3,
        curve: str = "cosine",
        three_phase: bool = False,
    ) -> OneCycle:
        """Returns a schedule for the momentum, which is low when the rate is high.

        Use it in `kgo.rule("adam", beta_1=...)` or `kgo.rule("sgd", momentum=...)`.

        Args:
            total_steps: The number of optimizer steps of the cycle, or `"fit"`.
            base_momentum: The value at the peak of the rate. Default: 0.85.
            max_momentum: The value at the start and at the end. Default: 0.95.
            warmup_fraction: The same as for the rate. Default: 0.3.
            curve: The same as for the rate. Default: `"cosine"`.
            three_phase: The same as for the rate. Default: False.

        Raises:
            ValueError: If a number is out of range.
            TypeError: If an argument is of the wrong type.

        Example:

        >>> import keras_groupopt as kgo
        >>> momentum = kgo.schedules.OneCycle.momentum(total_steps=100)
        >>> [round(float(momentum(step)), 2) for step in (0, 29, 99)]
        [0.95, 0.85, 0.95]
        """
        return cls(
            base_momentum,
            total_steps,
            warmup_fraction,
            max_momentum,
            max_momentum,
            curve,
            three_phase,
        )

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        total = self.total()
        exact = total if isinstance(total, int) else ops.cast(total, "float32")
        rise = self.warmup_fraction * exact
        parts = [(rise - 1, self.peak_learning_rate)]
        if self.three_phase:
            parts.append((2 * rise - 2, self.initial_learning_rate))
        parts.append((exact - 1, self.end_learning_rate))
        return piecewise(step, self.initial_learning_rate, parts, self.curve)


@registered
class Cyclic(Schedule):
    """Goes up and down between two values repeatedly, in straight lines.

    In cycle c = 1 + ⌊t / (up_steps + down_steps)⌋ a share h rises from 0 to 1 over up_steps and
    falls to 0 over down_steps. The value is
    initial_learning_rate + (peak_learning_rate − initial_learning_rate) · h · scale, where scale is
    1 (`"triangular"`), 1 / 2^(c − 1) (`"triangular2"`), decay_rate^t (`"exp_range"`), or a function
    of c or t.

    torch: `CyclicLR(base_lr=initial_learning_rate, max_lr=peak_learning_rate,
    step_size_up=up_steps, step_size_down=down_steps, mode, gamma=decay_rate, scale_fn=scale,
    scale_mode=scale_by)`. For its `base_momentum` and `max_momentum` make a second schedule, which
    goes from the high value to the low one: `Cyclic(max_momentum, base_momentum, ...)`.

    Args:
        initial_learning_rate: The value at the start and end of a cycle, a finite number >= 0.
        peak_learning_rate: The value in the middle of a cycle, a finite number >= 0. For a momentum
            it is the lower one.
        up_steps: The number of optimizer steps to the peak, an integer >= 1. Default: 2000.
        down_steps: The number of optimizer steps back, an integer >= 1. Default: `up_steps`.
        mode: `"triangular"`, `"triangular2"` or `"exp_range"`. Default: `"triangular"`.
        decay_rate: The factor per optimizer step of `"exp_range"`, a finite number > 0. Default: 1.
        scale: A function of one integer tensor that replaces `mode`. It must use `keras.ops` and be
            registered with `keras.saving.register_keras_serializable`. Default: none.
        scale_by: The argument of `scale`: `"cycle"`, which counts from 1, or `"iterations"`, which
            counts from 0. Default: `"cycle"`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Cyclic(0.0, 1.0, up_steps=2, mode="triangular2")
    >>> [float(schedule(step)) for step in range(8)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]

    Reference:
        Smith, Cyclical learning rates for training neural networks, 2015, arXiv:1506.01186.
    """

    initial_learning_rate: float = field(metadata=NUMBER)
    peak_learning_rate: float = field(metadata=NUMBER)
    up_steps: int = field(default=2000, metadata=count(1))
    down_steps: Any = field(default=None, metadata=count(1))
    mode: str = field(
        default="triangular", metadata=one_of("triangular", "triangular2", "exp_range")
    )
    decay_rate: float = field(default=1.0, metadata=POSITIVE)
    scale: Callable[[Any], Any] | None = field(default=None, metadata=FUNCTION)
    scale_by: str = field(default="cycle", metadata=one_of("cycle", "iterations"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.down_steps is None:
            self.down_steps = self.up_steps

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        size = self.up_steps + self.down_steps
        cycle, place = step // size + 1, step % size
        height = ops.where(
            place <= self.up_steps,
            ops.cast(place, "float32") / self.up_steps,
            ops.cast(size - place, "float32") / self.down_steps,
        )
        if self.scale is not None:
            height = height * ops.cast(
                self.scale(cycle if self.scale_by == "cycle" else step), "float32"
            )
        elif self.mode == "triangular2":
            height = height * powered(0.5, cycle - 1)
        elif self.mode == "exp_range":
            height = height * powered(self.decay_rate, step)
        # `mix` would not do, since a function may make the height larger than 1.
        low, peak = self.initial_learning_rate, self.peak_learning_rate
        return low + (peak - low) * height
