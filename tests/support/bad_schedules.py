"""Rows of bad input to schedules."""

from __future__ import annotations

from typing import Any

from bad_input import rows

import keras_groupopt as kgo
from keras_groupopt import schedules
from keras_groupopt.schedules import Linear, Polynomial, Sequential, WarmupStableDecay
from keras_groupopt.schedules.horizon import horizon

LINEAR = Linear(1.0, 10)
NAN, INF = float("nan"), float("inf")


def of(name: str, *arguments: Any, **options: Any) -> Any:
    cls = getattr(schedules, name)
    return lambda: cls(*arguments, **options)


# A valid call of each, of which one argument is replaced.
FALL: dict[str, Any] = {"total_steps": 9, "end_learning_rate": 0.1}
VALID: dict[str, dict[str, Any]] = {
    "Step": {"initial_learning_rate": 1.0, "decay_steps": 3, "decay_rate": 0.5},
    "MultiStep": {"initial_learning_rate": 1.0, "milestones": [3], "decay_rate": 0.5},
    "Linear": FALL | {"initial_learning_rate": 1.0},
    "Polynomial": FALL
    | {"initial_learning_rate": 1.0, "power": 2.0, "warmup_steps": 3, "warmup_start": 0.1},
    "WarmupStableDecay": FALL
    | {"peak_learning_rate": 1.0, "initial_learning_rate": 0.1}
    | {"warmup_steps": 3, "decay_curve": "linear"},
    "OneCycle": FALL
    | {"peak_learning_rate": 1.0, "initial_learning_rate": 0.1}
    | {"warmup_fraction": 0.3, "curve": "linear"},
    "Cyclic": {"initial_learning_rate": 0.1, "peak_learning_rate": 1.0, "decay_rate": 0.5}
    | {"up_steps": 3, "down_steps": 3, "mode": "triangular", "scale_by": "cycle"},
    "Scaled": {"schedule": LINEAR, "factor": 0.5},
    "Warmup": {"schedule": LINEAR, "steps": 3, "start": 0.1, "curve": "linear"},
    "SWA": {"schedule": LINEAR, "end_learning_rate": 0.1, "curve": "linear"}
    | {"start_step": 3, "anneal_steps": 3},
}
COUNTS_FROM_0 = ("warmup_steps", "start_step", "anneal_steps")


def replaced(kind: type, *wrongs: Any) -> list[tuple[str, str, Any, Any]]:
    """Valid calls with a wrong value in the place of each argument of a type."""
    return [
        (cls, name, wrong, of(cls, **(valid | {name: wrong})))
        for cls, valid in VALID.items()
        for name, right in valid.items()
        if isinstance(right, kind)
        for wrong in wrongs
    ]


BAD_SCHEDULES = [
    *(
        row
        for _, name, wrong, call in replaced(float, -1.0, NAN, INF, "1", True)
        for row in rows(
            TypeError if isinstance(wrong, str | bool) else ValueError,
            (call, f"`{name}` must be … Received: {name}={wrong!r} in "),
        )
    ),
    *(
        row
        for _, name, wrong, call in replaced(int, -1, 2.5, 0)
        if wrong or name not in COUNTS_FROM_0
        for row in rows(
            TypeError if isinstance(wrong, float) else ValueError,
            (call, f"`{name}` must be an integer >= … Received: {name}={wrong!r} in "),
        )
    ),
    *rows(
        ValueError,
        *(
            (call, f"`{name}` must be one of … Received: {name}='wrong' in ")
            for _, name, _, call in replaced(str, "wrong")
        ),
        *(
            (
                of(cls, **(VALID[cls] | {"total_steps": "epochs"})),
                '`total_steps` must be an integer >= … or "fit", the length of the run. Received',
            )
            for cls, valid in VALID.items()
            if "total_steps" in valid
        ),
        (of("MultiStep", 1.0, []), "at least one. Received: milestones=[] in MultiStep"),
        (of("MultiStep", 1.0, [3, 3]), "increasing … Received: milestones=[3, 3]"),
        (of("MultiStep", 1.0, [4, 3]), "must be increasing"),
        (of("MultiStep", 1.0, [0, 3]), "`milestones` must be an integer >= 1"),
        (of("Cyclic", 0.1, 1.0, 0), "`up_steps` must be an"),
        (of("OneCycle", 1.0, 1), "`total_steps` must be an … >= 2"),
        (of("OneCycle", 1.0, 9, 1.0), "less than 1. Received: warmup_fract"),
        (of("OneCycle", 1.0, 9, 0.6, three_phase=True), "at most 0.5 in three phases"),
        (
            of("Polynomial", 1.0, 9, warmup_steps=9),
            "less than `total_steps` … warmup_steps=9 with 9 steps in all, in Polynomial",
        ),
        (of("WarmupStableDecay", 1.0, 9, 5, 5), "together … warmup_steps=5, decay_steps=5"),
        *(
            (of("WarmupStableDecay", 1.0, 9, wrong), "decay_steps … share of the")
            for wrong in (0, -1, 1.5, NAN)
        ),
        (of("Sequential", [], []), "at least one schedule. Received"),
        (of("Chained", []), "at least one schedule. Received"),
        (of("Chained", [-1.0]), "`schedules` must be a finite"),
        (of("Sequential", [LINEAR], [3]), "1 milestones for 1 schedules in Sequential"),
        (of("Sequential", [1, 2, 3], [5, 4]), "must be increasing"),
        (lambda: kgo.warmup(0.1, 0), "`steps` must be an integer >="),
        (lambda: horizon(0), "`total` must be an integer >= 1"),
        (of("UnfreezeAt", -1), "`step` … -1 in UnfreezeAt"),
        (of("UnfreezeAt", 1, NAN), "`ratio` … nan in UnfreezeAt"),
    ),
    *rows(
        TypeError,
        (of("MultiStep", 1.0, [0.5]), "`milestones` must be an integer >= 1 … milestones=0.5"),
        (of("MultiStep", 1.0, 3), "in a list. Received: milestones=3"),
        (of("MultiStep", 1.0, "33"), "in a list"),
        (of("OneCycle", 1.0, 9, three_phase=3), "`three_phase` must be True"),
        (of("WarmupStableDecay", 1.0, 9, "3"), "share of the"),
        (of("WarmupStableDecay", 1.0, 9, True), "share of the"),
        (of("Chained", LINEAR), "must be a list of schedules or numbers"),
        (of("Chained", ["1"]), "`schedules` must be a finite number"),
        (of("Chained", [abs]), "`schedules` must be … kgo.schedules.Lambda(function)"),
        (of("Scaled", 0.1, 2), "`kgo.constant(value)`"),
        (of("Lambda", 0.1), "of one argument. Received: function=0.1"),
        (of("Lambda", int), "must be a function of one argument"),
        (of("Lambda", lambda: 0.1), "in Lambda: too many positional"),
        (
            of("Cyclic", 0.1, 1.0, scale=lambda step, cycle: 0.1),
            "`scale` must be a function of one argument … missing a required argument: 'cycle'",
        ),
        (lambda: horizon(0.5), "`total` must be an integer >= 1"),
        (of("UnfreezeAt", 1.5), "`step` must be an integer >= 0 … 1.5"),
    ),
]

# Lengths that are known only when a run is.
BAD_RUNS = [
    (lambda: kgo.warmup(Linear(1.0, "fit"), 9), 9, "9 steps before another … in Warmup"),
    (lambda: kgo.warmup(1.0, 9), 5, "for a run of 5 optimizer steps"),
    (lambda: Sequential([0.1, Linear(1.0, "fit")], [9]), 5, "9 steps before another … in Sequent"),
    (lambda: Polynomial(1.0, "fit", warmup_steps=9), 9, "warmup_steps=9 with 9 steps in all, in P"),
    (
        lambda: WarmupStableDecay(1.0, "fit", 5, 5),
        9,
        "warmup_steps=5, decay_steps=5 with 9 steps in all, in WarmupStableDecay",
    ),
]
