"""Times an optimizer step of keras_groupopt and of its peers, and their start-up.

    KERAS_BACKEND=jax python benchmarks/step_time.py --folder build/benchmarks

README.md in this folder explains what is compared and how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import backend
import contenders
import keras
import measuring
import memory
import models
import numpy as np
from contenders import CASES, Contender
from prepared import EPSILON, Prepared, Setting

SETS = {"peers": contenders.peers, "switches": contenders.switches}
Key = tuple[str, str]
# A contender that raises these is not available in the installed versions.
UNABLE = (AttributeError, RuntimeError)


def entries(name: str) -> dict[Key, Contender]:
    """Returns the contenders of a set, by case and name."""
    found: dict[Key, Contender] = {}
    for contender, made in SETS[name]().items():
        switched = name == "switches" and contender in contenders.OURS
        found |= {(case, contender): made for case in (CASES if switched else ["basic"])}
    return found


def prepare(contender: Contender, case: str, setting: Mapping[str, Any], start: Any) -> Prepared:
    """Prepares a contender, beginning with the common weights."""
    model = setting["model"]
    for variable, value in zip(model.trainable_variables, start, strict=True):
        variable.assign(value)
    gc.collect()
    backend.steps.fresh()
    return contender.prepare(Setting(**setting, options=CASES[case]))


def compare(
    found: Mapping[Key, Contender], setting: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Builds each contender, takes the first steps, and times the next ones in turns.

    Everything is built `--builds` times, each second time in the opposite order, because the order
    decides which memory a contender gets, and this affects its time.
    """
    start = [np.array(keras.ops.convert_to_numpy(v)) for v in setting["model"].trainable_variables]
    results: dict[Key, dict[str, Any]] = {key: {} for key in found}
    builds = []
    for build in range(options.builds):
        steps: dict[Any, Any] = {}
        weights: dict[Key, list[np.ndarray]] = {}
        for key in list(found)[:: -1 if build % 2 else 1]:
            print(f"  {' '.join(key)} …", file=sys.stderr)
            try:
                prepared = prepare(found[key], key[0], setting, start)
                for _ in range(options.steps - 1):
                    prepared.step()
            except UNABLE as error:
                results[key]["error"] = " ".join(str(error).split())[:200]
                continue
            steps[key] = prepared.step
            for part, seconds in prepared.start_up.items():
                clocks = results[key].setdefault("start_up", {}).setdefault(part, {})
                for clock, value in seconds.items():
                    clocks.setdefault(clock, []).append(value)
            results[key]["state_bytes"] = prepared.state_bytes
            if prepared.weights is not None and not build:
                weights[key] = prepared.weights()
        for key in weights:
            reference = key[0], found[key].reference
            if reference in weights:
                results[key]["compared_with"] = reference[1]
                results[key]["largest_weight_difference"] = largest(
                    weights[key], weights[reference]
                )
        del weights
        builds.append(measuring.in_turn(steps, options.rounds, seed=build))
        del steps
    for key in builds[0]:
        for clock in ("wall", "cpu"):
            times = [times[key][clock] for times in builds]
            results[key][f"{clock}_ms"] = measuring.spread(times)
            rounded = [[round(value, 3) for value in rounds] for rounds in times]
            results[key].setdefault("rounds", {})[clock] = rounded
    return [
        {"case": case, "contender": name, "what": made.what, "note": made.note}
        | results[case, name]
        for (case, name), made in found.items()
    ]


def largest(values: Iterable[np.ndarray], others: Iterable[np.ndarray]) -> float:
    """Returns the largest difference between two lists of weights."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(values, others, strict=True))


def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    """Returns the memory of a step of one contender, measured in this process."""
    mode, case, name = options.memory_of
    setting, start = common(options)
    contender = {**contenders.peers(), **contenders.switches()}[name]
    prepared = prepare(contender, case, {**setting, "mode": mode}, start)
    prepared.step()
    del start
    return memory.of_step(prepared.step, models.nbytes(setting["model"].trainable_variables))


def common(options: argparse.Namespace) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the setting that all contenders share, and the first weights."""
    model, pattern = models.make(options.model, options.dtype)
    gradients = [models.fixed_gradients(model, seed) for seed in range(2)]
    feed = backend.steps.Feed(gradients, model.trainable_variables)
    start = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    shared = {"model": model, "pattern": pattern, "feed": feed, "epsilon": options.epsilon}
    return shared, start


def warm_up(modes: Iterable[str]) -> None:
    """Runs work that a process does only once, so that no contender is charged for it."""
    model, pattern = models.make("small")
    feed = backend.steps.Feed([models.fixed_gradients(model, 0)] * 2, model.trainable_variables)
    for mode in modes:
        for name in ("grouped", "adamw"):
            setting = Setting(model, pattern, feed, mode, contenders.BASIC)
            with contextlib.suppress(*UNABLE):
                contenders.peers()[name].prepare(setting)


def arguments(received: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Times one optimizer step against its peers; writes JSON. The backend is "
        "the environment variable KERAS_BACKEND."
    )
    add = parser.add_argument
    add("--model", choices=models.MODELS, default="resnet50")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    add("--modes", choices=backend.steps.MODES, nargs="+", default=backend.steps.USUAL_MODES)
    add("--sets", choices=SETS, nargs="+", default=["peers"], help="default: peers")
    add("--builds", type=int, default=1, help="number of builds (default: 1)")
    add("--rounds", type=int, default=15, help="timed steps per build (default: 15)")
    add("--steps", type=int, default=20, help="steps before weights are compared (default: 20)")
    add("--epsilon", type=float, default=EPSILON, help=f"epsilon of AdamW (default: {EPSILON})")
    add("--memory", action="store_true", help="also measure peak memory, in other processes")
    add(
        "--memory-of", nargs=3, metavar=("MODE", "CASE", "NAME"), help="measure one in this process"
    )
    add("--folder", type=pathlib.Path, help="folder of the file, instead of standard output")
    options = parser.parse_args(received)
    if min(options.builds, options.rounds, options.steps) < 1:
        parser.error("--builds, --rounds and --steps must be at least 1")
    return options


def main() -> None:
    """Runs the benchmark and writes its result."""
    options = arguments()
    if options.memory_of:
        print(json.dumps(measure_memory(options)))
        return
    before = measuring.machine()
    warm_up(options.modes)
    setting, _ = common(options)
    results = []
    for mode in options.modes:
        for name in options.sets:
            print(f"{backend.NAME}, {options.model}, {mode}: {name}", file=sys.stderr)
            found = compare(entries(name), {**setting, "mode": mode}, options)
            results += [{"set": name, "mode": mode, **entry} for entry in found]
    if options.memory:
        common_arguments = ("--model", options.model, "--dtype", options.dtype, "--memory-of")
        for entry in results:
            if "error" not in entry and entry["contender"] not in ("copy", "addition"):
                which = (entry["mode"], entry["case"], entry["contender"])
                print(f"  memory of {' '.join(which)} …", file=sys.stderr)
                entry["memory"] = memory.in_new_process(__file__, *common_arguments, *which)
    hidden = ("folder", "memory_of", "model")
    result = {
        "benchmark": "step_time",
        "format": 2,
        "backend": backend.NAME,
        "model": models.describe(setting["model"], options.model),
        "versions": measuring.versions(*versioned()),
        "machine": before
        | {
            "load_average_after": measuring.machine()["load_average"],
            "devices": backend.steps.devices(),
        },
        "settings": {name: v for name, v in vars(options).items() if name not in hidden},
        "entries": results,
    }
    suffix = "" if options.dtype == "float32" else f"_{options.dtype}"
    name = f"{backend.NAME}_{options.model}{suffix}.json"
    measuring.write(result, options.folder and options.folder / name)


def versioned() -> list[str]:
    """Returns the packages whose versions matter."""
    optax = ["optax"] if backend.NAME == "jax" and backend.peers() else []
    return ["keras_groupopt", "keras", "numpy", backend.NAME, *optax]


if __name__ == "__main__":
    main()
