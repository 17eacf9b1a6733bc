"""Trains in child processes that are killed at random moments, and compares where they end.

    KERAS_BACKEND=jax python tests/programs/kill_resume.py --way backup --kills 100 --seed 1

A child is a fork of this process, which has imported everything and started no backend: it costs
what its training costs. It tells what it does through a pipe: `b` after a batch, `e` before a save,
`s` after it. The parent kills it by SIGKILL at a random moment after one of these, half of the time
within a save, and starts the next child, which resumes. A run that reaches its end must have the
weights and the optimizer state of a run that nobody touched, bit for bit; then the next begins.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

# Children of JAX compile the same programs: the first one's are kept for the others.
CACHE = tempfile.TemporaryDirectory()
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import keras_groupopt as kgo  # noqa: E402

EPOCHS, BATCHES, BATCH_SIZE = 8, 2, 4
PATIENCE = 120.0
_numbers = np.random.default_rng(0)
X = _numbers.normal(size=(BATCHES * BATCH_SIZE, 6)).astype("float32")
Y = _numbers.normal(size=(BATCHES * BATCH_SIZE, 2)).astype("float32")


# The child ----------------------------------------------------------------------------------------


class Tell(keras.callbacks.Callback):
    """Writes what happens into a pipe."""

    def __init__(self, pipe: int, at_batch: str, at_epoch: str) -> None:
        super().__init__()
        self.pipe, self.at_batch, self.at_epoch = pipe, at_batch, at_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        os.write(self.pipe, self.at_batch.encode())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        os.write(self.pipe, self.at_epoch.encode())


def make_model(way: str) -> keras.Model:
    """A model with one of everything that has to come back.

    Backups come amid a window of accumulation: three batches a window, two an epoch.
    """
    keras.utils.set_random_seed(0)
    if way == "checkpoint":
        keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh", name="body"),
            keras.layers.BatchNormalization(),
            # Keras' own callbacks do not save the state of its seed.
            keras.layers.Dropout(0.25 if way == "backup" else 0.0, seed=3),
            keras.layers.Dense(2, name="head"),
        ]
    )
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group("body", "body", learning_rate_ratio=0.5, anchor="initial")],
        model=model,
        rule="adam",
        learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.05, 1, 0.1),
        weight_decay=0.1,
        global_clipnorm=1.0,
        gradient_accumulation_steps=3,
        ema=kgo.EMA(0.9),
    )
    if way == "checkpoint":
        optimizer = kgo.LossScaleOptimizer(optimizer, initial_scale=2.0**20, dynamic_growth_steps=2)
    # XLA would take most of a child's time on TensorFlow.
    jit = "auto" if keras.backend.backend() == "jax" else False
    model.compile(optimizer=optimizer, loss="mse", auto_scale_loss=False, jit_compile=jit)
    return model


def newest(model: keras.Model, folder: pathlib.Path) -> int:
    """Loads the newest file that can be read, deletes those that cannot, returns its epoch."""
    for path in sorted(folder.glob("*.weights.h5"), reverse=True):
        try:
            model.load_weights(path)
        except (OSError, ValueError, KeyError):
            path.rename(path.with_suffix(".damaged"))
        else:
            return int(path.name.split(".")[0])
    return 0


def train(way: str, folder: pathlib.Path, pipe: int) -> None:
    """Trains from where the folder says to the end, and writes what came out."""
    model = make_model(way)
    start = 0
    before, after = Tell(pipe, "b", "e"), Tell(pipe, "", "s")
    if way == "checkpoint":
        start = newest(model, folder)
        # Keras' own callback saves at the end of every second batch.
        saving = keras.callbacks.ModelCheckpoint(
            str(folder / "{epoch:03d}.weights.h5"), save_weights_only=True, save_freq=BATCHES
        )
        before, after = Tell(pipe, "e", ""), Tell(pipe, "s", "")
    elif way == "keras backup":
        saving = keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False)
    else:
        saving = kgo.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    model.fit(
        X,
        Y,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        initial_epoch=start,
        shuffle=False,
        verbose=0,
        callbacks=[before, saving, after],
    )
    variables = [*model.variables, *model.optimizer.variables]
    values = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    np.savez(folder / "partial.npz", *values)
    os.replace(folder / "partial.npz", folder / "result.npz")


# The parent ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What happened."""

    kills: int = 0
    kills_within_a_save: int = 0
    damaged_files: int = 0
    runs: int = 0
    differences: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Child:
    """A process that trains, and what it said so far."""

    pid: int
    pipe: int
    said: str = ""
    over: bool = False

    def listen(self) -> str:
        """Returns what it says next, or nothing once it closed its end.

        Raises:
            RuntimeError: If it says nothing for too long.
        """
        if not select.select([self.pipe], [], [], PATIENCE)[0]:
            self.end(kill=True)
            raise RuntimeError("a child said nothing for too long")
        letter = os.read(self.pipe, 1).decode()
        self.said += letter
        self.over = not letter
        return letter

    def end(self, kill: bool) -> bool:
        """Ends it, by SIGKILL if asked; returns whether it was killed.

        Raises:
            RuntimeError: If it failed by itself.
        """
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(self.pipe, False)
            self.said += os.read(self.pipe, 10_000).decode()
        os.close(self.pipe)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if status and not killed:
            raise RuntimeError(f"a child failed with wait status {status}")
        return killed


def start(way: str, folder: pathlib.Path) -> Child:
    """Forks a child that trains."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    code = 1
    try:
        os.close(reading)
        train(way, folder, writing)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(child: Child) -> list[float]:
    """Lets a child train to its end; returns how long each of its saves took."""
    took, began = [], 0.0
    while not child.over:
        letter = child.listen()
        if letter == "e":
            began = time.perf_counter()
        elif letter == "s" and began:
            took.append(time.perf_counter() - began)
    if child.end(kill=False):
        raise RuntimeError("a child was killed by another process")
    return took


def kill_at_random(child: Child, chance: random.Random, save_time: float) -> bool:
    """Kills a child some time after one of the things it says; returns whether it still lived."""
    within_save = chance.random() < 0.5
    letter = "e" if within_save else chance.choice("be")
    count = chance.randint(1, 3)
    delay = chance.choice((0.0, 1.0)) * chance.uniform(0.0, 1.25 * save_time)
    while child.said.count(letter) < count and not child.over:
        child.listen()
    time.sleep(delay)
    return child.end(kill=not child.over)


def values_in(folder: pathlib.Path) -> list[np.ndarray]:
    with np.load(folder / "result.npz") as file:
        return [file[f"arr_{index}"] for index in range(len(file.files))]


def run(way: str, kills: int, seed: int, folder: pathlib.Path) -> Report:
    """Kills and resumes until there were enough kills, and the last run reached its end."""
    report, chance = Report(), random.Random(seed)
    whole = folder / "whole"
    whole.mkdir()
    save_time = float(np.median(finish(start(way, whole))))
    expected = values_in(whole)
    while report.kills < kills or not report.runs:
        here = folder / f"run-{report.runs}"
        here.mkdir()
        while not (here / "result.npz").exists():
            child = start(way, here)
            if report.kills >= kills:
                finish(child)
            elif kill_at_random(child, chance, save_time):
                report.kills += 1
                report.kills_within_a_save += child.said.endswith("e")
        report.runs += 1
        report.damaged_files += len(list(here.glob("*.damaged")))
        report.differences += [
            f"variable {place}: {value.ravel()[:3]} instead of {other.ravel()[:3]}"
            for place, (value, other) in enumerate(zip(values_in(here), expected, strict=True))
            if not np.array_equal(value, other)
        ]
        shutil.rmtree(here)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=("backup", "checkpoint", "keras backup"), default="backup")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments.way, arguments.kills, arguments.seed, pathlib.Path(folder))
    sys.stdout.write(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
