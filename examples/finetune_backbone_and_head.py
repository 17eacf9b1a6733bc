"""Fine-tune a pretrained backbone and its new head, each at its own rate.

A ResNet8 trained on CIFAR-10 learns Fashion-MNIST from 300 images. Plain fine-tuning uses one rate.
Grouped fine-tuning trains the backbone slower than the head and pulls it toward its pretrained
weights. Both get the same number of settings, epochs and batches. The settings are chosen on images
that are held out from the 300. The 500 test images only measure the chosen settings.

    python examples/finetune_backbone_and_head.py --seeds 5

It does not need a network. You can stop it with Ctrl-C, and the same command goes on where it
stopped.
"""

from __future__ import annotations

import time
from pathlib import Path

import keras
import numpy as np
from _common import compare, console, options_parser, plain, report, with_new_head
from _runs import Images, Method, Task

import keras_groupopt as kgo

ASSETS = Path(__file__).parent / "assets"


def build_model() -> keras.Model:
    """Returns the pretrained ResNet8 with a new head."""
    pretrained = keras.saving.load_model(ASSETS / "resnet8_cifar10.keras")
    features = pretrained.get_layer("flatten").output
    backbone = keras.Model(pretrained.input, features, name="resnet8")
    for layer in backbone.layers:  # remove the L2 penalty toward zero: we pull toward the anchor
        if getattr(layer, "kernel_regularizer", None):
            layer.kernel_regularizer = layer.kernel.regularizer = None
    return with_new_head(backbone, classes=10)


def grouped(
    model: keras.Model, steps: int, learning_rate: float, ratio: float, decay: float
) -> keras.optimizers.Optimizer:
    """Returns an optimizer with a slower backbone, pulled toward its pretrained kernels."""
    return kgo.GroupedOptimizer(
        groups=[
            kgo.Group(
                "backbone",
                "resnet8",
                learning_rate_ratio=ratio,
                weight_decay=decay,
                anchor="initial",
            ),
            kgo.Group("head", "head"),
        ],
        model=model,
        rule="adam",
        learning_rate=keras.optimizers.schedules.CosineDecay(learning_rate, steps),
        global_clipnorm=1.0,
    )


PLAIN = Method(
    "plain", plain, ({"learning_rate": 3e-3}, {"learning_rate": 1e-3}, {"learning_rate": 1e-2})
)
GROUPED = Method(
    "grouped",
    grouped,
    (
        {"learning_rate": 1e-2, "ratio": 0.3, "decay": 10.0},
        {"learning_rate": 1e-2, "ratio": 0.1, "decay": 10.0},
        {"learning_rate": 3e-3, "ratio": 0.3, "decay": 10.0},
    ),
)


def images(kind: str) -> Images:
    """Returns pictures as the backbone expects them, and their labels."""
    with np.load(ASSETS / "fashion_mini.npz") as arrays:
        pictures, labels = arrays[f"x_{kind}"], arrays[f"y_{kind}"]
    pictures = np.pad(pictures, ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
    return np.repeat(pictures[..., None], 3, axis=-1), labels.astype("int32")


def main() -> None:
    """Prints the plan, compares both methods, and draws the plot."""
    options = options_parser(__doc__, epochs=10, seeds=5).parse_args()
    started = time.perf_counter()
    model = build_model()
    grouped(model, steps=1, **GROUPED.settings[0]).plan.summary()
    task = Task("fashion", build_model, images("train"), images("test"), batch_size=30)
    results = compare(task, [PLAIN, GROUPED], options)
    report(task, results, options)
    seconds = time.perf_counter() - started
    console.print(f"{seconds:.0f} s on {keras.backend.backend()}")


if __name__ == "__main__":
    main()
