"""Interpolation between two values, accurate to float32 at any step.

The steps done and the steps left are both counted in integers. Computing one share as 1 minus the
other would leave only rounding error near the end of ten million steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import ops

Tensor = Any

CURVES = ("linear", "cosine")


def mix(start: Any, end: Any, elapsed: Tensor, length: Any, curve: str = "linear") -> Tensor:
    """Returns the value after `elapsed` of the `length` steps from `start` to `end`.

    With d = elapsed / length in [0, 1]: start · (1 − d) + end · d, or with sin²(π d / 2) for d.

    Args:
        start: The value at 0, a number or scalar tensor.
        end: The value at `length` and after.
        elapsed: Steps since the start, clipped to [0, `length`].
        length: A number or scalar tensor > 0.
        curve: `"linear"` or `"cosine"`. Default: `"linear"`.
    """
    done, left = shares(elapsed, length)
    if curve == "cosine":
        done, left = _sine_squared(done), _sine_squared(left)
    return start * left + end * done


def shares(elapsed: Tensor, length: Any) -> tuple[Tensor, Tensor]:
    """Returns the share of `length` steps that is done, and the share that is left."""
    elapsed = ops.minimum(ops.maximum(elapsed, 0), length)
    whole = ops.cast(length, "float32")
    return ops.cast(elapsed, "float32") / whole, ops.cast(length - elapsed, "float32") / whole


def after_warmup(step: Tensor, warmup: int, start: float, peak: float, value: Tensor) -> Tensor:
    """Returns `value`, or during the warm-up the value on the line from `start` to `peak`."""
    if warmup == 0:
        return value
    return ops.where(step < warmup, mix(start, peak, step, warmup), value)


def powered(rate: float, count: Tensor) -> Tensor:
    """Returns `rate ** count`. `ops.power` would amplify the rounding error of `rate`."""
    return ops.exp(ops.cast(count, "float32") * math.log(rate))


def piecewise(step: Tensor, value: Any, parts: Sequence[tuple[Any, Any]], curve: str) -> Tensor:
    """Returns the value at `step` of a piecewise curve that has `value` at step 0.

    Args:
        step: An integer scalar tensor.
        value: The value at step 0.
        parts: Pairs of the step at which a part ends, in increasing order, and the value there. A
            part may end before step 0; the next one then starts there.
        curve: `"linear"` or `"cosine"`, the shape of every part.
    """
    step = ops.cast(step, "float32")
    start: Any = 0
    ways = []
    for end, goal in parts:
        # A lower limit, so that a part of length 0 does not give 0 / 0.
        length = ops.maximum(ops.cast(end - start, "float32"), 1e-6)
        ways.append((end, mix(value, goal, step - start, length, curve)))
        start, value = end, goal
    result = ways[-1][1]
    for end, way in reversed(ways[:-1]):
        result = ops.where(step <= end, way, result)
    return result


def _sine_squared(share: Tensor) -> Tensor:
    return ops.square(ops.sin(share * (math.pi / 2)))
