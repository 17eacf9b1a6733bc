"""Training steps, `fit` and its callbacks."""

from __future__ import annotations

import sys
from typing import Any

import keras


def call_for_training(model: Any, x: Any) -> Any:
    """Calls a model as Keras' training step does.

    Only Keras knows whether `call` has a `training` argument.
    """
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns the loss as Keras' training step does.

    A user's `compute_loss` may have no `training` argument, which this wrapper handles.
    """
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def track_loss(model: Any, loss: Any, x: Any) -> None:
    """Adds the loss of a batch to the mean that `fit` shows. The metric has no public name."""
    count = keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
    model._loss_tracker.update_state(loss, sample_weight=count)


def update_metrics(model: Any, values: Any, loss: Any, *batch: Any) -> tuple[Any, Any]:
    """Returns the logs of a batch on JAX, and the values of the metrics' variables after it.

    The stateless update of the loss and all metrics has no public name.
    """
    return model._update_metrics_variables(values, loss, *batch)


def build_for(model: Any, data: Any) -> None:
    """Builds a model, its metrics and its optimizer for batches like `data`.

    `fit` does it by this method; the public `build` takes a shape and builds no metrics.
    """
    model._symbolic_build(data_batch=data)


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Lets the `fit` that has just begun start at `epoch`; `None` is the epoch of its argument.

    Callbacks get the arguments of `fit` too late to change them. `fit` reads this after it began.
    """
    model._initial_epoch = epoch


def callback_list_of(callback: keras.callbacks.Callback) -> Any:
    """Returns the list whose hook is calling `callback`, or `None`.

    The list lives as long as a call of `evaluate` or `predict`, also if it fails. Nothing else that
    Keras gives to a callback does: `model` and `params` outlive the call, and no hook follows a
    failure.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList) and any(
            listed is callback for listed in owner.callbacks
        ):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def note_shardings(model: Any) -> None:
    """Lets `fit` on JAX look up the layouts of the model's variables again.

    Keras 3.10 does so only when `fit` begins.
    """
    note = getattr(model, "_record_training_state_sharding_spec", None)
    if note is not None:
        note()


def with_layouts(model: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the state of a training step on JAX, laid out over devices as Keras 3.10 needs it.

    Its own training step does so with the layouts that `fit` notes. Other loops have none.
    """
    noted = hasattr(model, "_trainable_variable_shardings")
    enforce = getattr(model, "_enforce_jax_state_sharding", None)
    return tuple(enforce(*state)) if enforce is not None and noted else state
