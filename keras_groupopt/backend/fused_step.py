"""What a fused step takes: one rule's variables, and what is done to them around the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Tensor = Any


class Member(Protocol):
    """A variable of a fused step, and what is kept beside it.

    Attributes:
        variable: A Keras variable.
        fused_slots: The rule's state for this variable, in the order that the fused step takes.
        anchor: What it decays toward, a variable; `None` for zero.
        is_decayed: Whether it decays.
    """

    variable: Any
    fused_slots: tuple[Any, ...]
    anchor: Any | None

    @property
    def is_decayed(self) -> bool: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class ListStep:
    """One step of a rule on variables that move at one rate.

        g ← scale · g
        w ← w − decay · (w − anchor)                       if `is_decayed`
        w ← w − update of the rule at `rate`

    Args:
        rule: The rule. A fused step needs hyperparameters that are numbers.
        pairs: The variables and their gradients; for a fused step dense, and of the same dtype.
        rate: The rate η, a float32 scalar.
        scale: What gradients are multiplied by, a scalar; `None` for 1.
        decay: The share of the way to the anchor, a float32 scalar; `None` for no decay.
        made: What a backend made for other parts of this step, at other rates.
    """

    rule: Any
    pairs: Sequence[tuple[Member, Tensor]]
    rate: Tensor
    scale: Tensor | None
    decay: Tensor | None
    made: dict[Any, Any]


# Does the step.
FusedStep = Callable[[ListStep], None]
