"""A second assignment of rates, apart from that of rules: `GroupedOptimizer(ratios=...)`."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.base.checks import check_scalar
from keras_groupopt.selectors import Selector, as_selector


@dataclasses.dataclass(frozen=True, eq=False)
class Ratio:
    """What the rate of some variables is multiplied by, beside the ratio of their group.

    Args:
        place: Its place in the list, for errors.
        selector: Which variables.
        value: A number >= 0 or a schedule over optimizer steps.
    """

    place: int
    selector: Selector
    value: Any

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"`ratios[{self.place}]` ({self.selector.describe()})"


def as_ratios(ratios: Any) -> tuple[Ratio, ...]:
    """Returns pairs of selector and ratio, or a dict from one to the other, as a tuple.

    Raises:
        TypeError: If an item is no such pair, or its ratio no number and no schedule.
        ValueError: If a ratio is negative or not finite.
    """
    if ratios is None:
        return ()
    if isinstance(ratios, Mapping):
        ratios = list(ratios.items())
    if not isinstance(ratios, Sequence) or isinstance(ratios, str):
        raise TypeError(
            "`ratios` must be a list of pairs (selector, ratio), or a dict from selector to ratio. "
            f"Received: ratios={reprlib.repr(ratios)}. Write "
            '`ratios=[("backbone", 0.1), ("backbone/stem", 0.01)]`.'
        )
    return tuple(_as_ratio(place, pair) for place, pair in enumerate(ratios))


def _as_ratio(place: int, pair: Any) -> Ratio:
    if isinstance(pair, (str, Mapping)) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(
            "`ratios` must hold pairs (selector, ratio). Received: "
            f"ratios[{place}]={reprlib.repr(pair)}. Write "
            '`ratios=[("backbone", 0.1), ("backbone/stem", 0.01)]`.'
        )
    where = f"ratios[{place}]"
    try:
        selector = as_selector(pair[0])
    except (TypeError, ValueError) as error:
        raise type(error)(f"In `{where}`: {error}") from error
    if pair[1] is None:
        raise TypeError(
            "A ratio must be a finite number >= 0 or a schedule. Received: None in "
            f"`{where}` ({selector.describe()})."
        )
    return Ratio(place, selector, check_scalar("ratio", pair[1], where=f"`{where}`"))
