"""A backup after each epoch that survives a kill at any moment, and how `fit` resumes from it."""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from typing import Any

import h5py
import keras
import numpy as np

from keras_groupopt import backend
from keras_groupopt.base import compat, files
from keras_groupopt.training.optimizer_of import check_is_built

_SEEDS = "seeds"
_GENERATORS = "generators"
_NAME = re.compile(r"epoch-(\d+)\.weights\.h5")


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes a run that was killed after its last whole epoch, bit for bit.

    After each epoch it writes the weights, the optimizer's state and the seeds of layers such as
    `Dropout` (on torch also its generators) to `epoch-<epochs done>.weights.h5`, and keeps the last
    two such files. When `fit` begins it loads the newest one that can be read, and `fit` starts at
    that epoch.

    `keras.callbacks.BackupAndRestore` overwrites one file with the state and another with the
    number of the epoch. A process that is killed while it writes the first cannot resume; one that
    is killed between the two trains an epoch twice; and the seeds are not saved. Here a file
    appears whole or not at all, and its name holds the epoch.

    Give `fit` data in an order that depends only on the epoch (`shuffle=False`, or a dataset seeded
    by the epoch), as the state of a generator that shuffles is not in a file of weights. A layer
    with LoRA resumes with equal outputs, but not bit for bit: Keras saves it merged.

    Args:
        backup_dir: The folder of the backups, for this run alone. It is made if it is missing.
        delete_checkpoint: Whether the backups are deleted when `fit` ends. Default: `True`.

    Raises:
        ValueError: If `backup_dir` is empty. When training begins, if the model is not built, or
            no backup fits it.

    Example:

    >>> import tempfile, keras, numpy as np, keras_groupopt as kgo
    >>> def train(epochs):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    ...     model.compile(optimizer=kgo.GroupedOptimizer(model=model), loss="mse")
    ...     backup = kgo.BackupAndRestore(folder, delete_checkpoint=False)
    ...     history = model.fit(np.ones((8, 4)), np.ones((8, 2)), epochs=epochs, verbose=0,
    ...                         shuffle=False, callbacks=[backup])
    ...     return history.epoch
    >>> folder = tempfile.mkdtemp()
    >>> train(2), train(5)
    ([0, 1], [2, 3, 4])
    """

    def __init__(self, backup_dir: str | os.PathLike[str], delete_checkpoint: bool = True) -> None:
        super().__init__()
        if not os.fspath(backup_dir):
            raise ValueError(
                f"`backup_dir` must be the path of a folder. Received: backup_dir={backup_dir!r}."
            )
        self.backup_dir = pathlib.Path(backup_dir)
        self.delete_checkpoint = bool(delete_checkpoint)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Loads the newest backup that can be read."""
        check_is_built(self.model, "BackupAndRestore")
        self.backup_dir.mkdir(parents=True, exist_ok=True)
        first: Exception | None = None
        for epoch, path in reversed(self._backups()):
            try:
                _load(self.model, path)
            except (OSError, ValueError, KeyError) as error:
                first = first or error
                continue
            if first is not None:
                warnings.warn(
                    f"A backup could not be read, and the one before it was loaded: {path.name}. "
                    f"The error was: {first}",
                    stacklevel=2,
                )
            compat.start_at_epoch(self.model, epoch)
            return
        if first is not None:
            raise first

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Lets a later `fit` of this model start at its own `initial_epoch`."""
        compat.start_at_epoch(self.model, None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a backup, then deletes all but the last two."""
        path = self.backup_dir / f"epoch-{epoch + 1}.weights.h5"
        files.write(lambda partial: _save(self.model, partial), path)
        for _, path in self._backups()[:-2]:
            path.unlink()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the backups, so that a new run starts from its beginning."""
        compat.start_at_epoch(self.model, None)
        if self.delete_checkpoint:
            for _, path in self._backups():
                path.unlink()
            if not any(self.backup_dir.iterdir()):
                self.backup_dir.rmdir()

    def _backups(self) -> list[tuple[int, pathlib.Path]]:
        """Returns the epochs done and the files, the oldest first."""
        found = [(_NAME.fullmatch(path.name), path) for path in self.backup_dir.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)


def _seeds(model: Any) -> list[Any]:
    """Returns the states of random generators, which Keras does not save."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def _save(model: Any, path: pathlib.Path) -> None:
    model.save_weights(path)
    with h5py.File(path, "a") as file:
        group = file.create_group(_SEEDS)
        for place, variable in enumerate(_seeds(model)):
            group[str(place)] = keras.ops.convert_to_numpy(variable)
        group = file.create_group(f"{_GENERATORS}/{keras.backend.backend()}")
        for place, generator in enumerate(backend.random_states()):
            group[str(place)] = generator


def _load(model: Any, path: pathlib.Path) -> None:
    variables = _seeds(model)
    with h5py.File(path) as file:
        seeds = [np.asarray(file[f"{_SEEDS}/{place}"]) for place in range(len(variables))]
        # Another backend saved other generators.
        own = file.get(f"{_GENERATORS}/{keras.backend.backend()}", {})
        generators = [np.asarray(own[str(place)]) for place in range(len(own))]
    model.load_weights(path)
    for variable, seed in zip(variables, seeds, strict=True):
        variable.assign(seed)
    if generators:
        backend.restore_random_states(generators)
