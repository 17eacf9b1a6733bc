"""Times rival steps side by side, and says on what machine it was."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pathlib
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def in_turn(
    steps: Mapping[str, Callable[[], None]], repeats: int, seed: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Times each step once per round, in a new order each round.

    What else the machine does then slows all of them alike, and none always runs in the caches
    that the same other one left behind.

    Args:
        steps: By name, a function that returns when its work is done.
        repeats: The number of rounds.
        seed: Of the orders.

    Returns:
        By name, the `"wall"` and `"cpu"` milliseconds of each round. CPU time is that of all
        threads, and hardly grows when other programs share the cores.
    """
    order = random.Random(seed)
    names = list(steps)
    times = {name: {"wall": [], "cpu": []} for name in names}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            order.shuffle(names)
            for name in names:
                wall, cpu = time.perf_counter(), time.process_time()
                steps[name]()
                times[name]["wall"].append(1e3 * (time.perf_counter() - wall))
                times[name]["cpu"].append(1e3 * (time.process_time() - cpu))
    finally:
        gc.enable()
    return times


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Returns the median, the quartiles and the smallest of `values`."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    )
    found = {"median": middle, "quartile_1": low, "quartile_3": high, "minimum": min(values)}
    return {name: round(value, digits) for name, value in found.items()}


def ratio(values: Sequence[float], peers: Sequence[float]) -> dict[str, float]:
    """Returns the spread of `value / peer` over rounds, and the ratio of the smallest two.

    The two of a round were measured moments apart, so a busy machine cancels out.
    """
    each_round = [value / peer for value, peer in zip(values, peers, strict=True)]
    found = spread(each_round)
    del found["minimum"]
    return {**found, "of_minima": round(min(values) / min(peers), 3)}


def versions(*packages: str) -> dict[str, str]:
    """Returns the version of Python and of each installed package."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Returns what the figures depend on: system, processor, cores, and how busy it is now."""
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(usable),
        "load_average": [round(load, 2) for load in getattr(os, "getloadavg", lambda: ())()],
    }


def _processor() -> str:
    information = pathlib.Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
