"""An optimizer's state alone, in a `.npz` file that is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_groupopt.base import files
from keras_groupopt.checkpoint import manifest, store
from keras_groupopt.checkpoint.saved import Saved

ENDING = ".npz"


def write_file(path: str | os.PathLike[str], saved: Saved) -> None:
    """Writes state to a file, atomically.

    Raises:
        ValueError: If the path does not end in `.npz`.
        OSError: If it cannot be written. A file that was there stays.
    """

    def write(partial: pathlib.Path) -> None:
        arrays: dict[str, Any] = {}
        store.write(arrays, saved.manifest, saved.values)
        arrays = {name: store.in_known_dtype(array) for name, array in arrays.items()}
        np.savez(partial, **arrays)

    files.write(write, path, ENDING)


def read_file(path: str | os.PathLike[str]) -> Saved:
    """Returns the state in a file, after checking all of it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the path does not end in `.npz`, or the file is damaged.
    """
    with opened(path) as arrays:
        return store.read(arrays)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Mapping[str, Any]]:
    """Opens a file of state as a store."""
    path = os.fspath(files.check_ending(path, ENDING))
    if not os.path.exists(path):
        raise FileNotFoundError(f"`path` must be an existing file. Received: path={path!r}.")
    try:
        # The file is opened here, since NumPy leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            if not isinstance(arrays, Mapping):
                raise ValueError("it is not an archive")
            yield arrays
    except Exception as error:  # a damaged file may make zipfile and NumPy raise anything
        if "optimizer state" in str(error):
            raise
        raise manifest.damaged(f"{path!r} cannot be read: {error}") from error
