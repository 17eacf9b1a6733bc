"""Splits rates into a base rate and ratios whose float32 products are exactly the rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def split(rates: Sequence[float]) -> tuple[float, list[float]]:
    """Returns a base and one ratio per rate, with base · ratio = rate in float32.

    The base is the first rate for which such ratios exist, else the power of two nearest to the
    first rate.

    Args:
        rates: Numbers >= 0, at least one.

    Example:
    >>> split([0.5, 0.125])
    (0.5, [1.0, 0.25])
    """
    positive = [rate for rate in rates if rate > 0] or [1.0]
    power = 2.0 ** round(math.log2(positive[0]))
    for base in (*positive, power):
        ratios = [_ratio(rate, base) for rate in rates]
        found = [ratio for ratio in ratios if ratio is not None]
        if len(found) == len(rates):
            break
    return base, found


def _ratio(rate: float, base: float) -> float | None:
    wanted, factor = np.float32(rate), np.float32(base)
    quotient = float(wanted) / float(factor)
    nearest = np.float32(quotient)
    neighbours = (np.nextafter(nearest, np.float32(end)) for end in (np.inf, 0.0))
    # Prefer a short decimal number, as a person would write it.
    for ratio in (np.float32(f"{quotient:.6g}"), nearest, *neighbours):
        if np.float32(ratio * factor) == wanted:
            return float(str(ratio))
    return None
