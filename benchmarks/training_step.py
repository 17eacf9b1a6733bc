"""Times a training step with each gradient rule, through `fit`, and measures its peak memory.

    KERAS_BACKEND=jax python benchmarks/training_step.py --output build/training_step_jax.json

README.md in this folder explains what is compared and how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contenders
import keras
import measuring
import memory
import numpy as np
from prepared import WEIGHT_DECAY, Setting

import keras_groupopt as kgo

EVERY = 5
# The gradient rules by name. `None` is a plain `keras.Model`, which runs twice as a control.
RULES: dict[str, Callable[[], kgo.GradientRule] | None] = {
    "plain": None,
    "plain_again": None,
    "single_gradient": kgo.SingleGradient,
    "sam": lambda: kgo.SAM(0.05),
    "asam": lambda: kgo.ASAM(0.5),
    "gsam": lambda: kgo.GSAM(0.05),
    "looksam": lambda: kgo.LookSAM(0.05, every=EVERY),
}
PEER = "plain"
# The upper limits of the ratio to the time of the peer.
LIMITS = {"sam": 2.1, "looksam": 1.35}
# The memory of a step above that of the peer, in copies of the weights: one copy of the perturbed
# weights, and one set of gradients.
MEMORY_LIMIT = 2.0


def resnet(widths: tuple[int, ...], blocks: int, stride: int) -> tuple[Any, Any]:
    """Returns inputs and outputs of a residual network for pictures of 32 × 32 pixels."""
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))

    def convolution(x: Any, width: int, size: int, strides: int) -> Any:
        x = layers.Conv2D(width, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    x = layers.ReLU()(convolution(inputs, widths[0], 3, stride))
    for stage, width in enumerate(widths):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            y = layers.ReLU()(convolution(x, width, 3, strides))
            y = convolution(y, width, 3, 1)
            if strides != 1 or x.shape[-1] != width:
                x = convolution(x, width, 1, strides)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return inputs, layers.Dense(10, name="head")(x)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    # ResNet-10 with 4.9 million weights. Its first convolution halves the picture.
    "resnet10": lambda: resnet((64, 128, 256, 512), blocks=1, stride=2),
    "small": lambda: resnet((8, 16), blocks=1, stride=2),
}


def compiled(name: str, settings: argparse.Namespace) -> Any:
    """Returns a model with a gradient rule, compiled with two AdamW groups."""
    keras.utils.set_random_seed(0)
    inputs, outputs = MODELS[settings.model]()
    make = RULES[name]
    if make is None:
        model = keras.Model(inputs, outputs)
    else:
        model = kgo.SharpnessAwareModel(inputs, outputs, gradient_rule=make())
    options = {"weight_decay": WEIGHT_DECAY}
    optimizer = contenders.grouped(Setting(model, "head/.*", None, "", options))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


class Clock(keras.callbacks.Callback):
    """Measures the steps of an epoch, without the work of `fit` before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.wall = self.cpu = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock at the first batch."""
        if not batch:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops the clock when the loss of the last batch is computed."""
        for value in (logs or {}).values():
            float(value)
        self.wall = time.perf_counter() - self.wall
        self.cpu = time.process_time() - self.cpu


def prepare(name: str, settings: argparse.Namespace) -> Callable[[], tuple[float, float]]:
    """Returns a function that trains on `--steps` batches and returns wall and CPU ms per step."""
    model = compiled(name, settings)
    x, y = data(settings)

    def fit() -> tuple[float, float]:
        clock = Clock()
        model.fit(x, y, batch_size=settings.batch, shuffle=False, verbose=0, callbacks=[clock])
        return 1e3 * clock.wall / settings.steps, 1e3 * clock.cpu / settings.steps

    return fit


def data(settings: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns random pictures and labels for `--steps` batches."""
    generator = np.random.default_rng(0)
    count = settings.steps * settings.batch
    pictures = generator.normal(size=(count, 32, 32, 3)).astype("float32")
    return pictures, generator.integers(0, 10, count).astype("int32")


def compare(settings: argparse.Namespace) -> dict[str, Any]:
    """Builds a model for each rule, and times them while they take turns."""
    builds = []
    for build in range(settings.builds):
        names = settings.rules[:: -1 if build % 2 else 1]
        steps = {name: prepare(name, settings) for name in names}
        for step in steps.values():
            for _ in range(settings.warm_up):
                step()
        builds.append(measuring.in_turn(steps, settings.repeats, seed=build))
        del steps
        keras.utils.clear_session()
    results: dict[str, Any] = {}
    for name in settings.rules:
        results[name] = {
            f"{clock}_ms": measuring.spread([times[name][clock] for times in builds])
            for clock in ("wall", "cpu")
        }
        if name != PEER:
            results[name][f"ratio_to_{PEER}"] = {
                clock: measuring.ratio(
                    [times[name][clock] for times in builds],
                    [times[PEER][clock] for times in builds],
                )
                for clock in ("wall", "cpu")
            }
    return results


def memory_of_all(settings: argparse.Namespace) -> dict[str, Any]:
    """Returns the peak memory of a step with each rule, each measured in another process."""
    found = {}
    for name in settings.rules:
        options = ["--memory-of", name, "--model", settings.model]
        options += ["--batch", str(settings.batch), "--steps", str(settings.steps)]
        found[name] = memory.in_new_process(__file__, *options)
    peer = found[PEER]
    for result in found.values():
        copy = result["weights_mib"]
        result["above_plain_in_copies"] = {
            kind: round((result[kind] - peer[kind]) / copy, 2)
            for kind in ("resident_mib", "compiled_mib")
            if result.get(kind) is not None
        }
    return found


def measure_memory(name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Returns the peak memory of this process in an epoch, after epochs that compile."""
    model = compiled(name, settings)
    x, y = data(settings)
    options = {"batch_size": settings.batch, "shuffle": False, "verbose": 0}
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    result: dict[str, Any] = {"weights_mib": round(weights / memory.MEBIBYTE, 4)}
    if keras.backend.backend() == "jax":
        # XLA reports the memory that it plans, which is exact.
        return result | {"compiled_mib": compiled_mebibytes(model, x, y, settings)}
    for _ in range(2):
        model.fit(x, y, **options)
    peak = memory.peak_of(lambda: model.fit(x, y, **options))
    result["resident_mib"] = peak and round(peak[1], 1)
    return result


def compiled_mebibytes(
    model: Any, x: np.ndarray, y: np.ndarray, settings: argparse.Namespace
) -> float:
    """Returns the MiB that XLA plans for inputs, outputs and temporary values of a step."""
    import jax

    model.optimizer.build(model.trainable_variables)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in group] for group in groups)
    batch = x[: settings.batch], y[: settings.batch]
    # The step of Keras 3.10 reads layouts that `fit` records.
    getattr(model, "_record_training_state_sharding_spec", list)()
    lowered = jax.jit(model.train_step, donate_argnums=0).lower(state, batch)
    plan = lowered.compile().memory_analysis()
    total = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return round((total + plan.temp_size_in_bytes) / memory.MEBIBYTE, 1)


def targets(steps: dict[str, Any], peaks: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures that have a limit, and if they meet it."""
    found = {}
    for name in LIMITS.keys() & steps.keys():
        ratio, limit = steps[name][f"ratio_to_{PEER}"]["wall"]["ratio"], LIMITS[name]
        found[f"time: {name} / {PEER}"] = {"ratio": ratio, "limit": limit, "met": ratio <= limit}
    for kind, copies in peaks.get("sam", {}).get("above_plain_in_copies", {}).items():
        found[f"memory: sam - {PEER}, {kind}"] = {
            "copies": copies,
            "limit": MEMORY_LIMIT,
            "met": copies <= MEMORY_LIMIT,
        }
    return found


def arguments(received: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Times a training step with each gradient rule, through `fit`; prints JSON. "
        "The backend is the environment variable KERAS_BACKEND."
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet10")
    add("--rules", choices=RULES, nargs="+", default=list(RULES))
    add("--batch", type=int, default=16, help="pictures in a batch (default: 16)")
    add(
        "--steps", type=int, default=EVERY, help=f"steps that are timed together (default: {EVERY})"
    )
    add("--builds", type=int, default=2, help="number of builds (default: 2)")
    add("--repeats", type=int, default=5, help="rounds per build (default: 5)")
    add("--warm-up", type=int, default=1, help="untimed epochs (default: 1)")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure the memory")
    add("--memory-of", choices=RULES, help="measure the memory of one rule in this process")
    add("--output", type=pathlib.Path, help="file to write instead of standard output")
    settings = parser.parse_args(received)
    if min(settings.batch, settings.builds, settings.repeats, settings.warm_up) < 1:
        parser.error("--batch, --builds, --repeats and --warm-up must be at least 1")
    if settings.steps < 1 or settings.steps % EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}, the period of LookSAM")
    settings.rules = list(dict.fromkeys([PEER, *settings.rules]))
    return settings


def main() -> None:
    """Runs the benchmark and writes its result."""
    settings = arguments()
    if settings.memory_of:
        print(json.dumps(measure_memory(settings.memory_of, settings)))
        return
    backend = keras.backend.backend()
    before = measuring.machine()
    print(f"{backend}: steps …", file=sys.stderr)
    steps = compare(settings)
    peaks: dict[str, Any] = {}
    if settings.memory:
        print(f"{backend}: memory …", file=sys.stderr)
        peaks = memory_of_all(settings)
    hidden = ("output", "memory_of")
    result = {
        "benchmark": "training_step",
        "format": 1,
        "backend": backend,
        "versions": measuring.versions("keras_groupopt", "keras", "numpy", backend),
        "machine": before | {"load_average_after": measuring.machine()["load_average"]},
        "settings": {name: v for name, v in vars(settings).items() if name not in hidden},
        "steps": steps,
        "memory": peaks,
        "targets": targets(steps, peaks),
    }
    measuring.write(result, settings.output)


if __name__ == "__main__":
    main()
