"""Declarations of averages of the weights over optimizer steps: exponential, and equal (SWA).

With the weights `w_s` after optimizer step `s`, an average `v`, and `t` averages made so far:

    s ≤ start:                            v ← w_s
    s > start, (s − start) % every = 0:   v ← β_t · v + (1 − β_t) · w_s,   t ← t + 1

after constraints, in float32 for weights of lower precision. Training never reads `v`.

References: Polyak & Juditsky 1992, doi:10.1137/0330046; Izmailov et al. 2018, arXiv:1803.05407.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import field
from typing import Any

from keras_groupopt.base.arguments import SWITCH, checked_by, count, set_checked
from keras_groupopt.base.checks import check_count, check_scalar, is_schedule, message, optional


def check_momentum(name: str, value: Any, *, where: str) -> Any:
    """Returns a schedule as it is, and a number in [0, 1) as a float."""
    number = check_scalar(name, value, where=where)
    if not is_schedule(number) and not (number is not None and number < 1):
        raise ValueError(message(name, value, "a number in [0, 1) or a schedule", where))
    return number


class Average:
    """The base class of `EMA` and `SWA`, for annotations and checks."""

    every: int
    start: int

    def __post_init__(self) -> None:
        set_checked(self, dataclasses.fields(self), vars(self))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class EMA(Average):
    """An exponential moving average of the weights, for `GroupedOptimizer(ema=...)`.

    It starts as a copy of the weights at optimizer step `start`. Then, once per `every` optimizer
    steps, where `t` averages were made so far:

        β_t = min(momentum, (1 + t) / (10 + t))     if warmup, else momentum
        v ← β_t · v + (1 − β_t) · w

    after constraints, in float32 for weights of lower precision. Before `start` it equals the
    weights. Training never reads it. `kgo.UseAveragedWeights` validates and saves with it, and
    `kgo.averaged_weights(model)` puts it into the model temporarily.

    Args:
        momentum: `β` in [0, 1), a number or a schedule over optimizer steps. Default: 0.999.
        warmup: Whether `β` grows from 0.1 to `momentum`, so that the first weights lose their
            influence soon. Default: False.
        every: The number of optimizer steps between averages, at least 1. Default: 1.
        start: The optimizer step at which averaging begins. Default: 0.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a value is out of range.

    Example:

    >>> import keras_groupopt as kgo
    >>> optimizer = kgo.GroupedOptimizer(learning_rate=0.1, ema=kgo.EMA(0.999, warmup=True))

    Reference:
        Polyak & Juditsky 1992, doi:10.1137/0330046. Warm-up: as in TensorFlow's
        `ExponentialMovingAverage(num_updates=...)`.
    """

    momentum: Any = field(default=0.999, metadata=checked_by(check_momentum))
    warmup: bool = field(default=False, metadata=SWITCH)
    every: int = field(default=1, metadata=count(1))
    start: int = field(default=0, metadata=count(0))


@dataclasses.dataclass(frozen=True)
class SWA(Average):
    """An equal average of the weights (stochastic weight averaging), for `ema=`.

    It averages the weights after the optimizer steps `start + every`, `start + 2·every`, …. With
    `t` of them averaged so far,

        v ← (t · v + w) / (t + 1)

    after constraints, in float32 for weights of lower precision. Before the first average it equals
    the weights at step `start`, and before `start` the current weights.

    Args:
        every: The number of optimizer steps between averaged weights, at least 1, often an epoch.
            Default: 1.
        start: The optimizer step after which averaging begins. Default: 0.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a value is out of range.

    Example:

    >>> import keras_groupopt as kgo
    >>> optimizer = kgo.GroupedOptimizer(learning_rate=0.1, ema=kgo.SWA(every=100, start=1000))

    Reference:
        Izmailov et al. 2018, arXiv:1803.05407.
    """

    every: int = field(default=1, metadata=count(1))
    start: int = field(default=0, metadata=count(0))


@dataclasses.dataclass(frozen=True)
class KerasEMA(Average):
    """Keras' `use_ema`: the first average is the weights after the first step.

    Args:
        momentum: `β` in [0, 1). Default: 0.99.
        overwrite_frequency: The number of optimizer steps between writing the average into the
            weights. Default: never.
        every: Always 1.
        start: Always 0.
    """

    momentum: float = 0.99
    overwrite_frequency: int | None = None
    every: int = 1
    start: int = 0


def as_average(
    ema: Any, use_ema: Any, ema_momentum: float, ema_overwrite_frequency: int | None
) -> Average | None:
    """Returns the average of `GroupedOptimizer`, from its `ema=` or from Keras' arguments.

    Raises:
        TypeError: If `ema` is not an average.
        ValueError: If both ways are used, or an argument would have no effect.
    """
    where = "GroupedOptimizer"
    if ema is not None and not isinstance(ema, Average):
        hint = f"Write `ema=kgo.EMA({ema!r})`." if isinstance(ema, float) else ""
        raise TypeError(message("ema", ema, "`kgo.EMA(...)` or `kgo.SWA(...)`", advice=hint))
    if not isinstance(use_ema, bool):
        advice = "Pass the momentum as `ema_momentum=`."
        raise TypeError(message("use_ema", use_ema, "True or False", advice=advice))
    if not use_ema:
        if ema_overwrite_frequency is not None:
            raise ValueError(
                "`ema_overwrite_frequency` must come with `use_ema=True`. Received: "
                f"ema_overwrite_frequency={ema_overwrite_frequency!r} with use_ema=False."
            )
        return ema
    if ema is not None:
        raise ValueError(
            "Only one of `use_ema` and `ema` must be given. Received: use_ema=True and "
            f"ema={ema!r}. `ema=` leaves the weights alone at the end of `fit`; `use_ema=True` "
            "overwrites them, as in Keras."
        )
    momentum = check_momentum("ema_momentum", ema_momentum, where=where)
    check_steps = optional(functools.partial(check_count, least=1))
    name, steps = "ema_overwrite_frequency", ema_overwrite_frequency
    return KerasEMA(momentum, check_steps(name, steps, where=where))


def describe(average: Average | None) -> str | None:
    """Returns an average as the code that makes it, for the plan."""
    if average is None:
        return None
    shown = {
        field.name: getattr(average, field.name)
        for field in dataclasses.fields(average)  # type: ignore[arg-type]
        if field.name == "momentum" or getattr(average, field.name) != field.default
    }
    if is_schedule(shown.get("momentum")):
        shown["momentum"] = type(shown["momentum"]).__name__
    listed = ", ".join(f"{name}={value}" for name, value in shown.items())
    name = "use_ema" if isinstance(average, KerasEMA) else type(average).__name__
    return f"{name}({listed})"
