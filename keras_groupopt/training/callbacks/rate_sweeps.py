"""How the rates of a sweep are set: per group in a compiled step of its own, or one rate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import compat
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.step.run_length import ENDLESS


class OneRate:
    """The rate of an optimizer without groups.

    Args:
        optimizer: A Keras optimizer with one `learning_rate`.

    Raises:
        TypeError: If that cannot be set.
    """

    groups: tuple[str, ...] = ()
    follows_base = True

    def __init__(self, optimizer: Any) -> None:
        has_one = hasattr(optimizer, "learning_rate")
        if not has_one or not isinstance(compat.declared_learning_rate(optimizer), float):
            raise TypeError(
                "`LearningRateFinder` needs an optimizer with one `learning_rate`, a number. "
                f"Received: {type(optimizer).__name__} without. Compile with a GroupedOptimizer, "
                "whose schedules it can sweep too."
            )
        self._optimizer = optimizer

    @contextlib.contextmanager
    def swept(self, model: Any) -> Iterator[None]:
        """Returns a context in which rates can be set."""
        yield

    def set(self, curve: str | None, rate: float) -> None:
        """Sets the rate."""
        self._optimizer.learning_rate = rate


class GroupRates:
    """The rates of groups, whatever declares them: for a while, each is a number of its own.

    Args:
        optimizer: A built optimizer.
    """

    def __init__(self, optimizer: GroupedOptimizer) -> None:
        built = optimizer._require_built("LearningRateFinder")
        self._optimizer, self._built = optimizer, built
        self._moving = [group for group in built.groups if not group.frozen and group.variables]
        self.groups = tuple(group.name for group in self._moving)
        # Per group the factor of the base rate, or its own rate.
        self._factors: dict[str, float] = {}
        self._own: dict[str, float] = {}
        with self._no_run(), optimizer._in_run():
            base = ops.cast(optimizer.learning_rate, "float32")
            at = ops.convert_to_tensor(optimizer.iterations)
            for group in self._moving:
                if group.follows_base:
                    ratio = group.scalars["learning_rate_ratio"].at(at)
                    self._factors[group.name] = backend.on_host(ratio)
                else:
                    self._own[group.name] = backend.on_host(group.rate(base, at))

    @contextlib.contextmanager
    def _no_run(self) -> Iterator[None]:
        """Returns a context in which no `fit` is the run that schedules are made for."""
        length, run = self._built.run_length, self._optimizer._run
        unknown = length is not None and length.is_unknown
        if length is not None and unknown:
            length.pretended = ENDLESS
        run.is_training = False
        try:
            yield
        finally:
            run.is_training = True
            if length is not None:
                length.pretended = None

    @property
    def follows_base(self) -> bool:
        """Whether the base rate moves any group."""
        return any(self._factors.values())

    @contextlib.contextmanager
    def swept(self, model: Any) -> Iterator[None]:
        """Returns a context in which rates can be set, with a compiled step that reads them."""
        before = model.train_function
        with checkpoint.beside_weights(), backend.on_devices_of([self._optimizer.iterations]):
            for group in self._moving:
                group.swept = keras.Variable(
                    0.0,
                    dtype="float32",
                    trainable=False,
                    aggregation="only_first_replica",
                    name="swept_rate",
                )
        try:
            model.train_function = None
            with self._no_run():
                yield
        finally:
            for group in self._moving:
                group.swept = None
            model.train_function = before

    def set(self, curve: str | None, rate: float) -> None:
        """Sets all rates: of one group, where the others stand still, or of the base."""
        for group in self._moving:
            if curve is not None:
                own = rate if group.name == curve else 0.0
            else:
                own = self._own.get(group.name, rate * self._factors.get(group.name, 0.0))
            group.swept.assign(own)
