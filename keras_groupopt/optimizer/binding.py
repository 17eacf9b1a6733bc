"""Which model an optimizer belongs to, and the plan for its variables."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from keras_groupopt.base import text
from keras_groupopt.optimizer.building import positions_of
from keras_groupopt.optimizer.run import require_built
from keras_groupopt.plan.plan import Plan, with_state_bytes
from keras_groupopt.rules import state_size


def plan(optimizer: Any) -> Plan:
    """The plan: the built one, or a preview for the model as it is now.

    Raises:
        ValueError: If the optimizer is not built and has no model.
    """
    if optimizer._built is not None:
        built: Plan = optimizer._built.plan
        return built
    link = optimizer._link
    model = link.required_model()
    if model is None:
        raise ValueError(
            "`plan` needs a model before the optimizer is built. Received: no model. Pass "
            "`GroupedOptimizer(model=...)` or call `optimizer.bind(model)`."
        )
    preview, _ = link.resolve(optimizer._declared, list(model.trainable_variables))
    # The build warns if it comes to another plan than the user saw.
    link.shown = with_state_bytes(preview, state_size.estimate(preview))
    return link.shown


def bind(optimizer: Any, model: Any) -> None:
    """Attaches a model, from which layer paths come. It is held weakly.

    Args:
        model: The Keras model whose variables this optimizer trains.

    Raises:
        TypeError: If it is not a model.
        ValueError: If the optimizer was built with variables of another model.
    """
    check_is_model(model)
    if optimizer._built is not None:
        own = {id(variable) for variable in model.variables}
        if any(id(variable) not in own for variable in optimizer._built.variables):
            raise ValueError(
                "`model` must hold the variables that this optimizer was built with. "
                f'Received: model "{model.name}", which does not. Call '
                "`optimizer.rebuild(model)` if it took the place of that model, or make a new "
                "GroupedOptimizer for another model."
            )
    optimizer._link.reference = weakref.ref(model)


def check_is_model(model: Any, kind: type = keras.layers.Layer) -> None:
    """Refuses what is not a model.

    Args:
        model: The model.
        kind: What it must be. Default: a layer.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(model, kind):
        raise TypeError(
            "`model` must be a Keras model. Received: "
            f"model={model!r} of type {type(model).__name__}."
        )


def check_model(optimizer: Any, model: Any) -> None:
    """Refuses a model that the built optimizer cannot go on training as it is now.

    Attaches the model if none is attached. `GroupLogger` calls it when training begins.

    Args:
        model: The Keras model whose variables this optimizer trains.

    Raises:
        ValueError: If the optimizer is not built, if the model has trainable variables it was
            not built with, or if `trainable` changed since `fit` last made its training step.
    """
    built = require_built(optimizer, "check_model")
    if optimizer._link.model is None:
        optimizer.bind(model)
    now = positions_of(optimizer, model.trainable_variables)
    last = optimizer._run.last_step
    if last is None or not last.is_in(model.train_function):
        return
    positions = last.changed(now)
    changed = [v.path for v in built.plan.variables if v.position in positions]
    if changed:
        raise ValueError(
            "`trainable` must not change between `compile` and `fit`: a compiled step keeps "
            "training the variables it was made for. Received: changed "
            f"{text.listing(changed)}. Call `model.compile(optimizer=model.optimizer, ...)` "
            "again; the optimizer keeps its state."
        )
