"""What a contender gets, and what it makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
# Well below the norm of the gradients, so that clipping has work to do.
CLIPNORM = 1.0
BETA_1, BETA_2 = 0.9, 0.999
# That of Keras. Peers add theirs elsewhere, which a tiny one makes no difference to.
EPSILON = 1e-7
# Gradient, two moments and weight are read; two moments and weight are written.
ARRAYS_MOVED = 7


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a step is made from.

    Attributes:
        model: Its weights are moved, or copied where a peer has variables of its own.
        pattern: Of the paths in the first of two groups.
        feed: Two sets of gradients, as the backend has them: every second step takes the second,
            since constant gradients would not show a wrong moment.
        mode: How the backend runs the step: one of its `MODES`.
        options: What is switched on, in the words of `GroupedOptimizer`.
        epsilon: Of AdamW.
    """

    model: Any
    pattern: str
    feed: Any
    mode: str
    options: Mapping[str, Any]
    epsilon: float = EPSILON


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step that is ready to be timed.

    Attributes:
        step: Does a step, waits for its result, and returns wall and CPU milliseconds.
        start_up: By part, the wall and CPU seconds until the first step was done.
        weights: Reads the weights, in float32; `None` where there are none.
        state_bytes: What the optimizer keeps from step to step.
    """

    step: Callable[[], tuple[float, float]]
    start_up: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    weights: Callable[[], list[np.ndarray]] | None = None
    state_bytes: int = 0
