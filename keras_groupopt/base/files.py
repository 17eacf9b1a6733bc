"""Files that appear whole or not at all, whenever the process that writes them is killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable


def write(
    write_file: Callable[[pathlib.Path], None],
    path: str | os.PathLike[str],
    ending: str = ".weights.h5",
) -> None:
    """Puts a file that a function writes at `path`, in one step.

    Args:
        write_file: Writes the file at the path it is given.
        path: Where the file is to be.
        ending: What its name must end in. Default: `".weights.h5"`.

    Raises:
        ValueError: If `path` has another ending.
    """
    target = check_ending(path, ending)
    partial = target.with_name(f".{target.name.removesuffix(ending)}.partial{ending}")
    try:
        write_file(partial)
        _flush(partial)
        os.replace(partial, target)
        # The name, too, must outlast a loss of power. Windows cannot open folders.
        with contextlib.suppress(OSError):
            _flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def check_ending(path: str | os.PathLike[str], ending: str) -> pathlib.Path:
    """Returns `path`, after checking that its name has an ending.

    Raises:
        ValueError: If it has another one.
    """
    if not os.fspath(path).endswith(ending):
        raise ValueError(f"`path` must end in `{ending}`. Received: path={os.fspath(path)!r}.")
    return pathlib.Path(path)


def _flush(path: pathlib.Path) -> None:
    """Waits until what was written to `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
