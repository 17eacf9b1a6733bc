"""The order of axes of one weight in torch and in Keras."""

from __future__ import annotations

import numpy as np

# torch: linear (out, in), convolutions (out, in, …), transposed convolutions (in, out, …).
_TRANSPOSED = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}
# Depthwise (channels, 1, …) becomes (…, channels, 1).
_DEPTHWISE = {3: (2, 0, 1), 4: (2, 3, 0, 1)}


def to_keras(
    value: np.ndarray, shape: tuple[int, ...], transpose: bool | None
) -> np.ndarray | None:
    """Returns `value` with its axes in Keras' order.

    Args:
        value: An array with its axes in torch's order.
        shape: Its shape in Keras.
        transpose: Whether the axes are transposed if both orders fit. `None` means unknown.

    Returns:
        The array, or `None` if neither order fits.

    Raises:
        ValueError: If both orders fit and give different arrays, and `transpose` is `None`.

    Example:
    >>> to_keras(np.zeros((2, 3)), (3, 2), None).shape
    (3, 2)
    """
    rank = value.ndim
    orders = [_TRANSPOSED[rank]] if rank in _TRANSPOSED else []
    if rank in _DEPTHWISE and value.shape[1] == 1:
        orders.append(_DEPTHWISE[rank])
    fitting = [order for order in orders if tuple(value.shape[axis] for axis in order) == shape]
    unchanged = value if value.shape == shape else None
    if not fitting:
        return unchanged
    transposed = value.transpose(fitting[0])
    if unchanged is None:
        return transposed
    numbers = np.arange(value.size).reshape(value.shape)
    if np.array_equal(numbers, numbers.transpose(fitting[0])):
        return value
    if transpose is None:
        raise ValueError("Both orders of axes fit.")
    return transposed if transpose else value
