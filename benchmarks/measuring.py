"""Times steps that take turns, and describes the machine."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns the wall and CPU milliseconds of a function. CPU time is the sum over all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


class Stopwatch:
    """Measures the wall and CPU seconds of the parts of a start-up, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Calls `work`, measures it, and returns its result."""
        given: list[Any] = []
        wall, cpu = timed(lambda: given.append(work()))
        self.seconds[name] = {"wall": round(wall / 1e3, 4), "cpu": round(cpu / 1e3, 4)}
        return given[0]


def in_turn(
    steps: Mapping[str, Callable[[], tuple[float, float] | None]], repeats: int, seed: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Times each step once per round, in a new order in each round.

    So other programs slow all steps alike, and no step always finds the caches as the same other
    step left them.

    Args:
        steps: Functions by name, which return when their work is done. They may return the wall
            and CPU milliseconds of the part that counts.
        repeats: The number of rounds.
        seed: The seed of the orders. Default: 0.

    Returns:
        The `"wall"` and `"cpu"` milliseconds of each round, by name. CPU time is the sum over all
        threads, and grows little if other programs share the cores.
    """
    order = random.Random(seed)
    names = list(steps)
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in names}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            order.shuffle(names)
            for name in names:
                own: list[Any] = []
                whole = timed(lambda step=steps[name], own=own: own.append(step()))
                # Other functions may return anything.
                took = own[0] if isinstance(own[0], tuple) else whole
                for clock, value in zip(("wall", "cpu"), took, strict=True):
                    times[name][clock].append(value)
    finally:
        gc.enable()
    return times


def spread(builds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the median, the quartiles and the smallest of all rounds of all builds."""
    values = [value for rounds in builds for value in rounds]
    low, middle, high = _quartiles(values)
    return {
        "median": round(middle, 3),
        "quartile_1": round(low, 3),
        "quartile_3": round(high, 3),
        "minimum": round(min(values), 3),
    }


def ratio(builds: Sequence[Sequence[float]], peers: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the ratio of the times of two steps.

    The two times of a round were measured shortly after each other, so the load of the machine
    cancels out. The memory that a build got does not cancel out, so builds are averaged.

    Args:
        builds: The times of the rounds of each build.
        peers: The times of the other step in the same builds.

    Returns:
        `"ratio"`, the geometric mean over builds of the median of `value / peer` over rounds;
        `"of_builds"`, those medians; `"quartile_1"` and `"quartile_3"` of all rounds;
        `"of_minima"`, the ratio of the smallest times.
    """
    rounds = [
        [value / other for value, other in zip(values, others, strict=True)]
        for values, others in zip(builds, peers, strict=True)
    ]
    medians = [statistics.median(ratios) for ratios in rounds]
    low, _, high = _quartiles([value for ratios in rounds for value in ratios])
    of_minima = min(min(values) for values in builds) / min(min(others) for others in peers)
    return {
        "ratio": round(statistics.geometric_mean(medians), 3),
        "of_builds": [round(median, 3) for median in medians],
        "quartile_1": round(low, 3),
        "quartile_3": round(high, 3),
        "of_minima": round(of_minima, 3),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) == 1:
        return 3 * [values[0]]
    return statistics.quantiles(values, n=4, method="inclusive")


def versions(*packages: str) -> dict[str, str]:
    """Returns the version of Python, and the version that each package reports."""
    found = {package: importlib.import_module(package).__version__ for package in packages}
    return {"python": platform.python_version()} | found


def machine() -> dict[str, Any]:
    """Returns the system, the processor, the number of cores and the current load."""
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


def write(result: Mapping[str, Any], output: pathlib.Path | None) -> None:
    """Writes a result as JSON to a file, or to standard output if `output` is `None`."""
    text = json.dumps(result, indent=2)
    # Lists of numbers stay on one line.
    text = re.sub(r"\[[-\d.,e\s]+\]", lambda found: " ".join(found[0].split()), text)
    text = text.replace("[ ", "[").replace(" ]", "]")
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
