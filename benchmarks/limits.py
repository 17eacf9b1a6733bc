"""The limits of a step, as figures of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import results
from prepared import ARRAYS_MOVED
from results import Run

Figure = Callable[[Run, "list[Run]"], "float | None"]
OPTAX = ("optax_adamw", "optax_multi_transform", "optax_flatten")
# An average reads itself and the weights, and writes itself. A pull toward an anchor reads the
# anchor and the weights, and writes the weights.
ARRAYS_OF_SWITCH = 3


@dataclasses.dataclass(frozen=True)
class Limit:
    """The upper limit of a figure.

    Attributes:
        name: A description of the figure.
        most: The limit.
        figure: Computes the figure of a run from this run and all runs, or `None` if it was not
            measured.
        where: The backend and mode that it applies to. Default: "", which means all.
    """

    name: str
    most: float
    figure: Figure
    where: str = ""


def _step(peer: str) -> Figure:
    return lambda run, runs: results.times(run.find("grouped"), run.find(peer))


def _step_to_best(peers: Iterable[str]) -> Figure:
    return lambda run, runs: results.times(run.find("grouped"), run.best(peers))


def _start_up(*parts: str) -> Figure:
    def figure(run: Run, runs: list[Run]) -> float | None:
        own, peer = (results.cpu_seconds(run.find(name), *parts) for name in ("grouped", "adamw"))
        return own / peer if own and peer else None

    return figure


def _switched(case: str, other: str) -> Figure:
    def figure(run: Run, runs: list[Run]) -> float | None:
        return results.times(*(run.find("grouped", name, "switches") for name in (case, other)))

    return figure


def _added(case: str) -> Figure:
    """Returns the time that an option adds to a step, as a share of copying its bytes."""

    def figure(run: Run, runs: list[Run]) -> float | None:
        switched = run.find("grouped", case, "switches")
        basic = run.find("grouped", "basic", "switches")
        copy = run.find("copy", "basic", "switches")
        if switched is None or basic is None or copy is None:
            return None
        added = results.wall(switched) - results.wall(basic)
        return added / (results.wall(copy) * ARRAYS_OF_SWITCH / ARRAYS_MOVED)

    return figure


def _micro_step(run: Run, runs: list[Run]) -> float | None:
    micro = run.find("grouped", "micro_step", "switches")
    return results.times(micro, run.find("addition", "basic", "switches"))


def _ten_times(run: Run, runs: list[Run]) -> float | None:
    few = [
        other
        for other in runs
        if (other.title, other.model) == (run.title, results.MODELS["variables200"])
    ]
    many, few_entry = run.find("grouped"), few[0].find("grouped") if few else None
    if run.model != results.MODELS["variables2000"] or many is None or few_entry is None:
        return None
    return results.wall(many) / results.wall(few_entry)


def _state(run: Run, runs: list[Run]) -> float | None:
    entry = run.find("grouped")
    return entry and round(entry["state_bytes"] / run.file["model"]["bytes"], 2)


def _temporary(run: Run, runs: list[Run]) -> float | None:
    entry = run.find("grouped")
    return entry and entry.get("memory", {}).get("temporary_copies")


GRAPH, COMPILED = "tensorflow graph", "tensorflow compiled"
LIMITS = (
    Limit("step / torch.optim.AdamW(fused=True)", 1.2, _step("torch_fused"), "torch eager"),
    Limit("step / best of Keras and Optax", 1.05, _step_to_best(("adamw", *OPTAX)), "jax compiled"),
    Limit("trace / Keras AdamW, CPU", 0.5, _start_up("trace"), "jax compiled"),
    Limit("compile / Keras AdamW, CPU", 1.0, _start_up("compile"), "jax compiled"),
    Limit("step / Keras AdamW", 0.5, _step("adamw"), GRAPH),
    Limit("start-up / Keras AdamW, CPU", 0.25, _start_up(), GRAPH),
    Limit("step / Keras AdamW", 0.9, _step("adamw"), COMPILED),
    Limit("start-up / Keras AdamW, CPU", 0.5, _start_up(), COMPILED),
    Limit("step with clip / without", 1.3, _switched("basic", "no_clip")),
    Limit("step with ten times the variables / step", 11.0, _ten_times),
    Limit("what an average adds / a copy of its bytes", 1.0, _added("ema")),
    Limit("what anchors add / a copy of their bytes", 1.0, _added("anchors")),
    Limit("micro-step / addition of the gradients", 3.0, _micro_step),
    Limit("state / weights, bytes", 2.0, _state),
    Limit("allocated in a step / weights, bytes", 1.0, _temporary, "torch eager"),
)
ON_ACCELERATORS = (
    Limit("step / torch.optim.AdamW(fused=True)", 1.1, _step("torch_fused"), "torch eager"),
)


def reached(runs: list[Run]) -> list[list[str]]:
    """Returns a row per limit and run: title, model, name, figure, limit, and if it is met."""
    rows = []
    for run in runs:
        for limit in ON_ACCELERATORS if run.file["machine"]["devices"] else LIMITS:
            if limit.where not in ("", f"{run.backend} {run.mode}"):
                continue
            figure = limit.figure(run, runs)
            if figure is not None:
                met = "met" if figure <= limit.most else "not met"
                rows.append(
                    [run.title, run.model, limit.name, f"{figure:.2f}", f"{limit.most:g}", met]
                )
    return rows
