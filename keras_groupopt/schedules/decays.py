"""Schedules that go from one number to another over a known number of steps."""

from __future__ import annotations

import numbers
from dataclasses import field
from typing import Any

from keras import ops

from keras_groupopt.base.arguments import NUMBER, POSITIVE, checked_by, count, one_of
from keras_groupopt.base.checks import message
from keras_groupopt.schedules.arithmetic import after_warmup, mix, shares
from keras_groupopt.schedules.base import Schedule, registered
from keras_groupopt.schedules.horizon import total

Tensor = Any


@registered
class Linear(Schedule):
    """Goes in a straight line from one value to another, and stays there.

    With d = min(t, total_steps) / total_steps:
    initial_learning_rate · (1 − d) + end_learning_rate · d.

    torch: `LinearLR(start_factor, end_factor, total_iters=total_steps)`, where the two values are
    the optimizer's rate times the factors.

    Args:
        initial_learning_rate: The value at step 0, a finite number >= 0.
        total_steps: The number of optimizer steps to the end, an integer >= 1, or `"fit"` for the
            length of the run.
        end_learning_rate: The value after `total_steps`, a finite number >= 0. Default: 0.

    Raises:
        ValueError: If a number is out of range; when called, if the run's length is not known.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Linear(1.0, total_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 4, 5)]
    [1.0, 0.75, 0.0, 0.0]
    """

    initial_learning_rate: float = field(metadata=NUMBER)
    total_steps: int | str = field(metadata=total(1))
    end_learning_rate: float = field(default=0.0, metadata=NUMBER)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return mix(self.initial_learning_rate, self.end_learning_rate, step, self.total())


@registered
class Polynomial(Schedule):
    """Warms up in a straight line, decays along a power, and stays at the end value.

    With w = warmup_steps and T = total_steps, for t < w the line from warmup_start to
    initial_learning_rate; then, with s = (T − t) / (T − w):
    end_learning_rate + (initial_learning_rate − end_learning_rate) · s ^ power.

    torch: `PolynomialLR(total_iters=total_steps, power)`, without a warm-up and to 0. Transformers:
    `get_polynomial_decay_schedule_with_warmup`.

    Args:
        initial_learning_rate: The value at which the decay begins, a finite number >= 0.
        total_steps: The number of optimizer steps to the end, warm-up included: an integer >= 1, or
            `"fit"` for the length of the run.
        end_learning_rate: The value after `total_steps`, a finite number >= 0. Default: 0.
        power: The exponent, a finite number > 0. Default: 1, a straight line.
        warmup_steps: The number of warm-up steps, an integer >= 0 and less than `total_steps`.
            Default: 0.
        warmup_start: The value at step 0 of a warm-up, a finite number >= 0. Default: 0.

    Raises:
        ValueError: If a number is out of range; when called, if the run's length is not known or
            the run is not longer than the warm-up.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Polynomial(1.0, total_steps=6, power=2, warmup_steps=2)
    >>> [float(schedule(step)) for step in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.25, 0.0]
    """

    initial_learning_rate: float = field(metadata=NUMBER)
    total_steps: int | str = field(metadata=total(1))
    end_learning_rate: float = field(default=0.0, metadata=NUMBER)
    power: float = field(default=1.0, metadata=POSITIVE)
    warmup_steps: int = field(default=0, metadata=count(0))
    warmup_start: float = field(default=0.0, metadata=NUMBER)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(self.total_steps)

    def _check(self, total: Any) -> None:
        check_fits({"warmup_steps": self.warmup_steps}, total, "Polynomial", rest=1)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        warmup, total = self.warmup_steps, self.total()
        self._check(total)
        done, left = shares(step - warmup, at_least_one(total - warmup))
        if self.power != 1.0:
            # 1 − left^power, without rounding errors if it is small.
            done = -ops.expm1(self.power * ops.log1p(-done))
            left = ops.power(left, self.power)
        decayed = self.initial_learning_rate * left + self.end_learning_rate * done
        return after_warmup(step, warmup, self.warmup_start, self.initial_learning_rate, decayed)


def check_steps_or_share(name: str, value: Any, *, where: str) -> int | float:
    """Returns an integer >= 1, or a float in (0, 1).

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is out of range.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and isinstance(value, numbers.Integral) and int(value) >= 1:
        return int(value)
    if is_number and 0 < value < 1:
        return float(value)
    error = ValueError if is_number else TypeError
    raise error(message(name, value, "an integer >= 1, or a share of the whole in (0, 1)", where))


@registered
class WarmupStableDecay(Schedule):
    """Warms up in a straight line, holds the peak, and decays over the last steps.

    With w = warmup_steps, T = total_steps and D = decay_steps: for t < w the line from
    initial_learning_rate to peak_learning_rate; the peak until T − D; then, with
    d = (t − T + D) / D, peak_learning_rate · (1 − f(d)) + end_learning_rate · f(d), where f(d) is d
    (`"linear"`), sin²(π d / 2) (`"cosine"`) or √d (`"root"`).

    Transformers: `get_wsd_schedule(num_warmup_steps, num_decay_steps, num_training_steps)`.

    Args:
        peak_learning_rate: The value that is held, a finite number >= 0.
        total_steps: The number of optimizer steps to the end, an integer >= 1, or `"fit"` for the
            length of the run.
        decay_steps: The number of decay steps, an integer >= 1, or a float in (0, 1), a share of
            `total_steps`. Default: 0.1.
        warmup_steps: The number of warm-up steps, an integer >= 0. Default: 0.
        initial_learning_rate: The value at step 0 of a warm-up, a finite number >= 0. Default: 0.
        end_learning_rate: The value at the end and after it, a finite number >= 0. Default: 0.
        decay_curve: The shape of the decay: `"linear"`, `"cosine"` or `"root"`. Default:
            `"linear"`.

    Raises:
        ValueError: If a number is out of range, or warm-up and decay are longer than the whole.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.WarmupStableDecay(1.0, 10, decay_steps=4, warmup_steps=2)
    >>> [float(schedule(step)) for step in (0, 1, 2, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]

    Reference:
        Hu et al., MiniCPM, 2024, arXiv:2404.06395. `"root"`: Hägele et al., Scaling laws and
        compute-optimal training beyond fixed training durations, 2024, arXiv:2405.18392.
    """

    peak_learning_rate: float = field(metadata=NUMBER)
    total_steps: int | str = field(metadata=total(1))
    decay_steps: float = field(default=0.1, metadata=checked_by(check_steps_or_share))
    warmup_steps: int = field(default=0, metadata=count(0))
    initial_learning_rate: float = field(default=0.0, metadata=NUMBER)
    end_learning_rate: float = field(default=0.0, metadata=NUMBER)
    decay_curve: str = field(default="linear", metadata=one_of("linear", "cosine", "root"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(self.total_steps)

    def _check(self, total: Any) -> None:
        if isinstance(total, int):
            parts = {"warmup_steps": self.warmup_steps, "decay_steps": self._decay_steps(total)}
            check_fits(parts, total, "WarmupStableDecay")

    def _decay_steps(self, total: Any) -> Any:
        if isinstance(self.decay_steps, int):
            return self.decay_steps
        if isinstance(total, int):
            return max(1, round(self.decay_steps * total))
        share = ops.round(ops.cast(total, "float32") * self.decay_steps)
        return at_least_one(ops.cast(share, "int32"))

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        total = self.total()
        self._check(total)
        length = self._decay_steps(total)
        elapsed = step - (total - length)
        peak, end = self.peak_learning_rate, self.end_learning_rate
        if self.decay_curve == "root":
            done, left = shares(elapsed, length)
            root = ops.sqrt(done)
            value = peak * left / (1 + root) + end * root
        else:
            value = mix(peak, end, elapsed, length, self.decay_curve)
        return after_warmup(step, self.warmup_steps, self.initial_learning_rate, peak, value)


def check_fits(parts: dict[str, int], total: Any, where: str, rest: int = 0) -> None:
    """Checks that parts are not longer than the whole, if its length is a number.

    Args:
        parts: The steps of each part, by the name of the argument.
        total: The steps of the whole. `"fit"` or a tensor is not checked.
        where: The schedule's name.
        rest: The number of steps that must be left over. Default: 0.

    Raises:
        ValueError: If they are longer.
    """
    if not isinstance(total, int) or sum(parts.values()) + rest <= total:
        return
    names = " and ".join(f"`{name}`" for name in parts)
    together = " together" if len(parts) > 1 else ""
    must = "be less than" if rest else "not be more than"
    received = ", ".join(f"{name}={steps}" for name, steps in parts.items())
    raise ValueError(
        f"{names} must{together} {must} `total_steps`, which includes them. Received: "
        f"{received} with {total} steps in all, in {where}. Shorten them, or train for longer."
    )


def at_least_one(steps: Any) -> Any:
    """Returns `steps`, or 1 if a run is too short for them."""
    return max(steps, 1) if isinstance(steps, int) else ops.maximum(steps, 1)
