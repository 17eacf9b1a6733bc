"""What a fused step takes: one rule's variables, and what is done to them around the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Tensor = Any


@dataclasses.dataclass(frozen=True)
class ListStep:
    """One step of a rule on a list of variables that move at one rate.

        g ← scale · g
        w ← w − decay · (w − anchor)                       where `decayed`
        w ← w − update of the rule at `rate`

    Args:
        rule: The rule, whose hyperparameters are numbers.
        gradients: One per variable, dense and of its dtype.
        variables: Keras variables.
        slots: The rule's state, a list per slot, parallel to `variables`.
        rate: The rate η, a float32 scalar.
        scale: What gradients are multiplied by, a scalar; `None` for 1.
        decay: The share of the way to the anchor, a float32 scalar; `None` for no decay.
        decayed: Per variable, whether it decays.
        anchors: Per variable, its anchor, a variable; `None` for zero.
        made: What a backend made for the parts of this step that came before, at other rates.
    """

    rule: Any
    gradients: list[Tensor]
    variables: list[Any]
    slots: list[list[Any]]
    rate: Tensor
    scale: Tensor | None
    decay: Tensor | None
    decayed: list[bool]
    anchors: list[Any | None]
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)


# Does the step, all of it or none.
FusedStep = Callable[[ListStep], None]
