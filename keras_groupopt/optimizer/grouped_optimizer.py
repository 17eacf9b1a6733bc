"""The optimizer: groups resolved at build, one joint step in apply."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_groupopt import checkpoint
from keras_groupopt.base import compat
from keras_groupopt.base.checks import (
    answer_unknown,
    check_choice,
    check_clipping,
    check_count,
    check_positive,
    check_scalar,
    check_switch,
)
from keras_groupopt.optimizer import (
    applying,
    binding,
    building,
    config,
    freezing,
    measuring,
    rebuilding,
    saving,
    values,
)
from keras_groupopt.optimizer.declaration import (
    check_base,
    check_default_rule,
    declare,
)
from keras_groupopt.optimizer.link import Link
from keras_groupopt.optimizer.run import Run, require_built
from keras_groupopt.plan.averages import Average, as_average
from keras_groupopt.plan.group import as_anchor, as_exclusion, as_groups
from keras_groupopt.plan.plan import Defaults
from keras_groupopt.plan.ratios import as_ratios
from keras_groupopt.plan.rule_spec import as_rule
from keras_groupopt.schedules.horizon import horizon
from keras_groupopt.selectors import default_exclude_from_decay
from keras_groupopt.step import nonfinite
from keras_groupopt.step.accumulation import check_steps
from keras_groupopt.step.built import BuiltOptimizer

# Fixed at construction: a compiled step would ignore a later change.
FIXED = (
    "clipnorm",
    "clipvalue",
    "count_clipped_steps",
    "ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "fused",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "max_skipped_steps",
    "on_nonfinite",
    "ratios",
    "use_ema",
    "weight_decay",
)


@answer_unknown(
    {
        **dict.fromkeys(("params", "param_groups", "optimizers"), "groups"),
        **dict.fromkeys(("max_norm", "max_grad_norm", "clip_grad_norm"), "global_clipnorm"),
        **dict.fromkeys(("accumulation_steps", "every_k"), "gradient_accumulation_steps"),
        "lr": "learning_rate",
        "optimizer": "rule",
        "wd": "weight_decay",
    }
)
@keras.saving.register_keras_serializable(package="keras_groupopt")
class GroupedOptimizer(keras.optimizers.Optimizer):
    """Trains each group of a model's variables with its own rule, rate, decay and anchor.

    At optimizer step `t`, for a variable `w` with gradient `g` in group `G`:

        g ← mean of g over `gradient_accumulation_steps` micro-batches
        g ← clip of G, then g · min(1, global_clipnorm / ‖all g‖)
        η ← learning_rate(t) · learning_rate_ratio_G(t) · ratio of `ratios` for w
        w ← w − η · weight_decay_G(t) · (w − anchor)      if G decays and w is not excluded
        w ← w − update of the rule of G at rate η
        w ← constraint(w)
        average ← β · average + (1 − β) · w

    The norm is over all groups, in float32, without frozen groups and missing gradients. A
    variable without a gradient neither moves nor decays. If a gradient is not finite, no group
    moves, and `skipped_steps` counts the step. Schedules, averages and `iterations` count optimizer
    steps, not micro-batches.

    Under a TensorFlow strategy (`MirroredStrategy`, `MultiWorkerMirroredStrategy`,
    `OneDeviceStrategy`) `g` is the sum over all replicas before anything above uses it. Make model
    and optimizer under `strategy.scope()`.

    Args:
        groups: A list of `Group`, or a dict from name to `Group` or selector. Default: `()`, one
            group of all variables.
        model: The model, from which layer paths come. The optimizer holds it weakly. Without it,
            selectors see `variable.path`, which lacks the names of nested models. Default: `None`.
        rule: The rule of groups that name none: a name, a class, or `kgo.rule(...)`. Default:
            `"radam"`.
        learning_rate: The base rate per optimizer step: a number, a
            `keras.optimizers.schedules.LearningRateSchedule`, or a function without arguments.
            A compiled step calls a function once, when it is compiled, as in Keras. Default: 1e-3.
        weight_decay: The decay of groups that name none; a number or a schedule. Default: `None`,
            no decay.
        anchor: What decay pulls toward in groups that do not say: `"zero"`, `"initial"`, arrays
            or a file. Default: `"zero"`.
        exclude_from_decay: A selector of variables never decayed, in groups that do not say; `()`
            excludes none. Default: `kgo.default_exclude_from_decay`; extend it with `|`.
        ratios: A second assignment of rates, apart from that of rules: pairs (selector, ratio), or
            a dict from one to the other. The rate of a variable that a pair claims is that of its
            group times the ratio, a number >= 0 or a schedule; so is its decay. `overlap` says
            what holds if two pairs claim one variable. Default: `()`.
        global_clipnorm: Limit of the gradient norm over all groups. Default: `None`, no limit.
        clipnorm: Limit of each variable's gradient norm, in groups without clipping. Default:
            `None`, no limit.
        clipvalue: Limit of each gradient element, in groups without clipping. Default: `None`, no
            limit.
        gradient_accumulation_steps: Micro-batches per optimizer step, at least 1. Their gradients
            are averaged in float32 before anything else uses them; in `fit` a short last
            micro-batch weighs as a full one. A window that is open at the end
            of an epoch carries over; `kgo.FlushAccumulation` closes it instead. Default: `None`,
            as 1: no accumulation.
        ema: An average of the weights over optimizer steps: `kgo.EMA(...)` or `kgo.SWA(...)`.
            `fit` leaves the weights themselves alone. Default: `None`, no average.
        on_nonfinite: What happens if gradients are not finite (inf, NaN, or a norm over all
            groups beyond 1.8e19, whose square float32 cannot hold): `"skip"` leaves all state as
            it is, counts in `skipped_steps`, and warns at the first skip of a run, if that step is
            not compiled, and when `fit` ends; `"raise"` does so too and raises, in a compiled
            step when `fit` ends (`GroupLogger`: when the batch ends); `"propagate"` does not
            look. Default: `"skip"`.
        max_skipped_steps: With `on_nonfinite="skip"`, how many steps (micro-batches) skipped in a
            row are an error, at least 1. A compiled step cannot count them: `fit` looks when it
            ends, `GroupLogger` at the end of each epoch, and a row begins after the last look that
            saw a step done. `None` never raises. Default: 100.
        fused: Whether a rule may move all variables of its group at once, by what the backend has
            for that (torch's fused and foreach functions, TensorFlow's training operations, on JAX
            one trace for all variables of a shape), if there is such a step for it. The numbers
            are the rule's to rounding, and state and files are the same; `False` runs the rule's
            own update. Default: `True`.
        count_clipped_steps: Whether `clipped_steps` counts, for each group, the optimizer steps in
            which clipping shortened its gradients. The counts are saved. Each step then looks at
            the gradients of groups with a clipping of their own once more. Default: `False`.
        use_ema: Keras' averages: as `ema=kgo.EMA(ema_momentum)`, but the first average is the
            weights after the first step, and `fit` ends by writing the averages into the weights.
            Default: `False`.
        ema_momentum: The momentum for `use_ema`, in [0, 1). Default: 0.99.
        ema_overwrite_frequency: With `use_ema`, optimizer steps between writing the averages into
            the weights. Default: `None`, at the end of `fit` only.
        unclaimed: What happens to variables that no group claims: `"default"` (they form the
            group of that name), `"freeze"`, or `"error"`. Default: `"default"`.
        overlap: What happens to variables that two groups, or two of `ratios`, claim: `"error"`,
            `"first"` or `"last"`. Default: `"error"`.
        loss_scale_factor: The loss is multiplied by it and gradients are divided by it. Default:
            `None`, no scale.
        name: The optimizer's name. Default: Keras numbers one.

    Raises:
        ValueError: If a value is out of range, names repeat, or options contradict each other;
            at build, if a selector matches nothing, a group is empty, or groups overlap.
        TypeError: If an argument is of the wrong type.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer(
    ...     groups=[kgo.Group("backbone", "backbone", learning_rate_ratio=0.1)], model=model)
    >>> [group.name for group in optimizer.plan.groups]
    ['backbone', 'default']

    References:
        Decoupled decay: Loshchilov & Hutter 2019, arXiv:1711.05101. L2-SP: Li et al. 2018,
        arXiv:1802.01483. Clipping: Pascanu et al. 2013, arXiv:1211.5063.
    """

    def __init__(
        self,
        groups: Any = (),
        *,
        model: Any = None,
        rule: Any = "radam",
        learning_rate: Any = 1e-3,
        weight_decay: Any = None,
        anchor: Any = "zero",
        exclude_from_decay: Any = default_exclude_from_decay,
        ratios: Any = (),
        global_clipnorm: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        gradient_accumulation_steps: int | None = None,
        ema: Average | None = None,
        on_nonfinite: str = "skip",
        max_skipped_steps: int | None = 100,
        fused: bool = True,
        count_clipped_steps: bool = False,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        unclaimed: str = "default",
        overlap: str = "error",
        loss_scale_factor: float | None = None,
        name: str | None = None,
    ) -> None:
        where = "GroupedOptimizer"
        listed = as_groups(groups)
        base = check_base(learning_rate, listed)
        if loss_scale_factor is not None:
            loss_scale_factor = check_positive("loss_scale_factor", loss_scale_factor, where=where)
        super().__init__(learning_rate=base, loss_scale_factor=loss_scale_factor, name=name)
        # What belongs to the optimizer. All are plain objects: Keras would track and save lists.
        self._link = Link()
        self._run = Run()
        self._built: BuiltOptimizer | None = None
        # The counter itself. Keras divides it by `gradient_accumulation_steps`, once that is set.
        self._counter = super().iterations
        self._fingerprint = checkpoint.protect_early(self)
        # `compile` makes an optimizer from a config with tracking switched off.
        compat.track_all_state(self)
        limits = check_clipping(clipnorm, global_clipnorm, clipvalue, where=where)
        self.clipnorm, self.global_clipnorm, self.clipvalue = limits
        self.weight_decay = check_scalar("weight_decay", weight_decay, where=where)
        self.use_ema, self.ema_momentum = bool(use_ema), ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.ema, self.on_nonfinite = ema, on_nonfinite
        if max_skipped_steps is not None:
            max_skipped_steps = check_count("max_skipped_steps", max_skipped_steps, 1, where=where)
        self.max_skipped_steps = max_skipped_steps
        self.fused = check_switch("fused", fused, where=where)
        self.count_clipped_steps = check_switch(
            "count_clipped_steps", count_clipped_steps, where=where
        )
        assigned = as_ratios(ratios)
        self.ratios = tuple((ratio.selector, ratio.value) for ratio in assigned)
        self.gradient_accumulation_steps = check_steps(gradient_accumulation_steps, where)
        defaults = Defaults(
            learning_rate=base,
            rule=check_default_rule(as_rule(rule, where=where)),
            weight_decay=self.weight_decay,
            anchor=as_anchor(anchor, where=where),
            exclude_from_decay=as_exclusion(exclude_from_decay) or (),
            ratios=assigned,
            clipnorm=self.clipnorm,
            clipvalue=self.clipvalue,
            global_clipnorm=self.global_clipnorm,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            ema=as_average(ema, use_ema, ema_momentum, ema_overwrite_frequency),
            fused=self.fused,
            count_clipped_steps=self.count_clipped_steps,
            max_skipped_steps=max_skipped_steps,
            on_nonfinite=check_choice(
                "on_nonfinite", on_nonfinite, nonfinite.POLICIES, where=where
            ),
            unclaimed=check_choice(
                "unclaimed", unclaimed, ("default", "freeze", "error"), where=where
            ),
            overlap=check_choice("overlap", overlap, ("error", "first", "last"), where=where),
        )
        self._declared = declare(listed, defaults)
        self._sealed = True
        if model is not None:
            self.bind(model)

    # The model ----------------------------------------------------------------------------------

    plan = property(binding.plan)
    bind = binding.bind
    rebuild = rebuilding.rebuild
    add_group = rebuilding.add_group
    restart_schedules = rebuilding.restart_schedules
    freeze_to = freezing.freeze_to

    # Keras' protocol of a step -------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether it is built, and still knows every trainable variable of its model, in order."""
        return building.is_built(self)

    @built.setter
    def built(self, value: bool) -> None:
        """Ignored: Keras sets it, but only `build` builds."""

    build = building.build
    apply = applying.apply
    stateless_apply = applying.stateless_apply
    flush = applying.flush
    finalize_variable_values = applying.finalize_variable_values

    @property
    def iterations(self) -> Any:
        """The optimizer steps done, an integer variable. Micro-batches do not count."""
        return self._counter

    @property
    def variables(self) -> list[Any]:
        """All state: the optimizer's, then that of each group's rule; last what is not saved."""
        own, built = compat.tracked_variables(self), self._built
        if built is None:
            return own
        # A step on values (JAX) cannot copy anchors and averages from the weights. Between a load
        # of weights and that step, `fit` and hand-written loops ask for these variables alone.
        built.capture_due()
        return own + built.rule_variables + built.passing_variables

    # Values of a run -----------------------------------------------------------------------------

    @property
    def learning_rate(self) -> Any:
        """The base rate, per optimizer step. Groups follow it by their ratios."""
        with self._in_run():
            return compat.current_learning_rate(self)

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        values.set_learning_rate(self, learning_rate)

    def _in_run(self) -> AbstractContextManager[Any]:
        """Returns a block in which schedules may be called that end with the run."""
        if self._built is None:
            return horizon(values.told_steps(self))
        return self._built.in_run()

    _require_built = require_built
    learning_rates = property(values.learning_rates)
    learning_rate_ratios = property(values.learning_rate_ratios)
    set_learning_rate_ratio = values.set_learning_rate_ratio
    set_weight_decay = values.set_weight_decay
    total_steps = property(values.total_steps, values.set_total_steps)
    skipped_steps = property(values.skipped_steps)
    first_nonfinite_group = property(values.first_nonfinite_group)
    micro_batches = property(values.micro_batches)

    @property
    def clipped_steps(self) -> dict[str, Any]:
        """The optimizer steps in which clipping shortened the gradients of each group; integers.

        Empty unless the optimizer was made with `count_clipped_steps=True`, and built.
        """
        built = self._built
        counts = None if built is None else built.clipped_steps
        return {} if counts is None else dict(counts.counts)

    _check_finite = values.check_finite
    _average_pairs = values.average_pairs
    average_momentum = property(values.average_momentum)
    capture_anchors = values.capture_anchors
    anchor_drift = values.anchor_drift
    measure = measuring.measure
    measurements = measuring.measurements
    reset_measurements = measuring.reset_measurements

    # State and config ----------------------------------------------------------------------------

    set_weights = saving.set_weights
    save_own_variables = saving.save_own_variables
    load_own_variables = saving.load_own_variables
    state_dict = saving.state_dict
    load_state_dict = saving.load_state_dict
    save_state = saving.save_state
    load_state = saving.load_state
    get_config = config.get_config
    from_config = classmethod(config.from_config)

    # Refused -------------------------------------------------------------------------------------

    @property
    def _model_variables_moving_average(self) -> Any:
        # Keras' SwapEMAWeights asks for it. Its swap leaves the averages in place of the weights
        # after `predict`, and saves them as the weights.
        raise ValueError(
            "`SwapEMAWeights` must not be used with GroupedOptimizer: files it saves in `fit` hold "
            "the averages in place of the weights. Use `kgo.UseAveragedWeights()`."
        )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Always raises: exclusion is a selector here, with one meaning on all backends.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "`exclude_from_weight_decay` is not used by GroupedOptimizer. Received: "
            f"var_list={var_list!r}, var_names={var_names!r}. Pass "
            "`exclude_from_decay=kgo.default_exclude_from_decay | ...`."
        )

    def __repr__(self) -> str:
        built, declared = self._built, self._declared
        groups = declared.groups if built is None else [own.group for own in built.plan.groups]
        default = declared.defaults.rule
        rules = {
            group.name: "frozen" if group.frozen else (group.rule or default).label
            for group in groups
        } or {"default": default.label}
        state = "not built" if built is None else f"{len(built.variables)} variables"
        return f'<{type(self).__name__} "{self.name}": groups {rules}, {state}>'

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras' LossScaleOptimizer switches a factor off, which it then handles itself.
        fixed = name in FIXED or (name == "loss_scale_factor" and value is not None)
        if fixed and getattr(self, "_sealed", False):
            how = " Use `set_weight_decay(group, ...)`." if name == "weight_decay" else ""
            raise AttributeError(
                f"`{name}` is fixed at construction, as a compiled step would ignore the change. "
                f"Received: {name}={value!r}.{how}"
            )
        super().__setattr__(name, value)
