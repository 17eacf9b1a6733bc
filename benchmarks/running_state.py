"""Times what lives longer than a step: micro-batches, averages, checks, saving and loading.

    KERAS_BACKEND=jax python benchmarks/running_state.py --output build/running_state_jax.json

See README.md in this folder for what is compared and how to read the result.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compiled_steps
import keras
import measuring
import numpy as np
import step_time

import keras_groupopt as kgo

NEVER = 10**9

# By name, what is switched on. A window that never fills shows the micro-step alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "apply": {"on_nonfinite": "propagate"},
    "apply_again": {"on_nonfinite": "propagate"},
    "apply_checked": {"on_nonfinite": "skip"},
    "apply_clipped": {"on_nonfinite": "propagate", "global_clipnorm": 1.0},
    "apply_clipped_checked": {"on_nonfinite": "skip", "global_clipnorm": 1.0},
    "apply_averaged": {"on_nonfinite": "propagate", "ema": kgo.EMA(0.999)},
    "micro_step": {"on_nonfinite": "propagate", "gradient_accumulation_steps": NEVER},
    "micro_step_checked": {"on_nonfinite": "skip", "gradient_accumulation_steps": NEVER},
}
# Numerator, denominator, and the most their ratio may be, where there is a goal.
TARGETS: tuple[tuple[str, str, float | None], ...] = (
    ("apply_again", "apply", None),
    ("apply_checked", "apply", None),
    ("apply_clipped_checked", "apply_clipped", None),
    ("micro_step", "addition", 3.0),
    ("micro_step", "apply", 0.2),
    ("apply_averaged", "apply", 1.03),
)


def compare(model: Any, pattern: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Builds a step for each set of options, and times them and the addition in turn."""
    gradients = step_time.fixed_gradients(model)
    builds = []
    for build in range(settings.builds):
        steps: dict[str, Callable[[], None]] = {}
        names = list(OPTIONS)[:: -1 if build % 2 else 1]
        for name in names:
            optimizer = step_time.grouped(model, pattern, **OPTIONS[name])
            optimizer.build(model.trainable_variables)
            steps[name], _ = compiled_steps.prepare(optimizer, model, gradients)
        steps["addition"] = compiled_steps.prepare_addition(gradients)
        for step in steps.values():
            for _ in range(settings.warm_up):
                step()
        builds.append(measuring.in_turn(steps, settings.repeats, seed=build))
    results: dict[str, Any] = {}
    for name in builds[0]:
        results[name] = {
            f"{clock}_ms": measuring.spread([times[name][clock] for times in builds])
            for clock in ("wall", "cpu")
        }
    for name, peer, limit in TARGETS:
        ratio = measuring.ratio(
            [times[name]["wall"] for times in builds], [times[peer]["wall"] for times in builds]
        )
        results[name][f"ratio_to_{peer}"] = ratio | {"limit": limit}
    return results


def files(model: Any, pattern: str, repeats: int) -> dict[str, Any]:
    """Times saving and loading `.keras` and `.weights.h5` files, and weighs them."""
    contenders = {
        "grouped": lambda: step_time.grouped(model, pattern),
        "grouped_averaged": lambda: step_time.grouped(model, pattern, ema=kgo.EMA(0.999)),
        "adamw": lambda: step_time.adamw(model, pattern),
        "adamw_averaged": lambda: step_time.adamw(model, pattern, use_ema=True),
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in contenders.items():
            optimizer = make()
            model.compile(optimizer=optimizer, loss="mse")
            optimizer.build(model.trainable_variables)
            keras_file = pathlib.Path(folder) / f"{name}.keras"
            weights_file = pathlib.Path(folder) / f"{name}.weights.h5"
            work = {
                "save_keras": lambda path=keras_file: model.save(path),
                "load_keras": lambda path=keras_file: keras.saving.load_model(path),
                "save_weights": lambda path=weights_file: model.save_weights(path),
                "load_weights": lambda path=weights_file: model.load_weights(path),
            }
            results[name] = {
                f"{key}_seconds": measuring.spread([_seconds(call, repeats)])
                for key, call in work.items()
            }
            results[name]["keras_bytes"] = keras_file.stat().st_size
            results[name]["weights_bytes"] = weights_file.stat().st_size
    return results


def _seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def arguments(received: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Times micro-steps, averages, checks and files; prints JSON. The backend is "
        "the environment variable KERAS_BACKEND."
    )
    parser.add_argument("--model", choices=step_time.MODELS, default="resnet50")
    parser.add_argument("--builds", type=int, default=2, help="times all is built (default: 2)")
    parser.add_argument("--repeats", type=int, default=20, help="rounds a build (default: 20)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps (default: 3)")
    parser.add_argument("--file-repeats", type=int, default=3, help="saves and loads (default: 3)")
    parser.add_argument("--output", type=pathlib.Path, help="a file instead of standard output")
    settings = parser.parse_args(received)
    if min(settings.builds, settings.repeats, settings.warm_up, settings.file_repeats) < 1:
        parser.error("--builds, --repeats, --warm-up and --file-repeats must be at least 1")
    return settings


def main() -> None:
    """Runs the benchmark and writes its result."""
    settings = arguments()
    backend = keras.backend.backend()
    packages = ("keras_groupopt", "keras", "numpy", "h5py", backend)
    keras.utils.set_random_seed(0)
    model, pattern = step_time.MODELS[settings.model]()
    print(f"{backend}: steps …", file=sys.stderr)
    steps = compare(model, pattern, settings)
    print(f"{backend}: files …", file=sys.stderr)
    result = {
        "benchmark": "running_state",
        "format": 1,
        "backend": backend,
        "versions": measuring.versions(*packages),
        "machine": measuring.machine(),
        "settings": {name: v for name, v in vars(settings).items() if name != "output"},
        "model": {
            "name": settings.model,
            "trainable_values": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        },
        "steps": steps,
        "files": files(model, pattern, settings.file_repeats),
    }
    measuring.write(result, settings.output)


if __name__ == "__main__":
    main()
