"""An optimizer whose model or groups change: it is built again, and state is carried over."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import compat, text
from keras_groupopt.checkpoint.carried import Copies, carried
from keras_groupopt.optimizer import building, values
from keras_groupopt.optimizer.binding import check_is_model
from keras_groupopt.optimizer.declaration import declare
from keras_groupopt.optimizer.run import require_built
from keras_groupopt.plan import plan as planning
from keras_groupopt.plan.group import Group, as_groups
from keras_groupopt.selectors import layer_paths
from keras_groupopt.step import state_keys
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.gradient_rule_state import GradientState, Wanted
from keras_groupopt.step.run_length import is_needed

# What `fit`, `evaluate` and `predict` compiled for the variables as they were.
_COMPILED = ("train", "test", "predict")


def rebuild(optimizer: Any, model: Any, groups: Any = None) -> checkpoint.Report:
    """Resolves the plan again for a model that changed, and keeps the state of what stays.

    Call it after layers were frozen, unfrozen, given LoRA or added, or to change the groups. A
    variable keeps its moments, average, accumulator and anchor if it is still the same object; if
    no variable is (the model was made anew), if its layer path is the same. In another group it
    keeps them if the rule is of the same class and the slots agree. The step, the base rate, and
    numbers set by hand stay if their declaration did.

    A new variable starts fresh, and its `"initial"` anchor is its value now. It shares its
    group's count of steps, on which bias corrections depend; in a new group that count starts
    at 0. Schedules go on from the step of the optimizer. A variable that is frozen now is left
    out, and its state is dropped. To keep that state, do not rebuild: a variable that is frozen
    after the build is left alone. LoRA's variables are `<layer>/lora_kernel_a` and `_b`: select
    the layer.

    `fit` goes on with the compiled model, without `compile`. A callback may call it, with its
    `self.model`. A `LossScaleOptimizer` around this optimizer follows if it is the model's.

    Args:
        model: The model as it is now. It becomes the optimizer's.
        groups: The groups from now on, as for `GroupedOptimizer`. Default: the declared ones.

    Returns:
        What was kept, starts fresh and was dropped.

    Raises:
        TypeError: If `model` is not a model, or a group is not a group.
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
    frozen = optimizer._run.frozen_groups
    if frozen:
        raise ValueError(
            "`rebuild` must be called when no group is frozen by `freeze_to`, as it drops the "
            f"state of what is frozen. Received: it froze {', '.join(frozen)}. Call "
            "`optimizer.freeze_to(0)` first, and `freeze_to` again after."
        )
    old, declared = optimizer._built, optimizer._declared
    if old is not None and old.averages_in_weights:
        raise ValueError(
            "`rebuild` must be called when the model has its weights. Received: averages in "
            "their place. Call it outside of `kgo.averaged_weights(model)`."
        )
    if groups is not None:
        declared = declare(as_groups(groups), declared.defaults)
    # The records and the plan last shown describe the model as it was.
    link = dataclasses.replace(
        optimizer._link, reference=weakref.ref(model), records=None, shown=None
    )
    tracked = compat.tracked_variables(optimizer)
    built, link.catalog = building.make(optimizer, declared, link, list(model.trainable_variables))
    try:
        report = _give_old_state(optimizer, old, built)
    except BaseException:
        building.untrack(optimizer, compat.tracked_variables(optimizer)[len(tracked) :])
        raise
    before, now = ({id(v) for v in b.entries().values()} if b else set() for b in (old, built))
    building.untrack(optimizer, [v for v in tracked if id(v) in before and id(v) not in now])
    optimizer._declared, optimizer._link, optimizer._run.pending = declared, link, None
    building.keep(optimizer, built)
    outer = list(_around(model, optimizer))
    for wrapper in outer:
        if wrapper is not optimizer and wrapper.built:
            compat.replace_built_variables(wrapper, built.variables)
    if outer:
        forget_compiled(model)
    return report


def _give_old_state(
    optimizer: Any, old: BuiltOptimizer | None, built: BuiltOptimizer
) -> checkpoint.Report:
    pending = optimizer._run.pending
    if pending is not None:
        saved, waiting = pending
        terms = dataclasses.replace(waiting, strict=False)
        return checkpoint.give(optimizer, built, saved, terms)
    terms = checkpoint.Terms(strict=False)
    if old is None:
        terms.report.fresh += checkpoint.entries_of(optimizer, built)
        return terms.report
    old.capture_due()
    entries = checkpoint.entries_of(optimizer, old)
    saved = checkpoint.Saved(checkpoint.manifest_of(entries, old), entries)
    saved, left_out = carried(saved, old, built.paths, built.plan)
    # Through the device, one at a time: models are large.
    saved = checkpoint.Saved(saved.manifest, Copies(saved.values))
    checkpoint.give(optimizer, built, saved, terms)
    terms.report.dropped += left_out
    return terms.report


def add_group(optimizer: Any, group: Group) -> checkpoint.Report | None:
    """Declares one more group. A built optimizer is rebuilt for its model.

    The group claims its variables from those that no other group claims, or, with
    `overlap="last"`, from other groups. State of a variable that comes from another group is
    kept if both rules are of one class and the slots agree in name, shape and dtype; else it
    starts fresh. The group's count of steps goes on if its variables' moments do.

    Args:
        group: The group.

    Returns:
        The report of `rebuild`, or `None` if the optimizer is not built yet.

    Raises:
        TypeError: If it is not a `Group`.
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
    link, groups = optimizer._link, (*optimizer._declared.groups, group)
    if optimizer._built is None and link.records is None:
        declared = declare(as_groups(groups), optimizer._declared.defaults)
        if link.model is not None and link.model.built:
            link.resolve(declared, list(link.model.trainable_variables))
        link.shown, optimizer._declared = None, declared
        return None
    # Refuses what is not a group before it asks for the model.
    as_groups(groups)
    if link.model is None:
        raise ValueError(
            "`add_group` needs the model of an optimizer that was built or loaded. Received: "
            f"{group.where}, and no model, as after `load_model`. Call `optimizer.bind(model)` "
            "first."
        )
    return optimizer.rebuild(link.model, groups)


def restart_schedules(optimizer: Any) -> None:
    """Lets every schedule start over at the next step, for a further phase of training.

    `iterations` becomes 0, and for schedules with `total_steps="fit"` the next `fit` tells its own
    length. All other state stays: moments, averages and anchors, and bias corrections go on, as
    each group's rule counts its own steps. Call it between two calls of `fit`.

    Raises:
        ValueError: If the optimizer is not built.

    Example:
    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> rate = kgo.schedules.Linear(0.1, total_steps="fit")
    >>> model.compile(kgo.GroupedOptimizer(model=model, learning_rate=rate), loss="mse")
    >>> for _ in range(2):
    ...     history = model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=2, verbose=0)
    ...     steps, rate = model.optimizer.iterations, model.optimizer.learning_rate
    ...     print(int(steps), round(float(rate), 3))
    ...     model.optimizer.restart_schedules()
    4 0.0
    4 0.0
    """
    built, run = require_built(optimizer, "restart_schedules"), optimizer._run
    optimizer.iterations.assign(0)
    run.total_steps = run.compared_end = None
    run.past_history = getattr(optimizer._link.model, "history", None)
    run.warned_short.clear()
    if built.run_length is not None:
        built.run_length.forget()
    values.note_progress(optimizer)
    if built.guard is not None:
        built.guard.begin(built.taken())
    if optimizer._link.model is not None:
        # A compiled step holds the length that its `fit` told.
        forget_compiled(optimizer._link.model, ["train"])


# The state of a gradient rule --------------------------------------------------------------------


def keep_for_gradient_rule(optimizer: Any, wanted: Wanted, model: Any) -> None:
    """Keeps, and saves, what the gradient rule of a model asks for, instead of another's.

    A model with a gradient rule calls it when it is compiled.

    Args:
        optimizer: A `GroupedOptimizer`.
        wanted: What to keep.
        model: The model. It becomes the optimizer's, if that has another or none.

    Raises:
        ValueError: If a built optimizer does not fit the model.
    """
    link, built = optimizer._link, optimizer._built
    if built is None:
        link.gradient_rule = wanted
        if link.records is None:
            optimizer.bind(model)
        return
    if link.model is not model:
        optimizer.bind(model)
    before, link.gradient_rule = link.gradient_rule, wanted
    try:
        if _needs_no_rebuild(optimizer, model):
            _change_gradient_state(optimizer, built, wanted)
            return
        report = optimizer.rebuild(model)
    except BaseException:
        link.gradient_rule = before
        raise
    dropped = [key for key in report.dropped if state_keys.GRADIENT_RULE_STATE not in key]
    if dropped:
        warnings.warn(
            f"State of variables that are frozen now was dropped: {text.listing(dropped)}.",
            stacklevel=4,
        )


def _needs_no_rebuild(optimizer: Any, model: Any) -> bool:
    """Whether a rebuild would change nothing except the gradient rule's state."""
    built, run = optimizer._built, optimizer._run
    if built.plan.provisional or run.pending is not None:
        return False
    plan = optimizer._link.with_gradient_rule(built.plan)
    if is_needed(plan) != (built.run_length is not None):
        return False
    own = [id(variable) for variable in model.trainable_variables]
    paths = {info.identity: info.path for info in layer_paths.describe_model(model)}
    return own == [id(v) for v in built.variables if id(v) not in run.held] and all(
        paths.get(identity) == path for identity, path in built.paths.items()
    )


def _change_gradient_state(optimizer: Any, built: BuiltOptimizer, wanted: Wanted) -> None:
    """Keeps what another gradient rule asks for, and leaves all else as it is.

    Models that share the optimizer have steps that were compiled with the rest.
    """
    old, tracked = built.gradient_state, len(compat.tracked_variables(optimizer))
    new = GradientState(wanted, built.moving)
    try:
        with building.beside(optimizer, built.variables):
            new.make_variables(optimizer)
        built.gradient_state = new
        built.digest = checkpoint.protect(optimizer, built)
        checkpoint.place(checkpoint.entries_of(optimizer, built))
    except BaseException:
        built.gradient_state = old
        building.untrack(optimizer, compat.tracked_variables(optimizer)[tracked:])
        raise
    new.go_on_from(old)
    building.untrack(optimizer, [] if old is None else old.variables)
    backend.track(optimizer, checkpoint.entries_of(optimizer, built))
    built.plan = optimizer._link.with_gradient_rule(
        planning.with_state_bytes(built.plan, built.state_bytes())
    )


# The model ---------------------------------------------------------------------------------------


def check_has_values(model: Any) -> None:
    """Refuses what is not a model, or a model whose values a compiled step holds.

    Raises:
        TypeError: If it is not a model.
        ValueError: If it has no values now.
    """
    check_is_model(model)
    held = [v.path for v in model.variables if compat.is_purged(v)]
    if held:
        raise ValueError(
            "The model must have its values when it is changed. Received: a model whose "
            f"values a compiled step holds ({text.listing(held)}). In a callback take the model "
            "from `self.model`, which gives them back, before you change it. After a `fit` that "
            "failed, load the weights again."
        )


def _around(model: Any, optimizer: Any) -> Iterator[Any]:
    """Yields the model's optimizer and those inside it, if `optimizer` is one of them."""
    chain = [getattr(model, "optimizer", None)]
    while chain[-1] is not None:
        chain.append(getattr(chain[-1], "inner_optimizer", None))
    if any(link is optimizer for link in chain):
        yield from chain[:-1]


def forget_compiled(model: Any, kinds: Sequence[str] = _COMPILED) -> None:
    """Makes compiled functions anew: they hold the variables they were compiled for.

    Args:
        model: The model.
        kinds: Which functions. Default: all.
    """
    if getattr(model, "train_function", None) is not None:
        compat.note_shardings(model)
    for kind in kinds:
        if getattr(model, f"{kind}_function", None) is not None:
            # Not only dropped: `fit`, in which this may run, does not make it again.
            getattr(model, f"make_{kind}_function")(force=True)
