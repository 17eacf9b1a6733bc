"""The setting that a contender gets, and the prepared step that it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
# Well below the norm of the gradients, so that clipping acts.
CLIPNORM = 1.0
BETA_1, BETA_2 = 0.9, 0.999
# The default of Keras. Peers add theirs at another place, which does not matter if it is tiny.
EPSILON = 1e-7
# A step reads gradient, two moments and weight, and writes two moments and weight.
ARRAYS_MOVED = 7


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model, the gradients and the options of a step.

    Attributes:
        model: The model whose weights move. A peer with its own variables copies them.
        pattern: The pattern of the paths in the first of two groups.
        feed: Two sets of gradients as tensors of the backend. Steps alternate between them, because
            constant gradients would not reveal a wrong moment.
        mode: How the backend runs the step: one of its `MODES`.
        options: Options of `GroupedOptimizer`.
        epsilon: The epsilon of AdamW. Default: 1e-7.
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
        step: Takes a step, waits for its result, and returns wall and CPU milliseconds.
        start_up: The wall and CPU seconds of each part of the start-up. Default: empty.
        weights: Reads the weights in float32. Default: `None`, which means that there are none.
        state_bytes: The bytes of the optimizer state. Default: 0.
    """

    step: Callable[[], tuple[float, float]]
    start_up: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    weights: Callable[[], list[np.ndarray]] | None = None
    state_bytes: int = 0
