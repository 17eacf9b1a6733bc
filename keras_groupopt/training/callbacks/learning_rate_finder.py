"""A search for learning rates: a short sweep per group, after which nothing has changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base.checks import check_count, check_fraction, check_number, check_positive
from keras_groupopt.base.restoring import finish
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer import building
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.optimizer.loss_scale import LossScaleOptimizer
from keras_groupopt.plan.views.finder_result import RateCurve, RateCurves
from keras_groupopt.training.callbacks.group_names import check_moves, check_names
from keras_groupopt.training.callbacks.rate_sweeps import GroupRates, OneRate
from keras_groupopt.training.callbacks.snapshot import Snapshot
from keras_groupopt.training.optimizer_of import build_optimizer, check_is_built

_WHERE = "LearningRateFinder"
# A sweep ends if so many batches in a row take no step, because gradients are not finite.
_MOST_SKIPPED = 64


class LearningRateFinder:
    """Finds learning rates to start from: sweeps the rate up until the loss diverges.

    With `n = steps` it takes optimizer steps at the rates

        rate_i = minimum · (maximum / minimum)^(i / (n − 1)),  i = 0 … n − 1

    and notes for each rate the loss of the batch after its step. There is one curve per group, in
    which that group moves at the swept rate and the others stand still; and one for all groups
    together, in which the base rate is swept and ratios hold. Groups with a rate of their own do
    not follow the base, and keep their rate in that curve. Schedules stand still at the present
    step, and are swept like numbers: the rate that is found is the peak to give them. Schedules
    with `total_steps="fit"` need no `fit` before.

    Afterwards model and optimizer are what they were, bit for bit, also after an exception or
    Ctrl-C: weights, statistics of batch normalization, metrics, seeds, all state and counters of
    the optimizer, and the generators of Python, NumPy and torch. An optimizer that was not built
    is not built afterwards; if Keras' `LossScaleOptimizer` wraps it, it stays built, at step 0. The
    copy of all this is on the host. The step is compiled once for all curves.

    A plain Keras optimizer, whose rate must be a number, gets one curve.

    Args:
        minimum: The first rate, positive. Default: 1e-7.
        maximum: The last rate, above `minimum`. Default: 10.
        steps: The optimizer steps of each curve, at least 3. Default: 100.
        groups: Names of the groups to sweep; `None` among them stands for all together. Default:
            every group that moves, if there are several, and all together.
        smoothing: `β` of the mean that smooths the losses, in [0, 1). Default: 0.9.
        divergence: A number above 1. A sweep ends when the smoothed loss exceeds the lowest loss by
            `divergence − 1` times the lowest loss. Default: 4.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> model.compile(kgo.GroupedOptimizer({"backbone": "backbone"}, model=model), loss="mse")
    >>> x = np.random.default_rng(0).normal(size=(64, 4))
    >>> found = kgo.LearningRateFinder(steps=40).find(model, x, x[:, :2], batch_size=16)
    >>> list(found.curves)
    ['backbone', 'default', None]
    >>> model.optimizer.built, 1e-4 < found.learning_rate < 1
    (False, True)

    Reference:
        Smith 2015, arXiv:1506.01186.
    """

    def __init__(
        self,
        minimum: float = 1e-7,
        maximum: float = 10.0,
        steps: int = 100,
        groups: Sequence[str | None] | None = None,
        smoothing: float = 0.9,
        divergence: float = 4.0,
    ) -> None:
        self.minimum = check_positive("minimum", minimum, where=_WHERE)
        self.maximum = check_positive("maximum", maximum, where=_WHERE)
        if self.maximum <= self.minimum:
            raise ValueError(
                f"`maximum` must be above `minimum`. Received: minimum={minimum!r}, "
                f"maximum={maximum!r} in {_WHERE}."
            )
        self.steps = check_count("steps", steps, 3, where=_WHERE)
        self.groups = check_names(groups, where=_WHERE)
        self.smoothing = check_fraction("smoothing", smoothing, where=_WHERE)
        self.divergence = check_number("divergence", divergence, where=_WHERE)
        if self.divergence <= 1:
            raise ValueError(
                f"`divergence` must be above 1. Received: divergence={divergence!r} in {_WHERE}."
            )

    def find(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
    ) -> RateCurves:
        """Sweeps the rates of a compiled model on data, and restores everything.

        Each curve takes `steps + 1` batches (times the steps of accumulation), over several epochs
        if need be.

        Args:
            model: A built and compiled model.
            x: Data, as for `fit`. A generator is used up; a dataset begins anew for each curve.
                Default: `None`.
            y: As for `fit`. Default: `None`.
            batch_size: As for `fit`. Default: `None`.
            sample_weight: As for `fit`. Default: `None`.
            class_weight: As for `fit`. Default: `None`.
            shuffle: As for `fit`. Default: `True`.
            steps_per_epoch: As for `fit`. Default: `None`.

        Returns:
            The curves, with `suggestions`, `learning_rate`, `summary()` and `plot()`.

        Raises:
            TypeError: If the optimizer has no rate that can be set.
            ValueError: If the model is not built or not compiled, the loss is not finite before
                any step, a name in `groups` is unknown, or the data ran out.
        """
        _check_model(model)
        data = {
            "x": x,
            "y": y,
            "batch_size": batch_size,
            "sample_weight": sample_weight,
            "class_weight": class_weight,
            "shuffle": shuffle,
            "steps_per_epoch": steps_per_epoch,
        }
        curves: dict[str | None, RateCurve] = {}
        with _built(model) as optimizer:
            is_grouped = isinstance(optimizer, GroupedOptimizer)
            rates: Any = GroupRates(optimizer) if is_grouped else OneRate(optimizer)
            chosen = self._chosen(rates)
            before = Snapshot(model)
            with rates.swept(model):
                for curve in chosen:
                    try:
                        curves[curve] = self._sweep(model, rates, curve, data)
                    finally:
                        finish(before.restore)
        return RateCurves(curves)

    def _chosen(self, rates: GroupRates | OneRate) -> tuple[str | None, ...]:
        """Returns which curves to make.

        Raises:
            ValueError: If one that was asked for cannot be made.
        """
        known = rates.groups
        if self.groups is None:
            each = known if len(known) > 1 or not rates.follows_base else ()
            return (*each, None) if rates.follows_base else each
        for name in self.groups:
            if name is not None:
                check_moves(name, known, known, where=_WHERE)
            elif not rates.follows_base:
                raise ValueError(
                    "`groups` must not hold `None` if no group follows the base rate. Received: "
                    f"groups={list(self.groups)} in {_WHERE}."
                )
        return self.groups

    def _sweep(
        self, model: Any, rates: GroupRates | OneRate, curve: str | None, data: dict[str, Any]
    ) -> RateCurve:
        ratio = self.maximum / self.minimum
        planned = [self.minimum * ratio ** (i / (self.steps - 1)) for i in range(self.steps)]
        sweep = _Sweep(self, planned, lambda rate: rates.set(curve, rate))
        try:
            # The sweep ends the training.
            model.fit(**data, epochs=10**9, verbose=0, callbacks=[sweep])
        except FloatingPointError as error:
            # An optimizer with `on_nonfinite="raise"` raises this.
            sweep.diverge(str(error))
        return sweep.curve()


class _Sweep(keras.callbacks.Callback):
    """Raises the rate with each optimizer step of a `fit`, and notes the loss after each."""

    def __init__(self, finder: LearningRateFinder, rates: Sequence[float], assign: Any) -> None:
        super().__init__()
        self._finder, self._rates, self._assign = finder, rates, assign
        self._smoothed: list[float] = []
        self._raw: list[float] = []
        self._mean = 0.0
        self._first = math.nan
        # Losses of the micro-batches in the present window of accumulation.
        self._window: list[float] = []
        self._steps_before = 0
        self._batches = 0
        self._waiting = 0
        self.diverged = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps_before = self._steps_done()
        self._assign(self._rates[0])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # After this, the loss in the logs is that of this batch alone.
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if not logs or "loss" not in logs:
            raise ValueError(
                f'`{_WHERE}` needs "loss" in the logs of each batch. Received: '
                f"{sorted(logs or {})}. Does `train_step` return it?"
            )
        loss = float(backend.on_host(logs["loss"]))
        if not math.isfinite(loss):
            self.diverge(f"loss={loss}")
            return
        self._window.append(loss)
        steps = self._steps_done()
        self._waiting += 1
        if steps > self._steps_before:
            self._steps_before, self._waiting = steps, 0
            self._note(sum(self._window) / len(self._window))
            self._window = []
        elif self._waiting > _MOST_SKIPPED * (self._optimizer.gradient_accumulation_steps or 1):
            self.diverge("gradients that are not finite")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._batches:
            raise ValueError(
                "The data must have enough batches, or begin anew with each epoch. Received: data "
                f"that ran out after {len(self._raw) + 1} steps of a sweep of {len(self._rates)}. "
                "Pass arrays or a dataset, and not a generator."
            )

    def _note(self, loss: float) -> None:
        """Notes the loss of a window, which shows what the step before it did."""
        if math.isnan(self._first):
            self._first = loss
        else:
            beta, count = self._finder.smoothing, len(self._raw) + 1
            self._mean = beta * self._mean + (1 - beta) * loss
            self._raw.append(loss)
            self._smoothed.append(self._mean / (1 - beta**count))
            lowest = min(self._first, *self._smoothed)
            if self._smoothed[-1] > lowest + (self._finder.divergence - 1) * abs(lowest):
                self.diverged = True
        done = len(self._raw)
        if self.diverged or done == len(self._rates):
            self.model.stop_training = True
            return
        # The step that was just taken had the rate at `done`. The next step gets the next rate.
        self._assign(self._rates[min(done + 1, len(self._rates) - 1)])

    def diverge(self, what: str) -> None:
        """Ends the sweep, as a loss or its gradients are not finite.

        Raises:
            ValueError: If no step was taken before.
        """
        self.model.stop_training = True
        self.diverged = True
        if math.isnan(self._first):
            raise ValueError(
                f"The loss and its gradients must be finite before a sweep. Received: {what} "
                "on the first batches. Look at the data and the model."
            )

    @property
    def _optimizer(self) -> Any:
        return unwrap(self.model.optimizer)

    def _steps_done(self) -> int:
        return int(backend.on_host(self._optimizer.iterations))

    def curve(self) -> RateCurve:
        """Returns what was noted."""
        done = len(self._raw)
        return RateCurve(
            tuple(self._rates[:done]),
            tuple(self._smoothed),
            tuple(self._raw),
            self._first,
            self.diverged,
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a Keras model. Received: model={model!r} of type "
            f"{type(model).__name__}."
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError(f"`{_WHERE}` needs a compiled model. Call `model.compile(...)` first.")
    check_is_built(model, _WHERE)


@contextlib.contextmanager
def _built(model: Any) -> Iterator[Any]:
    """Yields the model's optimizer, built. Takes the build back afterwards, if it was not built."""
    outer, optimizer = model.optimizer, unwrap(model.optimizer)
    if not isinstance(optimizer, GroupedOptimizer):
        build_optimizer(model)
        yield optimizer
        return
    built: Any = optimizer._built
    if built is not None and built.averages_in_weights:
        raise ValueError(
            f"`{_WHERE}` must be called when the model has its weights. Received: averages in "
            "their place. Call it outside of `kgo.averaged_weights(model)`."
        )
    stays = outer.built or built is not None or optimizer._run.pending is not None
    take_back = building.note_unbuilt(optimizer)
    build_optimizer(model)
    try:
        yield optimizer
    finally:
        if not stays and (outer is optimizer or isinstance(outer, LossScaleOptimizer)):
            take_back()
