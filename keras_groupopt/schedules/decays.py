"""Values that go from one number to another over a known number of steps."""

from __future__ import annotations

import numbers
from typing import Any

import keras
from keras import ops

from keras_groupopt.base.checks import check_choice, check_count, check_number, check_positive
from keras_groupopt.schedules.arithmetic import mix, shares
from keras_groupopt.schedules.base import Schedule
from keras_groupopt.schedules.horizon import check_total

Tensor = Any

DECAYS = ("linear", "cosine", "root")


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Linear(Schedule):
    """Goes in a straight line from one value to another, and stays there.

    With d = min(t, total_steps) / total_steps:
    initial_learning_rate · (1 − d) + end_learning_rate · d.

    torch: `LinearLR(start_factor, end_factor, total_iters=total_steps)`, where the two values are
    the optimizer's rate times the factors.

    Args:
        initial_learning_rate: The value at step 0, a finite number >= 0.
        total_steps: Optimizer steps to the end, an integer >= 1, or `"fit"`: those of the run.
        end_learning_rate: The value from there on, a finite number >= 0. Default 0.

    Raises:
        ValueError: If a number is out of range; when called, if the run's length is not known.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Linear(1.0, total_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 4, 5)]
    [1.0, 0.75, 0.0, 0.0]
    """

    arguments = ("initial_learning_rate", "total_steps", "end_learning_rate")

    def __init__(
        self,
        initial_learning_rate: float,
        total_steps: int | str,
        end_learning_rate: float = 0.0,
    ) -> None:
        where = "Linear"
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where=where
        )
        self.total_steps = check_total("total_steps", total_steps, where)
        self.end_learning_rate = check_number("end_learning_rate", end_learning_rate, where=where)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        return mix(self.initial_learning_rate, self.end_learning_rate, step, self.total())


@keras.saving.register_keras_serializable(package="keras_groupopt")
class Polynomial(Schedule):
    """Warms up in a straight line, then decays along a power, and stays at the end.

    With w = warmup_steps and T = total_steps, for t < w the line from warmup_start to
    initial_learning_rate; then, with s = (T − t) / (T − w):
    end_learning_rate + (initial_learning_rate − end_learning_rate) · s ^ power.

    torch: `PolynomialLR(total_iters=total_steps, power)`, without a warm-up and to 0. Transformers:
    `get_polynomial_decay_schedule_with_warmup`.

    Args:
        initial_learning_rate: The value where the decay begins, a finite number >= 0.
        total_steps: Optimizer steps to the end, warm-up included: an integer >= 1, or `"fit"`:
            those of the run.
        end_learning_rate: The value from there on, a finite number >= 0. Default 0.
        power: The exponent, a finite number > 0. Default 1, a line.
        warmup_steps: Optimizer steps of warm-up, an integer >= 0, less than `total_steps`.
        warmup_start: The value at step 0 of a warm-up, a finite number >= 0.

    Raises:
        ValueError: If a number is out of range; when called, if the run's length is not known or
            the run is no longer than the warm-up.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras_groupopt as kgo
    >>> schedule = kgo.schedules.Polynomial(1.0, total_steps=6, power=2, warmup_steps=2)
    >>> [float(schedule(step)) for step in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.25, 0.0]
    """

    arguments = (
        "initial_learning_rate",
        "total_steps",
        "end_learning_rate",
        "power",
        "warmup_steps",
        "warmup_start",
    )

    def __init__(
        self,
        initial_learning_rate: float,
        total_steps: int | str,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        warmup_steps: int = 0,
        warmup_start: float = 0.0,
    ) -> None:
        where = "Polynomial"
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where=where
        )
        self.total_steps = check_total("total_steps", total_steps, where)
        self.end_learning_rate = check_number("end_learning_rate", end_learning_rate, where=where)
        self.power = check_positive("power", power, where=where)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 0, where=where)
        self.warmup_start = check_number("warmup_start", warmup_start, where=where)
        check_fits({"warmup_steps": self.warmup_steps}, self.total_steps, where, rest=1)

    def at(self, step: Tensor) -> Tensor:
        """Returns the value at `step`."""
        warmup, total = self.warmup_steps, self.total()
        check_fits({"warmup_steps": warmup}, total, "Polynomial", rest=1)
        done, left = shares(step - warmup, at_least_one(total - warmup))
        if self.power != 1.0:
            # 1 − left^power, without its rounding where it is small.
            done = -ops.expm1(self.power * ops.log1p(-done))
            left = ops.power(left, self.power)
        decayed = self.initial_learning_rate * left + self.end_learning_rate * done
        if warmup == 0:
            return decayed
        warming = mix(self.warmup_start, self.initial_learning_rate, step, warmup)
        return ops.where(step < warmup, warming, decayed)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class WarmupStableDecay(Schedule):
    """Warms up in a straight line, holds the peak, and decays over the last steps.

    With w = warmup_steps, T = total_steps and D = decay_steps: for t < w the line from
    initial_learning_rate to peak_learning_rate; the peak until T − D; then, with
    d = (t − T + D) / D, peak_learning_rate · (1 − f(d)) + end_learning_rate · f(d), where f(d) is d
    (`"linear"`), sin²(π d / 2) (`"cosine"`) or √d (`"root"`).

    Transformers: `get_wsd_schedule(num_warmup_steps, num_decay_steps, num_training_steps)`.

    Args:
        peak_learning_rate: The value that is held, a finite number >= 0.
        total_steps: Optimizer steps to the end, an integer >= 1, or `"fit"`: those of the run.
        decay_steps: Optimizer steps of the decay: an integer >= 1, or a float in (0, 1), the share
            of `total_steps`. Default 0.1.
        warmup_steps: Optimizer steps of the warm-up, an integer >= 0.
        initial_learning_rate: The value at step 0 of a warm-up, a finite number >= 0.
        end_learning_rate: The value at the end and after, a finite number >= 0.
        decay_curve: The shape of the decay: `"linear"`, `"cosine"` or `"root"`.

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

    arguments = (
        "peak_learning_rate",
        "total_steps",
        "decay_steps",
        "warmup_steps",
        "initial_learning_rate",
        "end_learning_rate",
        "decay_curve",
    )

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int | str,
        decay_steps: float = 0.1,
        warmup_steps: int = 0,
        initial_learning_rate: float = 0.0,
        end_learning_rate: float = 0.0,
        decay_curve: str = "linear",
    ) -> None:
        where = "WarmupStableDecay"
        self.peak_learning_rate = check_number(
            "peak_learning_rate", peak_learning_rate, where=where
        )
        self.total_steps = check_total("total_steps", total_steps, where)
        self.decay_steps = _steps_or_share("decay_steps", decay_steps, where)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 0, where=where)
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, where=where
        )
        self.end_learning_rate = check_number("end_learning_rate", end_learning_rate, where=where)
        self.decay_curve = check_choice("decay_curve", decay_curve, DECAYS, where=where)
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
        done, left = shares(step - (total - length), length)
        peak, end = self.peak_learning_rate, self.end_learning_rate
        if self.decay_curve == "root":
            root = ops.sqrt(done)
            value = peak * left / (1 + root) + end * root
        else:
            value = mix(peak, end, step - (total - length), length, self.decay_curve)
        if self.warmup_steps == 0:
            return value
        warming = mix(self.initial_learning_rate, peak, step, self.warmup_steps)
        return ops.where(step < self.warmup_steps, warming, value)


def check_fits(parts: dict[str, int], total: Any, where: str, rest: int = 0) -> None:
    """Refuses parts that are longer than the whole, where that is a number.

    Args:
        parts: Steps by the name of the argument.
        total: Steps in all; not a number while they are not known.
        where: The schedule's name.
        rest: Steps that must be left over.

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
        f"{names} must{together} {must} `total_steps`, which counts them too. Received: "
        f"{received} with {total} steps in all, in {where}. Shorten them, or train for longer."
    )


def at_least_one(steps: Any) -> Any:
    """Returns `steps`, or 1 where a run is too short for them."""
    return max(steps, 1) if isinstance(steps, int) else ops.maximum(steps, 1)


def _steps_or_share(name: str, value: Any, where: str) -> int | float:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if whole and int(value) >= 1:
        return int(value)
    real = isinstance(value, numbers.Real) and not isinstance(value, (bool, numbers.Integral))
    if real and 0 < float(value) < 1:
        return float(value)
    error = ValueError if whole or real else TypeError
    raise error(
        f"`{name}` must be an integer >= 1, or a share of the whole in (0, 1). Received: "
        f"{name}={value!r} in {where}."
    )
