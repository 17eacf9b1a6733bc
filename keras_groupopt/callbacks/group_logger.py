"""The rate of each group in `fit`'s logs, and a check that the optimizer still fits the model."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_groupopt import kernels
from keras_groupopt.callbacks.unwrap import unwrap
from keras_groupopt.grouped_optimizer import GroupedOptimizer
from keras_groupopt.naming import plain_names


class GroupLogger(keras.callbacks.Callback):
    """Puts the rate of each group into the logs of `fit`.

    At the end of each epoch the logs get `learning_rate`, the base rate, and
    `learning_rate_<group>` for each group that moves: `learning_rate(t) · learning_rate_ratio(t)`
    at the present optimizer step, as Python floats. Characters of a group's name that are no
    letter, digit, `_`, `-` or `.` become `_`. With a plain Keras optimizer only `learning_rate`
    is logged, so that one list of callbacks serves a comparison.

    Put it before callbacks that write logs down (`CSVLogger`, `TensorBoard`) and before those
    that change the rate at the end of an epoch (`ReduceLROnPlateau`).

    A warning at the end of an epoch tells how many steps the optimizer skipped in it, as gradients
    were not finite, and which group was the first at fault. With `on_nonfinite="raise"` the error
    comes when the batch ends, rather than when `fit` does; on JAX this waits for each step.

    Before training it looks at the model, as an optimizer cannot: it attaches the model to the
    optimizer if none is, refuses variables that the optimizer does not know and a `trainable` that
    changed since the model was compiled, and warns when `"initial"` anchors are not the weights
    training starts from.

    Args:
        drift: Whether to log `drift_<group>` too, `‖w − anchor‖` over the group's anchored
            variables, for each group with an anchor other than zero.
        skipped: Whether to log `skipped_steps` too, the optimizer's count of them so far, with
            those of a `kgo.LossScaleOptimizer` around it, which are no cause for a warning.

    Raises:
        TypeError: When training begins, if the optimizer has no single `learning_rate`, or
            `drift` or `skipped` is asked of another optimizer than `GroupedOptimizer`.
        FloatingPointError: When a batch ends, with `on_nonfinite="raise"`, if its gradients were
            not finite.
        ValueError: When training begins, if the optimizer does not fit the model any more.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer(
    ...     [kgo.Group("backbone", "backbone", learning_rate_ratio=0.5)],
    ...     model=model, learning_rate=0.25)
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0,
    ...                     callbacks=[kgo.GroupLogger()])
    >>> {name: values for name, values in history.history.items() if name != "loss"}
    {'learning_rate': [0.25], 'learning_rate_backbone': [0.125], 'learning_rate_default': [0.25]}
    """

    def __init__(self, drift: bool = False, skipped: bool = False) -> None:
        super().__init__()
        self.drift = bool(drift)
        self.skipped = bool(skipped)
        self._raises = False
        self._skipped_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the optimizer against the model."""
        outer = self.model.optimizer
        optimizer = unwrap(outer)
        if not hasattr(optimizer, "learning_rate"):
            raise TypeError(
                "`GroupLogger` needs an optimizer with one `learning_rate`. Received: "
                f"{type(optimizer).__name__}. Compile the model with a GroupedOptimizer."
            )
        if not isinstance(optimizer, GroupedOptimizer):
            for name, what in (("drift", "anchors"), ("skipped", "a count of skipped steps")):
                if getattr(self, name):
                    raise TypeError(
                        f"`GroupLogger({name}=True)` needs a GroupedOptimizer, which has {what}. "
                        f"Received: {type(optimizer).__name__}."
                    )
            return
        if self.skipped and outer is not optimizer and not hasattr(outer, "skipped_steps"):
            raise TypeError(
                "`GroupLogger(skipped=True)` needs a wrapper that counts what it skips. Received: "
                f"{type(outer).__name__}. Compile with `kgo.LossScaleOptimizer(optimizer)`."
            )
        self._raises = optimizer.on_nonfinite == "raise"
        self._skipped_before = kernels.on_host(optimizer.skipped_steps)
        if not self.model.built:
            return
        if not outer.built:
            # Where Keras builds later, the plan's errors would come out of a compiled step.
            outer.build(self.model.trainable_variables)
        optimizer.check_model(self.model)
        _warn_of_late_weights(optimizer)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises where the step was skipped, if that is asked for."""
        # Asking for the model waits, on JAX, until the step is done.
        if self._raises:
            unwrap(self.model.optimizer).check_finite()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs."""
        if logs is None:
            return
        optimizer = unwrap(self.model.optimizer)
        logs["learning_rate"] = _as_float(optimizer.learning_rate)
        if not isinstance(optimizer, GroupedOptimizer):
            return
        logs.update(_keyed("learning_rate", optimizer.learning_rates))
        skipped = kernels.on_host(optimizer.skipped_steps)
        if self.skipped:
            logs["skipped_steps"] = skipped + _skipped_around(self.model.optimizer, optimizer)
        if skipped > self._skipped_before:
            warnings.warn(
                f"{skipped - self._skipped_before} steps of epoch {epoch + 1} were skipped, as "
                "gradients were not finite; in the last of them first in group "
                f'"{optimizer.first_nonfinite_group}".',
                stacklevel=2,
            )
            self._skipped_before = skipped
        if self.drift:
            logs.update(_keyed("drift", optimizer.anchor_drift()))


def _skipped_around(outer: Any, optimizer: GroupedOptimizer) -> int:
    """Returns the steps that a `LossScaleOptimizer` skipped, as it does to find its scale."""
    if outer is optimizer:
        return 0
    return int(kernels.on_host(outer.skipped_steps))


def _warn_of_late_weights(optimizer: GroupedOptimizer) -> None:
    if kernels.on_host(optimizer.iterations) > 0:
        return
    drift = optimizer.anchor_drift()
    late = [
        planned.name
        for planned in optimizer.plan.groups
        if planned.name in drift
        and planned.group.anchor.kind == "initial"
        and _as_float(drift[planned.name]) > 0
    ]
    if late:
        names = ", ".join(f'"{name}"' for name in late)
        warnings.warn(
            'The "initial" anchors are not the weights that training starts from, in the groups '
            f"{names}: weights were set after the optimizer was built. Decay will pull away from "
            "them. Call `optimizer.capture_anchors()` before `fit` to pull toward them.",
            stacklevel=2,
        )


def _keyed(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    return {
        f"{prefix}_{key}": _as_float(value)
        for key, value in zip(plain_names(values), values.values(), strict=True)
    }


def _as_float(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
