"""Measures the sizes of the files of a compiled model, and times saving and loading them.

    KERAS_BACKEND=jax python benchmarks/saved_files.py --output build/saved_files_jax.json

README.md in this folder explains what is compared and how to read the result.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contenders
import keras
import measuring
import models
from prepared import LEARNING_RATE, WEIGHT_DECAY, Setting

import keras_groupopt as kgo

# Our optimizer and its peer, by name. LIMIT is the upper limit of the ratio of their file sizes.
PEERS = {"grouped": "adamw", "grouped_averaged": "adamw_averaged"}
LIMIT = 1.02


def optimizers(model: Any, pattern: str) -> dict[str, Callable[[], Any]]:
    """Returns functions that make the optimizers to save, by name."""

    def grouped(**options: Any) -> Any:
        options = {"weight_decay": WEIGHT_DECAY, **options}
        return contenders.grouped(Setting(model, pattern, None, "", options))

    def adamw(**options: Any) -> Any:
        return keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)

    return {
        "grouped": grouped,
        "grouped_averaged": lambda: grouped(ema=kgo.EMA(0.999)),
        "adamw": adamw,
        "adamw_averaged": lambda: adamw(use_ema=True),
    }


def measure(model: Any, pattern: str, repeats: int) -> dict[str, Any]:
    """Times saving and loading `.keras` and `.weights.h5` files, and measures their sizes."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in optimizers(model, pattern).items():
            optimizer = make()
            model.compile(optimizer=optimizer, loss="mse")
            optimizer.build(model.trainable_variables)
            whole = pathlib.Path(folder) / f"{name}.keras"
            weights = pathlib.Path(folder) / f"{name}.weights.h5"
            work = {
                "save_keras": lambda path=whole: model.save(path),
                "load_keras": lambda path=whole: keras.saving.load_model(path),
                "save_weights": lambda path=weights: model.save_weights(path),
                "load_weights": lambda path=weights: model.load_weights(path),
            }
            results[name] = {}
            for key, call in work.items():
                times = [measuring.timed(call)[0] / 1e3 for _ in range(repeats)]
                results[name][f"{key}_seconds"] = measuring.spread([times])
            results[name]["keras_bytes"] = whole.stat().st_size
            results[name]["weights_bytes"] = weights.stat().st_size
    for name, peer in PEERS.items():
        ratio = round(results[name]["keras_bytes"] / results[peer]["keras_bytes"], 5)
        results[name]["bytes_ratio"] = {"peer": peer, "ratio": ratio, "limit": LIMIT}
    return results


def arguments(received: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Measures files, and times saving and loading them; prints JSON. The backend "
        "is the environment variable KERAS_BACKEND."
    )
    parser.add_argument("--model", choices=models.MODELS, default="resnet50")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of saves and loads (default: 3)"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, help="file to write instead of standard output"
    )
    settings = parser.parse_args(received)
    if settings.repeats < 1:
        parser.error("--repeats must be at least 1")
    return settings


def main() -> None:
    """Runs the benchmark and writes its result."""
    settings = arguments()
    backend = keras.backend.backend()
    model, pattern = models.make(settings.model)
    result = {
        "benchmark": "saved_files",
        "format": 2,
        "backend": backend,
        "versions": measuring.versions("keras_groupopt", "keras", "numpy", "h5py", backend),
        "machine": measuring.machine(),
        "model": models.describe(model, settings.model),
        "repeats": settings.repeats,
        "files": measure(model, pattern, settings.repeats),
    }
    measuring.write(result, settings.output)


if __name__ == "__main__":
    main()
