"""What each group does, in the logs of `fit`, and a check that the optimizer fits the model."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base.checks import is_schedule
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer import binding, values
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.selectors.layer_names import plain_names
from keras_groupopt.step.measurements import NAMES as MEASURED
from keras_groupopt.training.optimizer_of import build_optimizer

# What each option reads that only a GroupedOptimizer has.
_NEEDED = {
    "drift": "anchors",
    "skipped": "a count of skipped steps",
    "gradient_norm": "groups",
    "update_ratio": "groups",
    "clip_share": "groups",
    "ema_momentum": "averages",
}
# The names in logs of what is measured over all groups together.
_OVER_ALL = {"gradient_norm": "global_gradient_norm", "clip_share": "clip_share"}


class GroupLogger(keras.callbacks.Callback):
    """Puts the rate of each group into the logs of `fit`, and on request how its steps look.

    At the end of each epoch the logs get `learning_rate`, the base rate, and
    `learning_rate_<group>` for each group that moves: `learning_rate(t) · learning_rate_ratio(t)`
    at the present optimizer step, as Python floats. Characters of a group's name other than
    letters, digits, `_`, `-` and `.` become `_`. With a plain Keras optimizer only `learning_rate`
    is logged, so that one list of callbacks serves a comparison.

    Put it before callbacks that write logs (`CSVLogger`, `TensorBoard`) and before those that
    change the rate at the end of an epoch (`ReduceLROnPlateau`), and after `kgo.FlushAccumulation`.

    `gradient_norm`, `update_ratio` and `clip_share` are means over the optimizer steps of the
    epoch, without skipped steps; NaN if there was no step. The compiled step measures them. It is
    compiled anew if it did not measure before, and goes on measuring in later calls of `fit`. A
    model with a gradient rule (`kgo.SharpnessAwareModel`) logs `sam_gap` and the `gradient_norm`
    of its batches by itself.

    `clipped_steps_<group>` is in the logs if the optimizer counts these steps
    (`GroupedOptimizer(count_clipped_steps=True)`): the steps so far in which clipping shortened the
    gradients of the group.

    A warning at the end of an epoch says how many steps the optimizer skipped in it because
    gradients were not finite, and which group was the first at fault. With `on_nonfinite="raise"`
    the error comes when the batch ends, instead of when `fit` ends; on JAX this waits for each
    step.

    Before training it checks the model, which an optimizer cannot do. It attaches the model to the
    optimizer if none is attached, and refuses variables that the optimizer does not know and a
    `trainable` that changed since the model was compiled.

    Args:
        drift: Whether to log `drift_<group>`, `‖w − anchor‖` over the group's anchored variables,
            for each group with an anchor other than zero. Default: `False`.
        skipped: Whether to log `skipped_steps`, the optimizer's count of them so far. It includes
            the steps that a `kgo.LossScaleOptimizer` around it skipped, which cause no warning.
            Default: `False`.
        gradient_norm: Whether to log `gradient_norm_<group>`, `‖g‖` of the gradients that a step
            takes, unscaled and before any clipping, and `global_gradient_norm` over all groups,
            which `global_clipnorm` limits. Default: `False`.
        update_ratio: Whether to log `update_ratio_<group>`, `‖Δw‖ / ‖w‖` of a step, decay
            included; about 1e-3 is usual. Each step keeps a copy of the weights while it runs.
            Default: `False`.
        clip_share: Whether to log the share of steps in which clipping shortened a gradient:
            `clip_share` for `global_clipnorm`, `clip_share_<group>` for a group that clips itself.
            Default: `False`.
        ema_momentum: Whether to log `ema_momentum`, `β_t` of the next average. Default: `False`.
        gradient_rule: Whether to log `sam_<name>`, each number of the model's gradient rule at the
            present step, such as `sam_rho`. Default: `False`.

    Raises:
        TypeError: When training begins, if the optimizer has no single `learning_rate`, an option
            needs a `GroupedOptimizer` and the optimizer is another, or `gradient_rule` is set and
            the model has no gradient rule.
        FloatingPointError: When a batch ends, with `on_nonfinite="raise"`, if its gradients were
            not finite.
        ValueError: When training begins, if the optimizer no longer fits the model, `clip_share`
            is set and the optimizer does not clip, or `ema_momentum` is set and it does not
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the optimizer against the model."""
        self._begun = False
        self._check_options()
        optimizer = unwrap(self.model.optimizer)
        if not isinstance(optimizer, GroupedOptimizer):
            return
        self._raises = optimizer.on_nonfinite == "raise"
        build_optimizer(self.model)
        if self.model.built:
            binding.check_model(optimizer, self.model)
        optimizer.measure(*self._measured, model=self.model)

    def _check_options(self) -> None:
        outer = self.model.optimizer
        optimizer = unwrap(outer)
        name = type(optimizer).__name__
        grouped = isinstance(optimizer, GroupedOptimizer)
        # The rate of a `GroupedOptimizer` is not read, as its schedule may not be ready.
        if not grouped and not hasattr(optimizer, "learning_rate"):
            raise TypeError(
                f"`GroupLogger` needs an optimizer with one `learning_rate`. Received: {name}. "
                "Compile the model with a GroupedOptimizer."
            )
        if self.gradient_rule and not getattr(_rule_of(self.model), "declared", None):
            raise TypeError(
                "`GroupLogger(gradient_rule=True)` needs a model with a gradient rule that has "
                f"numbers. Received: {type(self.model).__name__}. Train "
                "`kgo.sharpness_aware(model, kgo.SAM(0.05))`."
            )
        for option, what in _NEEDED.items():
            if getattr(self, option) and not grouped:
                raise TypeError(
                    f"`GroupLogger({option}=True)` needs a GroupedOptimizer, which has {what}. "
                    f"Received: {name}."
                )
        if self.skipped and outer is not optimizer and not hasattr(outer, "skipped_steps"):
            raise TypeError(
                "`GroupLogger(skipped=True)` needs a wrapper that counts what it skips. Received: "
                f"{type(outer).__name__}. Compile with `kgo.LossScaleOptimizer(optimizer)`."
            )
        if self.ema_momentum and optimizer.ema is None and not optimizer.use_ema:
            raise ValueError(
                "`GroupLogger(ema_momentum=True)` needs an optimizer that averages the weights. "
                "Make it with `GroupedOptimizer(ema=kgo.EMA(0.999))`."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the means of the epoch. Warns, once, of schedules that end before the run."""
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
            optimizer.reset_measurements()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises if the step was skipped, with `on_nonfinite="raise"`."""
        # On JAX, reading the model waits until the step is done.
        if self._raises:
            unwrap(self.model.optimizer)._check_finite()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs."""
        if logs is None:
            return
        optimizer = unwrap(self.model.optimizer)
        logs["learning_rate"] = _as_float(optimizer.learning_rate)
        grouped = isinstance(optimizer, GroupedOptimizer)
        with optimizer._in_run() if grouped else contextlib.nullcontext():
            if self.gradient_rule:
                logs.update(_numbers_of(_rule_of(self.model), optimizer.iterations))
            if grouped:
                self._log(optimizer, epoch, logs)

    def _log(self, optimizer: GroupedOptimizer, epoch: int, logs: dict[str, Any]) -> None:
        groups = [planned.name for planned in optimizer.plan.groups]
        names = dict(zip(groups, plain_names(groups), strict=True))
        logs.update(_keyed("learning_rate", optimizer.learning_rates, names))
        means = optimizer.measurements() if self._measured else {}
        for name in self._measured:
            for group, mean in means[name].items():
                logs[_OVER_ALL[name] if group is None else f"{name}_{names[group]}"] = mean
        for group, count in optimizer.clipped_steps.items():
            logs[f"clipped_steps_{names[group]}"] = backend.on_host(count)
        if self.ema_momentum:
            logs["ema_momentum"] = _as_float(optimizer.average_momentum)
        if self.skipped:
            skipped = backend.on_host(optimizer.skipped_steps)
            outer = self.model.optimizer
            around = 0 if outer is optimizer else backend.on_host(outer.skipped_steps)
            logs["skipped_steps"] = skipped + int(around)
        values.report_skipped(optimizer)
        optimizer._check_finite()
        if self.drift:
            logs.update(_keyed("drift", optimizer.anchor_drift(), names))

    @property
    def _measured(self) -> list[str]:
        """The measurements that the optimizer makes."""
        return [name for name in MEASURED if getattr(self, name)]


def _rule_of(model: Any) -> Any:
    return getattr(model, "gradient_rule", None)


def _keyed(prefix: str, values: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    return {f"{prefix}_{names[group]}": _as_float(value) for group, value in values.items()}


def _numbers_of(rule: Any, step: Any) -> dict[str, float]:
    """Returns the numbers of a gradient rule at an optimizer step, by their names in logs."""
    at = keras.ops.convert_to_tensor(step)
    present = {name: getattr(rule, name) for name in rule.declared}
    return {
        f"sam_{name}": _as_float(value(at)) if is_schedule(value) else float(value)
        for name, value in present.items()
    }


def _as_float(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
