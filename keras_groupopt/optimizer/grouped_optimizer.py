"""The optimizer: groups resolved at build, one joint step in apply."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops
from keras.distribution import distribute_tensor

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import compat, text
from keras_groupopt.base.checks import (
    check_choice,
    check_clipping,
    check_positive,
    check_scalar,
    check_switch,
)
from keras_groupopt.optimizer import config
from keras_groupopt.optimizer.declaration import (
    Declaration,
    check_base,
    check_default_rule,
)
from keras_groupopt.optimizer.freezing import Freezing
from keras_groupopt.optimizer.measuring import Measuring
from keras_groupopt.optimizer.model_binding import Binding
from keras_groupopt.optimizer.rebuilding import Rebuilding
from keras_groupopt.optimizer.run_values import RunningValues
from keras_groupopt.optimizer.saving import Persistence
from keras_groupopt.plan import resolve
from keras_groupopt.plan.averages import Average, as_average
from keras_groupopt.plan.group import as_anchor, as_exclusion, as_groups, as_rule
from keras_groupopt.plan.plan import Defaults, Plan, with_state_bytes
from keras_groupopt.plan.ratios import as_ratios
from keras_groupopt.rules import registry
from keras_groupopt.selectors import default_exclude_from_decay
from keras_groupopt.step import averages, nonfinite, one_step, run_length
from keras_groupopt.step.accumulation import check_steps
from keras_groupopt.step.built import BuiltOptimizer

Tensor = Any

# Set at construction and baked into a compiled step: setting them later would be ignored.
_FIXED = (
    "clipnorm",
    "clipvalue",
    "ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "fused",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "on_nonfinite",
    "ratios",
    "use_ema",
    "weight_decay",
)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class GroupedOptimizer(
    Binding,
    RunningValues,
    Rebuilding,
    Freezing,
    Persistence,
    Measuring,
    keras.optimizers.Optimizer,
):
    """Trains each group of a model's variables with its own rule, rate, decay and anchor.

    At optimizer step `t`, for a variable `w` with gradient `g` in group `G`:

        g ← mean of g over `gradient_accumulation_steps` micro-batches
        g ← clip of G, then g · min(1, global_clipnorm / ‖all g‖)
        η ← learning_rate(t) · learning_rate_ratio_G(t) · ratio of `ratios` for w
        w ← w − η · weight_decay_G(t) · (w − anchor)      where G decays and w is not excluded
        w ← w − update of the rule of G at rate η
        w ← constraint(w)
        average ← β · average + (1 − β) · w

    The norm is over all groups, in float32, without frozen groups and missing gradients. A
    variable without a gradient neither moves nor decays. Where a gradient is not finite, no group
    moves and `skipped_steps` counts. Schedules, averages and `iterations` count optimizer steps,
    not micro-batches.

    Under a TensorFlow strategy (`MirroredStrategy`, `MultiWorkerMirroredStrategy`,
    `OneDeviceStrategy`) `g` is the sum over all replicas before anything above sees it. Make model
    and optimizer under `strategy.scope()`.

    Args:
        groups: A list of `Group`, or a dict from name to `Group` or selector.
        model: The model, from which layer paths come. Held weakly. Without it, selectors see
            `variable.path`, which lacks the names of nested models.
        rule: The rule of groups that name none: a name, a class, or `kgo.rule(...)`.
        learning_rate: The base rate per optimizer step: a number, a
            `keras.optimizers.schedules.LearningRateSchedule`, or a function without arguments.
            A compiled step calls a function once, when it is compiled, as in Keras.
        weight_decay: The decay of groups that name none; a number or a schedule.
        anchor: What decay pulls toward in groups that do not say: `"zero"`, `"initial"`, arrays
            or a file.
        exclude_from_decay: A selector of variables never decayed, in groups that do not say.
            Default `kgo.default_exclude_from_decay`; extend it with `|`. `()` excludes none.
        ratios: A second assignment of rates, apart from that of rules: pairs (selector, ratio), or
            a dict from one to the other. The rate of a variable that a pair claims is that of its
            group times the ratio, a number >= 0 or a schedule; so is its decay. `overlap` says
            what holds where two claim one variable.
        global_clipnorm: Limit of the gradient norm over all groups.
        clipnorm: Limit of each variable's gradient norm, in groups without clipping.
        clipvalue: Limit of each gradient element, in groups without clipping.
        gradient_accumulation_steps: Micro-batches per optimizer step, at least 2; `None` for
            none. Their gradients are averaged in float32 before anything else sees them. A window
            open at the end of an epoch carries over; `kgo.FlushAccumulation` closes it instead.
        ema: An average of the weights over optimizer steps: `kgo.EMA(...)` or `kgo.SWA(...)`.
            `fit` leaves the weights themselves alone.
        on_nonfinite: What happens where gradients are not finite (inf, NaN, or a norm over all
            groups beyond 1.8e19, whose square float32 cannot hold): `"skip"` leaves all state as
            it is and counts in `skipped_steps`; `"raise"` does so too and raises, in a compiled
            step when `fit` ends (`GroupLogger`: when the batch ends); `"propagate"` does not
            look.
        fused: Whether a rule may move all variables of its group at once, by what the backend has
            for that (torch's fused and foreach functions, TensorFlow's training operations, on JAX
            one trace for all variables of a shape), where there is such a step for it. The numbers
            are the rule's to rounding, and state and files are the same; `False` runs the rule's
            own update.
        use_ema: Keras' averages: as `ema=kgo.EMA(ema_momentum)`, but the first average is the
            weights after the first step, and `fit` ends by writing the averages into the weights.
        ema_momentum: The momentum for `use_ema`, in [0, 1).
        ema_overwrite_frequency: With `use_ema`, optimizer steps between writing the averages into
            the weights; `None` for at the end of `fit` only.
        unclaimed: What happens to variables that no group claims: `"default"` (they form the
            group of that name), `"freeze"`, or `"error"`.
        overlap: What happens to variables that two groups, or two of `ratios`, claim: `"error"`,
            `"first"` or `"last"`.
        loss_scale_factor: The loss is multiplied by it and gradients are divided by it.
        name: The optimizer's name.

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
        fused: bool = True,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        unclaimed: str = "default",
        overlap: str = "error",
        loss_scale_factor: float | None = None,
        name: str | None = None,
    ) -> None:
        where = "GroupedOptimizer"
        declared = as_groups(groups)
        base = check_base(learning_rate, declared)
        if loss_scale_factor is not None:
            loss_scale_factor = check_positive("loss_scale_factor", loss_scale_factor, where=where)
        super().__init__(learning_rate=base, loss_scale_factor=loss_scale_factor, name=name)
        self._layout = checkpoint.protect_early(self)
        registry.check_instances_differ(declared)
        lifted = tuple(registry.lift_instance(group) for group in declared)
        limits = check_clipping(clipnorm, global_clipnorm, clipvalue, where=where)
        self.clipnorm, self.global_clipnorm, self.clipvalue = limits
        self.weight_decay = check_scalar("weight_decay", weight_decay, where=where)
        self.use_ema, self.ema_momentum = bool(use_ema), ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.ema, self.on_nonfinite = ema, on_nonfinite
        self.fused = check_switch("fused", fused, where=where)
        assigned = as_ratios(ratios)
        self.ratios = tuple((ratio.selector, ratio.value) for ratio in assigned)
        average = as_average(ema, use_ema, ema_momentum, ema_overwrite_frequency)
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
            ema=average,
            fused=self.fused,
            on_nonfinite=check_choice(
                "on_nonfinite", on_nonfinite, nonfinite.POLICIES, where=where
            ),
            unclaimed=check_choice(
                "unclaimed", unclaimed, ("default", "freeze", "error"), where=where
            ),
            overlap=check_choice("overlap", overlap, ("error", "first", "last"), where=where),
        )
        registry.check_rule(defaults.rule, where)
        resolve.check_declared(lifted, defaults)
        self._declaration = Declaration(lifted, defaults)
        self._built: BuiltOptimizer | None = None
        self._sealed = True
        config.warn_unserializable(lifted, defaults)
        if model is not None:
            self.bind(model)

    # Build --------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether it is built, and still knows every trainable variable of its model, in order.

        Keras asks before `fit` on JAX, and builds where the answer is no. `build` then refuses
        variables it does not know, before Keras has taken the weights out of the model.
        """
        if not self._is_built or self._declaration.pending is not None:
            return False
        if self._built is not None and self._built.run_length is not None:
            # What a compiled step cannot read.
            self._built.run_length.look()
        model = self._declaration.live_model(required=False)
        if model is None:
            return self._may_know_length()
        known = self._trainable_variables_indices
        places = [known.get(self._var_key(variable)) for variable in model.trainable_variables]
        return None not in places and self._in_order(places)

    @built.setter
    def built(self, value: bool) -> None:
        self._is_built = value

    def build(self, variables: Sequence[Any]) -> None:
        """Resolves the plan for `variables`, freezes it, and makes all state.

        With `keras.distribution` state lies beside its weight, unless an entry of the layout map
        of `ModelParallel` matches its key, `group/layer path/slot`; scalars are on every device.

        Args:
            variables: The trainable Keras variables, in the order gradients will come in.

        Raises:
            ValueError: If the plan cannot be made, an entry of a layout map does not fit its state,
                or state that was loaded before has another layout.
        """
        variables = list(variables)
        if self._is_built:
            if not self._may_know_length():
                raise ValueError(run_length.NO_MODEL)
            positions = self._positions(variables)
            if not self._in_order(positions):
                raise ValueError(
                    "`fit` on JAX passes values in the order of the model's trainable variables, "
                    "and the optimizer must have been built in that order. Received: an optimizer "
                    f"built with {self._name_of(self._trainable_variables[0])} first, for a model "
                    f"with {self._name_of(variables[0])} first. Build it with "
                    "`optimizer.build(model.trainable_variables)`."
                )
        else:
            self._build(variables)
        pending = self._declaration.pending
        if pending is not None:
            # Kept where it is refused, so that no later call goes on as if it had been loaded.
            # A LossScaleOptimizer builds within a compiled step, which cannot read on the host.
            with backend.outside_compiled_step():
                built = self._require_built("build")
                checkpoint.give(self, built, *pending, self._declaration.resting)
                if built.gradient_state is not None:
                    built.gradient_state.set_late()
            self._declaration.pending = None

    def _build(self, variables: list[Any]) -> None:
        plan = self._resolve(variables)
        self._say_if_changed(plan)
        built = self._make_built(plan, variables)
        config.warn_about_variables(plan, variables)
        compat.register_variables(self, super().build, variables)
        built.set_scalars(self._declaration.current)
        if built.run_length is not None and self._declaration.total_steps is not None:
            built.run_length.set(self._declaration.total_steps)
        self._layout.stand_for(built.digest)
        self._built = built
        self._hold(built)

    def _live_model(self) -> Any:
        return self._declaration.live_model(required=False)

    def _may_know_length(self) -> bool:
        """Whether schedules that end with the run may learn where that is."""
        declaration, built = self._declaration, self._built
        if declaration.total_steps is not None or declaration.model is not None:
            return True
        if built is None:
            # A file may hold it.
            return declaration.records is not None
        return built.run_length is None or not built.run_length.is_unknown

    def _make_built(self, plan: Plan, variables: list[Any]) -> BuiltOptimizer:
        # A build that fails leaves nothing behind: what may fail comes before what is kept.
        declaration, before = self._declaration, len(self._variables)
        with checkpoint.beside_weights(), backend.on_devices_of([self._iterations, *variables]):
            built = BuiltOptimizer(
                plan, variables, declaration.live_model(required=False), declaration.gradient_rule
            )
            if run_length.is_needed(plan):
                steps = plan.defaults.gradient_accumulation_steps
                built.run_length = run_length.RunLength(self._live_model, steps)
                if not self._may_know_length():
                    raise ValueError(run_length.NO_MODEL)
            for planned in plan.groups:
                if planned.group.rule is not None:
                    registry.claim_instance(planned.group.rule, self, planned.group.where)
            built.make_variables(self)
            built.digest = checkpoint.protect(self, built)
        built.measurements = self.make_measurements(built, declaration.measured)
        try:
            checkpoint.place(checkpoint.entries_of(self, built))
        except ValueError:
            for variable in self._variables[before:]:
                compat.untrack(self, variable)
            raise
        built.plan = with_state_bytes(plan, built.state_bytes())
        return built

    # Step ---------------------------------------------------------------------------------------

    @backend.as_written
    def apply(
        self,
        grads: Sequence[Tensor],
        trainable_variables: Sequence[Any] | None = None,
        sample_count: Any = None,
    ) -> None:
        """Does one optimizer step, or takes in one micro-batch where gradients are accumulated.

        Args:
            grads: One gradient per variable, of its shape; `None` where there is none.
            trainable_variables: Their variables. The first call builds the optimizer with them;
                later calls may leave some out, which is as if they had no gradient. Default: all
                variables it was built with.
            sample_count: The samples (or tokens) that `grads` is the mean over, a number or a
                scalar tensor. With it, micro-batches of different sizes weigh as in one batch. In
                a replica of a TensorFlow strategy: those of this replica.

        Raises:
            FloatingPointError: With `on_nonfinite="raise"`, where the step is not compiled.
            NotImplementedError: Under a strategy of TensorFlow that is not named above.
            ValueError: If a variable is unknown, counts differ, or every gradient is `None`; under
                a strategy, if model or optimizer were made outside of its scope.
        """
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            if not self._is_built:
                raise ValueError(
                    "`apply` needs variables until the optimizer is built. Received: gradients "
                    "only. Call `optimizer.build(model.trainable_variables)` first."
                )
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
            self._build_once(variables)
        if len(grads) != len(variables):
            raise ValueError(
                "`grads` must hold one gradient per variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables."
            )
        positions = self._positions(variables)
        built = self._require_built("apply")
        self._capture_once(built)
        built.received = frozenset(positions)
        built.received_in = self._declaration.train_function()
        # `torch.compile` cannot read an annotation here.
        missing = []  # type: ignore[var-annotated]

        self._look_at_run(built)

        def step_on_device(sums: list[Tensor | None], samples: Tensor | None) -> None:
            with keras.name_scope(self.name), built.in_run(self._iterations) as run:
                reach = built.within_reach(positions)
                routed = one_step.route(built, sums, positions, reach)
                built.note_gradients(routed.indices)
                own = [built.variables[position] for position in reach]
                changing = [*self.changing_variables, *own]
                if built.run_length is not None:
                    built.run_length.keep(run.total)
                one_step.step(built, routed, self._settings(samples), changing)
            missing[:] = routed.paths

        # Not those received, which may be one device's.
        known = [built.variables[position] for position in positions]
        one_step.on_each_device(step_on_device, grads, known, sample_count, self.variables)
        self._warn_of_missing(built, missing)

    def _look_at_run(self, built: BuiltOptimizer) -> None:
        """Says which schedules are shorter than the `fit` that this step is of, once for each."""
        declaration = self._declaration
        end = run_length.of_fit(self._live_model(), self.gradient_accumulation_steps)
        if end is not None and end != declaration.run_seen and declaration.is_run:
            declaration.run_seen = end
            run_length.warn_if_shorter(built.plan, end, declaration.said_short)

    def _build_once(self, variables: list[Any]) -> None:
        if not self._is_built or self._declaration.pending is not None:
            backend.once_per_step(lambda: self.build(variables))

    def _capture_once(self, built: BuiltOptimizer) -> None:
        if built.is_anything_due:
            backend.once_per_step(lambda: built.capture_due(self._iterations, stepping=True))

    def flush(self) -> bool:
        """Does the optimizer step of a window of micro-batches that is not full, if there is one.

        The mean is over the micro-batches that came. Call it outside a compiled step, as
        `kgo.FlushAccumulation` does at the end of each epoch.

        Returns:
            Whether there was a step to do.

        Raises:
            ValueError: If the optimizer is not built.
        """
        built = self._require_built("flush")
        if built.window is None:
            return False
        built.window.weighted = None
        if not backend.on_host(built.window.count):
            return False
        window, variables = built.window, [*self.changing_variables, *self._trainable_variables]

        def flush_on_device(none: list[Tensor]) -> None:
            with built.in_run(self._iterations):
                one_step.flush(built, window, self._settings(None), variables)

        backend.over_replicas(flush_on_device, [], variables)
        return True

    def _settings(self, sample_count: Tensor | None) -> one_step.Settings:
        return one_step.Settings(
            base=lambda: ops.cast(self.learning_rate, "float32"),
            iterations=self._iterations,
            global_clipnorm=self.global_clipnorm,
            loss_scale_factor=self.loss_scale_factor,
            on_nonfinite=self._declaration.defaults.on_nonfinite,
            sample_count=sample_count,
        )

    def _warn_of_missing(self, built: BuiltOptimizer, missing: list[str]) -> None:
        if not missing or tuple(missing) in built.warned:
            return
        built.warned.add(tuple(missing))
        whole = "" if built.window is None else " where none comes in the whole window"
        warnings.warn(
            f"No gradient for {text.listing(missing)}: "
            f"these variables neither move nor decay{whole}.",
            stacklevel=3,
        )

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Tensor],
        trainable_variables: Sequence[Tensor],
        sample_count: Any = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Does one step on values instead of variables (JAX and torch).

        Args:
            optimizer_variables: Values of `optimizer.variables`, in order.
            grads: One gradient per value of `trainable_variables`.
            trainable_variables: Values of the variables the optimizer was built with, in order,
                without those whose `trainable` is now `False`.
            sample_count: As in `apply`.

        Returns:
            The new values of `trainable_variables` and of `optimizer_variables`.

        Raises:
            ValueError: If the optimizer is not built, or counts differ.
        """
        if not self._is_built or not backend.STATELESS:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        variables = list(self._trainable_variables)
        if len(trainable_variables) != len(variables):
            variables = [variable for variable in variables if variable.trainable]
        own = self.variables
        counts = (len(trainable_variables), len(optimizer_variables))
        if counts != (len(variables), len(own)):
            model = self._declaration.live_model(required=False)
            if model is not None:
                # Names the variables the values may be of, where it is they that changed.
                self._positions(model.trainable_variables)
            raise ValueError(
                "`stateless_apply` must get one value per variable. Received: "
                f"{counts[0]} trainable and {counts[1]} optimizer values, for {len(variables)} "
                f"and {len(own)} variables. If variables became trainable, or were added, after "
                "the optimizer was built, call `optimizer.rebuild(model)`, which keeps the state "
                "of every variable that stays."
            )
        mapping = [
            *zip(variables, backend.private_copies(trainable_variables), strict=True),
            *zip(own, backend.private_copies(optimizer_variables), strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.apply(grads, variables, sample_count)
        return values_in(scope, variables), values_in(scope, own)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Says, at the end of `fit`, what the compiled step could not; does what `use_ema` asks.

        Such as that it went on after the end of a schedule.

        Args:
            var_list: The model's trainable variables now.

        Raises:
            FloatingPointError: With `on_nonfinite="raise"`, if a compiled step was skipped.
        """
        if self._built is None:
            return
        if not compat.is_readable(self._iterations):
            # Of a `fit` that failed, whose compiled step holds the values still. Without a model
            # that step knew no names of variables that were added.
            self._positions(list(var_list))
            return
        if self.use_ema:
            ended = {id(variable) for variable in var_list}
            pairs = [pair for pair in self.average_pairs() if id(pair[1]) in ended]
            averages.copy_into_weights(pairs)
        self.check_finite()
        if self._declaration.is_run:
            # A further `fit` of the same compiled step went on without a word.
            self.check_run_length(backend.on_host(self._iterations))
        if self._built.received is None:
            return
        received = self._built.received
        made, running = self._built.received_in, self._declaration.train_function()
        if made is not None and running is not None and made() is not running():
            # The model was compiled since, and no step of that ran.
            return
        now = frozenset(self._positions(list(var_list)))
        if now != received:
            paths = [v.path for v in self._built.plan.variables if v.position in now ^ received]
            warnings.warn(
                "`trainable` changed after the model was compiled, and the compiled step does "
                f"not know: {text.listing(paths)}. Call "
                "`model.compile(optimizer=model.optimizer, ...)` again after such a change.",
                stacklevel=2,
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the declaration, the present scalars and the resolved plan, as plain JSON."""
        return config.to_config(self, self._declaration, self._built)

    @classmethod
    def from_config(cls, config_: dict[str, Any], custom_objects: Any = None) -> GroupedOptimizer:
        """Returns the optimizer that `get_config` described, without its state."""
        with compat.custom_objects(custom_objects):
            arguments, rest = config.from_config(config_)
            optimizer = cls(**arguments)
        config.restore(optimizer, optimizer._declaration, rest)
        return optimizer

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Refused: exclusion is a selector here, with one meaning on all backends.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "`exclude_from_weight_decay` is not used by GroupedOptimizer. Received: "
            f"var_list={var_list!r}, var_names={var_names!r}. Pass "
            "`exclude_from_decay=kgo.default_exclude_from_decay | ...`."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras' LossScaleOptimizer switches a factor off, which it then handles itself.
        fixed = name in _FIXED or (name == "loss_scale_factor" and value is not None)
        if fixed and getattr(self, "_sealed", False):
            how = " Use `set_weight_decay(group, ...)`." if name == "weight_decay" else ""
            raise AttributeError(
                f"`{name}` is fixed at construction, as a compiled step would ignore the change. "
                f"Received: {name}={value!r}.{how}"
            )
        super().__setattr__(name, value)


def values_in(scope: keras.StatelessScope, variables: Sequence[Any]) -> list[Tensor]:
    """Returns the values of variables in a scope, laid out over devices as the variables are.

    A compiler that is free to choose takes another layout, and the next step is compiled again.
    """
    values = []
    for variable in variables:
        value, layout = scope.get_current_value(variable), compat.layout_of(variable)
        values.append(value if layout is None else distribute_tensor(value, layout))
    return values
