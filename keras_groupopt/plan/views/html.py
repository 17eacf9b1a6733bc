"""A plan as HTML for notebooks, without scripts or outside resources, and with escaped text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from keras_groupopt.plan.views.figures import GROUP_COLUMNS, GroupFigures, Plan, plan_figures

# A notebook stores its output, and 10,000 variables would add megabytes to the file.
MOST_LISTED = 1000

# The colours work with light and dark themes, since they build on the notebook's text colour.
_STYLE = """<style>
.kgo-plan { font-size: 0.9em; overflow-x: auto; }
.kgo-plan table { border-collapse: collapse; margin: 0.4em 0; }
.kgo-plan th, .kgo-plan td { padding: 0.25em 0.7em; text-align: left; vertical-align: top;
  background: transparent; border: 0 solid rgba(128, 128, 128, 0.45);
  border-bottom-width: 1px; }
.kgo-plan th { border-bottom-width: 2px; }
.kgo-plan .kgo-number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.kgo-plan .kgo-frozen { opacity: 0.55; }
.kgo-plan .kgo-note { border-left: 3px solid #d08700; padding-left: 0.6em; }
.kgo-plan summary { cursor: pointer; }
.kgo-plan dl { display: grid; grid-template-columns: max-content auto; gap: 0.1em 0.8em;
  margin: 0.4em 0; }
.kgo-plan dt { font-weight: bold; }
.kgo-plan dd { margin: 0; }
</style>"""


def to_html(plan: Plan) -> str:
    """Writes a plan as one HTML fragment: one row per group, totals, and variables to unfold.

    Args:
        plan: What `Plan.to_dict()` returns.

    Returns:
        A `<div>` with its own style, for `_repr_html_`. It lists at most 1000 variables per group
        and tells how many more there are.

    Raises:
        ValueError: If `plan` has another format number.

    Example:
    >>> plan = {"format": 1, "provisional": False, "options": {}, "groups": []}
    >>> to_html(plan).startswith('<div class="kgo-plan">')
    True
    """
    figures = plan_figures(plan)
    parts = ['<div class="kgo-plan">', _STYLE, f"<strong>{escape(figures.title)}</strong>"]
    if figures.note:
        parts.append(f'<p class="kgo-note">{escape(figures.note)}</p>')
    groups = ((group.frozen, group.cells()) for group in figures.groups)
    parts.append(_table(GROUP_COLUMNS, groups))
    terms = (
        f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>"
        for label, value in figures.totals + figures.settings
    )
    parts.append(f"<dl>{''.join(terms)}</dl>")
    parts.extend(map(_group_details, figures.groups))
    parts.append("</div>")
    return "\n".join(parts)


def _group_details(group: GroupFigures) -> str:
    columns, rows = group.variable_cells(MOST_LISTED)
    left_out = len(group.variables) - len(rows)
    noun = "variable" if len(group.variables) == 1 else "variables"
    return (
        f"<details><summary><strong>{escape(group.name)}</strong>: "
        f"{len(group.variables):,} {noun}, claimed by "
        f"<code>{escape(group.selector)}</code></summary>"
        + _table(columns, ((group.frozen, [(cell,) for cell in row]) for row in rows))
        + (f"<p>and {left_out:,} more</p>" if left_out else "")
        + "</details>"
    )


def _table(columns: Sequence[str], rows: Iterable[tuple[bool, Sequence[tuple[str, ...]]]]) -> str:
    """Writes a table of escaped cells with one or more lines. True dims a row."""
    numbers = [' class="kgo-number"' if name.endswith(">") else "" for name in columns]
    head = "".join(
        f"<th{number}>{escape(name.removesuffix('>'))}</th>"
        for name, number in zip(columns, numbers, strict=True)
    )
    body = []
    for dim, cells in rows:
        row = "".join(
            f"<td{number}>{'<br/>'.join(map(escape, lines))}</td>"
            for lines, number in zip(cells, numbers, strict=True)
        )
        body.append(f'<tr class="kgo-frozen">{row}</tr>' if dim else f"<tr>{row}</tr>")
    return (
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody></table>"
    )
