"""A recipe for parts that start training one after another, the head first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt.base.checks import check_count
from keras_groupopt.plan.group import Group
from keras_groupopt.recipes.parts import listed_parts, parts_of
from keras_groupopt.schedules.steps import UnfreezeAt
from keras_groupopt.selectors import Selector, as_selector


def gradual_unfreezing(
    parts: keras.Model | Sequence[Any],
    steps_per_stage: int | Sequence[int],
    *,
    head: Any = None,
    blocks: Any = None,
) -> list[tuple[Selector, UnfreezeAt]]:
    """Returns ratios that are 0 until a part's stage, for `ratios=`. The last part starts at once.

    With n parts, numbered from 0 at the input, and s steps per stage, part k moves from optimizer
    step (n − 1 − k) · s on. The ratio is a schedule, so nothing is compiled again, moments are
    kept, and a resumed run continues at the stage of its step. The gradients of a part that waits
    still enter its moments and the norm for `global_clipnorm`. With `optimizer.freeze_to` they
    enter neither.

    Args:
        parts: A built Keras model, whose parts are found as in `layerwise_decay`, or a list of
            parts in order from the input: selectors, paths, layers, lists of these, `kgo.Group`, or
            pairs (selector, ratio) as from `layerwise_decay`, whose ratios hold from the part's
            stage on.
        steps_per_stage: The number of optimizer steps per stage, an integer >= 1, or one such
            number for each stage except the last, in the order of stages.
        head: The head of a model, as in `layerwise_decay`. Default: the one that is found.
        blocks: The blocks of a model, as in `layerwise_decay`. Default: those that are found.

    Returns:
        Pairs (selector, `kgo.schedules.UnfreezeAt`), from the input to the head.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, there are too many or too few, a part has no
            selector, or the parts of the model cannot be found.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.recipes.gradual_unfreezing(["body", ("neck", 0.5), "head"], 100)
    [(path("body"), UnfreezeAt(200, 1)),
     (path("neck"), UnfreezeAt(100, 0.5)),
     (path("head"), UnfreezeAt(0, 1))]

    Reference:
        Howard and Ruder, ULMFiT, 2018, arXiv:1801.06146.
    """
    pairs: list[tuple[Selector, Any]]
    if isinstance(parts, keras.Layer):
        pairs = [(selector, 1.0) for selector in parts_of(parts, head, blocks).selectors()]
    else:
        listed = listed_parts(parts, head=head, blocks=blocks)
        pairs = [_as_pair(part, at) for at, part in enumerate(listed)]
    starts = _starts(steps_per_stage, len(pairs))
    return [
        (selector, UnfreezeAt(start, ratio))
        for (selector, ratio), start in zip(pairs, reversed(starts), strict=True)
    ]


def _as_pair(part: Any, at: int) -> tuple[Selector, Any]:
    if isinstance(part, Group):
        if part.selector is None:
            raise ValueError(
                "A group in `parts` must have a selector. Received: "
                f"{part.where}, without a selector, as parts[{at}]."
            )
        return part.selector, 1.0
    if isinstance(part, tuple) and len(part) == 2 and not _is_selection(part[1]):
        if callable(part[1]):
            raise TypeError(
                "`parts` must have numbers as ratios. Received: a schedule in "
                f"parts[{at}]. Pass the part without a ratio, and the schedule to its group."
            )
        return as_selector(part[0], f"parts[{at}]"), part[1]
    return as_selector(part, f"parts[{at}]"), 1.0


def _is_selection(value: Any) -> bool:
    return isinstance(value, (str, Selector, list, tuple)) or hasattr(value, "weights")


def _starts(steps: Any, count: int) -> list[int]:
    """Returns the first step of each stage, that of the head first."""
    given = list(steps) if isinstance(steps, (list, tuple)) else [steps]
    each = [check_count("steps_per_stage", v, 1, where="gradual_unfreezing") for v in given]
    if not isinstance(steps, (list, tuple)):
        each *= count - 1
    if len(each) != count - 1:
        raise ValueError(
            f"`steps_per_stage` must have one number for each stage except the last, {count - 1} "
            f"for {count} parts. Received: steps_per_stage={steps!r}."
        )
    return list(itertools.accumulate(each, initial=0))
