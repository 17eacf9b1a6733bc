"""The optimizer inside what Keras wraps around it."""

from __future__ import annotations

from typing import Any

import keras


def unwrap(optimizer: Any) -> Any:
    """Returns the optimizer inside a `LossScaleOptimizer`, which `compile` adds in mixed_float16.

    Args:
        optimizer: What `model.optimizer` is.
    """
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer
