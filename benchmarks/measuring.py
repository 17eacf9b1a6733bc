"""Times rival steps side by side, and says on what machine it was."""

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
    """Returns the wall and CPU milliseconds of a piece of work; CPU time is that of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


class Stopwatch:
    """Notes the wall and CPU seconds of the parts of a start-up, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Does `work`, notes how long it took, and returns what it gave."""
        given: list[Any] = []
        wall, cpu = timed(lambda: given.append(work()))
        self.seconds[name] = {"wall": round(wall / 1e3, 4), "cpu": round(cpu / 1e3, 4)}
        return given[0]


def in_turn(
    steps: Mapping[str, Callable[[], tuple[float, float] | None]], repeats: int, seed: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Times each step once per round, in a new order each round.

    What else the machine does then slows all of them alike, and none always runs in the caches
    that the same other one left behind.

    Args:
        steps: By name, a function that returns when its work is done. It may return the wall and
            CPU milliseconds of the part of it that counts.
        repeats: The number of rounds.
        seed: Of the orders.

    Returns:
        By name, the `"wall"` and `"cpu"` milliseconds of each round. CPU time is that of all
        threads, and grows little when other programs share the cores.
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
                # Other steps return what they did.
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
    """Returns how many times as long one step takes as another.

    The two of a round were measured moments apart, so a busy machine cancels out; what a build
    got of memory does not, and is averaged.

    Args:
        builds: The times of the rounds of each build.
        peers: Those of the other step, of the same builds.

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
    """Returns the version of Python and of each package, whatever it was installed as."""
    found = {package: importlib.import_module(package).__version__ for package in packages}
    return {"python": platform.python_version()} | found


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


def write(result: Mapping[str, Any], output: pathlib.Path | None) -> None:
    """Writes a result as JSON to a file, or to standard output where none is given."""
    text = json.dumps(result, indent=2)
    # Numbers of one list stay in one line.
    text = re.sub(r"\[[-\d.,e\s]+\]", lambda found: " ".join(found[0].split()), text)
    text = text.replace("[ ", "[").replace(" ]", "]")
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
