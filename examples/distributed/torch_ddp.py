"""Train in several processes with torch, each with a share of every batch, and compare with one.

    python examples/distributed/torch_ddp.py

It starts its own processes. `DistributedDataParallel` averages gradients in `backward`, for both
passes of SAM, so the optimizer gets the gradients of the whole batch in each process.
"""

from __future__ import annotations

import os
import tempfile

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from _task import BATCH, make_model, numbers, options, pictures, report

PROCESSES = 2


def train(model: keras.Model, call: torch.nn.Module, batches: int, rank: int, count: int) -> None:
    """Trains on the share of each batch that belongs to one of several processes."""
    variables, loss = model.trainable_variables, keras.losses.SparseCategoricalCrossentropy()
    x, y = map(torch.as_tensor, pictures(batches))
    for start in range(0, len(x), BATCH):
        share = slice(start + rank * BATCH // count, start + (rank + 1) * BATCH // count)
        _, gradients = model.compute_gradients(lambda s=share: loss(y[s], call(x[s])))
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)


def work(rank: int, batches: int, folder: str) -> None:
    """Trains in one of the processes."""
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=PROCESSES)
    model = make_model()
    # Wrap it before the first step, so that all processes start from the weights of rank 0.
    call = torch.nn.parallel.DistributedDataParallel(model)
    train(model, call, batches, rank, PROCESSES)
    if rank == 0:
        np.save(f"{folder}/numbers.npy", numbers(model))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Trains in one process and then in several."""
    batches = options(__doc__).batches
    alone = make_model()
    train(alone, alone, batches, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (batches, folder), nprocs=PROCESSES)
        report(np.load(f"{folder}/numbers.npy"), numbers(alone), f"{PROCESSES} processes")


if __name__ == "__main__":
    main()
