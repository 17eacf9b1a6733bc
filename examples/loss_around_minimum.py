"""Draw the training loss around the minima that plain training, SAM and ASAM find.

A ResNet8 trained on CIFAR-10 learns Fashion-MNIST from 300 images, once with each gradient rule.
Everything else is the same. Then the training loss is measured at

    w + t · d,   ‖d of a filter‖ = ‖w of that filter‖,

for random directions d, which are the same for all rules except for the norms. Biases and
parameters of batch normalization do not move (Li et al. 2018, arXiv:1712.09913). The command

    KERAS_BACKEND=torch python examples/loss_around_minimum.py --output docs/sharpness.png

printed the training loss as mean ± deviation over the directions, and the test accuracy:

    rule        t = 0   t = 0.1         t = 0.2         t = 0.3         t = 0.4        accuracy
    plain       0.048   0.115 ± 0.026   0.524 ± 0.171   1.644 ± 0.667   3.932 ± 2.123   0.800
    SAM(0.05)   0.138   0.180 ± 0.015   0.343 ± 0.088   0.826 ± 0.433   2.285 ± 1.857   0.806
    ASAM(0.3)   0.145   0.174 ± 0.005   0.293 ± 0.033   0.590 ± 0.107   1.386 ± 0.460   0.810

The figures are from one seed. The rules differ in the shape of the minimum, not in the accuracy.
The example does not need a network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
from _common import ROOT, console, spread
from finetune_backbone_and_head import build_model, images
from rich.table import Table

import keras_groupopt as kgo

RULES = {
    "plain": kgo.SingleGradient,
    "SAM(0.05)": lambda: kgo.SAM(0.05),
    "ASAM(0.3)": lambda: kgo.ASAM(0.3),
}
COLOURS = ("#e8833a", "#1b6ca8", "#3a9d5d")
Curves = dict[str, np.ndarray]  # by rule: one row of losses per direction


def trained(rule: kgo.GradientRule, epochs: int) -> keras.Model:
    """Returns a model that is fine-tuned with a gradient rule."""
    keras.utils.set_random_seed(0)
    model = kgo.sharpness_aware(build_model(), rule)
    steps = epochs * 10
    optimizer = kgo.GroupedOptimizer(
        groups=[kgo.Group("backbone", "resnet8", learning_rate_ratio=0.3)],
        model=model,
        rule="adam",
        learning_rate=keras.optimizers.schedules.CosineDecay(1e-2, steps),
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = images("train")
    order = np.random.default_rng(0)
    for _ in range(epochs):
        rows = order.permutation(len(x))
        model.fit(x[rows], y[rows], batch_size=30, shuffle=False, verbose=0)
    return model


def direction(variables: list[keras.Variable], seed: int) -> list[np.ndarray]:
    """Returns a random direction whose filters have the same norms as those of the variables."""
    generator, found = np.random.default_rng(seed), []
    for variable in variables:
        weights = keras.ops.convert_to_numpy(variable)
        drawn = generator.normal(size=weights.shape)
        axes = tuple(range(weights.ndim - 1))  # a filter computes one output
        found.append(drawn * norms(weights, axes) / norms(drawn, axes))
    return found


def norms(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Returns the norm over some axes."""
    return np.sqrt(np.sum(np.square(values), axis=axes))


def losses(model: keras.Model, distances: np.ndarray, directions: int) -> np.ndarray:
    """Returns the training loss at each distance (columns) along each direction (rows)."""
    x, y = images("train")
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    start = [keras.ops.convert_to_numpy(kernel).copy() for kernel in kernels]
    found = np.zeros((directions, len(distances)))
    for row in range(directions):
        way = direction(kernels, seed=row)
        for column, distance in enumerate(distances):
            for kernel, weights, step in zip(kernels, start, way, strict=True):
                kernel.assign(weights + distance * step)
            found[row, column] = model.evaluate(x, y, batch_size=300, verbose=0, return_dict=True)[
                "loss"
            ]
    for kernel, weights in zip(kernels, start, strict=True):
        kernel.assign(weights)
    return found


def table(distances: np.ndarray, curves: Curves, accuracies: dict[str, float]) -> Table:
    """Returns the loss at each distance in either direction, and the test accuracies."""
    shown = sorted({round(abs(t), 6) for t in distances})
    result = Table("rule", title="training loss at distance t, mean ± deviation over directions")
    for t in shown:
        result.add_column(f"t = {t:g}", justify="right", no_wrap=True)
    result.add_column("test accuracy", justify="right")
    for name, rows in curves.items():
        cells = [spread(rows[:, np.isclose(abs(distances), t)].mean(axis=1)) for t in shown]
        result.add_row(name, *cells, f"{accuracies[name]:.3f}")
    return result


def draw(distances: np.ndarray, curves: Curves, accuracies: dict[str, float], path: Path) -> None:
    """Draws one thin line per direction, and a thick one for their mean."""
    from _picture import STYLE, plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        for colour, (name, rows) in zip(COLOURS, curves.items(), strict=True):
            axes.plot(distances, rows.T, color=colour, lw=0.9, alpha=0.4)
            label = f"{name}: test accuracy {100 * accuracies[name]:.1f} %"
            axes.plot(distances, rows.mean(axis=0), color=colour, lw=3, label=label)
        axes.set(title="Training loss along random directions", ylabel="loss", ylim=(0, None))
        axes.set_xlabel("t: distance from the trained weights, relative to each filter's norm")
        axes.legend(loc="upper center")
        figure.savefig(path, dpi=90, facecolor="white")
        plt.close(figure)


def main() -> None:
    """Trains with each rule, measures the losses, prints the table, and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=20, help="epochs of each training (default 20)")
    add("--directions", type=int, default=4, help="random directions (default 4)")
    add("--points", type=int, default=4, help="distances each way (default 4)")
    add("--output", type=Path, default=ROOT / "runs" / "sharpness.png", help="file of the plot")
    options = parser.parse_args()
    distances = np.linspace(-0.4, 0.4, 2 * options.points + 1)
    curves, accuracies = {}, {}
    for name, make in RULES.items():
        model = trained(make(), options.epochs)
        curves[name] = losses(model, distances, options.directions)
        test = model.evaluate(*images("test"), batch_size=100, verbose=0, return_dict=True)
        accuracies[name] = test["accuracy"]
    console.print(table(distances, curves, accuracies))
    draw(distances, curves, accuracies, options.output)
    console.print(f"plot: {options.output}, on {keras.backend.backend()}")


if __name__ == "__main__":
    main()
