"""The plot of the results: time of a step as a share of that of Keras' AdamW."""

from __future__ import annotations

import pathlib

import matplotlib
import results
from matplotlib import pyplot
from results import Run

# It can be read on white and on black.
INK = "#808080"
BARS = (("best peer", "#b0894a"), ("ours", "#3a86c8"), ("copy of the bytes", "#9a9a9a"))


def draw(runs: list[Run], path: pathlib.Path) -> None:
    """Draws one panel per backend and mode, with the bars of each model."""
    runs = [run for run in runs if run.find("adamw") and run.find("grouped")]
    titles = list(dict.fromkeys(run.title for run in runs))
    style = {
        "svg.hashsalt": "keras_groupopt",
        "svg.fonttype": "none",
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        most = max(len([run for run in runs if run.title == title]) for title in titles)
        figure, axes = pyplot.subplots(
            1,
            len(titles),
            figsize=(2.6 * len(titles) + 1, 0.9 + 0.55 * most),
            squeeze=False,
            layout="constrained",
        )
        for panel, title in zip(axes[0], titles, strict=True):
            _panel(panel, title, [run for run in runs if run.title == title])
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _panel(panel: matplotlib.axes.Axes, title: str, runs: list[Run]) -> None:
    for index, (label, color) in enumerate(BARS):
        places, shares = [], []
        for row, run in enumerate(runs):
            entries = {
                "best peer": run.best(run.own_peers()),
                "ours": run.find("grouped"),
                "copy of the bytes": run.find("copy"),
            }
            share = results.times(entries[label], run.find("adamw"))
            if share is not None:
                places.append(row + 0.27 * (index - 1))
                shares.append(share)
        panel.barh(places, shares, height=0.25, color=color, label=label)
    panel.axvline(1.0, color=INK, linewidth=1, linestyle="--", label="Keras AdamW")
    panel.set_title(title, fontsize=9)
    panel.set_yticks(range(len(runs)), [run.model for run in runs])
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
