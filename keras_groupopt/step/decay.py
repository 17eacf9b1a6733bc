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
from keras_groupopt.backend.fused_step import Member


def apply_decay(members: Sequence[Member], factor: Any) -> None:
    """Moves each variable toward its anchor, in place.

    Args:
        members: The variables that decay, of any shape and float dtype.
        factor: `η · λ` of this optimizer step, a float32 scalar tensor.
    """
    free = [own.variable for own in members if own.anchor is None]
    anchored = [own for own in members if own.anchor is not None]
    if free:
        backend.decay_to_zero(free, factor)
    if anchored:
        variables, anchors = [own.variable for own in anchored], [own.anchor for own in anchored]
        backend.decay_to_anchor(variables, anchors, factor)
