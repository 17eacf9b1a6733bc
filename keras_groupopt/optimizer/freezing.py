"""Groups that do not train for a while: fastai's `freeze_to`."""

from __future__ import annotations

import numbers
from typing import Any

from keras_groupopt.base.checks import wrong_type
from keras_groupopt.optimizer.rebuilding import check_has_values, forget_compiled


def freeze_to(optimizer: Any, n: int) -> list[str]:
    """Freezes all groups before the `n`-th, and trains it and those after it.

    Groups count in the order of the model, by where the first variable of each is among its
    trainable variables: `freeze_to(-1)` trains the last group only, `freeze_to(-2)` the last
    two, `freeze_to(0)` all. Variables of frozen groups stop being `trainable`: they stay
    bit-identical, have no part in the norm, and keep their state for when they go on. `fit`
    compiles its step again; make a `tf.function` or `jax.jit` that you wrote again yourself.
    BatchNorm layers go on as `layer.trainable` says. It is saved with the optimizer.

    Groups declared `frozen` stay so. To open groups one by one without compiling again, see
    `kgo.recipes.gradual_unfreezing`.

    Args:
        n: The first group to train; from the end if negative.

    Returns:
        The names of the groups that train now.

    Raises:
        TypeError: If `n` is not an integer.
        ValueError: If there is no such group, it leaves none to train, or the optimizer is not
            built and has no model.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
    ...                           keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer({"backbone": "backbone", "head": "head"}, model=model)
    >>> optimizer.freeze_to(-1)
    ['head']
    >>> [layer.name for layer in model.layers if layer.trainable_variables]
    ['head']
    >>> optimizer.freeze_to(0)
    ['backbone', 'head']

    Reference:
        Howard & Ruder 2018, arXiv:1801.06146; `Learner.freeze_to` of fastai.
    """
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise wrong_type("n", n, "an integer: `freeze_to(-1)` trains the last group")
    model = optimizer._link.model
    if model is not None:
        check_has_values(model)
    if optimizer._built is None:
        if model is None:
            raise ValueError(
                "`freeze_to` needs a model before the optimizer is built. Received: no model. "
                "Pass `GroupedOptimizer(model=...)` or call `optimizer.bind(model)`."
            )
        # What is frozen has to be built, to go on later.
        optimizer.build(model.trainable_variables)
    groups = [planned for planned in optimizer.plan.groups if planned.variables]
    groups.sort(key=lambda planned: planned.variables[0].position)
    names = [planned.name for planned in groups]
    first = n + len(names) if n < 0 else n
    moving = [planned.name for planned in groups[first:] if not planned.group.frozen]
    if not 0 <= first < len(names) or not moving:
        raise ValueError(
            f"`n` must leave a group to train. Received: freeze_to({n}) with {len(names)} "
            f"groups, in this order: {', '.join(names)}."
        )
    optimizer._run.freeze(names[:first], optimizer._built)
    if model is not None:
        forget_compiled(model)
    return moving
