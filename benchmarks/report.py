"""Prints or writes tables and limits of the results of `step_time.py`.

    python benchmarks/report.py build/benchmarks
    python benchmarks/report.py benchmarks/results --write README.md

The second form replaces the text between two marker comments in a Markdown file, and writes the
table of all entries and the plot into the folder of the results.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence

import limits
import results
from results import Entry, Run

BEGIN, END = "<!-- performance -->", "<!-- /performance -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Returns a number with about two digits, or a dash for `None`."""
    if value is None:
        return "–"
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}"


HEAD = (
    "backend",
    "model",
    "Keras AdamW",
    "MultiOptimizer, no clip",
    "best peer",
    "ours, `fused=False`",
    "**ours**",
)


def row(run: Run, figure: Callable[[Entry | None], float | None]) -> list[str]:
    """Returns the row of a run, with the figure of each contender."""
    best = run.best(run.own_peers())
    peer = f"{number(figure(best))} ({best['contender']})" if best else "–"
    cells = [number(figure(run.find(name))) for name in ("adamw", "multi_optimizer")]
    cells += [peer, number(figure(run.find("grouped_plain")))]
    return [run.title, run.model, *cells, f"**{number(figure(run.find('grouped')))}**"]


def median(entry: Entry | None) -> float | None:
    """Returns the median milliseconds of a step."""
    return entry and results.wall(entry)


def difference(entry: Entry | None) -> str:
    """Returns the largest difference of a weight from the reference, as text."""
    value = (entry or {}).get("largest_weight_difference")
    return "–" if value is None else f"{value:.0e}" if value else "0"


def step_times(runs: list[Run]) -> str:
    """Returns the table of the milliseconds of a step."""
    head = (*HEAD, "copy of the bytes", "weights differ by")
    rows = [
        [*row(run, median), number(median(run.find("copy"))), difference(run.find("grouped"))]
        for run in runs
    ]
    return table(head, rows)


def start_ups(runs: list[Run]) -> str:
    """Returns the table of the CPU seconds from the build to the end of the first step."""
    return table(HEAD, [row(run, results.cpu_seconds) for run in runs if run.backend != "torch"])


def reached(runs: list[Run]) -> str:
    """Returns the table of the limits."""
    return table(("backend", "model", "figure", "is", "limit", ""), limits.reached(runs))


def details(runs: list[Run]) -> str:
    """Returns the table of all entries."""
    rows = []
    for run in runs:
        for entry in run.entries():
            spread = entry["wall_ms"]
            parts = [
                f"{part.replace('_', ' ')} {number(statistics.median(clocks['cpu']))}"
                for part, clocks in entry.get("start_up", {}).items()
            ]
            found, apart = entry.get("memory", {}), difference(entry)
            if "compared_with" in entry:
                apart += f" from {entry['compared_with']}"
            rows.append(
                [
                    run.title,
                    run.model,
                    entry["set"],
                    entry["case"],
                    entry["contender"],
                    number(spread["median"]),
                    f"{number(spread['quartile_1'])} … {number(spread['quartile_3'])}",
                    number(entry["cpu_ms"]["median"]),
                    ", ".join(parts),
                    f"{entry['state_bytes'] / run.file['model']['bytes']:.2f}",
                    number(found.get("temporary_copies")),
                    number(found.get("peak_mib")),
                    apart,
                    entry["note"],
                ]
            )
    head = (
        *("backend", "model", "set", "case", "contender", "wall ms", "quartiles", "CPU ms"),
        *("start-up, CPU s", "state / weights", "allocated / weights", "peak MiB"),
        *("weights differ by", ""),
    )
    return table(head, rows)


def provenance(runs: list[Run]) -> str:
    """Returns the machines and versions of the runs as a sentence."""
    machines, versions = {}, {}
    for run in runs:
        machine = run.file["machine"]
        where = ", ".join([machine["processor"], *machine["devices"]])
        machines[f"{machine['cores']} cores of {where}"] = None
        versions |= run.file["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"Measured on {' and '.join(machines)}; {named}."


# Rows that are only in the full tables, not in the README.
LEFT_OUT = (("torch", "EfficientNetB7"), ("torch", "200 small variables"))


def front(runs: list[Run]) -> str:
    """Returns the table of the README, with at most eight rows."""
    rows = []
    for run in [run for run in runs if (run.backend, run.model) not in LEFT_OUT][:8]:
        title, model, keras, multi, peer, _, ours = row(run, median)
        seconds = [
            "–" if run.backend == "torch" else number(results.cpu_seconds(run.find(name)))
            for name in ("adamw", "grouped")
        ]
        rows.append([title, model, keras, multi, peer, ours, *seconds])
    head = (
        *("backend", "model", "Keras AdamW", "MultiOptimizer, no clip", "best peer", "**ours**"),
        *("start-up, Keras", "start-up, ours"),
    )
    return table(head, rows)


def section(runs: list[Run], folder: str, picture: str) -> str:
    """Returns the section of the README."""
    return "\n\n".join(
        [
            "One `apply` of AdamW with decay and a global clip, in milliseconds (medians of steps "
            "that took turns), and the CPU seconds from the build to the end of the first step.",
            front(runs),
            f"{provenance(runs)} [All figures]({folder}/README.md), their spread, the limits they "
            f"are held against, and [a plot]({folder}/{picture}).",
        ]
    )


def replace(text: str, new: str) -> str:
    """Returns a text in which the part between the markers is replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The file lacks {BEGIN} and {END} in this order. Add them.")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def write(runs: list[Run], folder: pathlib.Path, readme: pathlib.Path) -> None:
    """Writes the section of the README, and the plot and all entries beside the results."""
    import plot

    plot.draw(runs, folder / "performance.svg")
    everything = [
        "# Results",
        "Written by `benchmarks/report.py` from the files in this folder.",
        provenance(runs),
        "## Step, in milliseconds",
        "*weights differ by*: the largest difference from `fused=False` after 20 steps. *copy of "
        "the bytes*: the time in which this machine copies what a step has to read and write.",
        step_times(runs),
        "![Time of a step as a share of that of Keras' AdamW](performance.svg)",
        "## Start-up, in CPU seconds",
        "From the build to the end of the first step.",
        start_ups(runs),
        "## Limits",
        reached(runs),
        "## All entries",
        details(runs),
    ]
    (folder / "README.md").write_text("\n\n".join(everything) + "\n")
    relative = pathlib.Path(os.path.relpath(folder, readme.parent)).as_posix()
    new = section(runs, relative, "performance.svg")
    readme.write_text(replace(readme.read_text(), new))


def main() -> None:
    """Prints or writes the report."""
    parser = argparse.ArgumentParser(description="Reports what step_time.py measured.")
    parser.add_argument("folder", type=pathlib.Path, help="folder of the JSON files")
    parser.add_argument("--write", type=pathlib.Path, metavar="README", help="file to update")
    parser.add_argument("--details", action="store_true", help="also print all entries")
    options = parser.parse_args()
    runs = results.load(options.folder)
    if not runs:
        parser.error(f"`folder` must hold results of step_time.py. Received: {options.folder}")
    if options.write:
        write(runs, options.folder, options.write)
    parts = [provenance(runs), "Step, ms", step_times(runs), "Start-up, CPU s", start_ups(runs)]
    parts += ["Limits", reached(runs)]
    if options.details:
        parts.append(details(runs))
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
