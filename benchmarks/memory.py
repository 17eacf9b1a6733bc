"""The peak memory of a function, and of one step in another process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

MEBIBYTE = 2**20


def in_new_process(script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script whose freed memory goes back to the system, and returns the JSON it prints."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def peak_of(work: Callable[[], Any]) -> tuple[float, float] | None:
    """Returns the resident MiB before `work` and their peak while it runs.

    Returns `None` if the system is not Linux or does not report them.
    """
    reset, status = pathlib.Path("/proc/self/clear_refs"), pathlib.Path("/proc/self/status")
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        reset.write_text("5")
        before = re.search(r"VmRSS:\s*(\d+) kB", status.read_text())
        work()
        most = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
    except (OSError, AttributeError):
        return None
    if not before or not most:
        return None
    return int(before[1]) / 1024, int(most[1]) / 1024


def of_step(step: Callable[[], Any], weights_bytes: int) -> dict[str, float]:
    """Returns the peak memory of a step after its first call, and how much it allocates."""
    found = peak_of(lambda: [step() for _ in range(2)])
    if found is None:
        return {}
    before, most = found
    return {
        "peak_mib": round(most, 1),
        "temporary_copies": round((most - before) * MEBIBYTE / weights_bytes, 3),
    }
