"""Where the summaries print: a console, or a function that takes single lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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
