"""A plan as a table in the terminal, in the look of Keras' `model.summary()`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_groupopt.plan.views.figures import (
    GROUP_COLUMNS,
    GroupFigures,
    Plan,
    PlanFigures,
    plan_figures,
)
from keras_groupopt.plan.views.plot import rate_rows
from keras_groupopt.plan.views.printing import printing

# The colours of Keras' summary: numbers, types, and the two answers of its "Trainable" column.
_NUMBER, _TYPE = "color(34)", "color(33)"
_ANSWERS = {"Y": "bold color(34)", "N": "bold color(9)"}
_SMALLEST, _LARGEST = 72, 120
_ASCII = str.maketrans({"–": "-", "×": "x", "→": "->", "≥": ">=", "…": "..."})


def summary(
    plan: Plan,
    *,
    expand: bool | str | Iterable[str] = False,
    line_length: int | None = None,
    print_fn: Callable[[str], object] | None = None,
    console: Console | None = None,
    rates: Mapping[str, Any] | None = None,
) -> None:
    """Prints a plan: one row per group, then totals and the settings that all groups share.

    "Excluded" counts the variables that are not decayed. The memory is `–` if it is unknown, and
    `≥` a number if only a part is known.

    Args:
        plan: What `Plan.to_dict()` returns.
        expand: Whether to list each variable too, or the names of the groups whose variables are
            listed. Default: False.
        line_length: The width in characters, at least 72. Default: the width of the console, at
            most 120.
        print_fn: Called with each line as plain text, instead of printing. Default: none.
        console: Where to print. Default: standard output, with colours in a terminal.
        rates: What `plan.sampled_rates.curves` returned, which is printed below. Default: none.

    Raises:
        ValueError: If `expand` has a name that is not of a group, `line_length` is too small, or
            both `print_fn` and `console` are given.

    Example:
    >>> plan = {
    ...     "format": 1, "provisional": False, "options": {"learning_rate": "0.001"},
    ...     "groups": [{
    ...         "name": "head", "selector": 'path("head")', "rule": "radam", "rule_arguments": {},
    ...         "learning_rate": "0.001", "weight_decay": None, "anchor": None,
    ...         "exclude_from_decay": None, "frozen": False,
    ...         "variables": [{"path": "head/bias", "name": "bias", "shape": [10],
    ...                        "dtype": "float32", "decayed": False, "anchored": False,
    ...                        "state_bytes": 80}],
    ...     }],
    ... }
    >>> summary(plan, line_length=72, print_fn=print)
    Plan: 1 group, 1 variable
    ┏━━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━┓
    ┃ Group      ┃           ┃         ┃ Learning   ┃ Weight     ┃         ┃
    ┃ (rule)     ┃ Variables ┃  Params ┃ rate       ┃ decay      ┃  Memory ┃
    ┡━━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━┩
    │ head       │         1 │      10 │ 0.001      │ –          │ 80.00 B │
    │ (radam)    │           │ 100.0 % │            │            │         │
    └────────────┴───────────┴─────────┴────────────┴────────────┴─────────┘
     Total params: 10 (40.00 B)
     Trained params: 10 (40.00 B)
     Optimizer memory: 80.00 B
     Learning rate: 0.001
    """
    if print_fn is not None and console is not None:
        raise ValueError(
            "`print_fn` and `console` must not be given together. "
            f"Received: print_fn={print_fn!r}, console={console!r}. Leave one of them out."
        )
    if line_length is not None and line_length < _SMALLEST:
        raise ValueError(
            f"`line_length` must be at least {_SMALLEST}. Received: line_length={line_length}. "
            "Leave it out to use the width of the console."
        )
    figures = plan_figures(plan)
    expanded = _expanded(figures.groups, expand)
    with printing(print_fn, console, line_length) as target:
        _Printer(target, line_length).print_plan(figures, expanded, rates)


def _expanded(
    groups: Sequence[GroupFigures], expand: bool | str | Iterable[str]
) -> list[GroupFigures]:
    if isinstance(expand, bool):
        return list(groups) if expand else []
    wanted = (expand,) if isinstance(expand, str) else tuple(expand)
    names = [group.name for group in groups]
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            raise ValueError(
                "`expand` must be True, False or names of groups. "
                f"Received: expand={expand!r}, where no group is called {name!r}. "
                + (f"Did you mean {near[0]!r}? " if near else "")
                + f"The groups are: {', '.join(map(repr, names)) or 'none'}."
            )
    return [group for group in groups if group.name in wanted]


class _Printer:
    """Prints figures on one console at one width."""

    def __init__(self, console: Console, line_length: int | None) -> None:
        self.console = console
        self.width = line_length or min(console.width, _LARGEST)

    def print_plan(
        self,
        figures: PlanFigures,
        expanded: Sequence[GroupFigures],
        rates: Mapping[str, Any] | None,
    ) -> None:
        self.print_text((figures.title, "bold"))
        groups = ((group.frozen, group.cells()) for group in figures.groups)
        self.print(self.table(GROUP_COLUMNS, groups, lines=True))
        for label, value in figures.totals:
            self.print_text((f"{label}: ", "bold"), (value, _NUMBER), indent=1)
        for label, value in figures.settings:
            self.print_text((f"{label}: ", "bold"), (value, ""), indent=1)
        if figures.note:
            self.print_text((figures.note, "color(214)"), indent=1)
        for group in expanded:
            self.console.print()
            title = (f'Group: "{group.name}"', "bold")
            self.print_text(title, (f" claims {group.selector}", "dim"))
            self.print(self.variables_table(group))
        if rates is not None:
            self.console.print()
            self.print_text(("Learning rate at optimizer step", "bold"))
            for table in self.rate_tables(rates):
                self.print(table)

    def rate_tables(self, rates: Mapping[str, Any]) -> list[Table]:
        """Makes one column per step, in several tables below each other if the width needs it."""
        headings, rows = rate_rows(rates)
        longest = max(len(cell) for row in rows for cell in row[1:])
        column = 3 + max(longest, *(len(line) for text in headings for line in text.split("\n")))
        names = min(max(len(row[0]) for row in rows), self.width // 3)
        each = max(1, (self.width - names - 4) // column)
        tables = []
        for start in range(0, len(headings), each):
            shown = slice(start, start + each)
            cells = (
                (group["frozen"], [(cell,) for cell in (row[0], *row[1:][shown])])
                for row, group in zip(rows, rates["groups"], strict=True)
            )
            table = self.table(["Group", *(f"{text}>" for text in headings[shown])], cells)
            table.width = None
            tables.append(table)
        return tables

    def variables_table(self, group: GroupFigures) -> Table:
        columns, rows = group.variable_cells()
        cells = ((group.frozen, [(cell,) for cell in row]) for row in rows)
        table = self.table(columns, cells, first=_TYPE)
        table.columns[0].ratio = 1
        return table

    def table(
        self,
        columns: Iterable[str],
        rows: Iterable[tuple[bool, Sequence[Sequence[str]]]],
        first: str = "",
        lines: bool = False,
    ) -> Table:
        """Makes a table of this width.

        Args:
            columns: The names of the columns. `>` after a name marks a column of numbers.
            rows: The cells, each with its lines. True dims a row.
            first: The style of the first column. Default: "".
            lines: Whether there are lines between rows. Default: False.
        """
        table = Table(box=HEAVY_HEAD, show_lines=lines, width=self.width)
        for name in columns:
            numbers = name.endswith(">")
            # Text is wrapped, numbers are not.
            table.add_column(
                name.removesuffix(">"),
                justify="right" if numbers else "left",
                no_wrap=numbers,
                overflow="fold",
            )
        for dim, cells in rows:
            styles = [first, *(_ANSWERS.get(cell[0], _NUMBER) for cell in cells[1:])]
            table.add_row(*map(self.cell, cells, styles), style="dim" if dim else None)
        return table

    def cell(self, lines: Iterable[str], style: str) -> Text:
        return Text("\n").join(self.text((line, style)) for line in lines)

    def text(self, *cells: tuple[str, str]) -> Text:
        return Text.assemble(*((self.legible(text), style) for text, style in cells))

    def legible(self, text: str) -> str:
        """Returns `text` without control characters, in characters that the console can encode."""
        if not self.console.encoding.lower().startswith("utf"):
            text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )

    def print_text(self, *cells: tuple[str, str], indent: int = 0) -> None:
        self.print(Padding.indent(self.text(*cells), indent))

    def print(self, renderable: RenderableType) -> None:
        self.console.print(renderable, width=self.width, crop=False)
