"""Files that appear whole or not at all, whenever the process that writes them is killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable


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
