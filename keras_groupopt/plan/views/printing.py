"""What views print and draw on: a console, a function that takes lines, a figure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console


@contextlib.contextmanager
def printing(
    print_fn: Callable[[str], object] | None, console: Console | None, width: int | None = None
) -> Iterator[Console]:
    """Yields the console to print on.

    Args:
        print_fn: Called with each line as plain text, instead of printing.
        console: Where to print. `None` means standard output.
        width: The width of a new console. Default: that of the terminal.
    """
    if print_fn is None:
        yield console or Console(highlight=False, width=width)
        return
    plain = Console(
        width=width,
        highlight=False,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
    )
    with plain.capture() as capture:
        yield plain
    for line in capture.get().splitlines():
        print_fn(line.rstrip())


def new_figure(size: tuple[float, float], instead: str = "") -> Any:
    """Returns a `matplotlib.figure.Figure` without a window.

    Args:
        size: Its width and height in inches.
        instead: What to do without matplotlib, for the error. Default: "".

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"`plot` needs matplotlib, which could not be imported ({error}). Install it with "
            f"`pip install keras-groupopt[plots]`.{instead}"
        ) from error
    return Figure(figsize=size, layout="constrained")
