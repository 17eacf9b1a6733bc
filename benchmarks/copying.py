"""The limit of the machine: copying as many bytes as a step of AdamW moves."""

from __future__ import annotations

import concurrent.futures

import measuring
import models
import numpy as np
from prepared import ARRAYS_MOVED, Prepared, Setting


def prepare(setting: Setting) -> Prepared:
    """Prepares a copy by all cores. Each byte is read and written, so half of them are copied."""
    moved = ARRAYS_MOVED * models.nbytes(setting.model.trainable_variables)
    source = np.ones(moved // 2, "uint8")
    target = np.zeros_like(source)
    cores = measuring.machine()["cores"]
    pieces = list(zip(np.array_split(source, cores), np.array_split(target, cores), strict=True))
    pool = concurrent.futures.ThreadPoolExecutor(cores)

    def copy(piece: tuple[np.ndarray, np.ndarray]) -> None:
        np.copyto(piece[1], piece[0])

    return Prepared(lambda: measuring.timed(lambda: list(pool.map(copy, pieces))))
