"""An optimizer whose model or groups change: groups are built again, and state is carried over."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import compat, text
from keras_groupopt.checkpoint.carried import Copies, carried
from keras_groupopt.optimizer import config
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.plan import resolve
from keras_groupopt.plan.group import Group, as_groups
from keras_groupopt.plan.plan import Plan, with_state_bytes
from keras_groupopt.rules import registry
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.gradient_rule_state import GradientState, Wanted

# What `fit`, `evaluate` and `predict` compiled for the variables as they were.
_COMPILED = ("train", "test", "predict")


class Rebuilding:
    """The part of `GroupedOptimizer` that follows a model that changes."""

    _declaration: Declaration
    _built: BuiltOptimizer | None
    _variables: list[Any]
    _is_built: bool
    _layout: Any
    _resolve: Any
    _make_built: Any
    _with_gradient_rule: Any
    iterations: Any

    def rebuild(self, model: Any, groups: Any = None) -> checkpoint.Report:
        """Resolves the plan again for a model that changed, and keeps the state of what stays.

        After layers were frozen, unfrozen, given LoRA or added, or with other groups. A variable
        keeps its moments, average, accumulator and anchor if it is still the same object; if none
        is (the model was made anew), if its layer path is the same. In another group it keeps them
        where the rule is of the same class and the slots agree. The step, the base rate, and
        numbers set by hand stay where their declaration did.

        A new variable starts fresh, and its `"initial"` anchor is its value now. It shares its
        group's count of steps, on which bias corrections depend; in a new group that count starts
        at 0. Schedules go on from the step of the optimizer. A variable that is frozen now is left
        out, and its state is dropped; where it shall stay, do not rebuild: a variable frozen later
        is left alone. LoRA's variables are `<layer>/lora_kernel_a` and `_b`: select the layer.

        `fit` goes on with the compiled model, without `compile`. A callback may call it, with its
        `self.model`. A `LossScaleOptimizer` around this optimizer follows where it is the model's.

        Args:
            model: The model as it is now. It becomes the optimizer's.
            groups: The groups from now on, as for `GroupedOptimizer`. Default: the declared ones.

        Returns:
            What was kept, starts fresh and was dropped.

        Raises:
            TypeError: If `model` is no model, or a group is none.
            ValueError: If the groups do not fit the model. The optimizer is then as it was.

        Example:
        >>> import keras, keras_groupopt as kgo
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
        ...                           keras.layers.Dense(2, name="head")])
        >>> model.get_layer("backbone").trainable = False
        >>> optimizer = kgo.GroupedOptimizer(model=model, rule="adam")
        >>> optimizer.build(model.trainable_variables)
        >>> model.get_layer("backbone").trainable = True
        >>> report = optimizer.rebuild(model, {"backbone": "backbone"})
        >>> [key for key in report.kept if key.endswith("momentums")]
        ['default/head/kernel/momentums', 'default/head/bias/momentums']
        """
        check_has_values(model)
        frozen = self._declaration.frozen_groups
        if frozen:
            raise ValueError(
                "`rebuild` must be called when no group is frozen by `freeze_to`, as it drops the "
                f"state of what is frozen. Received: it froze {', '.join(frozen)}. Call "
                "`optimizer.freeze_to(0)` first, and `freeze_to` again after."
            )
        if self._built is not None and self._built.averages_in_weights:
            raise ValueError(
                "`rebuild` must be called when the model has its weights. Received: averages in "
                "their place. Call it outside of `kgo.averaged_weights(model)`."
            )
        before = self._declaration
        old, tracked = self._built, len(self._variables)
        # The optimizer resolves what it declares: for the length of the try, the new declaration.
        self._declaration = _changed(before, weakref.ref(model), groups)
        try:
            variables = list(model.trainable_variables)
            plan: Plan = self._resolve(variables)
            built = self._make_built(plan, variables)
            built.set_scalars(self._declaration.current)
            config.warn_about_variables(plan, variables)
            report = self._give_old_state(old, built)
        except BaseException:
            self._declaration = before
            for variable in self._variables[tracked:]:
                compat.untrack(self, variable)
            raise
        for variable in _gone(self._variables[:tracked], old, built):
            compat.untrack(self, variable)
        self._layout.stand_for(built.digest)
        self._built, self._declaration.pending = built, None
        self._is_built = True
        for optimizer in [self, *_around(model, self)]:
            compat.replace_built_variables(optimizer, variables)
        if _is_of(model, self):
            forget_compiled(model)
        return report

    def note_unbuilt(self) -> Callable[[], None]:
        """Returns a function that takes back a build that follows, and what came of it."""
        tracked = len(self._variables)

        def undo() -> None:
            for variable in self._variables[tracked:]:
                compat.untrack(self, variable)
            compat.replace_built_variables(self, [])
            self._layout.stand_for(checkpoint.NOT_BUILT)
            self._built, self._is_built = None, False

        return undo

    def _change_gradient_state(self, built: BuiltOptimizer, wanted: Wanted) -> None:
        """Keeps what another gradient rule asks for, and leaves all else as it is.

        Models that share the optimizer have steps that were compiled with the rest.
        """
        old, tracked = built.gradient_state, len(self._variables)
        new = GradientState(wanted)
        try:
            with (
                checkpoint.beside_weights(),
                backend.on_devices_of([self.iterations, *built.variables]),
            ):
                new.make_variables(self, built.moving)
            built.gradient_state = new
            built.digest = checkpoint.protect(self, built)
            checkpoint.place(checkpoint.entries_of(self, built))
        except BaseException:
            built.gradient_state = old
            for variable in self._variables[tracked:]:
                compat.untrack(self, variable)
            raise
        new.go_on_from(old)
        for variable in [] if old is None else old.variables:
            compat.untrack(self, variable)
        built.plan = self._with_gradient_rule(with_state_bytes(built.plan, built.state_bytes()))

    def _give_old_state(
        self, old: BuiltOptimizer | None, built: BuiltOptimizer
    ) -> checkpoint.Report:
        terms = checkpoint.Terms(strict=False, moves=True)
        pending = self._declaration.pending
        if pending is not None:
            saved, waiting = pending
            return checkpoint.give(
                self, built, saved, dataclasses.replace(waiting, strict=False, moves=True)
            )
        if old is None:
            terms.report.fresh += checkpoint.entries_of(self, built)
            return terms.report
        old.capture_due(self.iterations)
        entries = checkpoint.entries_of(self, old)
        saved = checkpoint.Saved(checkpoint.manifest_of(entries, old), entries)
        saved, left_out = carried(saved, old, built.paths, built.plan)
        # Through the device, one at a time: models are large.
        saved = checkpoint.Saved(saved.manifest, Copies(saved.values))
        checkpoint.give(self, built, saved, terms)
        terms.report.dropped += left_out
        return terms.report

    def add_group(self, group: Group) -> checkpoint.Report | None:
        """Declares one more group. A built optimizer is rebuilt for its model.

        The group claims its variables from those that no other group claims, or, with
        `overlap="last"`, from other groups. State of a variable that comes from another group is
        kept where both rules are of one class and the slots agree in name, shape and dtype; else it
        starts fresh. The group's count of steps goes on where its variables' moments do.

        Args:
            group: The group.

        Returns:
            The report of `rebuild`, or `None` if the optimizer is not built yet.

        Raises:
            TypeError: If it is no `Group`.
            ValueError: If its name is taken, it does not fit the model, or a built optimizer has no
                model. The optimizer is then as it was.

        Example:
        >>> import keras, keras_groupopt as kgo
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> optimizer = kgo.GroupedOptimizer(model=model, rule="adam")
        >>> optimizer.build(model.trainable_variables)
        >>> report = optimizer.add_group(kgo.Group("head", "head", learning_rate_ratio=0.5))
        >>> report.renamed["head/head/bias/momentums"]
        'default/head/bias/momentums'
        """
        before = self._declaration
        groups = (*before.groups, group)
        declaration = _changed(before, before.model, groups)
        model = before.live_model(required=False)
        if self._built is None and before.records is None:
            self._declaration = declaration
            try:
                if model is not None and model.built:
                    self._resolve(list(model.trainable_variables))
            except BaseException:
                self._declaration = before
                raise
            return None
        if model is None:
            raise ValueError(
                "`add_group` needs the model of an optimizer that was built or loaded. Received: "
                f"{group.where}, and no model. Call `optimizer.bind(model)` first."
            )
        return self.rebuild(model, groups)


def check_has_values(model: Any) -> None:
    """Refuses what is no model, or a model whose values a compiled step holds.

    Raises:
        TypeError: If it is no model.
        ValueError: If it has no values now.
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "`model` must be a Keras model. Received: "
            f"model={model!r} of type {type(model).__name__}."
        )
    held = [v.path for v in model.variables if compat.is_purged(v)]
    if held:
        raise ValueError(
            "The model must have its values when it is changed. Received: a model whose "
            f"values a compiled step holds ({text.listing(held)}). In a callback take the model "
            "from `self.model`, which gives them back, before you change it. After a `fit` that "
            "failed, load the weights again."
        )


def _changed(before: Declaration, model: Any, groups: Any) -> Declaration:
    """Returns a declaration for another model, with other groups where they are given.

    Raises:
        TypeError: If a group is none.
        ValueError: If the groups contradict each other or the rest of the declaration.
    """
    declaration = copy.copy(before)
    declaration.model = model
    # They describe the model as it was.
    declaration.preview = declaration.records = None
    if groups is not None:
        declared = as_groups(groups)
        registry.check_instances_differ(declared)
        declaration.groups = tuple(registry.lift_instance(group) for group in declared)
        resolve.check_declared(declaration.groups, declaration.defaults)
        config.warn_unserializable(declaration.groups, declaration.defaults)
    return declaration


def _gone(tracked: Sequence[Any], old: BuiltOptimizer | None, new: BuiltOptimizer) -> list[Any]:
    """Returns the variables of the old groups."""
    before, now = ({id(v) for v in p.entries().values()} if p else set() for p in (old, new))
    return [v for v in tracked if id(v) in before and id(v) not in now]


def _chain(model: Any) -> list[Any]:
    """Returns the model's optimizer and those inside it, from the outside in."""
    chain = []
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        chain.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return chain


def _is_of(model: Any, optimizer: Any) -> bool:
    return any(link is optimizer for link in _chain(model))


def _around(model: Any, optimizer: Any) -> Sequence[Any]:
    """Returns the built optimizers around `optimizer` in the model."""
    if not _is_of(model, optimizer):
        return []
    return [link for link in _chain(model) if link is not optimizer and link.built]


def forget_compiled(model: Any, kinds: Sequence[str] = _COMPILED) -> None:
    """Makes compiled functions anew: they hold the variables they were compiled for."""
    if getattr(model, "train_function", None) is not None:
        compat.note_shardings(model)
    for kind in kinds:
        if getattr(model, f"{kind}_function", None) is not None:
            # Not only dropped: `fit`, in which this may run, does not make it again.
            getattr(model, f"make_{kind}_function")(force=True)
