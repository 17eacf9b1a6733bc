"""Means of the values that a training step reports."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

Tensor = Any


class _MeanOrNaN(keras.metrics.Mean):
    def result(self) -> Tensor:
        """Returns the mean."""
        count = ops.convert_to_tensor(self.count)
        nothing = ops.equal(count, 0)
        mean = self.total / ops.where(nothing, ops.ones_like(count), count)
        return ops.where(nothing, ops.full_like(mean, float("nan")), mean)


def mean(name: str) -> keras.metrics.Mean:
    """Returns a mean that is NaN, instead of 0, if nothing was added."""
    return _MeanOrNaN(name=name)


def add(metric: Any, value: Tensor, counts: Tensor) -> None:
    """Adds a value to a mean, if it counts."""
    value = ops.cast(value, "float32")
    metric.update_state(
        ops.where(counts, value, ops.zeros_like(value)),
        sample_weight=ops.cast(counts, "float32"),
    )
