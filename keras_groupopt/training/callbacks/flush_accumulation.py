"""Ends windows of gradient accumulation at the end of epochs."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base.unwrap import unwrap


class FlushAccumulation(keras.callbacks.Callback):
    """Takes the optimizer step of a window that is open at the end of an epoch.

    Without it the window goes on in the next epoch, and every step has the same number of
    micro-batches. With it no gradient outlives its epoch, and the last step of an epoch is the mean
    over the remaining micro-batches.

    Put it before callbacks that save (`ModelCheckpoint`) or swap weights. The validation of the
    epoch runs before this step.

    Raises:
        TypeError: When training begins, if the optimizer has no `flush`.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(kgo.GroupedOptimizer(gradient_accumulation_steps=4), loss="mse")
    >>> _ = model.fit(np.ones((6, 4)), np.ones((6, 2)), batch_size=1, verbose=0,
    ...               callbacks=[kgo.FlushAccumulation()])
    >>> int(model.optimizer.iterations)
    2
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that there is something to flush."""
        optimizer = unwrap(self.model.optimizer)
        if not hasattr(optimizer, "flush"):
            raise TypeError(
                "`FlushAccumulation` needs a GroupedOptimizer. Received: "
                f"{type(optimizer).__name__}."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the step."""
        unwrap(self.model.optimizer).flush()
