"""The result of `LearningRateFinder`: curves, suggested rates, a table and a plot."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

from keras_groupopt.plan.views.printing import new_figure, printing

_TOGETHER = "all together"
# The suggestion is a tenth of the rate with the lowest loss, as in Smith 2015 and fastai.
_MARGIN = 10.0


@dataclasses.dataclass(frozen=True)
class RateCurve:
    """The loss after a step at each rate of a sweep.

    Args:
        rates: The rates, in increasing order.
        losses: The smoothed loss of the next batch after the step at each rate.
        raw_losses: The same losses, not smoothed.
        first_loss: The loss before the first step.
        diverged: Whether the sweep ended early because the loss had risen too much.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    raw_losses: tuple[float, ...]
    first_loss: float
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate with the lowest loss, or `None` if the loss only rose."""
        if not self.losses or self.lowest == self._first:
            return None
        return self.rates[self.lowest] / _MARGIN

    @property
    def lowest(self) -> int:
        """The index of the lowest loss after the first tenth, whose means are of few batches."""
        return min(range(self._first, len(self.losses)), key=self.losses.__getitem__)

    @property
    def _first(self) -> int:
        return len(self.losses) // 10


class RateCurves:
    """The result of `kgo.LearningRateFinder.find`.

    Args:
        curves: One `RateCurve` per group, by name. The key `None` is for all groups together.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> model.compile(kgo.GroupedOptimizer(model=model, rule="sgd"), loss="mse")
    >>> found = kgo.LearningRateFinder(steps=30).find(model, np.ones((8, 4)), np.ones((8, 2)))
    >>> 1e-3 < found.learning_rate < 1.0
    True
    >>> list(found.curves)
    [None]
    """

    def __init__(self, curves: Mapping[str | None, RateCurve]) -> None:
        self.curves = dict(curves)

    def __repr__(self) -> str:
        named = {"all" if name is None else name: rate for name, rate in self.suggestions.items()}
        return f"RateCurves(suggestions={named})"

    @property
    def suggestions(self) -> dict[str | None, float | None]:
        """A suggested rate for each curve: a tenth of the rate with the lowest loss.

        It is `None` if the loss only rose. A suggestion is a starting point and not an optimum: the
        loss of few batches is noisy, so look at the plot.
        """
        return {name: curve.suggestion for name, curve in self.curves.items()}

    @property
    def learning_rate(self) -> float | None:
        """The suggestion for the base rate, with all groups trained at their ratios."""
        curve = self.curves.get(None)
        return None if curve is None else curve.suggestion

    def summary(
        self,
        *,
        print_fn: Callable[[str], object] | None = None,
        console: Console | None = None,
    ) -> None:
        """Prints one row per curve: the suggestion, the lowest loss, and the rate of divergence.

        Args:
            print_fn: Called with each line as plain text, instead of printing. Default: none.
            console: Where to print. Default: standard output.
        """
        table = Table(box=HEAVY_HEAD)
        table.add_column("Group")
        for column in ("Suggestion", "Lowest loss", "At rate", "Diverged at"):
            table.add_column(column, justify="right")
        for name, curve in self.curves.items():
            table.add_row(_title(name), *_figures(curve))
        with printing(print_fn, console, width=100) as target:
            target.print(table)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the smoothed losses over the rates, with a mark at each suggestion.

        Args:
            path: A file for the figure. Its extension gives the format. Default: none.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure = new_figure((7.0, 4.5))
        axes = figure.add_subplot()
        for name, curve in self.curves.items():
            if not curve.rates:
                continue
            rate = curve.suggestion
            label = _title(name) + (": no suggestion" if rate is None else f": {rate:.1e}")
            (line,) = axes.plot(curve.rates, curve.losses, label=label)
            if rate is not None:
                height = _at(curve.rates, curve.losses, rate)
                axes.plot([rate], [height], marker="o", color=line.get_color())
        axes.set_xscale("log")
        axes.set_xlabel("learning rate of the group (all together: base rate)")
        axes.set_ylabel("loss, smoothed")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def _title(name: str | None) -> str:
    return _TOGETHER if name is None else name


def _figures(curve: RateCurve) -> list[str]:
    text = "-" if curve.suggestion is None else f"{curve.suggestion:.2e}"
    if not curve.losses:
        return [text, "-", "-", "at once" if curve.diverged else "-"]
    loss, rate = curve.losses[curve.lowest], curve.rates[curve.lowest]
    end = f"{curve.rates[-1]:.2e}" if curve.diverged else "-"
    return [text, f"{loss:.4g}", f"{rate:.2e}", end]


def _at(rates: Sequence[float], losses: Sequence[float], rate: float) -> float:
    """Returns the loss at the rate nearest to `rate`."""
    place = min(range(len(rates)), key=lambda i: abs(math.log(rates[i] / rate)))
    return losses[place]
