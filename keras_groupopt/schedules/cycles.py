"""Values that rise and fall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_groupopt.base.checks import (
    check_choice,
    check_count,
    check_number,
    check_positive,
    check_switch,
)
from keras_groupopt.schedules.arithmetic import CURVES, piecewise, powered
from keras_groupopt.schedules.base import Schedule
from keras_groupopt.schedules.functions import check_function
from keras_groupopt.schedules.horizon import check_total

Tensor = Any

MODES = ("triangular", "triangular2", "exp_range")


@keras.saving.register_keras_serializable(package="keras_groupopt")
class OneCycle(Schedule):
    """Rises from a low value to a peak, then falls far below where it began: one cycle.

    With T = total_steps and p = warmup_fraction · T − 1: from initial_learning_rate at step 0 to
    peak_learning_rate at p, to end_learning_rate at T − 1. In three phases: down to
    initial_learning_rate at 2p, then to the end.

    torch: `OneCycleLR(max_lr=peak_learning_rate, total_steps, pct_start=warmup_fraction,
    anneal_strategy=curve, three_phase)`; the defaults of the other two values are those of its
    `div_factor` and `final_div_factor`. There one number as `max_lr` replaces the rate of every
    group, and their ratios are lost; here a group's ratio multiplies the whole cycle.
    `OneCycle.momentum` is what torch does to the momentum meanwhile.

    Args:
        peak_learning_rate: The value at the top, a finite number >= 0.
        total_steps: Optimizer steps of the cycle, an integer >= 2, or `"fit"`: those of the run.
        warmup_fraction: The share of the cycle that rises, in [0, 1), in three phases up to 0.5.
        initial_learning_rate: The value at step 0. Default `peak_learning_rate / 25`.
        end_learning_rate: The value at the end and after. Default `initial_learning_rate / 10000`.
        curve: The shape of each phase, `"cosine"` or `"linear"`.
        three_phase: Whether the fall is as long as the rise, with a phase to the end after it.

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

    arguments = (
        "peak_learning_rate",
        "total_steps",
        "warmup_fraction",
        "initial_learning_rate",
        "end_learning_rate",
        "curve",
        "three_phase",
    )

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int | str,
        warmup_fraction: float = 0.3,
        initial_learning_rate: float | None = None,
        end_learning_rate: float | None = None,
        curve: str = "cosine",
        three_phase: bool = False,
    ) -> None:
        where = "OneCycle"
        self.peak_learning_rate = check_number(
            "peak_learning_rate", peak_learning_rate, where=where
        )
        self.total_steps = check_total("total_steps", total_steps, where, least=2)
        if initial_learning_rate is None:
            initial_learning_rate = self.peak_learning_rate / 25
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where=where
        )
        if end_learning_rate is None:
            end_learning_rate = self.initial_learning_rate / 10_000
        self.end_learning_rate = check_number("end_learning_rate", end_learning_rate, where=where)
        self.curve = check_choice("curve", curve, CURVES, where=where)
        self.three_phase = check_switch("three_phase", three_phase, where=where)
        self.warmup_fraction = check_number("warmup_fraction", warmup_fraction, where=where)
        if self.warmup_fraction > 0.5 if three_phase else self.warmup_fraction >= 1:
            rule = "at most 0.5 in three phases" if three_phase else "less than 1"
            raise ValueError(
                f"`warmup_fraction` must be {rule}. Received: warmup_fraction={warmup_fraction!r} "
                f"in {where}."
            )

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
        """Returns the schedule of a momentum beside that of the rate: low where that is high.

        For `kgo.rule("adam", beta_1=...)` or `kgo.rule("sgd", momentum=...)`.

        Args:
            total_steps: Optimizer steps of the cycle, or `"fit"`.
            base_momentum: The value where the rate peaks.
            max_momentum: The value at the start and at the end.
            warmup_fraction: As of the rate.
            curve: As of the rate.
            three_phase: As of the rate.

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


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Cyclic(Schedule):
    """Goes up and down between two values again and again, in straight lines.

    Cycle c = 1 + ⌊t / (up_steps + down_steps)⌋; within it the share h of the way from the low value
    to the peak rises from 0 to 1 over up_steps and falls to 0 over down_steps. The value is
    initial_learning_rate + (peak_learning_rate − initial_learning_rate) · h · scale, where scale is
    1 (`"triangular"`), 1 / 2^(c − 1) (`"triangular2"`), decay_rate^t (`"exp_range"`), or what a
    function makes of c or t.

    torch: `CyclicLR(base_lr=initial_learning_rate, max_lr=peak_learning_rate,
    step_size_up=up_steps, step_size_down=down_steps, mode, gamma=decay_rate, scale_fn=scale,
    scale_mode=scale_by)`. Its `base_momentum` and `max_momentum` are a second schedule for the
    momentum, from the high value to the low: `Cyclic(max_momentum, base_momentum, ...)`.

    Args:
        initial_learning_rate: The value that a cycle begins and ends with, a finite number >= 0.
        peak_learning_rate: The value in the middle, a finite number >= 0; lower, for a momentum.
        up_steps: Optimizer steps to the peak, an integer >= 1. Default 2000.
        down_steps: Optimizer steps back, an integer >= 1. Default `up_steps`.
        mode: `"triangular"`, `"triangular2"` or `"exp_range"`.
        decay_rate: The factor per optimizer step of `"exp_range"`, a finite number > 0.
        scale: A function of one integer tensor in place of `mode`, written in `keras.ops` and
            registered with `keras.saving.register_keras_serializable`.
        scale_by: What `scale` is given: `"cycle"`, from 1 on, or `"iterations"`, from 0 on.

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

    arguments = (
        "initial_learning_rate",
        "peak_learning_rate",
        "up_steps",
        "down_steps",
        "mode",
        "decay_rate",
        "scale",
        "scale_by",
    )

    def __init__(
        self,
        initial_learning_rate: float,
        peak_learning_rate: float,
        up_steps: int = 2000,
        down_steps: int | None = None,
        mode: str = "triangular",
        decay_rate: float = 1.0,
        scale: Callable[[Any], Any] | None = None,
        scale_by: str = "cycle",
    ) -> None:
        where = "Cyclic"
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where=where
        )
        self.peak_learning_rate = check_number(
            "peak_learning_rate", peak_learning_rate, where=where
        )
        self.up_steps = check_count("up_steps", up_steps, 1, where=where)
        down_steps = self.up_steps if down_steps is None else down_steps
        self.down_steps = check_count("down_steps", down_steps, 1, where=where)
        self.mode = check_choice("mode", mode, MODES, where=where)
        self.decay_rate = check_positive("decay_rate", decay_rate, where=where)
        self.scale = None if scale is None else check_function("scale", scale, where)
        self.scale_by = check_choice("scale_by", scale_by, ("cycle", "iterations"), where=where)

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
        # Not a mix of shares: a function may make the height larger than 1.
        low, peak = self.initial_learning_rate, self.peak_learning_rate
        return low + (peak - low) * height
