"""Who takes a step: ours, Keras', the backend's own, and the limits of the machine.

All do the same arithmetic, which is checked: two groups have equal rates, and all is decayed.
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
# Peers do not look for gradients that are not finite; `checked` does, as it is by default.
BASIC: dict[str, Any] = {
    "weight_decay": WEIGHT_DECAY,
    "global_clipnorm": CLIPNORM,
    "on_nonfinite": "propagate",
}
# One thing switched at a time. A window that never fills shows the micro-step alone.
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
    """What takes a step, and whose weights it should arrive at.

    Attributes:
        what: What it is, in words.
        prepare: Makes it ready.
        reference: The contender whose weights its own are compared with; `None` for none.
        note: Why the two may differ by more than rounding.
    """

    what: str
    prepare: Callable[[Setting], Prepared]
    reference: str | None = "adamw"
    note: str = ""


def _keras(make: Callable[[Setting], Any]) -> Callable[[Setting], Prepared]:
    return lambda setting: backend.steps.prepare(lambda: make(setting), setting)


def grouped(setting: Setting, *, fused: bool = True) -> Any:
    """Returns ours, with two AdamW groups."""
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
    """Returns Keras' AdamW, for one group."""
    return keras.optimizers.AdamW(
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        beta_1=BETA_1,
        beta_2=BETA_2,
        epsilon=setting.epsilon,
        global_clipnorm=CLIPNORM if clip else None,
    )


def multi_optimizer(setting: Setting) -> Any:
    """Returns Keras' optimizer of two optimizers."""
    early, late = (adamw(setting, clip=False) for _ in range(2))
    optimizers = keras.optimizers
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(late, {setting.pattern: early}))


def plain(setting: Setting) -> Any:
    """Returns ours, every variable updated by the rule as it is written."""
    return grouped(setting, fused=False)


OURS = {
    "grouped": Contender("GroupedOptimizer, two groups", _keras(grouped), "grouped_plain"),
    "grouped_plain": Contender("GroupedOptimizer(fused=False), two groups", _keras(plain)),
}


def peers() -> Mapping[str, Contender]:
    """Returns all that do the basic step, by name."""
    found = {
        **OURS,
        "adamw": Contender("keras.optimizers.AdamW, one group", _keras(adamw), None),
    }
    # Younger than the oldest Keras that is supported.
    if hasattr(keras.optimizers, "MultiOptimizer"):
        found["multi_optimizer"] = Contender(
            "keras.optimizers.MultiOptimizer, two groups, no clip",
            _keras(multi_optimizer),
            note="not clipped, as it cannot clip over all",
        )
    own = backend.peers()
    for name, (what, prepare) in (own.PEERS if own else {}).items():
        found[name] = Contender(what, prepare, note=own.EPSILON_NOTE)
    return found | limits()


def switches() -> Mapping[str, Contender]:
    """Returns those that are timed with one thing switched at a time, by name."""
    addition = Contender("the gradients added to sums", backend.steps.addition, None)
    return OURS | {"addition": addition} | limits()


def limits() -> Mapping[str, Contender]:
    """Returns what no step can be faster than."""
    if backend.steps.devices():
        return {}
    what = "a copy of the bytes that AdamW moves"
    return {"copy": Contender(what, copying.prepare, None)}
