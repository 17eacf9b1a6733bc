"""Where bad input is tried out: a model, optimizers that were built for it, files; and its rows.

A row is a call, the type of its error, and what the message says, with "…" for what lies between.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import numpy_of

import keras_groupopt as kgo
from keras_groupopt import Group, GroupedOptimizer

SGD = keras.optimizers.SGD
CURVE = keras.optimizers.schedules.CosineDecay(0.1, 10)
NAN = float("nan")
NOT_FINITE = [(-1, ValueError), (NAN, ValueError), (float("inf"), ValueError)]
NO_NUMBER = [("0.1", TypeError), (True, TypeError), (1j, TypeError)]


def backbone_and_head(width: int = 2) -> keras.Model:
    backbone = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3, name="dense"),
            keras.layers.BatchNormalization(name="norm"),
        ],
        name="backbone",
    )
    head = keras.layers.Dense(width, name="head")
    return keras.Sequential([keras.Input((3,)), backbone, head])


class World:
    """A model, another one with the same layers, files, and optimizers that were built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.other = backbone_and_head(), backbone_and_head()
        self.variables = self.model.trainable_variables
        self.gradients = [keras.ops.ones(v.shape) for v in self.variables]
        self.built = GroupedOptimizer(
            [
                Group("backbone", "backbone", weight_decay=0.1, anchor="initial"),
                Group("frozen", "head/bias", frozen=True),
            ],
            model=self.model,
            rule=kgo.rule("sgd", momentum=0.9),
        )
        self.scheduled = GroupedOptimizer(
            [Group("backbone", "backbone", learning_rate_ratio=CURVE, weight_decay=CURVE)],
            model=self.model,
            rule="sgd",
            learning_rate=CURVE,
        )
        for optimizer in (self.built, self.scheduled):
            optimizer.build(self.variables)
        backbone_and_head(width=5).save(folder / "wide.keras")
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(7)]).save_weights(
            folder / "other.weights.h5"
        )
        (folder / "text.keras").write_text("not a model")

    def build(self, groups: Any = (), **options: Any) -> None:
        """Builds a new optimizer for the model, which must leave no variables where it fails."""
        optimizer = GroupedOptimizer(groups, **{"model": self.model} | options)
        before = len(optimizer.variables)
        try:
            optimizer.build(self.variables)
        finally:
            assert len(optimizer.variables) == before or optimizer.built

    def anchored(self, anchor: Any, **options: Any) -> None:
        """Builds with a given anchor for the head, whose kernel has shape (3, 2)."""
        if isinstance(anchor, str):
            anchor = str(self.folder / anchor)
        selector = options.pop("selector", "head")
        self.build([Group("head", selector, weight_decay=0.1, anchor=anchor)], **options)

    def without_model(self) -> GroupedOptimizer:
        """An optimizer whose model no longer exists."""
        optimizer = GroupedOptimizer(model=backbone_and_head())
        gc.collect()
        return optimizer

    def state(self) -> list[np.ndarray]:
        """Everything that a refused call must leave as it was."""
        held = [*self.model.variables, *self.other.variables]
        return [numpy_of(v) for v in (*held, *self.built.variables, *self.scheduled.variables)]

    def stateless(self, of: str, by: int) -> None:
        """Does a stateless step with a value too many or too few."""
        values = {
            "own": [numpy_of(v) for v in self.built.variables],
            "weights": [numpy_of(v) for v in self.variables],
        }
        values[of] = values[of][:by] if by < 0 else values[of] + values[of][:by]
        own, weights = (
            [keras.ops.convert_to_tensor(value) for value in values[name]]
            for name in ("own", "weights")
        )
        self.built.stateless_apply(own, self.gradients, weights)


def head(**options: Any) -> Group:
    return Group("head", "head", **options)


def with_head(**options: Any) -> GroupedOptimizer:
    return GroupedOptimizer([head(**options)])


def rows(
    error: type[Exception], *calls: tuple[Callable[[World], Any], str], marks: Any = ()
) -> Any:
    return [pytest.param(call, error, text, id=text, marks=marks) for call, text in calls]


def pattern(text: str) -> re.Pattern[str]:
    """A text in which " … " stands for anything, to search for in a message."""
    return re.compile(".*".join(map(re.escape, text.split(" … "))), re.DOTALL)


ONLY_TORCH = pytest.mark.backends("torch", reason="torch is imported only where it is in use")
ONLY_JAX = pytest.mark.backends("jax", reason="optax is imported only beside JAX")
