"""From the optimizer of one `compile` to that of the next, with its state."""

from __future__ import annotations

from typing import Any

from keras_groupopt import checkpoint
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.checkpoint.carried import carried
from keras_groupopt.optimizer import saving
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.plan.plan import Plan
from keras_groupopt.selectors import layer_paths
from keras_groupopt.step.built import BuiltOptimizer


def transfer_state(old: Any, new: Any) -> checkpoint.Report:
    """Gives a new optimizer the state of an old one, for a model compiled again.

    What belongs to a variable goes to the same variable; if the model was made anew, to the one of
    the same layer path, as does what was loaded but not built yet. In another group it is kept
    if both rules are of one class and the slots agree. The step comes along; a rate, ratio or
    decay does if both declare it alike. What has no counterpart starts fresh or is dropped, as
    the report says. All is copied: `old` may be trained on.

    Args:
        old: A `GroupedOptimizer` that is built or was loaded, also in a `LossScaleOptimizer`, whose
            scale starts over.
        new: Another one, built or not. If not, the state waits for its build, and the report is
            filled then.

    Returns:
        What was kept, starts fresh and was dropped.

    Raises:
        TypeError: If one is not a `GroupedOptimizer`.
        ValueError: If they are the same, if `old` has no state, or if the groups of `new` do not
            fit its model.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> old = kgo.GroupedOptimizer(model=model, rule="adam", learning_rate=0.5)
    >>> old.build(model.trainable_variables)
    >>> _ = old.iterations.assign(3)
    >>> new = kgo.GroupedOptimizer(model=model, rule="adam", learning_rate=kgo.constant(0.25))
    >>> report = kgo.transfer_state(old, new)
    >>> new.build(model.trainable_variables)
    >>> int(new.iterations), report.dropped
    (3, ['@learning_rate'])
    """
    source, target = _grouped("old", old), _grouped("new", new)
    if source is target:
        raise ValueError(
            "`new` must be another optimizer than `old`. Received: one optimizer twice. To follow "
            "a model that changed, call `optimizer.rebuild(model)`."
        )
    terms = checkpoint.Terms(strict=False)
    built, run = source._built, source._run
    if built is None and run.pending is None:
        raise ValueError(
            "`old` must have state. Received: an optimizer that is neither built nor loaded."
        )
    saved, left_out = saving.take(source, "transfer_state"), list[str]()
    if built is not None and run.pending is None:
        saved, left_out = carried(saved, built, *_present(target, built))
    saving.accept(target, saved, terms)
    terms.report.dropped += left_out
    if target._built is None:
        terms.report.status = "waits for the build"
    return terms.report


def _present(
    optimizer: GroupedOptimizer, old: BuiltOptimizer
) -> tuple[dict[int, str], Plan | None]:
    """Returns the layer paths by identity that an optimizer has or will have, and its plan."""
    if optimizer._built is not None:
        return optimizer._built.paths, optimizer.plan
    link = optimizer._link
    if link.model is not None and link.model.built:
        infos = layer_paths.describe_model(link.model).infos
        plan, _ = link.resolve(optimizer._declared, list(link.model.trainable_variables))
        return {info.identity: info.path for info in infos}, plan
    if link.model is None and link.records is None:
        # Built without a model, it will take paths from the variables.
        infos = layer_paths.describe_variables(old.variables).infos
        return {info.identity: info.path for info in infos}, None
    return {}, None


def _grouped(name: str, optimizer: Any) -> GroupedOptimizer:
    inner = unwrap(optimizer)
    if not isinstance(inner, GroupedOptimizer):
        raise TypeError(
            f"`{name}` must be a GroupedOptimizer. Received: {name}={inner!r} of type "
            f"{type(inner).__name__}. From a Keras optimizer use `kgo.from_optimizer` or "
            "`kgo.from_multi_optimizer`."
        )
    return inner
