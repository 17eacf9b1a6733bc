"""State of an optimizer alone in a `.npz` file, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_groupopt.base import files
from keras_groupopt.checkpoint import manifest, store
from keras_groupopt.checkpoint.keys import stored_name
from keras_groupopt.checkpoint.saved import Saved

SUFFIX = ".npz"


def write_file(path: str | os.PathLike[str], saved: Saved) -> None:
    """Writes state to a file, atomically.

    Raises:
        ValueError: If the path does not end in `.npz`.
        OSError: If it cannot be written. A file that was there stays.
    """
    path = _checked(path)
    arrays: dict[str, Any] = {}
    store.write(arrays, saved.manifest, saved.values)
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            plain: dict[str, Any] = {name: _plain(array) for name, array in arrays.items()}
            np.savez(file, **plain)
        files.put_in_place(pathlib.Path(temporary), pathlib.Path(path))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


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
    path = _checked(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"`path` must be an existing file. Received: path={path!r}.")
    try:
        # NumPy leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            if not isinstance(arrays, Mapping):
                raise ValueError("it is no archive")
            yield _Arrays(arrays)
    except Exception as error:  # a damaged file may make zipfile and NumPy raise anything
        if "optimizer state" in str(error):
            raise
        raise manifest.damaged(f"{path!r} cannot be read: {error}") from error


class _Arrays(Mapping[str, Any]):
    """The arrays of a `.npz` file, with the dtypes that its format lacks."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays
        self._dtypes: dict[str, str] = {}
        if store.MANIFEST in arrays:
            layout = manifest.from_text(bytes(arrays[store.MANIFEST]))
            self._dtypes = {stored_name(key): spec[1] for key, spec in layout["state"].items()}

    def __getitem__(self, name: str) -> Any:
        array = self._arrays[name]
        dtype = np.dtype(self._dtypes.get(name, array.dtype))
        same_bytes = array.dtype.kind == "u" and array.dtype.itemsize == dtype.itemsize
        return array.view(dtype) if same_bytes and _has_no_place(dtype) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _plain(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}") if _has_no_place(array.dtype) else array


def _has_no_place(dtype: Any) -> bool:
    """Whether `.npz` cannot name a dtype, such as bfloat16."""
    return dtype.kind == "V" or not hasattr(np, dtype.name)


def _checked(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    if not path.endswith(SUFFIX):
        raise ValueError(f'`path` must end in "{SUFFIX}". Received: path={path!r}.')
    return path
