"""The plot of a comparison: rates, distances from the start, accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from _common import accuracies_by_method, spread
from matplotlib.axes import Axes

COLOURS = {"plain": "#e8833a", "grouped": "#1b6ca8"}
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "legend.fontsize": 11,
}
LINES = ("-", "--", ":", "-.")


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the logged values as means over the seeds, and each test accuracy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure, (rate, drift, accuracy) = plt.subplots(
            1, 3, figsize=(15, 5.2), width_ratios=(5, 5, 4), layout="constrained"
        )
        for method in accuracies_by_method(results):
            runs = [result for result in results if result["method"] == method]
            for key, label in rate_keys(runs[0]):
                plot(rate, runs, key, label)
            for key in (key for key in runs[0]["history"][0] if key.startswith("drift_")):
                plot(drift, runs, key, key.removeprefix("drift_"))
        rate.set(title="Learning rate of each group", ylabel="learning rate")
        drift.set(title="Drift from the start (the anchor)", ylabel="‖weights − weights at step 0‖")
        for axes in (rate, drift):
            axes.set(xlabel="optimizer step", xlim=(0, None), ylim=(0, None))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
        draw_accuracies(accuracy, accuracies_by_method(results))
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def rate_keys(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the keys of the logged rates, and the label of each."""
    prefix = "learning_rate_"
    groups = [key for key in run["history"][-1] if key.startswith(prefix)]
    return [(key, key.removeprefix(prefix)) for key in groups] or [("learning_rate", "all")]


def plot(axes: Axes, runs: Sequence[dict[str, Any]], key: str, label: str) -> None:
    """Draws one line: the mean over the runs after each epoch."""
    method = runs[0]["method"]
    values = np.mean([[row[key] for row in run["history"]] for run in runs], axis=0)
    steps = np.arange(len(values)) * runs[0]["steps_per_epoch"]
    drawn = sum(line.get_color() == COLOURS[method] for line in axes.lines)
    width = 4.5 if method == "plain" else 2.2  # wide, so that it shows below another line
    style = {"ls": LINES[drawn % len(LINES)], "lw": width, "color": COLOURS[method]}
    axes.plot(steps, values, **style, label=f"{method}: {label}")


def draw_accuracies(axes: Axes, accuracies: dict[str, list[float]]) -> None:
    """Draws one dot per seed, and the mean and deviation of each method."""
    for place, (method, values) in enumerate(accuracies.items()):
        colour = COLOURS[method]
        offsets = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else [0]
        axes.scatter(place + np.asarray(offsets), values, 55, color=colour, alpha=0.6, lw=0)
        deviation = np.std(values, ddof=1) if len(values) > 1 else 0
        axes.errorbar(
            place + 0.27, np.mean(values), deviation, fmt="o", color=colour, capsize=5, lw=2
        )
        text = spread(np.multiply(values, 100), digits=1).replace(" ± ", "\n± ")
        axes.annotate(text, (place + 0.34, np.mean(values)), va="center", color=colour)
    axes.set(title="Test accuracy in %", xlim=(-0.4, len(accuracies) - 0.2))
    axes.set_xlabel("one dot per seed; mean and deviation")
    axes.set_xticks(range(len(accuracies)), list(accuracies), fontsize=13)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}")
    axes.grid(axis="x", visible=False)
