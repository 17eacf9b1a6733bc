"""Times one optimizer step of keras_groupopt and of its peers, and weighs their files.

    KERAS_BACKEND=jax python benchmarks/step_time.py --output build/step_time_jax.json

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

import keras_groupopt as kgo

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
# Well below the norm of the gradients, so that clipping has work to do.
CLIPNORM = 1.0

# The most that one step, and one file, may take of the peer's.
STEP_LIMIT = 1.1
FILE_LIMIT = 1.02


def resnet50() -> Any:
    """`keras.applications.ResNet50` and the pattern of its first group."""
    return keras.applications.ResNet50(weights=None), "conv[1-4]_.*"


def small() -> Any:
    """A model to try the benchmark with, and the pattern of its first group."""
    layers = keras.layers
    blocks = []
    for index in range(3):
        blocks.append(layers.Conv2D(128, 3, padding="same", name=f"conv{index}"))
        blocks.append(layers.BatchNormalization(name=f"norm{index}"))
    head = [layers.GlobalAveragePooling2D(name="pool"), layers.Dense(10, name="head")]
    return keras.Sequential([keras.Input((16, 16, 3)), *blocks, *head]), "(conv|norm)[01]/.*"


MODELS: dict[str, Callable[[], Any]] = {"resnet50": resnet50, "small": small}


# The contenders ------------------------------------------------------------------------------
# Both groups have one rate: then all of them do the same arithmetic, which is checked.


def grouped(model: Any, pattern: str, exclude: Any = (), **options: Any) -> Any:
    """Ours: two AdamW groups with decay."""
    return kgo.GroupedOptimizer(
        [kgo.Group("early", kgo.regex(pattern)), kgo.Group("late", ~kgo.regex(pattern))],
        model=model,
        rule="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        exclude_from_decay=exclude,
        # Peers do not look for gradients that are not finite; `running_state.py` times that.
        **{"on_nonfinite": "propagate", **options},
    )


def grouped_default_exclusion(model: Any, pattern: str, **options: Any) -> Any:
    """Ours, with biases, scales and offsets left out of the decay, as it is by default."""
    return grouped(model, pattern, kgo.default_exclude_from_decay, **options)


def multi_optimizer(model: Any, pattern: str, **options: Any) -> Any:
    """`keras.optimizers.MultiOptimizer` with two AdamW; a clipping norm is one per group."""
    early, late = (adamw(model, pattern, **options) for _ in range(2))
    optimizers = keras.optimizers
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(late, {pattern: early}))


def adamw(model: Any, pattern: str, **options: Any) -> Any:
    """`keras.optimizers.AdamW`, one group."""
    return keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)


def multi_optimizer_again(model: Any, pattern: str, **options: Any) -> Any:
    """The peer a second time: how far its ratio is from 1 is how far to trust the others."""
    return multi_optimizer(model, pattern, **options)


PEER = "multi_optimizer"
REFERENCE = "adamw"
CONTENDERS = (grouped, grouped_default_exclusion, multi_optimizer, multi_optimizer_again, adamw)
CLIPPING: dict[str, dict[str, Any]] = {
    "no_clip": {},
    "global_clip": {"global_clipnorm": CLIPNORM},
}


def fixed_gradients(model: Any) -> list[np.ndarray]:
    """Returns one random gradient per trainable variable, the same in each run."""
    generator = np.random.default_rng(0)
    return [
        generator.normal(0.0, 0.01, size=variable.shape).astype("float32")
        for variable in model.trainable_variables
    ]


def compare(
    model: Any, pattern: str, options: dict[str, Any], settings: argparse.Namespace, eager: bool
) -> dict[str, Any]:
    """Builds every contender, checks that they agree, and times them in turn.

    All are built anew `--builds` times, every second time in the opposite order: one that is
    built first gets other memory than one built last, which shows in the times.
    """
    gradients = fixed_gradients(model)
    start = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    results: dict[str, Any] = {
        contender.__name__: {"what": (contender.__doc__ or "").strip()} for contender in CONTENDERS
    }
    builds = []
    for build in range(settings.builds):
        steps: dict[str, Callable[[], None]] = {}
        weights: dict[str, list[np.ndarray]] = {}
        for contender in CONTENDERS[:: -1 if build % 2 else 1]:
            name = contender.__name__
            for variable, value in zip(model.trainable_variables, start, strict=True):
                variable.assign(value)
            try:
                optimizer = contender(model, pattern, **options)
            except AttributeError as error:
                # A peer that the installed Keras does not have is missing, not a failed run.
                results[name]["error"] = str(error)
                continue
            began = time.perf_counter()
            optimizer.build(model.trainable_variables)
            built = time.perf_counter()
            step, read = compiled_steps.prepare(optimizer, model, gradients, eager=eager)
            prepared = time.perf_counter()
            step()
            first = time.perf_counter()
            for _ in range(settings.warm_up - 1):
                step()
            steps[name], weights[name] = step, read()
            results[name].setdefault("build_seconds", []).append(round(built - began, 3))
            # The first step traces and compiles.
            results[name].setdefault("first_step_seconds", []).append(round(first - prepared, 3))
        for name, values in weights.items():
            results[name]["largest_weight_difference"] = largest(values, weights[REFERENCE])
        del weights
        builds.append(measuring.in_turn(steps, settings.repeats, seed=build))
    for name in builds[0]:
        for clock in ("wall", "cpu"):
            own = [times[name][clock] for times in builds]
            results[name][f"{clock}_ms"] = measuring.spread(own)
            for peer in {PEER, REFERENCE} & builds[0].keys() - {name}:
                others = [times[peer][clock] for times in builds]
                ratios = results[name].setdefault(f"ratio_to_{peer}", {})
                ratios[clock] = measuring.ratio(own, others)
    return results


def largest(values: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Returns the largest difference of two lists of weights."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(values, others, strict=True))


def weigh(model: Any, pattern: str) -> dict[str, Any]:
    """Returns the bytes of the `.keras` file of the model compiled with each contender."""
    sizes: dict[str, Any] = {}
    for contender in (grouped, multi_optimizer, adamw):
        try:
            optimizer = contender(model, pattern)
        except AttributeError:
            continue
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.keras"
            model.save(path)
            sizes[contender.__name__] = path.stat().st_size
    ratio = round(sizes["grouped"] / sizes["adamw"], 5)
    return {"bytes": sizes, "ratio": ratio, "limit": FILE_LIMIT, "met": ratio <= FILE_LIMIT}


def targets(steps: dict[str, Any]) -> dict[str, Any]:
    """Returns the ratios that have a limit, and whether they keep it."""
    found = {}
    for case, peer in (("no_clip", PEER), ("global_clip", REFERENCE)):
        if case in steps and f"ratio_to_{peer}" in steps[case]["grouped"]:
            ratio = steps[case]["grouped"][f"ratio_to_{peer}"]["wall"]["ratio"]
            name = f"{case}: grouped / {peer}"
            found[name] = {"ratio": ratio, "limit": STEP_LIMIT, "met": ratio <= STEP_LIMIT}
    return found


def arguments(received: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Times one optimizer step against its peers; prints JSON. The backend is "
        "the environment variable KERAS_BACKEND."
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--builds", type=int, default=2, help="times all is built (default: 2)")
    parser.add_argument("--repeats", type=int, default=20, help="rounds a build (default: 20)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps (default: 3)")
    parser.add_argument("--clip", choices=CLIPPING, nargs="+", default=list(CLIPPING))
    parser.add_argument("--eager", action="store_true", help="TensorFlow: also without a graph")
    parser.add_argument("--output", type=pathlib.Path, help="a file instead of standard output")
    settings = parser.parse_args(received)
    if min(settings.builds, settings.repeats, settings.warm_up) < 1:
        parser.error("--builds, --repeats and --warm-up must be at least 1")
    return settings


def main() -> None:
    """Runs the benchmark and writes its result."""
    settings = arguments()
    backend = keras.backend.backend()
    packages = ("keras_groupopt", "keras", "numpy", "h5py", backend)
    result: dict[str, Any] = {
        "benchmark": "step_time",
        "format": 1,
        "backend": backend,
        "versions": measuring.versions(*packages),
        "machine": measuring.machine(),
        "settings": {
            **{name: v for name, v in vars(settings).items() if name != "output"},
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "global_clipnorm": CLIPNORM,
            "dtype": "float32",
        },
    }
    keras.utils.set_random_seed(0)
    model, pattern = MODELS[settings.model]()
    result["model"] = {
        "name": settings.model,
        "trainable_variables": len(model.trainable_variables),
        "trainable_values": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
    }
    modes = [False, True] if settings.eager and compiled_steps.can_run_eagerly() else [False]
    for eager in modes:
        steps = {}
        for case in settings.clip:
            print(f"{backend}: {case}{' eager' if eager else ''} …", file=sys.stderr)
            steps[case] = compare(model, pattern, CLIPPING[case], settings, eager)
        result["eager_steps" if eager else "steps"] = steps
    result["file_size"] = weigh(model, pattern)
    result["targets"] = targets(result["steps"])
    result["machine"]["load_average_after"] = measuring.machine()["load_average"]
    measuring.write(result, settings.output)


if __name__ == "__main__":
    main()
