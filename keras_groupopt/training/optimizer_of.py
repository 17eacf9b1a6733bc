"""The optimizer of a model, for callbacks and functions that need a `GroupedOptimizer`."""

from __future__ import annotations

from typing import Any

from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer


def grouped_optimizer_of(model: Any, asked: str, advice: str) -> GroupedOptimizer:
    """Returns the `GroupedOptimizer` of a model, also from within a `LossScaleOptimizer`.

    Args:
        model: A Keras model.
        asked: The name of what needs it, for the error.
        advice: What the user can do, for the error.

    Raises:
        TypeError: If the model has another optimizer.
    """
    optimizer = unwrap(getattr(model, "optimizer", None))
    if not isinstance(optimizer, GroupedOptimizer):
        raise TypeError(
            f"`{asked}` needs a GroupedOptimizer. Received: {type(optimizer).__name__}. {advice}"
        )
    return optimizer


def build_optimizer(model: Any) -> None:
    """Builds the optimizer of a built model.

    Otherwise Keras would build it within a compiled step, and errors about the plan would be raised
    from there.
    """
    if model.built and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def check_is_built(model: Any, asked: str) -> None:
    """Refuses a model that is not built.

    Raises:
        ValueError: If it is not built.
    """
    if not model.built:
        raise ValueError(
            f"`{asked}` needs a built model, and this model is not built. Call `model.build(...)`, "
            "or the model on a batch, first."
        )
