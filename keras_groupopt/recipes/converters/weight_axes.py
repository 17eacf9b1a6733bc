"""How torch and Keras lay out one weight, and when that is open."""

from __future__ import annotations

import numpy as np

# Linear (out, in); convolutions (out, in, …) and transposed ones (in, out, …), axes in space last.
_TURNED = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}
# Depthwise (channels, 1, …) becomes (…, channels, 1).
_DEPTHWISE = {3: (2, 0, 1), 4: (2, 3, 0, 1)}


def to_keras(value: np.ndarray, shape: tuple[int, ...], turned: bool | None) -> np.ndarray | None:
    """Returns `value` in Keras' layout.

    Args:
        value: An array in torch's layout.
        shape: The shape it has in Keras.
        turned: Which layout counts where both fit: torch's axes turned round (`True`), or as they
            are (`False`). `None`: neither is preferred.

    Returns:
        The array, or `None` if no layout fits.

    Raises:
        ValueError: If both fit, differ, and none is preferred.

    Example:
    >>> to_keras(np.zeros((2, 3)), (3, 2), None).shape
    (3, 2)
    """
    rank = value.ndim
    found = [value] if value.shape == shape else []
    orders = [_TURNED.get(rank)]
    if rank in _DEPTHWISE and value.shape[1] == 1:
        orders.append(_DEPTHWISE[rank])
    fitting = [
        order
        for order in orders
        if order is not None and tuple(value.shape[axis] for axis in order) == shape
    ]
    if not fitting or not found:
        return value.transpose(fitting[0]) if fitting else next(iter(found), None)
    numbers = np.arange(value.size).reshape(value.shape)
    if np.array_equal(numbers, numbers.transpose(fitting[0])):
        return value
    if turned is None:
        raise ValueError("both layouts fit")
    return value.transpose(fitting[0]) if turned else value
