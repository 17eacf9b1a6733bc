"""A recipe for rates that rise from the input to the head, as in fastai: `slice(1e-5, 1e-3)`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt.base.checks import check_count, check_positive, message
from keras_groupopt.plan.group import Group
from keras_groupopt.recipes.parts import listed_parts, parts_of, selector_for
from keras_groupopt.selectors import as_selector


def discriminative(
    parts: keras.Model | Sequence[Any],
    rates: slice | float,
    *,
    head: Any = None,
    blocks: Any = None,
    count: int | None = None,
) -> list[Group]:
    """Returns one group per part, with ratios that spread the rates from the input to the head.

    With n parts, numbered from 0 at the input, and the base rate `stop`:

        slice(start, stop)   rate_k = start · (stop / start) ** (k / (n − 1))
        slice(stop)          rate_k = stop / 10, and stop for the last
        stop                 rate_k = stop

    The ratios are these rates over `stop`, so compile with `learning_rate=stop`. A single part has
    the rate `stop`.

    Args:
        parts: A built Keras model, whose parts are found as in `layerwise_decay`, or a list of
            parts in order from the input, each a selector, path, layer or list of these.
        rates: A slice of rates > 0, or one rate.
        head: The head of a model. Default: the one that is found.
        blocks: The blocks of a model, as in `layerwise_decay`. Default: those that are found.
        count: The number of groups for a model, including the head. Neighbouring parts are joined
            as evenly as possible. Default: one group per part.

    Returns:
        Groups "part_0", "part_1", … from the input to the head. The last group of a model is
        "head". Parts of a model without trainable variables get no group, but they count.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a rate is not positive, `count` is larger than the number of parts, or the
            parts cannot be found.

    Example:
    >>> import keras_groupopt as kgo
    >>> groups = kgo.recipes.discriminative(["stem", "body", "head"], slice(1e-5, 1e-3))
    >>> [(group.name, round(group.learning_rate_ratio, 6)) for group in groups]
    [('part_0', 0.01), ('part_1', 0.1), ('part_2', 1.0)]

    Reference:
        Howard and Ruder, ULMFiT, 2018, arXiv:1801.06146.
    """
    start, stop = _ends(rates)
    if isinstance(parts, keras.Layer):
        found = parts_of(parts, head, blocks)
        below, top = found.below, [found.head] if found.head else []
        positions = [*_joined(below, count, len(top)), *top]
        named = [
            (
                "head" if found.head and at == len(positions) - 1 else f"part_{at}",
                selector_for(found.catalog, part),
                any(found.catalog[position].trainable for position in part),
            )
            for at, part in enumerate(positions)
        ]
    else:
        listed = listed_parts(parts, head=head, blocks=blocks, count=count)
        named = [
            (f"part_{at}", as_selector(part, f"parts[{at}]"), True)
            for at, part in enumerate(listed)
        ]
    ratios = _ratios(start, stop, len(named))
    return [
        Group(name, selector, learning_rate_ratio=ratio)
        for (name, selector, moves), ratio in zip(named, ratios, strict=True)
        if moves
    ]


def _ends(rates: Any) -> tuple[float | None, float]:
    if not isinstance(rates, slice):
        rate = check_positive("rates", rates, where="discriminative")
        return rate, rate
    if rates.step is not None or rates.stop is None:
        raise ValueError(message("rates", rates, "slice(start, stop) or slice(stop)"))
    stop = check_positive("rates.stop", rates.stop, where="discriminative")
    if rates.start is None:
        return None, stop
    return check_positive("rates.start", rates.start, where="discriminative"), stop


def _ratios(start: float | None, stop: float, count: int) -> list[float]:
    if start is None:
        return [0.1] * (count - 1) + [1.0]
    if count == 1:
        return [1.0]
    return [(start / stop) ** ((count - 1 - k) / (count - 1)) for k in range(count)]


def _joined(parts: list[frozenset[int]], count: int | None, heads: int) -> list[frozenset[int]]:
    if count is None:
        return parts
    count = check_count("count", count, 1, where="discriminative")
    if not heads < count <= len(parts) + heads:
        raise ValueError(
            f"`count` must be from {heads + 1} to {len(parts) + heads}, the number of parts of the "
            f"model. Received: count={count}."
        )
    wanted = count - heads
    cuts = [round(k * len(parts) / wanted) for k in range(wanted + 1)]
    return [frozenset[int]().union(*parts[a:b]) for a, b in itertools.pairwise(cuts)]
