"""What is timed: our optimizer, those of Keras and of the backend, and the limit of the machine.

All compute the same update, and the benchmark checks this: two groups have equal rates, and all
variables are decayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import backend
import copying
import keras
from prepared import (
    BETA_1,
    BETA_2,
    CLIPNORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Prepared,
    Setting,
)

import keras_groupopt as kgo

NEVER = 10**9
# Peers do not check for gradients that are not finite. The case `checked` has the default check.
BASIC: dict[str, Any] = {
    "weight_decay": WEIGHT_DECAY,
    "global_clipnorm": CLIPNORM,
    "on_nonfinite": "propagate",
}
# Each case changes one option. A window that never fills has micro-steps only.
CASES: dict[str, dict[str, Any]] = {
    "basic": BASIC,
    "no_clip": BASIC | {"global_clipnorm": None},
    "no_decay": BASIC | {"weight_decay": None},
    "anchors": BASIC | {"anchor": "initial"},
    "ema": BASIC | {"ema": kgo.EMA(0.999)},
    "micro_step": BASIC | {"gradient_accumulation_steps": NEVER},
    "checked": BASIC | {"on_nonfinite": "skip"},
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer that is timed, and the contender with the same weights.

    Attributes:
        what: A description.
        prepare: Prepares its step.
        reference: The contender that its weights are compared with, or `None`. Default: "adamw".
        note: Why the two may differ by more than rounding. Default: "".
    """

    what: str
    prepare: Callable[[Setting], Prepared]
    reference: str | None = "adamw"
    note: str = ""


def _keras(make: Callable[[Setting], Any]) -> Callable[[Setting], Prepared]:
    return lambda setting: backend.steps.prepare(lambda: make(setting), setting)


def grouped(setting: Setting, *, fused: bool = True) -> Any:
    """Returns our optimizer with two AdamW groups."""
    pattern = setting.pattern
    return kgo.GroupedOptimizer(
        [kgo.Group("early", kgo.regex(pattern)), kgo.Group("late", ~kgo.regex(pattern))],
        model=setting.model,
        rule=kgo.rule("adamw", beta_1=BETA_1, beta_2=BETA_2, epsilon=setting.epsilon),
        learning_rate=LEARNING_RATE,
        exclude_from_decay=(),
        fused=fused,
        **setting.options,
    )


def adamw(setting: Setting, *, clip: bool = True) -> Any:
    """Returns Keras' AdamW with one group."""
    return keras.optimizers.AdamW(
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        beta_1=BETA_1,
        beta_2=BETA_2,
        epsilon=setting.epsilon,
        global_clipnorm=CLIPNORM if clip else None,
    )


def multi_optimizer(setting: Setting) -> Any:
    """Returns Keras' MultiOptimizer with two groups."""
    early, late = (adamw(setting, clip=False) for _ in range(2))
    optimizers = keras.optimizers
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(late, {setting.pattern: early}))


def plain(setting: Setting) -> Any:
    """Returns our optimizer without fused steps: the rule updates one variable after another."""
    return grouped(setting, fused=False)


OURS = {
    "grouped": Contender("GroupedOptimizer, two groups", _keras(grouped), "grouped_plain"),
    "grouped_plain": Contender("GroupedOptimizer(fused=False), two groups", _keras(plain)),
}


def peers() -> Mapping[str, Contender]:
    """Returns the contenders of the basic step, by name."""
    found = {
        **OURS,
        "adamw": Contender("keras.optimizers.AdamW, one group", _keras(adamw), None),
    }
    # The oldest supported Keras does not have it.
    if hasattr(keras.optimizers, "MultiOptimizer"):
        found["multi_optimizer"] = Contender(
            "keras.optimizers.MultiOptimizer, two groups, no clip",
            _keras(multi_optimizer),
            note="not clipped, because it cannot clip over all groups",
        )
    own = backend.peers()
    for name, (what, prepare) in (own.PEERS if own else {}).items():
        found[name] = Contender(what, prepare, note=own.EPSILON_NOTE)
    return found | limits()


def switches() -> Mapping[str, Contender]:
    """Returns the contenders that are timed with one option changed at a time, by name."""
    addition = Contender("the gradients added to sums", backend.steps.addition, None)
    return OURS | {"addition": addition} | limits()


def limits() -> Mapping[str, Contender]:
    """Returns the lower limit of a step."""
    if backend.steps.devices():
        return {}
    what = "a copy of the bytes that AdamW moves"
    return {"copy": Contender(what, copying.prepare, None)}
