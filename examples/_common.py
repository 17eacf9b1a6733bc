"""Options, choice of settings and tables, which all examples use."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
from _runs import Images, Method, Run, Runs, Task, stop_between_steps
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDS = 2  # trials per setting, each validated on another third of the training images
Result = dict[str, Any]
console = Console(highlight=False)


def options_parser(
    description: str, epochs: int, seeds: int, picture: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser of the options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--seeds", type=int, default=seeds, help=f"test runs per method (default {seeds})")
    add("--epochs", type=int, default=epochs, help=f"epochs of every run (default {epochs})")
    add("--steps", type=int, help="optimizer steps per epoch (default: every image once)")
    add("--tries", type=int, help="settings tried per method (default: all)")
    if picture:
        add("--output", type=Path, help="file of the plot (default: in the folder of --runs)")
        add("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw the plot")
    add(
        "--runs",
        type=Path,
        default=ROOT / "runs",
        help="folder that keeps the runs, to resume them",
    )
    add(
        "--fresh",
        action="store_true",
        help="delete the kept runs of these settings, and start over",
    )
    return parser


def installed(package: str) -> Path:
    """Returns the folder of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: see the first lines of {sys.argv[0]}")
    return Path(spec.origin).parent


def with_new_head(backbone: keras.Model, classes: int) -> keras.Model:
    """Returns the backbone with frozen batch statistics, and a new layer `head` on top of it."""
    for layer in backbone.layers:  # a few hundred images are too few for new statistics
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    inputs = keras.Input(backbone.input_shape[1:])
    head = keras.layers.Dense(classes, activation="softmax", name="head")
    return keras.Model(inputs, head(backbone(inputs, training=False)))


def plain(model: keras.Model, steps: int, learning_rate: float) -> keras.optimizers.Optimizer:
    """Returns an Adam that trains all variables at one rate."""
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    return keras.optimizers.Adam(schedule, global_clipnorm=1.0)


def compare(task: Task, methods: Sequence[Method], options: argparse.Namespace) -> list[Result]:
    """Chooses a setting for each method on validation images, then measures it on test images.

    All methods get the same number of settings, epochs and batches. Returns the test results. On
    Ctrl-C it exits with code 130.
    """
    tries = min(len(method.settings[: options.tries]) for method in methods)
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with stop_between_steps() as stop, Progress(*columns, console=console) as progress:
        runs = Runs(options.runs, task, options.epochs, options.steps, options.fresh, stop)
        if kept := runs.finished():
            console.print(f"[cyan]resumes[/] with {kept} finished runs in {runs.folder}")
        total = len(methods) * (options.seeds + (FOLDS * tries * (tries > 1)))
        bar = progress.add_task("all runs", total=total)

        def train(run: Run) -> Result:
            result = runs.result(run, progress)
            progress.advance(bar)
            return result

        try:
            chosen: list[dict[str, float]] = []
            for method in methods:
                before = chosen[-1] if method.adds else {}
                settings = tuple({**before, **setting} for setting in method.settings)
                method = dataclasses.replace(method, settings=settings)
                chosen.append(choose(task, method, tries, train))
            return [
                train(Run(method, setting, seed, task.train, task.test, "test"))
                for method, setting in zip(methods, chosen, strict=True)
                for seed in range(options.seeds)
            ]
        except KeyboardInterrupt:
            progress.console.print("[yellow]stopped[/]; the same command goes on from here")
            raise SystemExit(130) from None


def choose(
    task: Task, method: Method, tries: int, train: Callable[[Run], Result]
) -> dict[str, float]:
    """Returns the setting with the lowest loss on images held out from the training images.

    With few images, the loss distinguishes settings better than the accuracy does.
    """
    if tries == 1:
        return method.settings[0]
    table = Table("setting", "loss", "accuracy", title=f"{method.name} on the validation images")
    losses = []
    for setting in method.settings[:tries]:
        results = [
            train(Run(method, setting, fold, *hold_out(task.train, fold), "validation"))
            for fold in range(FOLDS)
        ]
        loss, accuracy = (np.mean([r[key] for r in results]) for key in ("loss", "accuracy"))
        table.add_row(describe(setting), f"{loss:.3f}", f"{accuracy:.3f}")
        losses.append(loss)
    best = int(np.argmin(losses))
    table.rows[best].style = "bold green"
    console.print(table)
    return method.settings[best]


def hold_out(images: Images, fold: int) -> tuple[Images, Images]:
    """Returns two thirds of the images of each class, and the other third."""
    x, y = images
    order = np.random.default_rng(0).permutation(len(x))
    held_out = order[np.argsort(y[order], kind="stable")][fold::3]
    rest = np.setdiff1d(order, held_out)
    return (x[rest], y[rest]), (x[held_out], y[held_out])


def describe(setting: dict[str, float]) -> str:
    """Returns a setting as text."""
    return ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in setting.items())


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Returns mean and sample standard deviation as text."""
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{deviation}"


def report(task: Task, results: Sequence[Result], options: argparse.Namespace) -> None:
    """Prints the test accuracies side by side, and draws the plot unless `--no-plot` is set."""
    console.print(result_table(results))
    if options.plot:
        from _picture import draw  # only the plot needs matplotlib

        path = options.output or options.runs / f"{task.name}.png"
        draw(results, path)
        console.print(f"plot: {path}")


def result_table(results: Sequence[Result]) -> Table:
    """Returns the test accuracies of all methods side by side."""
    accuracies = accuracies_by_method(results)
    settings = {result["method"]: describe(result["setting"]) for result in results}
    caption = "\n".join(f"{method}: {setting}" for method, setting in settings.items())
    table = Table(title="accuracy on the test images", caption=caption)
    table.add_column("seed", no_wrap=True)
    for seed in range(len(results) // len(accuracies)):
        table.add_column(str(seed), justify="right")
    table.add_column("mean ± deviation", justify="right", style="bold", no_wrap=True)
    for method, values in accuracies.items():
        table.add_row(method, *(f"{value:.3f}" for value in values), spread(values))
    (first, *_, last) = accuracies.values()
    gains = np.subtract(last, first)
    table.add_section()
    table.add_row("difference", *(f"{gain:+.3f}" for gain in gains), spread(gains))
    return table


def accuracies_by_method(results: Sequence[Result]) -> dict[str, list[float]]:
    """Returns the accuracies of each method, in the order of the seeds."""
    found: dict[str, list[float]] = {}
    for result in results:
        found.setdefault(result["method"], []).append(result["accuracy"])
    return found
