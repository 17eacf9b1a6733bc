"""Rows of bad input to schedules: a call, the type of its error, and what the message says."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import keras_groupopt as kgo
from keras_groupopt import schedules
from keras_groupopt.schedules.horizon import horizon

LINEAR = schedules.Linear(1.0, 10)


def of(name: str, *arguments: Any, **options: Any) -> Any:
    cls = getattr(schedules, name)
    return lambda: cls(*arguments, **options)


def row(identity: str, call: Any, error: type[Exception], message: str) -> Any:
    return pytest.param(call, error, message, id=identity)


# A valid call of each, of which one argument is replaced.
VALID: dict[str, dict[str, Any]] = {
    "Step": {"initial_learning_rate": 1.0, "decay_steps": 3, "decay_rate": 0.5},
    "MultiStep": {"initial_learning_rate": 1.0, "milestones": [3], "decay_rate": 0.5},
    "Linear": {"initial_learning_rate": 1.0, "total_steps": 9, "end_learning_rate": 0.1},
    "Polynomial": {
        "initial_learning_rate": 1.0,
        "total_steps": 9,
        "end_learning_rate": 0.1,
        "power": 2.0,
        "warmup_steps": 3,
        "warmup_start": 0.1,
    },
    "WarmupStableDecay": {
        "peak_learning_rate": 1.0,
        "total_steps": 9,
        "warmup_steps": 3,
        "initial_learning_rate": 0.1,
        "end_learning_rate": 0.1,
        "decay_curve": "linear",
    },
    "OneCycle": {
        "peak_learning_rate": 1.0,
        "total_steps": 9,
        "warmup_fraction": 0.3,
        "initial_learning_rate": 0.1,
        "end_learning_rate": 0.1,
        "curve": "linear",
    },
    "Cyclic": {
        "initial_learning_rate": 0.1,
        "peak_learning_rate": 1.0,
        "up_steps": 3,
        "down_steps": 3,
        "decay_rate": 0.5,
        "mode": "triangular",
        "scale_by": "cycle",
    },
    "Scaled": {"schedule": LINEAR, "factor": 0.5},
    "Warmup": {"schedule": LINEAR, "steps": 3, "start": 0.1, "curve": "linear"},
    "SWA": {
        "schedule": LINEAR,
        "end_learning_rate": 0.1,
        "start_step": 3,
        "anneal_steps": 3,
        "curve": "linear",
    },
    "Lambda": {"function": keras.ops.sqrt, "learning_rate": 0.1},
}
COUNTS_FROM_0 = ("warmup_steps", "start_step", "anneal_steps")

BAD_SCHEDULES = [
    *(
        row(
            f"{cls}, {name}={wrong!r}",
            of(cls, **(valid | {name: wrong})),
            TypeError if isinstance(wrong, str) or wrong is True else ValueError,
            rf"(?s)`{name}` must be .*Received: {name}={wrong!r} in ",
        )
        for cls, valid in VALID.items()
        if cls != "Lambda"
        for name, right in valid.items()
        if isinstance(right, float)
        for wrong in (-1.0, float("nan"), float("inf"), "1", True)
    ),
    *(
        row(
            f"{cls}, {name}={wrong!r}",
            of(cls, **(valid | {name: wrong})),
            TypeError if isinstance(wrong, float) else ValueError,
            rf"`{name}` must be an integer >= \d.*Received: {name}={wrong!r} in ",
        )
        for cls, valid in VALID.items()
        for name, right in valid.items()
        if isinstance(right, int)
        for wrong in (-1, 2.5, *([] if name in COUNTS_FROM_0 else [0]))
    ),
    *(
        row(
            f"{cls}, {name}=wrong",
            of(cls, **(valid | {name: "wrong"})),
            ValueError,
            rf"`{name}` must be one of \"\w+\", \".*Received: {name}='wrong' in ",
        )
        for cls, valid in VALID.items()
        for name, right in valid.items()
        if isinstance(right, str)
    ),
    *(
        row(
            f"{cls}, total_steps='epochs'",
            of(cls, **(VALID[cls] | {"total_steps": "epochs"})),
            ValueError,
            r"`total_steps` must be an integer >= \d or \"fit\", the length of the run\. Received",
        )
        for cls in ("Linear", "Polynomial", "WarmupStableDecay", "OneCycle")
    ),
    *(
        row(f"milestones {wrong}", of("MultiStep", 1.0, wrong), error, message)
        for wrong, error, message in (
            ([], ValueError, r"at least one\. Received: milestones=\[\] in MultiStep"),
            ([3, 3], ValueError, r"must be increasing.*Received: milestones=\[3, 3\]"),
            ([4, 3], ValueError, "must be increasing"),
            ([0, 3], ValueError, "`milestones` must be an integer >= 1"),
            ([0.5], TypeError, r"`milestones` must be an integer >= 1.*milestones=0\.5"),
            (3, TypeError, "in a list. Received: milestones=3"),
            ("33", TypeError, "in a list"),
        )
    ),
    row("a cycle of zero steps", of("Cyclic", 0.1, 1.0, 0), ValueError, "`up_steps` must be an"),
    row(
        "a cycle of one step", of("OneCycle", 1.0, 1), ValueError, "`total_steps` must be an.*>= 2"
    ),
    row(
        "no fall", of("OneCycle", 1.0, 9, 1.0), ValueError, r"less than 1\. Received: warmup_fract"
    ),
    row(
        "three phases too long",
        of("OneCycle", 1.0, 9, 0.6, three_phase=True),
        ValueError,
        "at most 0.5 in three phases",
    ),
    row("phases", of("OneCycle", 1.0, 9, three_phase=3), TypeError, "`three_phase` must be True"),
    row(
        "a warm-up as long as the whole",
        of("Polynomial", 1.0, 9, warmup_steps=9),
        ValueError,
        r"`warmup_steps` must be less than `total_steps`.*warmup_steps=9 with 9 steps in all, in P",
    ),
    row(
        "a warm-up and a decay longer than the whole",
        of("WarmupStableDecay", 1.0, 9, 5, 5),
        ValueError,
        r"`warmup_steps` and `decay_steps` must together not be .*warmup_steps=5, decay_steps=5",
    ),
    *(
        row(f"decay_steps={wrong}", of("WarmupStableDecay", 1.0, 9, wrong), error, "share of the")
        for wrong, error in (
            (0, ValueError),
            (-1, ValueError),
            (1.5, ValueError),
            (float("nan"), ValueError),
            ("3", TypeError),
            (True, TypeError),
        )
    ),
    row("no schedules", of("Sequential", [], []), ValueError, "at least one schedule. Received"),
    row("nothing chained", of("Chained", []), ValueError, "at least one schedule. Received"),
    row("no list", of("Chained", LINEAR), TypeError, "must be a list of schedules or numbers"),
    row("a negative number", of("Chained", [-1.0]), ValueError, "`schedules` must be a finite"),
    row("text", of("Chained", ["1"]), TypeError, "`schedules` must be a finite number"),
    row(
        "a function among schedules",
        of("Chained", [abs]),
        TypeError,
        r"`schedules` must be a schedule.*kgo\.schedules\.Lambda\(function\)",
    ),
    row("a number to scale", of("Scaled", 0.1, 2), TypeError, r"is `kgo\.constant\(value\)`"),
    row(
        "too many milestones",
        of("Sequential", [LINEAR], [3]),
        ValueError,
        "one fewer than the schedules. Received: 1 milestones for 1 schedules in Sequential",
    ),
    row("milestones back", of("Sequential", [1, 2, 3], [5, 4]), ValueError, "must be increasing"),
    row("no function", of("Lambda", 0.1), TypeError, r"of one argument\. Received: function=0\.1"),
    row("a class", of("Lambda", int), TypeError, "must be a function of one argument"),
    row(
        "a function without arguments",
        of("Lambda", lambda: 0.1),
        TypeError,
        "in Lambda: too many positional",
    ),
    row(
        "a function of two",
        of("Cyclic", 0.1, 1.0, scale=lambda step, cycle: 0.1),
        TypeError,
        "`scale` must be a function of one argument.*missing a required argument: 'cycle'",
    ),
    row("warmup(0 steps)", lambda: kgo.warmup(0.1, 0), ValueError, "`steps` must be an integer >="),
    row("a run of 0 steps", lambda: horizon(0), ValueError, "`total` must be an integer >= 1"),
    row("a run of half steps", lambda: horizon(0.5), TypeError, "`total` must be an integer >= 1"),
]

# Lengths that are known only when a run is.
BAD_CALLS = [
    (lambda: kgo.warmup(schedules.Linear(1.0, "fit"), 9), 9, "9 steps before another .* in warmup"),
    (lambda: kgo.warmup(1.0, 9), 5, "for a run of 5 optimizer steps"),
    (
        lambda: schedules.Sequential([0.1, schedules.Linear(1.0, "fit")], [9]),
        5,
        "9 steps before another schedule in Sequential",
    ),
    (
        lambda: schedules.Polynomial(1.0, "fit", warmup_steps=9),
        9,
        "warmup_steps=9 with 9 steps in all, in Polynomial",
    ),
    (
        lambda: schedules.WarmupStableDecay(1.0, "fit", 5, 5),
        9,
        "warmup_steps=5, decay_steps=5 with 9 steps in all, in WarmupStableDecay",
    ),
]
