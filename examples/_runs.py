"""Training runs that are kept in a folder, so that a run that stopped can go on.

A finished run leaves its result in `<name>.json`, which is read if the run is asked for again.
While a run trains, `<name>.keras` holds the model and its optimizer after the last whole epoch
(with rates, slots and anchors), and `<name>.history.json` holds the logs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.progress import Progress

import keras_groupopt as kgo

Images = tuple[np.ndarray, np.ndarray]  # pictures and their labels


@dataclass(frozen=True)
class Task:
    """A pretrained model and the images it is fine-tuned on."""

    name: str
    build_model: Callable[[], keras.Model]  # pretrained backbone, fresh head, not compiled
    train: Images
    test: Images
    batch_size: int


@dataclass(frozen=True)
class Method:
    """A function that makes the optimizer, and the settings to try.

    If the optimizer averages the weights, the averages are measured. If there is a gradient rule,
    the model trains with it.
    """

    name: str
    make_optimizer: Callable[..., keras.optimizers.Optimizer]  # (model, steps, **setting)
    settings: tuple[dict[str, float], ...]
    adds: bool = False  # add its settings to the one chosen for the method before it
    make_rule: Callable[..., kgo.GradientRule] | None = None  # (**setting)


@dataclass(frozen=True)
class Run:
    """One training: a method, a setting, a seed, and the images to train on and to measure on."""

    method: Method
    setting: dict[str, float]
    seed: int  # for the weights of the new head and the order of the images
    train: Images
    evaluate: Images
    purpose: str  # "validation" or "test": the images to measure on

    @property
    def name(self) -> str:
        setting = "-".join(f"{key}={value:g}" for key, value in self.setting.items())
        return f"{self.purpose}-{self.method.name}-{setting}-seed={self.seed}"


class Runs:
    """The folder of the runs of one task, one number of steps and one backend."""

    def __init__(
        self,
        parent: Path,
        task: Task,
        epochs: int,
        steps: int | None,
        fresh: bool,
        stop: threading.Event,
    ):
        self.task, self.epochs, self.stop = task, epochs, stop
        self.steps = steps or len(task.train[0]) // task.batch_size  # per epoch, in every run
        key = {
            "task": task.name,
            "epochs": epochs,
            "steps_per_epoch": self.steps,
            "batch_size": task.batch_size,
            "backend": keras.backend.backend(),
            "keras": keras.version(),
            "keras_groupopt": kgo.__version__,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = parent / f"{task.name}-{key['backend']}-{digest}"
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "settings.json", key)

    def finished(self) -> int:
        """Returns the number of finished runs."""
        return sum(not path.name.endswith(".history.json") for path in self.folder.glob("*-*.json"))

    def result(self, run: Run, progress: Progress) -> dict[str, Any]:
        """Returns the result of a run. If the run is not finished, it trains to its end."""
        path = self.folder / f"{run.name}.json"
        if not path.exists():
            write_json(path, self._train(run, progress))
            for suffix in (".keras", ".history.json"):
                path.with_suffix(suffix).unlink(missing_ok=True)
        return json.loads(path.read_text())

    def _train(self, run: Run, progress: Progress) -> dict[str, Any]:
        if self.stop.is_set():
            raise KeyboardInterrupt
        started, steps = time.perf_counter(), self.steps
        keras.utils.clear_session()
        keras.utils.set_random_seed(run.seed)
        model = self.task.build_model()
        if run.method.make_rule is not None:
            model = kgo.sharpness_aware(model, run.method.make_rule(**run.setting))
        keeper = KeepRun(self.folder / f"{run.name}.keras", model, self.stop, progress)
        if keeper.checkpoint.exists():
            model = keras.saving.load_model(keeper.checkpoint)
        else:
            model.compile(
                optimizer=run.method.make_optimizer(model, steps * self.epochs, **run.setting),
                loss="sparse_categorical_crossentropy",
                metrics=["accuracy"],
            )
        done = int(model.optimizer.iterations)
        keeper.resume(done // steps, self.epochs)
        model.fit(
            batches(*run.train, self.task.batch_size, run.seed, first=done),
            steps_per_epoch=steps,
            initial_epoch=done // steps,
            epochs=self.epochs,
            shuffle=False,
            callbacks=[kgo.GroupLogger(), keeper],
            verbose=0,
        )
        averages = getattr(model.optimizer, "ema", None) is not None
        with kgo.averaged_weights(model) if averages else contextlib.nullcontext():
            measured = model.evaluate(*run.evaluate, batch_size=100, verbose=0, return_dict=True)
        return {
            "method": run.method.name,
            "setting": run.setting,
            "seed": run.seed,
            **measured,
            "seconds": round(time.perf_counter() - started, 1),
            "steps_per_epoch": steps,
            "history": keeper.history,
        }


class KeepRun(keras.callbacks.Callback):
    """Saves model, optimizer and logs after each epoch, and logs how far each part has moved.

    For each layer directly below the model, `drift_<layer>` is the norm of the difference between
    its weights and those at the start of the run.
    """

    def __init__(
        self, checkpoint: Path, model: keras.Model, stop: threading.Event, progress: Progress
    ):
        super().__init__()
        self.checkpoint, self.stop = checkpoint, stop
        self.start = {layer.name: layer.get_weights() for layer in model.layers if layer.weights}
        self.history: list[
            dict[str, float]
        ] = []  # the values at the start, then at the end of each epoch
        self.progress = progress
        self.bar = progress.add_task(checkpoint.stem, total=None)

    def resume(self, epoch: int, epochs: int) -> None:
        """Reads the logs up to `epoch`, where training goes on."""
        if epoch:
            self.history = json.loads(self._history_path.read_text())[: epoch + 1]
            self.progress.console.print(f"[cyan]resumes[/] {self.checkpoint.stem} at epoch {epoch}")
        self.progress.update(self.bar, completed=epoch, total=epochs)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        if not self.history:
            rates = {"learning_rate": float(self.model.optimizer.learning_rate)}
            for group, rate in getattr(self.model.optimizer, "learning_rates", {}).items():
                rates[f"learning_rate_{group}"] = float(rate)
            self.history.append({**rates, **{f"drift_{name}": 0.0 for name in self.start}})

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        drift = {f"drift_{name}": self._drift(name) for name in self.start}
        self.history.append({**(logs or {}), **drift})
        write_json(self._history_path, self.history)
        unfinished = self.checkpoint.with_suffix(".unfinished.keras")
        self.model.save(unfinished)
        os.replace(unfinished, self.checkpoint)
        self.progress.advance(self.bar)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.progress.remove_task(self.bar)

    @property
    def _history_path(self) -> Path:
        return self.checkpoint.with_suffix(".history.json")

    def _drift(self, name: str) -> float:
        pairs = zip(self.model.get_layer(name).get_weights(), self.start[name], strict=True)
        return float(np.sqrt(sum(np.sum((now - start) ** 2) for now, start in pairs)))


@contextlib.contextmanager
def stop_between_steps() -> Iterator[threading.Event]:
    """Lets the first Ctrl-C stop training after the current step, and a second one at once.

    A backend that is stopped inside a step may crash while it exits.
    """
    stop = threading.Event()

    def request(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def batches(x: np.ndarray, y: np.ndarray, size: int, seed: int, first: int) -> Iterator[Images]:
    """Yields shuffled batches without end, beginning with number `first`.

    The order depends only on the seed and the number of the batch, so a run that stopped goes on
    with the next batches.
    """
    per_pass = len(x) // size
    for number in itertools.count(first):
        index, part = divmod(number, per_pass)
        order = np.random.default_rng([seed, index]).permutation(len(x))
        rows = order[part * size : (part + 1) * size]
        yield x[rows], y[rows]


def write_json(path: Path, content: Any) -> None:
    """Writes a new file and then replaces the old one, so that no reader sees half a file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1))
    os.replace(unfinished, path)
