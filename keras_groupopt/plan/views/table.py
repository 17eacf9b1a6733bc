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
    GroupFigures,
    Plan,
    PlanFigures,
    parameter_count,
    plan_figures,
    value_text,
)
from keras_groupopt.plan.views.plot import rate_rows

# The colours of Keras' summary: numbers, types, and the two answers of its "Trainable" column.
_NUMBER, _TYPE = "color(34)", "color(33)"
_ANSWERS = {True: ("Y", "bold color(34)"), False: ("N", "bold color(9)")}
_SMALLEST, _WIDE, _LARGEST = 72, 110, 120
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
    """Prints a plan: one row a group, then totals and the settings that all groups share.

    "Excluded" counts the variables that decay leaves out. Memory reads `–` while the optimizer is
    not built and nothing is known, and `≥` where only a part is known.

    Args:
        plan: What `Plan.to_dict()` returns.
        expand: Whether to list each variable too; a name, or several, for these groups only.
        line_length: Width in characters, at least 72. Defaults to the width of the console, 120 at
            most. From 110 on, share, anchor and exclusions have columns of their own.
        print_fn: Called with each line as plain text, instead of printing.
        console: Where to print. Defaults to standard output, with colours in a terminal.
        rates: What `plan.sampled_rates.curves` returns: the rates of each group at some steps,
            printed below.

    Raises:
        ValueError: If `expand` names no group, `line_length` is too small, or both `print_fn` and
            `console` are given.

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
    if print_fn is not None:
        plain = Console(
            width=line_length,
            highlight=False,
            force_terminal=False,
            force_jupyter=False,
            color_system=None,
        )
        with plain.capture() as capture:
            _Printer(plain, line_length).print_plan(figures, expanded, rates)
        for line in capture.get().splitlines():
            print_fn(line.rstrip())
    else:
        console = console or Console(highlight=False)
        _Printer(console, line_length).print_plan(figures, expanded, rates)


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
        wide = self.width >= _WIDE
        self.print(self.wide_table(figures) if wide else self.narrow_table(figures))
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
        """A column per step, in as many tables below each other as the width asks for."""
        headings, rows = rate_rows(rates)
        longest = max(len(cell) for row in rows for cell in row[1:])
        column = 3 + max(longest, *(len(line) for text in headings for line in text.split("\n")))
        names = min(max(len(row[0]) for row in rows), self.width // 3)
        each = max(1, (self.width - names - 4) // column)
        tables = []
        for start in range(0, len(headings), each):
            shown = slice(start, start + each)
            table = self.table("Group", *(f"{text}>" for text in headings[shown]), lines=False)
            table.width = None
            for row, group in zip(rows, rates["groups"], strict=True):
                table.add_row(
                    self.text((row[0], "")),
                    *(self.number(cell) for cell in row[1:][shown]),
                    style="dim" if group["frozen"] else None,
                )
            tables.append(table)
        return tables

    def wide_table(self, figures: PlanFigures) -> Table:
        table = self.table(
            "Group (rule)", "Variables>", "Params>", "Share>", "Learning rate", "Weight decay",
            "Anchor", "Excluded>", "Memory>",
        )  # fmt: skip
        for group in figures.groups:
            table.add_row(
                self.text((f"{group.name} (", ""), (group.rule, _TYPE), (")", "")),
                self.number(f"{group.variable_count:,}"),
                self.number(f"{group.parameters:,}"),
                self.number(group.share),
                self.number(group.learning_rate),
                self.number(group.weight_decay),
                self.text((group.anchor, "")),
                self.number(group.excluded),
                self.number(group.memory),
                style="dim" if group.frozen else None,
            )
        return table

    def narrow_table(self, figures: PlanFigures) -> Table:
        """Fewer columns than the wide table, with the rest on further lines of the same cells."""
        table = self.table(
            "Group (rule)", "Variables>", "Params>", "Learning rate", "Weight decay", "Memory>"
        )
        for group in figures.groups:
            decay = [self.number(group.weight_decay)]
            if group.decays:
                decay.append(self.text((f"→ {group.anchor}", "")))
                decay.append(self.text((f"{group.excluded} excluded", "")))
            rule = self.text(("(", ""), (group.rule, _TYPE), (")", ""))
            table.add_row(
                _lines(self.text((group.name, "")), rule),
                self.number(f"{group.variable_count:,}"),
                _lines(self.number(f"{group.parameters:,}"), self.number(group.share)),
                self.number(group.learning_rate),
                _lines(*decay),
                self.number(group.memory),
                style="dim" if group.frozen else None,
            )
        return table

    def variables_table(self, group: GroupFigures) -> Table:
        ratios = [variable.get("ratio", 1.0) for variable in group.variables]
        several = any(ratio != 1.0 for ratio in ratios)
        table = self.table(
            *("Path", "Shape", "Dtype", "Params>", *(["Ratio>"] if several else [])),
            *("Decayed", "Anchored"),
            lines=False,
        )
        table.columns[0].ratio = 1
        for variable, ratio in zip(group.variables, ratios, strict=True):
            table.add_row(
                self.text((variable["path"], _TYPE)),
                self.number(value_text(variable["shape"])),
                self.text((variable["dtype"], "")),
                self.number(f"{parameter_count([variable]):,}"),
                *([self.number(value_text(ratio))] if several else []),
                *(Text(*_ANSWERS[bool(variable[key])]) for key in ("decayed", "anchored")),
                style="dim" if group.frozen else None,
            )
        return table

    def table(self, *columns: str, lines: bool = True) -> Table:
        """An empty table of this width; `>` after a name marks a column of numbers."""
        table = Table(box=HEAVY_HEAD, show_lines=lines, width=self.width)
        for name in columns:
            numbers = name.endswith(">")
            # A number is never broken over two lines; text gives way instead.
            table.add_column(
                name.removesuffix(">"),
                justify="right" if numbers else "left",
                no_wrap=numbers,
                overflow="fold",
            )
        return table

    def number(self, text: str) -> Text:
        return self.text((text, _NUMBER))

    def text(self, *cells: tuple[str, str]) -> Text:
        return Text.assemble(*((self.legible(text), style) for text, style in cells))

    def legible(self, text: str) -> str:
        """`text` without control characters, in what the encoding of the console can write."""
        if not self.console.encoding.lower().startswith("utf"):
            text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )

    def print_text(self, *cells: tuple[str, str], indent: int = 0) -> None:
        self.print(Padding.indent(self.text(*cells), indent))

    def print(self, renderable: RenderableType) -> None:
        self.console.print(renderable, width=self.width, crop=False)


def _lines(*texts: Text) -> Text:
    return Text("\n").join(texts)
