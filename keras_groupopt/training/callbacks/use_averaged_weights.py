"""Validation, early stopping and chosen callbacks see the averages; training does not.

Keras calls no hook when `fit`, `evaluate` or `predict` fails. So the averages are in the weights'
place only within calls that this module wraps, and whose `finally` puts the weights back.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.step.averages import copy_from_weights
from keras_groupopt.training import batch_norm
from keras_groupopt.training.averaged_weights import averaged_weights, averages_of, statistics_pairs
from keras_groupopt.training.callbacks.backup import BackupAndRestore
from keras_groupopt.training.optimizer_of import build_optimizer

_BATCH_NORM = ("average", "raw")
_NO_INPUTS = (type(None), bool, int, float)
_BATCH_HOOKS = tuple(
    f"on_{kind}_batch_{end}" for kind in ("train", "test", "predict") for end in ("begin", "end")
)
_Callback = keras.callbacks.Callback


class UseAveragedWeights(keras.callbacks.Callback):
    """Validates, stops early and saves with the averages of the weights.

    In `fit`, in any order of the callbacks:

    | who | sees |
    | --- | --- |
    | training, `BackupAndRestore`, other callbacks | the weights |
    | validation | the averages |
    | `EarlyStopping` on a `val_` value | the averages, so it restores what was validated |
    | `ModelCheckpoint` | the weights: a run resumes from the file, which has the averages too |
    | those passed as `callbacks` | the averages: `ModelCheckpoint` there writes an export |

    As a callback of `evaluate` or `predict` it makes them use the averages. `fit` ends with the
    weights, or with those that `EarlyStopping(restore_best_weights=True)` restores.

    The weights come back bit for bit, also after exceptions and Ctrl-C. In `fit` they are back
    before the exception leaves it. In `evaluate` and `predict` the same holds for exceptions in a
    step. After an exception in the data or in another callback they are back once the traceback is
    freed, or when this object is used again. Prefer `with kgo.averaged_weights(model):` there.

    Args:
        callbacks: Callbacks of `fit` that see the averages in all their hooks. Do not also pass
            them to `fit`. Default: none.
        batch_norm: The source of the statistics of batch normalization for the averages.
            `"average"`: they are averaged like the weights, once per epoch, and saved with the
            optimizer's state. `"raw"`: those of the weights. Or inputs, as for
            `kgo.update_batch_norm`, to estimate them from before each validation; not an iterable
            that can be used only once. Default: `"average"`.

    Raises:
        TypeError: If an item of `callbacks` is not a callback. When training begins, if the
            optimizer is not a `GroupedOptimizer`.
        ValueError: If a callback must not see the averages, or `batch_norm` is unknown. When
            training begins, if the optimizer keeps no averages.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo, os, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(kgo.GroupedOptimizer(ema=kgo.EMA(0.9)), loss="mse")
    >>> x, y = np.ones((8, 4)), np.ones((8, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     best = keras.callbacks.ModelCheckpoint(
    ...         os.path.join(folder, "averaged.keras"), save_best_only=True)
    ...     history = model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=[
    ...         kgo.UseAveragedWeights([best]),
    ...         keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)])
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback] = (), batch_norm: Any = "average"
    ) -> None:
        super().__init__()
        self.callbacks = _checked(callbacks)
        is_name = isinstance(batch_norm, str)
        if (is_name and batch_norm not in _BATCH_NORM) or isinstance(batch_norm, _NO_INPUTS):
            raise ValueError(
                '`batch_norm` must be "average", "raw" or inputs to estimate from. Received: '
                f"batch_norm={batch_norm!r}."
            )
        self.batch_norm = batch_norm
        self._validating = False
        self._estimated_at: int | None = None
        self._swap = contextlib.ExitStack()
        for hook in _BATCH_HOOKS:
            # Keras waits for every batch if a callback has such a hook.
            if any(_acts(callback, hook) for callback in self.callbacks):
                setattr(self, hook, functools.partial(self._forward, hook))

    def set_model(self, model: Any) -> None:
        """Passes the model on."""
        super().set_model(model)
        for callback in self.callbacks:
            callback.set_model(model)

    def set_params(self, params: Any) -> None:
        """Passes the parameters on."""
        super().set_params(params)
        for callback in self.callbacks:
            callback.set_params(params)

    # fit ----------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the optimizer, and lets validation see the averages."""
        self._swap.close()
        self._estimated_at = None
        model = self.model
        if isinstance(unwrap(model.optimizer), GroupedOptimizer):
            build_optimizer(model)
        self._move_statistics(start=True)
        self._validate_with_averages(model)
        self._forward("on_train_begin", logs, swapped=False)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes the hook on."""
        self._forward("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages statistics, and passes the hook on."""
        self._move_statistics()
        self._forward("on_epoch_end", epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Lets `evaluate` see the weights again, and passes the hook on."""
        _remove_own_evaluate(self.model)
        self._forward("on_train_end", logs, swapped=False)

    def _validate_with_averages(self, model: Any) -> None:
        _remove_own_evaluate(model)
        original = model.evaluate

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            # `fit` passes Keras' list of callbacks, which is made anew for each `fit`.
            listed = getattr(kwargs.get("callbacks"), "callbacks", [])
            if not any(callback is self for callback in listed):
                _remove_own_evaluate(model)
                return original(*args, **kwargs)
            listed[:] = [
                _SeesAverages(each) if _restores_what_was_validated(each) else each
                for each in listed
            ]
            self._move_statistics()
            with averaged_weights(model):
                self._validating = True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._validating = False

        evaluate.of_averages = True  # type: ignore[attr-defined]
        model.evaluate = evaluate

    def _move_statistics(self, start: bool = False) -> None:
        """Moves the averages of statistics as far as those of the weights."""
        model = self.model
        optimizer, averages = averages_of(model, "UseAveragedWeights")
        if isinstance(self.batch_norm, str) and self.batch_norm == "raw":
            averages.statistics.clear()
            return
        pairs = statistics_pairs(model, averages, make=True)
        if not pairs:
            return
        step = backend.on_host(optimizer.iterations)
        if isinstance(self.batch_norm, str):
            averages.move_statistics(pairs, step)
        elif not start and step != self._estimated_at:
            self._estimated_at = step
            with averaged_weights(model):
                batch_norm.update_batch_norm(model, self.batch_norm)
                copy_from_weights(pairs)

    # evaluate and predict -----------------------------------------------------------------------

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages in, if `evaluate` is not called by `fit`."""
        self._enter("test_function")
        self._forward("on_test_begin", logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the weights back."""
        self._forward("on_test_end", logs)
        self._leave()

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages in."""
        self._enter("predict_function")
        self._forward("on_predict_begin", logs)

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the weights back."""
        self._forward("on_predict_end", logs)
        self._leave()

    def _enter(self, attribute: str) -> None:
        if self._validating:
            return
        self._swap.close()
        model = self.model
        function = getattr(model, attribute)
        swap = contextlib.ExitStack()
        swap.enter_context(averaged_weights(model))
        swap.callback(setattr, model, attribute, function)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException:
                swap.close()
                raise

        setattr(model, attribute, guarded)
        self._swap = swap
        listed = compat.callback_list_of(self)
        if listed is not None:
            weakref.finalize(listed, swap.close)

    def _leave(self) -> None:
        if not self._validating:
            self._swap.close()

    def _forward(self, hook: str, *args: Any, swapped: bool = True, **kwargs: Any) -> None:
        own = [callback for callback in self.callbacks if _acts(callback, hook)]
        if not own:
            return
        with averaged_weights(self.model) if swapped else contextlib.nullcontext():
            for callback in own:
                getattr(callback, hook)(*args, **kwargs)


class _SeesAverages(keras.callbacks.Callback):
    """Stands for a callback, and lets it see the averages at the end of epochs."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        for name in dir(_Callback):
            if name.startswith(("on_", "set_")) and name != "on_epoch_end":
                setattr(self, name, getattr(callback, name))
        self._callback = callback

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes the hook on with the averages in the model."""
        with averaged_weights(self._callback.model):
            self._callback.on_epoch_end(epoch, logs)


def _restores_what_was_validated(callback: Any) -> bool:
    return (
        isinstance(callback, keras.callbacks.EarlyStopping)
        and callback.restore_best_weights
        and callback.monitor.startswith("val_")
    )


def _remove_own_evaluate(model: Any) -> None:
    """Removes the `evaluate` of an earlier `fit`. A `fit` that failed could not remove it."""
    if hasattr(vars(model).get("evaluate"), "of_averages"):
        del model.evaluate


def _acts(callback: Any, hook: str) -> bool:
    """Returns whether a callback does anything in a hook."""
    if hook in _BATCH_HOOKS and getattr(callback, "save_freq", None) == "epoch":
        return False
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(_Callback, hook)


def _checked(callbacks: Any) -> list[Any]:
    own = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in own:
        if not isinstance(callback, _Callback):
            raise TypeError(
                "`callbacks` must be a list of Keras callbacks. Received: "
                f"{callback!r} of type {type(callback).__name__}."
            )
        if isinstance(
            callback, (keras.callbacks.BackupAndRestore, BackupAndRestore, UseAveragedWeights)
        ):
            raise ValueError(
                "`callbacks` must be callbacks that may see the averages. Received: "
                f"{type(callback).__name__}. Put it in `fit`'s own list: a run resumed from "
                "averages would be another one."
            )
    return own
