"""Files that appear whole or not at all, whenever the process that writes them is killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import keras


def save_weights(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes what `model.save_weights` writes, in one step that a kill cannot cut in two.

    `model.save_weights` empties a file that exists before it writes it anew: a process killed in
    between leaves neither the old weights nor the new. This writes a file beside it, brings it to
    the disk, and puts it in the old one's place. Whoever opens `path` finds a whole file, the old
    or the new. What a kill leaves is `.<name>.partial.weights.h5`, which the next save overwrites.

    Args:
        model: A built Keras model.
        path: Where to; it must end in `.weights.h5`.

    Raises:
        TypeError: If `model` is no model.
        ValueError: If `path` ends otherwise, or the model is not built.

    Example:

    >>> import os, tempfile, keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> folder = tempfile.mkdtemp()
    >>> kgo.save_weights(model, os.path.join(folder, "model.weights.h5"))
    >>> os.listdir(folder)
    ['model.weights.h5']
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a Keras model. Received: "
            f"model={model!r} of type {type(model).__name__}."
        )
    write(model.save_weights, path)


def write(write_file: Callable[[pathlib.Path], None], path: str | os.PathLike[str]) -> None:
    """Puts a file that a function writes at `path`, in one step.

    Args:
        write_file: Writes the file at the path it is given.
        path: Where the file is to be; it must end in `.weights.h5`.
    """
    target = pathlib.Path(path)
    if not target.name.endswith(".weights.h5"):
        raise ValueError(f"`path` must end in `.weights.h5`. Received: path={os.fspath(path)!r}.")
    name = target.name.removesuffix(".weights.h5")
    partial = target.with_name(f".{name}.partial.weights.h5")
    try:
        write_file(partial)
        put_in_place(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def put_in_place(partial: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file that was written beside its place the name it is to have, in one step."""
    _flush(partial)
    os.replace(partial, target)
    # The name, too, must outlast a loss of power. Windows cannot open folders.
    with contextlib.suppress(OSError):
        _flush(target.parent)


def _flush(path: pathlib.Path) -> None:
    """Waits until what was written to `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
