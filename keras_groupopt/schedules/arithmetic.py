"""Ways from one value to another, to float32 accuracy at any step.

What is done and what is left of a way are both counted in integers, and neither is one minus the
other: near the end of ten million steps a difference from 1 would be rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import ops

Tensor = Any

CURVES = ("linear", "cosine")


def mix(start: Any, end: Any, elapsed: Tensor, length: Any, curve: str = "linear") -> Tensor:
    """Returns the value after `elapsed` of `length` steps on a way from `start` to `end`.

    With d = elapsed / length in [0, 1]: start · (1 − d) + end · d, or with sin²(π d / 2) for d.

    Args:
        start: The value at 0, a number or scalar tensor.
        end: The value at `length` and after.
        elapsed: Steps since the start; less than 0 counts as 0, more than `length` as `length`.
        length: A number or scalar tensor > 0.
        curve: `"linear"` or `"cosine"`.
    """
    done, left = shares(elapsed, length)
    if curve == "cosine":
        done, left = _sine_squared(done), _sine_squared(left)
    return start * left + end * done


def shares(elapsed: Tensor, length: Any) -> tuple[Tensor, Tensor]:
    """Returns what is done and what is left of `length` steps, as float32 shares of it."""
    elapsed = ops.minimum(ops.maximum(elapsed, 0), length)
    whole = ops.cast(length, "float32")
    return ops.cast(elapsed, "float32") / whole, ops.cast(length - elapsed, "float32") / whole


def powered(rate: float, count: Tensor) -> Tensor:
    """Returns `rate ** count` for a count of steps. `power` would raise the rounding of `rate`."""
    return ops.exp(ops.cast(count, "float32") * math.log(rate))


def piecewise(step: Tensor, value: Any, parts: Sequence[tuple[Any, Any]], curve: str) -> Tensor:
    """Returns the value at `step` on a way that starts at 0 with `value`.

    Args:
        step: An integer scalar tensor.
        value: The value at step 0.
        parts: Pairs of the step at which a part ends, rising, and the value there. A part that
            ends before step 0 is not seen; the next one starts where it ended.
        curve: `"linear"` or `"cosine"`, of every part.
    """
    step = ops.cast(step, "float32")
    start: Any = 0
    ways = []
    for end, goal in parts:
        # Not shorter than rounding, so that a part without a length is not 0 / 0.
        length = ops.maximum(ops.cast(end - start, "float32"), 1e-6)
        ways.append((end, mix(value, goal, step - start, length, curve)))
        start, value = end, goal
    result = ways[-1][1]
    for end, way in reversed(ways[:-1]):
        result = ops.where(step <= end, way, result)
    return result


def _sine_squared(share: Tensor) -> Tensor:
    return ops.square(ops.sin(share * (math.pi / 2)))
