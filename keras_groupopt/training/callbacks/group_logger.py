"""What each group does, in `fit`'s logs, and a check that the optimizer still fits the model."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base.checks import is_schedule
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer import binding, values
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.selectors.layer_names import plain_names
from keras_groupopt.step.measurements import NAMES as MEASURED

# What can be asked for, and what only a GroupedOptimizer has for it.
_NEEDED = {
    "drift": "anchors",
    "skipped": "a count of skipped steps",
    "gradient_norm": "groups",
    "update_ratio": "groups",
    "clip_share": "groups",
    "ema_momentum": "averages",
}
# What is over all groups together.
_OVER_ALL = {"gradient_norm": "global_gradient_norm", "clip_share": "clip_share"}


class GroupLogger(keras.callbacks.Callback):
    """Puts the rate of each group into the logs of `fit`, and on request what its steps are like.

    At the end of each epoch the logs get `learning_rate`, the base rate, and
    `learning_rate_<group>` for each group that moves: `learning_rate(t) · learning_rate_ratio(t)`
    at the present optimizer step, as Python floats. Characters of a group's name that are no
    letter, digit, `_`, `-` or `.` become `_`. With a plain Keras optimizer only `learning_rate`
    is logged, so that one list of callbacks serves a comparison.

    Put it before callbacks that write logs down (`CSVLogger`, `TensorBoard`) and before those
    that change the rate at the end of an epoch (`ReduceLROnPlateau`), and after
    `kgo.FlushAccumulation`.

    `gradient_norm`, `update_ratio` and `clip_share` are means over the optimizer steps of the
    epoch, without those that were skipped; NaN where there was none. They are measured in the
    compiled step, which is compiled anew if it was without; the optimizer goes on measuring in
    later calls of `fit`. A model with a gradient rule (`kgo.SharpnessAwareModel`) logs
    `sam_gap` and the `gradient_norm` of its batches by itself.

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
        gradient_norm: Whether to log `gradient_norm_<group>` too, `‖g‖` of the gradients that a
            step takes, unscaled and before any clipping, and `global_gradient_norm` over all
            groups: what `global_clipnorm` is the limit of.
        update_ratio: Whether to log `update_ratio_<group>` too, `‖Δw‖ / ‖w‖` of a step, decay
            included; about 1e-3 is usual. Each step keeps a copy of the weights for its length.
        clip_share: Whether to log the share of steps in which clipping shortened a gradient:
            `clip_share` for `global_clipnorm`, `clip_share_<group>` where a group clips itself.
        ema_momentum: Whether to log `ema_momentum` too, `β_t` of the next average.
        gradient_rule: Whether to log `sam_<name>` too, each number of the model's gradient rule at
            the present step, such as `sam_rho`.

    Raises:
        TypeError: When training begins, if the optimizer has no single `learning_rate`, something
            is asked of another optimizer than `GroupedOptimizer`, or `gradient_rule` of a model
            without one.
        FloatingPointError: When a batch ends, with `on_nonfinite="raise"`, if its gradients were
            not finite.
        ValueError: When training begins, if the optimizer does not fit the model any more,
            `clip_share` is asked of one that does not clip, or `ema_momentum` of one that does not
            average.

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

    def __init__(
        self,
        drift: bool = False,
        skipped: bool = False,
        *,
        gradient_norm: bool = False,
        update_ratio: bool = False,
        clip_share: bool = False,
        ema_momentum: bool = False,
        gradient_rule: bool = False,
    ) -> None:
        super().__init__()
        self.drift = bool(drift)
        self.skipped = bool(skipped)
        self.gradient_norm = bool(gradient_norm)
        self.update_ratio = bool(update_ratio)
        self.clip_share = bool(clip_share)
        self.ema_momentum = bool(ema_momentum)
        self.gradient_rule = bool(gradient_rule)
        self._raises = False
        self._begun = False
        self._skipped_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the optimizer against the model."""
        self._begun = False
        outer = self.model.optimizer
        optimizer = unwrap(outer)
        grouped = isinstance(optimizer, GroupedOptimizer)
        # A schedule may not be ready to be read.
        if not grouped and not hasattr(optimizer, "learning_rate"):
            raise TypeError(
                "`GroupLogger` needs an optimizer with one `learning_rate`. Received: "
                f"{type(optimizer).__name__}. Compile the model with a GroupedOptimizer."
            )
        rule = getattr(self.model, "gradient_rule", None)
        if self.gradient_rule and not getattr(rule, "declared", None):
            raise TypeError(
                "`GroupLogger(gradient_rule=True)` needs a model with a gradient rule that has "
                f"numbers. Received: {type(self.model).__name__}. Train "
                "`kgo.sharpness_aware(model, kgo.SAM(0.05))`."
            )
        if not grouped:
            for name, what in _NEEDED.items():
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
        if self.ema_momentum and optimizer.ema is None and not optimizer.use_ema:
            raise ValueError(
                "`GroupLogger(ema_momentum=True)` needs an optimizer that averages the weights. "
                "Received: one that does not. Make it with "
                "`GroupedOptimizer(ema=kgo.EMA(0.999))`."
            )
        self._raises = optimizer.on_nonfinite == "raise"
        self._skipped_before = backend.on_host(optimizer.skipped_steps)
        if self.model.built:
            if not outer.built:
                # Where Keras builds later, the plan's errors would come out of a compiled step.
                outer.build(self.model.trainable_variables)
            binding.check_model(optimizer, self.model)
            _warn_of_late_weights(optimizer)
        optimizer.measure(*self._measured, model=self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the means of the epoch; says, once, which schedules end before the run."""
        optimizer = unwrap(self.model.optimizer)
        if isinstance(optimizer, GroupedOptimizer) and optimizer.built and not self._begun:
            self._begun = True
            batches = self.params.get("steps")
            if batches:
                left = (self.params["epochs"] - epoch) * batches
                steps = left // (optimizer.gradient_accumulation_steps or 1)
                end = backend.on_host(optimizer.iterations) + steps
                values.check_run_length(optimizer, end)
        if self._measured:
            unwrap(self.model.optimizer).reset_measurements()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises where the step was skipped, if that is asked for."""
        # Asking for the model waits, on JAX, until the step is done.
        if self._raises:
            unwrap(self.model.optimizer)._check_finite()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs."""
        if logs is None:
            return
        optimizer = unwrap(self.model.optimizer)
        logs["learning_rate"] = _as_float(optimizer.learning_rate)
        if isinstance(optimizer, GroupedOptimizer):
            with optimizer._in_run():
                self._log(optimizer, epoch, logs)
        elif self.gradient_rule:
            logs.update(_numbers_of(self.model.gradient_rule, optimizer.iterations))

    def _log(self, optimizer: GroupedOptimizer, epoch: int, logs: dict[str, Any]) -> None:
        if self.gradient_rule:
            logs.update(_numbers_of(self.model.gradient_rule, optimizer.iterations))
        names = _log_names(optimizer)
        logs.update(_keyed("learning_rate", optimizer.learning_rates, names))
        means = optimizer.measurements() if self._measured else {}
        for name in self._measured:
            for group, mean in means[name].items():
                logs[_OVER_ALL[name] if group is None else f"{name}_{names[group]}"] = mean
        if self.ema_momentum:
            logs["ema_momentum"] = _as_float(optimizer.average_momentum)
        skipped = backend.on_host(optimizer.skipped_steps)
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
            logs.update(_keyed("drift", optimizer.anchor_drift(), names))

    @property
    def _measured(self) -> list[str]:
        """What the optimizer is to measure."""
        return [name for name in MEASURED if getattr(self, name)]


def _skipped_around(outer: Any, optimizer: GroupedOptimizer) -> int:
    """Returns the steps that a `LossScaleOptimizer` skipped, as it does to find its scale."""
    if outer is optimizer:
        return 0
    return int(backend.on_host(outer.skipped_steps))


def _warn_of_late_weights(optimizer: GroupedOptimizer) -> None:
    if backend.on_host(optimizer.iterations) > 0:
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


def _log_names(optimizer: GroupedOptimizer) -> dict[str, str]:
    """Returns what each group is called in logs, whichever of them something is logged of."""
    groups = [planned.name for planned in optimizer.plan.groups]
    return dict(zip(groups, plain_names(groups), strict=True))


def _keyed(prefix: str, values: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    return {f"{prefix}_{names[group]}": _as_float(value) for group, value in values.items()}


def _numbers_of(rule: Any, step: Any) -> dict[str, float]:
    """Returns each number of a gradient rule at an optimizer step, by its name in logs."""
    values = {name: getattr(rule, name) for name in rule.declared}
    at = keras.ops.convert_to_tensor(step)
    return {
        f"sam_{name}": _as_float(value(at)) if is_schedule(value) else float(value)
        for name, value in values.items()
    }


def _as_float(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
