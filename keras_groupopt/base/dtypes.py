"""The size of arrays, from their dtypes as Keras names them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """Returns the bytes of an array. Two values of a 4-bit dtype share a byte.

    Example:
    >>> bytes_of((2, 3), "float32"), bytes_of((2, 3), "bfloat16"), bytes_of((2, 3), "int4")
    (24, 12, 3)
    """
    values = math.prod(shape)
    if dtype in ("int4", "uint4"):
        return math.ceil(values / 2)
    kind = getattr(ml_dtypes, dtype, np.sctypeDict.get(dtype))
    if isinstance(kind, type) and issubclass(kind, np.generic):
        return values * np.dtype(kind).itemsize
    # Keras' "string" has no fixed size.
    return values
