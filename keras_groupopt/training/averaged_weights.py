"""The averages in place of the weights: for a while, in a file, and from a file.

A file that Keras saves in training holds the weights, and the averages in the optimizer's state: a
run resumes from it exactly. A file saved while the averages are in place of the weights is an
export. It holds no optimizer state, as a run would resume from weights that it never had.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import ops

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import text
from keras_groupopt.base.restoring import finish, remember
from keras_groupopt.optimizer import model_files
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.selectors import layer_paths
from keras_groupopt.step.averages import Averages, Pair, copy_into_weights, statistics_path
from keras_groupopt.training import batch_norm
from keras_groupopt.training.optimizer_of import grouped_optimizer_of

_AVERAGE = "/@average"


@contextlib.contextmanager
def averaged_weights(model: Any) -> Iterator[None]:
    """Puts the averages in place of the weights within a `with` block.

    Afterwards, also after an exception or Ctrl-C, the weights and the statistics of batch
    normalization are as before, bit for bit. Values are copied; the averages do not change. Weights
    without an average (in frozen groups) stay. Statistics that `kgo.UseAveragedWeights` averaged
    are used too; otherwise call `kgo.update_batch_norm` within the block. Averages are cast to
    weights of lower precision. A block within the block does nothing. A file saved within the block
    holds the averages and no optimizer state.

    Args:
        model: A model compiled with a built `GroupedOptimizer(ema=...)`.

    Yields:
        Nothing.

    Raises:
        TypeError: If the model has another optimizer.
        ValueError: If the optimizer is not built or keeps no averages. After the block, if the
            model was trained in it; the weights are restored then.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(kgo.GroupedOptimizer(ema=kgo.EMA(0.9)), loss="mse")
    >>> x, y = np.ones((8, 4)), np.ones((8, 2))
    >>> _ = model.fit(x, y, verbose=0)
    >>> raw = model.get_weights()
    >>> with kgo.averaged_weights(model):
    ...     loss = model.evaluate(x, y, verbose=0)
    >>> all((old == new).all() for old, new in zip(raw, model.get_weights()))
    True
    """
    optimizer, averages = averages_of(model, "averaged_weights")
    if averages.in_weights:
        yield
        return
    synchronize(model)
    pairs = [*optimizer._average_pairs(), *statistics_pairs(model, averages)]
    replaced = {id(variable): variable for _, variable in pairs}
    replaced |= {id(variable): variable for variable in batch_norm.statistics(model)}
    put_back = remember(replaced.values())
    before = backend.on_host(optimizer.iterations)
    try:
        averages.in_weights = True
        with _no_state_saved_around(model.optimizer, optimizer):
            copy_into_weights(pairs)
            yield
    finally:
        # On JAX, what `evaluate` still holds would overwrite the weights later.
        synchronize(model)
        try:
            finish(put_back)
        finally:
            averages.in_weights = False
    done = backend.on_host(optimizer.iterations) - before
    if done:
        raise ValueError(
            f"Do not train inside `averaged_weights(model)`. {done} optimizer steps were taken "
            "from the averages. The weights have been restored, the optimizer's state has not."
        )


def save_averaged(model: Any, path: str | os.PathLike[str]) -> None:
    """Exports the model with the averages as its weights.

    The file holds no optimizer state, so a run that starts from it is a new run. To resume a run,
    save it with `model.save`: that file holds weights and averages. If this package is not
    installed, load the export with `keras.saving.load_model(path, compile=False)`.

    Args:
        model: A model compiled with a built `GroupedOptimizer(ema=...)`.
        path: A file to write, which ends in `.keras`, or in `.weights.h5` for weights alone.

    Raises:
        TypeError: If the model has another optimizer.
        ValueError: If `path` ends differently, or the optimizer is not built or keeps no averages.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo, os, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(kgo.GroupedOptimizer(ema=kgo.EMA(0.9)), loss="mse")
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "averaged.keras")
    ...     kgo.save_averaged(model, path)
    ...     averaged = keras.saving.load_model(path)
    """
    path = os.fspath(path)
    if not path.endswith((".keras", ".weights.h5")):
        raise ValueError(f"`path` must end in `.keras` or `.weights.h5`. Received: path={path!r}.")
    with averaged_weights(model):
        if path.endswith(".keras"):
            model.save(path)
        else:
            model.save_weights(path, overwrite=True)


def load_averages(model: Any, path: str | os.PathLike[str]) -> None:
    """Loads the averages in a file as the weights of a model, to use it or to start a new run.

    Weights without an average (in frozen groups) are loaded from the file as they are, and so are
    statistics of batch normalization, unless `kgo.UseAveragedWeights` averaged them. No optimizer
    state is loaded.

    Args:
        model: A built model of the same layers. It need not be compiled.
        path: A `.keras` or `.weights.h5` file of a model with a `GroupedOptimizer(ema=...)`, as
            `model.save`, `ModelCheckpoint` or `BackupAndRestore` write it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read, holds no averages, or does not fit the model. The
            model has not changed then.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo, os, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(kgo.GroupedOptimizer(ema=kgo.EMA(0.9)), loss="mse")
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "run.keras")
    ...     model.save(path)
    ...     kgo.load_averages(model, path)
    """
    saved = model_files.read_state(path)
    factors = [] if saved is None else checkpoint.without_lora_averages(saved)[1]
    if factors:
        raise ValueError(
            "`path` must be a file of a model without LoRA. Received: "
            f"path={os.fspath(path)!r}, with {text.listing(factors)}. Keras saves such a layer "
            "merged into its kernel, so averages of the factors do not fit. Export the averages "
            "with `kgo.save_averaged(model, path)`."
        )
    found = [] if saved is None else _averages_among(saved, model)
    if not found:
        raise ValueError(
            f"`path` must be a file with averages. Received: path={os.fspath(path)!r}, which has "
            "none. Load a file of `kgo.save_averaged` with `kgo.load_weights(model, path)`."
        )
    model_files.load_weights(model, path, optimizer=False)
    for variable, value in found:
        variable.assign(ops.cast(ops.convert_to_tensor(value), variable.dtype))


def averages_of(model: Any, asked: str) -> tuple[GroupedOptimizer, Averages]:
    """Returns a model's optimizer and its averages.

    Args:
        model: A Keras model.
        asked: The name of what needs the averages, for errors.

    Raises:
        TypeError: If the optimizer is not a `GroupedOptimizer`.
        ValueError: If the optimizer is not built, or keeps no averages.
    """
    advice = "Call `model.compile(kgo.GroupedOptimizer(ema=kgo.EMA(0.999)), ...)`."
    optimizer = grouped_optimizer_of(model, asked, advice)
    averages = optimizer._require_built(asked).averages
    if averages is None:
        raise ValueError(
            f"`{asked}` needs an optimizer with averages. Received: one without. Make it with "
            "`GroupedOptimizer(ema=kgo.EMA(0.999))`."
        )
    return optimizer, averages


def statistics_pairs(model: Any, averages: Averages, make: bool = False) -> list[Pair]:
    """Returns averages of BatchNorm statistics and their variables.

    Args:
        model: The model.
        averages: The averages of its optimizer.
        make: Whether to make those that are missing, as copies of the statistics, and to drop those
            of statistics that are gone. Default: `False`.
    """
    if not make and not averages.statistics:
        return []
    paths = {info.identity: info.path for info in layer_paths.describe_model(model).infos}
    own = {paths[id(variable)]: variable for variable in batch_norm.statistics(model)}
    if make:
        for path in averages.statistics.keys() - own.keys():
            del averages.statistics[path]
        for path in own.keys() - averages.statistics.keys():
            averages.add_statistics(path, own[path])
    kept = averages.statistics
    return [(kept[path], variable) for path, variable in own.items() if path in kept]


def synchronize(model: Any) -> None:
    """Writes the values that `fit` on JAX holds during an epoch into the variables."""
    synchronize = getattr(model, "jax_state_sync", None)
    if synchronize is not None:
        synchronize()


@contextlib.contextmanager
def _no_state_saved_around(outer: Any, optimizer: Any) -> Iterator[None]:
    """Keeps a `LossScaleOptimizer` in a block from saving the state of the optimizer inside."""
    if outer is optimizer:
        yield
        return
    outer.save_own_variables = lambda store: None
    try:
        yield
    finally:
        del outer.save_own_variables


def _averages_among(saved: checkpoint.Saved, model: Any) -> list[tuple[Any, np.ndarray]]:
    """Returns variables of the model and their saved averages.

    Raises:
        ValueError: If an average does not fit the model.
    """
    catalog = layer_paths.describe_model(model)
    variables = {id(variable): variable for variable in model.variables}
    by_layer_path = {info.path: variables.get(info.identity) for info in catalog.infos}
    by_path = by_layer_path
    if saved.manifest.get("provisional"):
        # The optimizer that was saved knew no model, and so no layer paths.
        trainable = model.trainable_variables
        infos = layer_paths.describe_variables(trainable).infos
        by_path = {info.path: v for info, v in zip(infos, trainable, strict=True)}
    found, differences = [], []
    for key, value in saved.values.items():
        if key.endswith(_AVERAGE):
            # The group's name, which has no slash, comes before the path.
            known = by_path
            path: str | None = key.partition("/")[2].removesuffix(_AVERAGE)
        else:
            path, known = statistics_path(key), by_layer_path
        if path is None:
            continue
        variable = known.get(path)
        if variable is None:
            hint = text.nearest(path, known, " (nearest: {})")
            differences.append(f"{path} is not in the model{hint}")
        elif tuple(value.shape) != tuple(variable.shape):
            differences.append(f"{path}: saved as {list(value.shape)}, now {list(variable.shape)}")
        else:
            found.append((variable, value))
    if differences:
        raise ValueError(
            "The averages in the file must fit the model. Nothing was loaded. First differences:"
            f"\n  {text.first_lines(differences)}"
        )
    return found
