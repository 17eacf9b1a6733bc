"""Ratios of rates that are assigned independently of groups: `GroupedOptimizer(ratios=...)`."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.base.checks import check_scalar, errors_in
from keras_groupopt.selectors import Selector, as_selector

_EXAMPLE = 'Write `ratios=[("backbone", 0.1), ("backbone/stem", 0.01)]`.'


@dataclasses.dataclass(frozen=True, eq=False)
class Ratio:
    """A factor of the rate of some variables, in addition to the ratio of their group.

    Args:
        place: Its place in the list, for errors.
        selector: The variables.
        value: A number >= 0 or a schedule over optimizer steps.
    """

    place: int
    selector: Selector
    value: Any

    @property
    def where(self) -> str:
        """The name of this ratio in errors."""
        return f"`ratios[{self.place}]`"


def as_ratios(ratios: Any) -> tuple[Ratio, ...]:
    """Returns pairs of selector and ratio, or a dict from one to the other, as a tuple.

    Raises:
        TypeError: If an item is not a pair, or its ratio is neither a number nor a schedule.
        ValueError: If a ratio is negative or not finite.
    """
    if ratios is None:
        return ()
    if isinstance(ratios, Mapping):
        ratios = list(ratios.items())
    if not isinstance(ratios, Sequence) or isinstance(ratios, str):
        raise TypeError(
            "`ratios` must be a list of pairs (selector, ratio), or a dict from selector to ratio. "
            f"Received: ratios={reprlib.repr(ratios)}. {_EXAMPLE}"
        )
    return tuple(_as_ratio(place, pair) for place, pair in enumerate(ratios))


def _as_ratio(place: int, pair: Any) -> Ratio:
    if isinstance(pair, (str, Mapping)) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(
            "`ratios` must hold pairs (selector, ratio). Received: "
            f"ratios[{place}]={reprlib.repr(pair)}. {_EXAMPLE}"
        )
    where = f"`ratios[{place}]`"
    with errors_in(where):
        selector = as_selector(pair[0])
    if pair[1] is None:
        raise TypeError(
            "A ratio must be a finite number >= 0 or a schedule. Received: None in "
            f"{where} ({selector.describe()})."
        )
    return Ratio(place, selector, check_scalar("ratio", pair[1], where=where))
