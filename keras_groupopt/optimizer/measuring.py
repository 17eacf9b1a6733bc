"""What steps measure on request."""

from __future__ import annotations

from typing import Any

from keras_groupopt.optimizer.building import beside
from keras_groupopt.optimizer.rebuilding import forget_compiled
from keras_groupopt.optimizer.run import require_built
from keras_groupopt.step.measurements import CLIP_SHARE, Means, Measurements, check_names


def measure(optimizer: Any, *names: str, model: Any = None) -> None:
    """Measures every optimizer step from now on, for `measurements`.

    `kgo.GroupLogger` calls it. If you write the training loop, call it before you compile the
    step. What is measured costs a pass over gradients or weights in each step: `"gradient_norm"`
    and `"clip_share"` use norms that the step computes anyway, if it does; `"update_ratio"`
    keeps a copy of the weights for the length of a step.

    Args:
        *names: Some of `"gradient_norm"`, `"update_ratio"` and `"clip_share"`.
        model: The model whose compiled training step is made anew, as it does not measure yet.
            Default: the optimizer's model.

    Raises:
        ValueError: If a name is none of these, or it is `"clip_share"` and nothing clips.

    Example:
    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer(
    ...     model=model, rule="sgd", learning_rate=0.5, global_clipnorm=1.0)
    >>> optimizer.measure("gradient_norm", "clip_share")
    >>> ones = [np.ones(v.shape, "float32") for v in model.trainable_variables]
    >>> optimizer.apply(ones, model.trainable_variables)
    >>> measured = optimizer.measurements()
    >>> round(measured["gradient_norm"]["default"], 4), measured["clip_share"]
    (3.1623, {None: 1.0})
    """
    check_names(names)
    if CLIP_SHARE in names and not optimizer._declared.clips:
        raise ValueError(
            '"clip_share" needs an optimizer that clips gradients. Received: one that does '
            "not. Make it with `GroupedOptimizer(global_clipnorm=1.0)`."
        )
    wanted = optimizer._run.measured | set(names)
    if wanted == optimizer._run.measured:
        return
    built = optimizer._built
    if built is not None:
        with beside(optimizer, built.variables):
            built.measurements = Measurements(wanted, built.groups)
    optimizer._run.measured = wanted
    model = optimizer._link.model if model is None else model
    if getattr(model, "train_function", None) is not None:
        forget_compiled(model, ("train",))


def measurements(optimizer: Any) -> Means:
    """Returns the means over the optimizer steps since the last `reset_measurements`.

    Per group that moves: `"gradient_norm"`, the norm of its gradients before any clipping;
    `"update_ratio"`, how far a step moves its weights over the norm of its weights;
    `"clip_share"`, the share of steps in which its own clipping shortened a gradient, for
    groups that have one. Under the key `None`: the norm over all groups, and the share of steps
    in which `global_clipnorm` shortened the gradients. Steps that were skipped do not count, a
    step without a gradient counts with 0, and what no step measured is NaN.

    Reads values from the device.

    Returns:
        A dict by measurement of dicts by group, with what `measure` was called for.

    Raises:
        ValueError: If the optimizer is not built.
    """
    own = require_built(optimizer, "measurements").measurements
    return {} if own is None else own.means(optimizer.global_clipnorm is not None)


def reset_measurements(optimizer: Any) -> None:
    """Starts the means of `measurements` over; call it outside of a compiled step."""
    built = optimizer._built
    if built is not None and built.measurements is not None:
        built.measurements.reset()
