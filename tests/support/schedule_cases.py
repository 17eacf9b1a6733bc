"""Schedules beside the schedulers of torch that they equal: rows of (ours, torch's, steps).

Torch's are made for an optimizer whose groups have the rates `BASE` and `BASE * RATIO`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import pytest

from keras_groupopt import warmup
from keras_groupopt.schedules import (
    SWA,
    Chained,
    Cyclic,
    Lambda,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Scaled,
    Sequential,
    Step,
)

try:
    import torch
    from torch.optim import lr_scheduler as theirs
    from torch.optim.swa_utils import SWALR
except ModuleNotFoundError:  # tests that need it are skipped then
    torch = theirs = SWALR = None

BASE, RATIO = 0.5, 0.25


@keras.saving.register_keras_serializable(package="schedule_cases")
def inverse_root(step: Any) -> Any:
    return 1 / keras.ops.sqrt(1 + keras.ops.cast(step, "float32"))


@keras.saving.register_keras_serializable(package="schedule_cases")
def harmonic(count: Any) -> Any:
    return 1 / (1 + keras.ops.cast(count, "float32"))


KerasCosine = keras.optimizers.schedules.CosineDecay
ONE_CYCLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "linear": {"curve": "linear"},
    "three phases": {"three_phase": True},
    "three phases, linear": {"three_phase": True, "curve": "linear", "warmup_fraction": 0.41},
    "fraction": {"warmup_fraction": 0.123},
    "without a rise": {"warmup_fraction": 0.0},
    "values": {"initial_learning_rate": BASE / 4, "end_learning_rate": BASE / 8},
}
CYCLIC: dict[str, dict[str, Any]] = {
    "defaults": {},
    "short": {"up_steps": 5},
    "asymmetric": {"up_steps": 3, "down_steps": 8},
    "halving": {"up_steps": 3, "mode": "triangular2"},
    "exponential": {"up_steps": 4, "mode": "exp_range", "decay_rate": 0.95},
    "by a function of cycles": {"up_steps": 3, "scale": harmonic},
    "by a function of steps": {"up_steps": 3, "scale": harmonic, "scale_by": "iterations"},
}


def in_turn(optimizer: Any, milestones: list[int], *schedulers: Any) -> Any:
    return theirs.SequentialLR(optimizer, list(schedulers), milestones)


ROWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "step": (lambda: Step(BASE, 7), lambda o: theirs.StepLR(o, 7)),
    "step, rate": (lambda: Step(BASE, 3, 0.7), lambda o: theirs.StepLR(o, 3, 0.7)),
    "steps": (
        lambda: MultiStep(BASE, [3, 4, 20]),
        lambda o: theirs.MultiStepLR(o, [3, 4, 20]),
    ),
    "steps, rate": (
        lambda: MultiStep(BASE, [1, 39], 0.3),
        lambda o: theirs.MultiStepLR(o, [1, 39], 0.3),
    ),
    "linear": (lambda: Linear(BASE / 3, 5, BASE), lambda o: theirs.LinearLR(o)),
    "down": (lambda: Linear(BASE, 30, BASE * 0.1), lambda o: theirs.LinearLR(o, 1.0, 0.1, 30)),
    "polynomial": (lambda: Polynomial(BASE, 5), lambda o: theirs.PolynomialLR(o)),
    "power": (lambda: Polynomial(BASE, 30, power=2.5), lambda o: theirs.PolynomialLR(o, 30, 2.5)),
    "lambda": (
        lambda: Lambda(inverse_root, BASE),
        lambda o: theirs.LambdaLR(o, lambda step: (1 + step) ** -0.5),
    ),
    **{
        f"one-cycle, {name}": (
            lambda options=options: OneCycle(BASE, 40, **options),
            lambda o, options=options: one_cycle(o, **options),
        )
        for name, options in ONE_CYCLE.items()
    },
    **{
        f"cyclic, {name}": (
            lambda options=options: Cyclic(BASE, 4 * BASE, **options),
            lambda o, options=options: cyclic(o, **options),
        )
        for name, options in CYCLIC.items()
    },
    "in turn": (
        lambda: Sequential([BASE * 0.1, Step(BASE, 4, 0.9), Linear(BASE, 6, BASE / 2)], [5, 20]),
        lambda o: in_turn(
            o,
            [5, 20],
            theirs.ConstantLR(o, 0.1, 100),
            theirs.StepLR(o, 4, 0.9),
            theirs.LinearLR(o, 1.0, 0.5, 6),
        ),
    ),
    "one in turn": (
        lambda: Sequential([Step(BASE, 4)], []),
        lambda o: in_turn(o, [], theirs.StepLR(o, 4)),
    ),
    "warm-up": (
        lambda: warmup(Step(BASE, 5, 0.5), 8, start=BASE / 10),
        lambda o: in_turn(o, [8], theirs.LinearLR(o, 0.1, 1.0, 8), theirs.StepLR(o, 5, 0.5)),
    ),
    # Torch's cosine rises again after 38 steps.
    "warm-up before a schedule of Keras": (
        lambda: warmup(KerasCosine(BASE, 30), 8, start=BASE / 10),
        lambda o: in_turn(o, [8], theirs.LinearLR(o, 0.1, 1.0, 8), theirs.CosineAnnealingLR(o, 30)),
    ),
    "chained": (
        lambda: Chained([Step(BASE, 6, 0.5), Linear(0.1, 9, 1.0), 0.7]),
        lambda o: theirs.ChainedScheduler(
            [
                theirs.StepLR(o, 6, 0.5),
                theirs.LinearLR(o, 0.1, 1.0, 9),
                theirs.ConstantLR(o, 0.7, 99),
            ]
        ),
    ),
    "scaled": (lambda: Scaled(Step(1.0, 6, 0.5), BASE), lambda o: theirs.StepLR(o, 6, 0.5)),
    **{
        f"averaging, {curve}, {steps}": (
            lambda steps=steps, curve=curve: SWA(Step(BASE, 5, 0.5), BASE / 8, 12, steps, curve),
            lambda o, steps=steps, curve=curve: Averaging(o, 12, steps, curve),
        )
        for curve in ("cosine", "linear")
        for steps in (10, 0)
    },
}
EQUAL = [
    pytest.param(*row, 38 if "of Keras" in name else 40, id=name) for name, row in ROWS.items()
]


def peaks(optimizer: Any, factor: float = 1.0) -> list[float]:
    return [group["lr"] * factor for group in optimizer.param_groups]


def one_cycle(optimizer: Any, **options: Any) -> Any:
    start = options.pop("initial_learning_rate", BASE / 25)
    end = options.pop("end_learning_rate", start / 1e4)
    return theirs.OneCycleLR(
        optimizer,
        peaks(optimizer),
        total_steps=40,
        pct_start=options.pop("warmup_fraction", 0.3),
        anneal_strategy={"cosine": "cos", "linear": "linear"}[options.pop("curve", "cosine")],
        div_factor=BASE / start,
        final_div_factor=start / end,
        **options,
    )


def cyclic(optimizer: Any, **options: Any) -> Any:
    renamed = {
        "up_steps": "step_size_up",
        "down_steps": "step_size_down",
        "decay_rate": "gamma",
        "scale_by": "scale_mode",
    }
    options = {renamed.get(name, name): value for name, value in options.items()}
    if options.pop("scale", None) is not None:
        options["scale_fn"] = lambda count: 1 / (1 + count)
    return theirs.CyclicLR(
        optimizer, peaks(optimizer), peaks(optimizer, 4), cycle_momentum=False, **options
    )


class Averaging:
    """A scheduler up to a step, then the one of an average of weights in its place."""

    def __init__(self, optimizer: Any, start: int, steps: int, curve: str) -> None:
        self.before = theirs.StepLR(optimizer, 5, 0.5)
        self.start, self.done = start, 0
        self.after = lambda: SWALR(
            optimizer,
            peaks_of_average(optimizer),
            steps,
            {"cosine": "cos", "linear": "linear"}[curve],
        )

    def step(self) -> None:
        self.done += 1
        if self.done < self.start:
            self.before.step()
        elif self.done == self.start:
            self.before.step()
            self.swa = self.after()
        else:
            self.swa.step()


def peaks_of_average(optimizer: Any) -> list[float]:
    return [group["initial_lr"] / 8 for group in optimizer.param_groups]


def run_of_torch(make: Callable[[Any], Any], steps: int, **options: Any) -> list[list[dict]]:
    """The settings of two groups at each optimizer step."""
    pytest.importorskip("torch")
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": BASE * ratio} for ratio in (1, RATIO)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9, **options)
    found = []
    with warnings.catch_warnings():
        # A SequentialLR steps its own schedulers in a way that torch itself deprecates.
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
        for _ in range(steps):
            found.append(
                [{"lr": g["lr"], "momentum": g["momentum"]} for g in optimizer.param_groups]
            )
            optimizer.step()
            scheduler.step()
    return found
