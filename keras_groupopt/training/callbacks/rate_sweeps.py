"""Sets the rates of a sweep: those of groups, which a compiled step reads, or a single one."""

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
        TypeError: If that rate cannot be set.
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
        """Returns a block in which rates can be set."""
        yield

    def set(self, curve: str | None, rate: float) -> None:
        """Sets the rate."""
        self._optimizer.learning_rate = rate


class GroupRates:
    """The rates of groups, however they are declared. In a sweep each is a number.

    Args:
        optimizer: A built optimizer.
    """

    def __init__(self, optimizer: GroupedOptimizer) -> None:
        self._optimizer = optimizer
        self._built = optimizer._require_built("LearningRateFinder")
        moving = [group for group in self._built.moving_groups if group.members]
        self.groups = tuple(group.name for group in moving)
        # By group, the factor of the base rate, and the rate if it does not follow the base.
        self._rates: dict[str, tuple[float, float]] = {}
        # The variables that a compiled step reads the rates from, by group.
        self._swept: dict[str, Any] = {}
        with self._no_run(), optimizer._in_run():
            base = ops.cast(optimizer.learning_rate, "float32")
            at = ops.convert_to_tensor(optimizer.iterations)
            for group in moving:
                if group.follows_base:
                    ratio = group.scalars["learning_rate_ratio"].at(at)
                    self._rates[group.name] = (backend.on_host(ratio), 0.0)
                else:
                    self._rates[group.name] = (0.0, backend.on_host(group.rate(base, at)))

    @contextlib.contextmanager
    def _no_run(self) -> Iterator[None]:
        """Returns a block in which no `fit` counts as the run that schedules are made for."""
        length, run = self._built.run_length, self._optimizer._run
        if length is not None and not length.look():
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
        return any(factor for factor, _ in self._rates.values())

    @contextlib.contextmanager
    def swept(self, model: Any) -> Iterator[None]:
        """Returns a block in which rates can be set, with a compiled step that reads them."""
        before = model.train_function
        with checkpoint.beside_weights(), backend.on_devices_of([self._optimizer.iterations]):
            self._swept = {
                group: keras.Variable(
                    0.0,
                    dtype="float32",
                    trainable=False,
                    aggregation="only_first_replica",
                    name="swept_rate",
                )
                for group in self.groups
            }
        try:
            model.train_function = None
            with self._built.sweep(self._swept), self._no_run():
                yield
        finally:
            model.train_function = before

    def set(self, curve: str | None, rate: float) -> None:
        """Sets the rate of one group, while the others stand still. `None` sets the base rate."""
        for group, variable in self._swept.items():
            factor, own = self._rates[group] if curve is None else (float(group == curve), 0.0)
            variable.assign(rate * factor + own)
