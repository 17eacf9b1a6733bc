"""Trains on 2 gloo processes as on one, and prints as JSON what it found.

`test_several_devices.py` runs it once and has a test for each thing found.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from typing import Any

import keras
import numpy as np
from device_runs import ROWS, X, make, numbers

import keras_groupopt as kgo

OVERFLOWS = X.copy()
# A sample of the second process, in the second batch.
OVERFLOWS[13] = np.inf
FIRST = ROWS["clip and anchors"]
# How a model is made, and its loop. The model of the last one is saved by one process, too.
RUNS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "no_sync": (*FIRST, {"micro_batches": 2}),
    "overflow": (*FIRST, {"samples": OVERFLOWS}),
    **{row: (*made, {}) for row, made in ROWS.items()},
    "GSAM": ({"gradient_rule": lambda: kgo.GSAM(0.1)}, None, {}),
}
PROCESSES = 2


def train(
    model: keras.Model,
    call: Any,
    rank: int,
    processes: int,
    micro_batches: int = 1,
    samples: np.ndarray = X,
) -> None:
    """A loop without `fit`. With `micro_batches`, torch adds up so many gradients for a step."""
    import torch

    optimizer, variables = model.optimizer, model.trainable_variables
    size = 8 // processes
    for batch in range(8):
        start = batch % 4 * 8 + size * rank
        x = torch.as_tensor(samples[start : start + size])
        if isinstance(model, kgo.SharpnessAware):
            _, gradients = model.compute_gradients(lambda x=x: torch.mean((call(x) - x**2) ** 2))
            with torch.no_grad():
                optimizer.apply(gradients, variables)
            continue
        last = (batch + 1) % micro_batches == 0
        silent = getattr(call, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else silent():
            loss = torch.mean((call(x) - x**2) ** 2) / micro_batches
            optimizer.scale_loss(loss).backward()
        if last:
            gradients = [variable.value.grad for variable in variables]
            with torch.no_grad():
                optimizer.apply(gradients, variables)
            for variable in variables:
                variable.value.grad = None


def work(rank: int, folder: str, address: str) -> None:
    """What each process does."""
    import torch

    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=PROCESSES
    )
    parallel = torch.nn.parallel.DistributedDataParallel
    for name, (options, wrap, how) in RUNS.items():
        # Other weights in each process: those of rank 0 are given to all before the build.
        model = make(options, wrap, seed=rank)
        train(model, parallel(model), rank, PROCESSES, **how)
        np.save(pathlib.Path(folder) / f"{name}-{rank}.npy", numbers(model))
    if rank == 0:
        model.save(f"{folder}/model.keras")
    torch.distributed.barrier()
    loaded = keras.saving.load_model(f"{folder}/model.keras")
    assert np.array_equal(numbers(loaded), numbers(model))
    train(loaded, parallel(loaded), rank, PROCESSES)
    np.save(pathlib.Path(folder) / f"loaded-{rank}.npy", numbers(loaded))
    torch.distributed.destroy_process_group()


def main() -> None:
    import torch

    alone = {}
    for name, (options, wrap, how) in RUNS.items():
        model = make(options, wrap)
        train(model, model, 0, 1, **how)
        alone[name] = numbers(model)
        skipped = int(getattr(model.optimizer, "inner_optimizer", model.optimizer).skipped_steps)
        assert skipped == (2 if name == "overflow" else 0)
    train(model, model, 0, 1)
    alone["loaded"] = numbers(model)
    address = f"file://{os.getcwd()}/meeting"
    torch.multiprocessing.spawn(work, (os.getcwd(), address), nprocs=PROCESSES)
    found = {}
    for row, expected in alone.items():
        first, second = (np.load(f"{row}-{rank}.npy") for rank in range(PROCESSES))
        found[row] = {
            "difference": float(np.abs(first - expected).max()),
            "identical": bool(np.array_equal(first, second)),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
