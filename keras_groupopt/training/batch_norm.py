"""Statistics of batch normalization: which variables they are, and their estimate from data.

A statistic belongs to the weights it was measured with. Averaged weights need other statistics:
`kgo.UseAveragedWeights` averages the statistics, too, and `update_batch_norm` measures them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.checks import check_count
from keras_groupopt.base.restoring import remember
from keras_groupopt.selectors import layer_paths

_ESTIMATED = ("moving_mean", "moving_variance", "moving_stddev")


def layers_of(model: Any) -> list[Any]:
    """Returns the layers below `model` with statistics that training moves, each once."""
    return [
        layer
        for layer in layer_paths.layers(model)
        if layer.trainable
        and all(getattr(layer, name, None) is not None for name in _ESTIMATED[:2])
    ]


def statistics(model: Any) -> list[Any]:
    """Returns the statistics of `model`: float variables that those layers assign to."""
    return [
        variable
        for layer in layers_of(model)
        for variable in compat.own_variables(layer)
        if not variable.trainable and "float" in keras.backend.standardize_dtype(variable.dtype)
    ]


def update_batch_norm(
    model: Any, data: Any, steps: int | None = None, *, batch_size: int = 32
) -> None:
    """Estimates the statistics of batch normalization anew, as the mean over `data`.

    With `m_i` the mean (or variance) of batch `i`, of `n_i` samples, in training mode:

        moving ← Σ n_i · m_i / Σ n_i

    Weights, states of random generators, metrics and the layers' `momentum` stay as they are.
    Layers that are frozen or called with `training=False` keep their statistics. If a layer is
    called several times per batch, its last call counts.

    Within `kgo.averaged_weights(model)` the estimate is for the averages, and is undone after the
    block.

    Args:
        model: A built Keras model.
        data: Inputs, as for `model.predict`: arrays (a list or dict of them for several inputs),
            a dataset, or an iterator of batches. From batches `(x, y)` only `x` is used.
        steps: The most batches to take. Set it if `data` never ends. Default: all.
        batch_size: Samples per batch of arrays. Default: 32.

    Raises:
        ValueError: If the model has no statistics to estimate, or `data` has no batch.
        TypeError: If `steps` or `batch_size` is not an integer. Nothing has changed after an error.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(name="norm")])
    >>> kgo.update_batch_norm(model, np.full((8, 2), 3.0), batch_size=4)
    >>> keras.ops.convert_to_numpy(model.get_layer("norm").moving_mean).tolist()
    [3.0, 3.0]

    Reference:
        Izmailov et al. 2018, arXiv:1803.05407, section 3.2.
    """
    where = "update_batch_norm"
    steps = None if steps is None else check_count("steps", steps, 1, where=where)
    batches = _batches(data, check_count("batch_size", batch_size, 1, where=where))
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            "`model` must have batch normalization that is not frozen. Received: model "
            f'"{model.name}", which has none.'
        )
    estimated = [
        getattr(layer, name)
        for layer in layers
        for name in _ESTIMATED
        if getattr(layer, name, None) is not None
    ]
    others = {id(v): v for v in (*model.non_trainable_variables, *statistics(model))}
    put_back = remember(others.values())
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            # With momentum 0 the statistics are those of the last batch.
            layer.momentum = 0.0
        for variable in estimated:
            _drop_nonfinite(variable)
        means = _mean_statistics(model, itertools.islice(batches, steps), estimated)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        put_back()
    for variable, mean in zip(estimated, means, strict=True):
        variable.assign(ops.cast(mean, variable.dtype))


def _mean_statistics(model: Any, batches: Iterable[Any], estimated: list[Any]) -> list[Any]:
    seen = 0
    means: list[Any] = [0.0] * len(estimated)
    for batch in batches:
        count = int(ops.shape(keras.tree.flatten(batch)[0])[0])
        if not count:
            continue
        with backend.without_gradients():
            model(batch, training=True)
        seen += count
        values = [ops.cast(ops.convert_to_tensor(v), "float32") for v in estimated]
        share = count / seen
        means = [m + share * (v - m) for m, v in zip(means, values, strict=True)]
    if not seen:
        raise ValueError(
            "`data` must have at least one batch. Received: none. An iterator that was used "
            "before may have reached its end."
        )
    return means


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Yields inputs, batch by batch."""
    leaves = keras.tree.flatten(data)
    if all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves) and leaves:
        for start in range(0, len(leaves[0]), batch_size):
            chosen = slice(start, start + batch_size)
            yield keras.tree.map_structure(lambda leaf, chosen=chosen: _tensor(leaf[chosen]), data)
        return
    if isinstance(data, keras.utils.PyDataset):
        batches: Iterable[Any] = map(data.__getitem__, range(len(data)))
    else:
        batches = data
    for batch in batches:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        yield keras.tree.map_structure(_tensor, x)


def _tensor(value: Any) -> Any:
    if ops.is_tensor(value):
        return value
    # The dataset may be another framework's.
    array = np.asarray(value)
    wide = array.dtype == np.float64
    return ops.convert_to_tensor(array.astype(keras.config.floatx()) if wide else array)


def _drop_nonfinite(variable: Any) -> None:
    """Sets elements that are not finite to 0. With momentum 0, 0 · NaN would keep them NaN."""
    value = ops.convert_to_tensor(variable)
    variable.assign(ops.where(ops.isfinite(value), value, ops.zeros_like(value)))
