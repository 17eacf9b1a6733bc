"""A plan over time: a plot of its rates, and the rates at some steps as text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.plan.views.printing import new_figure

Curves = Mapping[str, Any]

# The colours differ in lightness too, and each has a line style, so that they differ in grey.
_COLOURS = ("#0072b2", "#d55e00", "#000000", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#777777")
_STYLES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1.5, 1.5, 1.5, 1.5, 1.5)))
_WIDE_SPAN = 100.0

_RATE, _RATIO, _DECAY = "learning rate", "ratio", "weight decay"
_FROM_ZERO = (_RATE, _RATIO, _DECAY)
_LOGARITHMIC = (_RATE, _RATIO)

# The lower and upper edge of a curve, by the place of its group (-1: all groups).
Lines = Mapping[int, tuple[Sequence[float], Sequence[float]]]


def figure(
    curves: Curves, path: str | os.PathLike[str] | None = None, log: bool | None = None
) -> Any:
    """Draws the curves of a plan: rates, and ratios, decays and momentums if there are any.

    Args:
        curves: What `keras_groupopt.plan.sampled_rates.sampled` returned.
        path: A file for the picture. Its extension gives the format. Default: none.
        log: Whether rates and ratios are on a logarithmic scale. Default: True if the highest
            values of two groups differ by more than a factor of 100.

    Returns:
        A `matplotlib.figure.Figure`, without a window.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    groups = [group for group in curves["groups"] if not group["frozen"]]
    looks = _looks(len(groups))
    panels = _panels(curves, groups)
    heights = [2.6, *[1.3] * (len(panels) - 1)]
    drawing = new_figure(
        (8.4, 1.1 + sum(heights)), " `plan.summary(at=[0, 0.5, 1.0])` prints the rates without it."
    )
    axes = drawing.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    steps = curves["steps"]
    for axis, (label, lines) in zip(axes, panels, strict=True):
        for place, (lowest, highest) in lines.items():
            colour, style = looks[place] if place >= 0 else ("#444444", "-")
            name = groups[place]["name"] if place >= 0 else "all groups"
            axis.plot(steps, highest, color=colour, linestyle=style, linewidth=1.8, label=name)
            if lowest != highest:
                axis.plot(steps, lowest, color=colour, linestyle=style, linewidth=0.9)
                axis.fill_between(steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        axis.set_ylabel(label)
        axis.grid(visible=True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        axis.yaxis.set_major_formatter("{x:g}")
        if label in _FROM_ZERO:
            axis.set_ylim(bottom=0)
        if label in _LOGARITHMIC and (_is_wide(lines) if log is None else log):
            _on_a_log_scale(axis, lines)
    _legend(axes[0], groups, [g["name"] for g in curves["groups"] if g["frozen"]])
    axes[-1].set_xlabel("optimizer steps")
    axes[-1].locator_params(axis="x", nbins=8, integer=True, steps=[1, 2, 2.5, 5, 10])
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    drawing.align_ylabels(axes)
    if path is not None:
        drawing.savefig(path, dpi=150)
    return drawing


def _panels(curves: Curves, groups: Sequence[Curves]) -> list[tuple[str, Lines]]:
    """Returns the labels and lines of each panel, from top to bottom.

    There is no panel for ratios if all are 1, and none for decays if there are none.
    """
    panels: list[tuple[str, Lines]] = [
        (_RATE, {i: _edges(g["learning_rate"]) for i, g in enumerate(groups)})
    ]
    ratios = {i: _edges(group["ratio"]) for i, group in enumerate(groups)}
    if any(set(lowest) | set(highest) != {1.0} for lowest, highest in ratios.values()):
        panels.append((_RATIO, ratios))
    decays = {i: g["weight_decay"] for i, g in enumerate(groups) if g["weight_decay"] is not None}
    if decays:
        panels.append((_DECAY, {i: (line, line) for i, line in decays.items()}))
    for name in dict.fromkeys(name for group in groups for name in group["arguments"]):
        own = {i: g["arguments"][name] for i, g in enumerate(groups) if name in g["arguments"]}
        panels.append((name, {i: (line, line) for i, line in own.items()}))
    return [*panels, *((name, {-1: (line, line)}) for name, line in curves["shared"].items())]


def _edges(spread: Curves) -> tuple[list[float], list[float]]:
    return spread["lowest"], spread["highest"]


def _looks(count: int) -> list[tuple[Any, Any]]:
    """Returns a colour and a line style per group. The colours of many groups are a ramp."""
    styles = itertools.cycle(_STYLES)
    if count <= len(_COLOURS):
        return list(zip(_COLOURS[:count], styles, strict=False))
    from matplotlib import colormaps

    ramp = colormaps["viridis"]
    return [(ramp(0.92 * i / (count - 1)), style) for i, style in zip(range(count), styles)]  # noqa: B905


def _peaks(lines: Lines) -> list[float]:
    peaks = [max(highest) for _, highest in lines.values()]
    return [peak for peak in peaks if peak > 0]


def _is_wide(lines: Lines) -> bool:
    peaks = _peaks(lines)
    return bool(peaks) and max(peaks) > _WIDE_SPAN * min(peaks)


def _on_a_log_scale(axis: Any, lines: Lines) -> None:
    peaks = _peaks(lines)
    if not peaks:
        return
    values = [value for lowest, _ in lines.values() for value in lowest if value > 0]
    axis.set_yscale("log", nonpositive="mask")
    # This scale cannot show 0, so it ends three decades below the lowest peak.
    axis.set_ylim(bottom=max(min(values) / 1.5, min(peaks) / 1000), top=max(peaks) * 1.5)


def _legend(axis: Any, groups: Sequence[Curves], frozen: Sequence[str]) -> None:
    """Lists the groups beside the plot, the highest rate first."""
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(groups)), key=lambda i: -max(groups[i]["learning_rate"]["highest"]))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    for name in frozen:
        handles += axis.plot([], [], linestyle="none")
        labels.append(f"{name} (frozen)")
    axis.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        handlelength=3.2,
        title="group",
        alignment="left",
    )


def rate_rows(curves: Curves) -> tuple[list[str], list[list[str]]]:
    r"""Returns the rates of a plan as text: one heading per step, and one row per group.

    Args:
        curves: What `keras_groupopt.plan.sampled_rates.curves` returned.

    Example:

    >>> spread = {"lowest": [0.0, 0.001], "highest": [0.0, 0.01]}
    >>> rate_rows({"steps": [0, 1500], "shares": [None, 0.5], "groups": [
    ...     {"name": "head", "frozen": False, "learning_rate": spread}]})
    (['0', '1,500\n50 %'], [['head', '0', '0.001 … 0.01']])
    """
    headings = [
        f"{step:,}" + ("" if share is None else f"\n{100 * share:g} %")
        for step, share in zip(curves["steps"], curves["shares"], strict=True)
    ]
    rows = []
    for group in curves["groups"]:
        if group["frozen"]:
            cells = ["frozen"] * len(headings)
        else:
            edges = zip(*_edges(group["learning_rate"]), strict=True)
            cells = [_rate(lowest, highest) for lowest, highest in edges]
        rows.append([group["name"], *cells])
    return headings, rows


def _rate(lowest: float, highest: float) -> str:
    low, high = f"{lowest:.4g}", f"{highest:.4g}"
    return low if low == high else f"{low} … {high}"
