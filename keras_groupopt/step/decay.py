"""Decoupled weight decay toward zero or toward an anchor.

For the decayed variables `w` of a group with rate `η`, coefficient `λ` and anchor `a`:

    w ← w − η · λ · (w − a)

before the rule's update, so from the weights before it; `a = 0` is ordinary decay, and the
initial weights as `a` are L2-SP. Nothing enters a moment, and `η = 0` gives no decay.

References: Loshchilov & Hutter 2019, arXiv:1711.05101; Li et al. 2018, arXiv:1802.01483.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_groupopt import backend


def apply_decay(
    variables: Sequence[Any], anchors: Sequence[Any | None], learning_rate: Any, weight_decay: Any
) -> None:
    """Moves each variable toward its anchor, in place.

    Args:
        variables: Keras variables of any shape and float dtype.
        anchors: Per variable, a variable of its shape, or `None` for zero.
        learning_rate: `η`, a float32 scalar tensor, per optimizer step.
        weight_decay: `λ`, a float32 scalar tensor.
    """
    factor = learning_rate * weight_decay
    free = [v for v, anchor in zip(variables, anchors, strict=True) if anchor is None]
    pairs = [
        (v, anchor) for v, anchor in zip(variables, anchors, strict=True) if anchor is not None
    ]
    if free:
        backend.decay_to_zero(free, factor)
    if pairs:
        backend.decay_to_anchor([v for v, _ in pairs], [anchor for _, anchor in pairs], factor)
