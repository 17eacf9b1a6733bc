"""Parts that join the training one after another, the head first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt.base.checks import check_count
from keras_groupopt.plan.group import Group
from keras_groupopt.recipes.parts import parts_of, selector_for
from keras_groupopt.schedules.unfreezing import UnfreezeAt
from keras_groupopt.selectors import Selector, as_selector

__all__ = ["gradual_unfreezing"]


def gradual_unfreezing(
    parts: keras.Model | Sequence[Any],
    steps_per_stage: int | Sequence[int],
    *,
    head: Any = None,
    blocks: Any = None,
) -> list[tuple[Selector, UnfreezeAt]]:
    """Returns ratios that are 0 until a part's stage, for `ratios=`. The last part starts at once.

    With n parts, numbered from 0 at the input, and s steps per stage, part k moves from optimizer
    step (n − 1 − k) · s on. The ratio is a schedule: nothing is compiled again, moments are kept,
    and a resumed run is at the stage of its step. Gradients of a part that waits are in its moments
    and in `global_clipnorm`'s norm; `optimizer.freeze_to` leaves them out of both.

    Args:
        parts: A built Keras model, whose parts are found as by `layerwise_decay`; or the parts
            themselves in order from the input: selectors, paths, layers, lists of these,
            `kgo.Group`, or pairs (selector, ratio) such as `layerwise_decay` returns, whose ratios
            hold from the part's stage on.
        steps_per_stage: Optimizer steps from one stage to the next, a whole number >= 1; or one
            such number per stage but the last, in the order of stages.
        head: The head of a model, as for `layerwise_decay`.
        blocks: The blocks of a model, as for `layerwise_decay`.

    Returns:
        Pairs (selector, `kgo.schedules.UnfreezeAt`), from the input to the head.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, there are too many or too few, a part has no
            selector, or the parts of the model can't be found.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.recipes.gradual_unfreezing(["body", ("neck", 0.5), "head"], 100)
    [(path("body"), UnfreezeAt(200, 1)),
     (path("neck"), UnfreezeAt(100, 0.5)),
     (path("head"), UnfreezeAt(0, 1))]

    Reference:
        Howard and Ruder, ULMFiT, 2018, arXiv:1801.06146.
    """
    if isinstance(parts, keras.Layer):
        found = parts_of(parts, head, blocks)
        every = [*found.below, *([found.head] if found.head else [])]
        pairs: list[tuple[Selector, Any]] = [
            (selector_for(found.catalog, part), 1.0) for part in every
        ]
    elif isinstance(parts, (str, Selector)) or not isinstance(parts, Sequence) or not parts:
        raise TypeError(
            "`parts` must be a Keras model, or a list of parts from input to output. Received: "
            f"parts={parts!r}."
        )
    elif head is not None or blocks is not None:
        raise ValueError(
            "`head` and `blocks` must be given with a model only. Received: "
            f"parts={parts!r} and one of them. A list of parts says it all."
        )
    else:
        pairs = [_as_pair(part, at) for at, part in enumerate(parts)]
    starts = _starts(steps_per_stage, len(pairs))
    return [
        (selector, UnfreezeAt(start, ratio))
        for (selector, ratio), start in zip(pairs, reversed(starts), strict=True)
    ]


def _as_pair(part: Any, at: int) -> tuple[Selector, Any]:
    if isinstance(part, Group):
        if part.selector is None:
            raise ValueError(
                "`parts` must say which variables each part has. Received: "
                f"{part.where}, without a selector, as parts[{at}]."
            )
        return part.selector, 1.0
    if isinstance(part, tuple) and len(part) == 2 and not _is_selection(part[1]):
        if callable(part[1]):
            raise TypeError(
                "`parts` must have numbers as ratios. Received: a schedule in "
                f"parts[{at}]. Give such a part no ratio, and its schedule to its group."
            )
        return as_selector(part[0], f"parts[{at}]"), part[1]
    return as_selector(part, f"parts[{at}]"), 1.0


def _is_selection(value: Any) -> bool:
    return isinstance(value, (str, Selector, list, tuple)) or hasattr(value, "weights")


def _starts(steps: Any, count: int) -> list[int]:
    """Returns the first step of each stage, the head's first."""
    given = list(steps) if isinstance(steps, (list, tuple)) else [steps] * max(count - 1, 1)
    each = [check_count("steps_per_stage", v, 1, where="gradual_unfreezing") for v in given]
    if not isinstance(steps, (list, tuple)):
        each = each[: count - 1]
    if len(each) != count - 1:
        raise ValueError(
            f"`steps_per_stage` must have one number per stage but the last, {count - 1} for "
            f"{count} parts. Received: steps_per_stage={steps!r}."
        )
    return list(itertools.accumulate(each, initial=0))
