"""Lower ratios when a metric stops improving, whatever the base rate is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base.checks import (
    check_choice,
    check_count,
    check_fraction,
    check_number,
    check_positive,
    is_schedule,
)
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.training.callbacks.group_names import check_moves, check_names
from keras_groupopt.training.optimizer_of import build_optimizer, grouped_optimizer_of

_WHERE = "PlateauRatio"


class PlateauRatio(keras.callbacks.Callback):
    """Lowers the ratios of groups when a metric stops improving.

    After `patience` epochs without an improvement, for each of the groups:

        learning_rate_ratio ← max(factor · learning_rate_ratio, min_ratio · declared ratio)

    The groups keep their proportions down to the floor. `keras.callbacks.ReduceLROnPlateau`
    decides when. Use `PlateauRatio` in the two cases in which that callback cannot be used: if the
    base rate is a schedule, which cannot be set; and if only some groups are to be lowered. If the
    base rate is a number, `ReduceLROnPlateau` lowers the base and keeps the ratios. Nothing is
    compiled anew. A group with a rate of its own is lowered as well, as its ratio scales that rate.

    Ratios are state: they are saved, and a resumed run goes on with the lowered ones. The counters
    and the best value start over with each `fit`, as in Keras. Put `kgo.GroupLogger` before it.

    Args:
        monitor: The name of the metric in the logs. Default: `"val_loss"`.
        factor: What ratios are multiplied by, in (0, 1). Default: 0.1.
        patience: Epochs without an improvement before ratios are lowered, >= 0. Default: 10.
        min_ratio: The floor, as a share of the declared ratio, in [0, 1). Default: 0.
        groups: Names of the groups. Default: all that move.
        mode: `"min"`, `"max"`, or `"auto"`, which decides by the metric's name. Default: `"auto"`.
        min_delta: The least change that counts as an improvement, >= 0. Default: 1e-4.
        cooldown: Epochs after ratios were lowered that do not count, >= 0. Default: 0.
        verbose: 1 to print when ratios are lowered, 0 for no output. Default: 0.

    Raises:
        ValueError: If a value is out of range; when training begins, if no group has a given name,
            or the group is frozen.
        TypeError: If an argument is of the wrong type; when training begins, if the optimizer is
            not a `GroupedOptimizer`, or the ratio of a group is a schedule.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer(
    ...     [kgo.Group("backbone", "backbone", learning_rate_ratio=0.5)], model=model,
    ...     learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 100))
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> plateau = kgo.PlateauRatio("loss", factor=0.5, patience=1, min_delta=1e6)
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 2)), epochs=3, verbose=0, callbacks=[plateau])
    >>> {name: float(ratio) for name, ratio in optimizer.learning_rate_ratios.items()}
    {'backbone': 0.125, 'default': 0.25}
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        min_ratio: float = 0.0,
        groups: Sequence[str] | None = None,
        *,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(monitor, str) or not monitor:
            raise TypeError(
                f"`monitor` must be the name of a metric. Received: monitor={monitor!r}."
            )
        self.monitor = monitor
        self.factor = check_positive("factor", factor, where=_WHERE)
        self.min_ratio = check_fraction("min_ratio", min_ratio, where=_WHERE)
        if self.factor >= 1:
            raise ValueError(f"`factor` must be below 1. Received: factor={factor!r} in {_WHERE}.")
        self.groups = check_names(groups, where=_WHERE)
        self.verbose = check_count("verbose", verbose, 0, where=_WHERE)
        self._decides = keras.callbacks.ReduceLROnPlateau(
            monitor=monitor,
            factor=self.factor,
            patience=check_count("patience", patience, 0, where=_WHERE),
            mode=check_choice("mode", mode, ("auto", "min", "max"), where=_WHERE),
            min_delta=check_number("min_delta", min_delta, where=_WHERE),
            cooldown=check_count("cooldown", cooldown, 0, where=_WHERE),
            min_lr=self.min_ratio,
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the groups, and starts counting."""
        optimizer = self._optimizer
        build_optimizer(self.model)
        if self.model.built:
            self._chosen(optimizer)
        self._decides.set_model(_StandIn(self))
        self._decides.on_train_begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the metric, and lowers the ratios if it has stopped improving."""
        before = self._ratios()
        # A copy, because Keras' callback logs a learning rate, which here is a share.
        self._decides.on_epoch_end(epoch, dict(logs or {}))
        now = self._ratios()
        if self.verbose and now != before:
            listed = ", ".join(f"{name} {now[name]:g}" for name in self._chosen(self._optimizer))
            text = f"Epoch {epoch + 1}: {_WHERE} lowers learning_rate_ratio to: {listed}."
            sys.stdout.write(f"\n{text}\n")

    @property
    def _optimizer(self) -> GroupedOptimizer:
        advice = "Use `keras.callbacks.ReduceLROnPlateau` with it."
        return grouped_optimizer_of(self.model, _WHERE, advice)

    def _ratios(self) -> dict[str, float]:
        present = self._optimizer.learning_rate_ratios
        return {name: float(backend.on_host(ratio)) for name, ratio in present.items()}

    def _chosen(self, optimizer: GroupedOptimizer) -> dict[str, float]:
        """Returns the declared ratio of each group to lower.

        Raises:
            ValueError: If no group has a given name, or the group is frozen.
            TypeError: If a ratio is a schedule.
        """
        groups = {planned.name: planned.group for planned in optimizer.plan.groups}
        moving = [name for name, group in groups.items() if not group.frozen]
        chosen = moving if self.groups is None else self.groups
        for name in chosen:
            check_moves(name, groups, moving, where=_WHERE)
            if is_schedule(groups[name].learning_rate_ratio):
                raise TypeError(
                    f"`{_WHERE}` must get groups whose `learning_rate_ratio` is a number. "
                    f'Received: "{name}", whose ratio is a schedule. Name the others in `groups=`.'
                )
        return {name: float(groups[name].learning_rate_ratio) for name in chosen}

    def _share(self) -> float:
        """Returns the largest share of its declared ratio that a group has left."""
        ratios = self._ratios()
        shares = [
            ratios[name] / declared
            for name, declared in self._chosen(self._optimizer).items()
            # Ratios are kept in float32.
            if ratios[name] > self.min_ratio * declared * (1 + 1e-6)
        ]
        return max(shares, default=self.min_ratio)

    def _lower(self) -> None:
        ratios = self._ratios()
        for name, declared in self._chosen(self._optimizer).items():
            floor = min(self.min_ratio * declared, ratios[name])
            ratio = max(ratios[name] * self.factor, floor)
            self._optimizer.set_learning_rate_ratio(name, ratio)


class _StandIn:
    """Stands for the model and its optimizer in Keras' callback. Its rate is a share."""

    def __init__(self, callback: PlateauRatio) -> None:
        self._callback = callback
        self.optimizer = self

    @property
    def metrics(self) -> list[Any]:
        """The model's metrics, which say whether higher is better."""
        return list(self._callback.model.metrics)

    @property
    def learning_rate(self) -> float:
        """The share of the declared ratios that is left."""
        return self._callback._share()

    @learning_rate.setter
    def learning_rate(self, share: float) -> None:
        self._callback._lower()
