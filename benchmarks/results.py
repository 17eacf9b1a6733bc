"""The files that `step_time.py` writes, and the figures in them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import measuring

ORDER = ("torch", "jax", "tensorflow")
MODELS = {
    "resnet50": "ResNet50",
    "efficientnetb7": "EfficientNetB7",
    "vit_b16": "ViT-B/16",
    "variables2000": "2,000 small variables",
    "variables200": "200 small variables",
    "small": "small",
}
# These contenders do not come from the backend.
NOT_OF_BACKEND = ("grouped", "grouped_plain", "adamw", "multi_optimizer", "copy", "addition")
Entry = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """The entries of one mode of one backend on one model.

    Attributes:
        file: The content of the file that `step_time.py` wrote.
        mode: The mode of the entries.
    """

    file: dict[str, Any]
    mode: str

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.file["backend"]

    @property
    def model(self) -> str:
        """The model's name for tables."""
        return MODELS[self.file["model"]["name"]]

    @property
    def title(self) -> str:
        """Backend and mode, and the dtype of the weights if it is not float32."""
        dtype = self.file["settings"]["dtype"]
        suffix = "" if dtype == "float32" else f", {dtype}"
        return f"{self.backend} {self.mode}{suffix}"

    def entries(self, group: str | None = None) -> list[Entry]:
        """Returns the entries that were timed, of one set or of all."""
        return [
            entry
            for entry in self.file["entries"]
            if entry["mode"] == self.mode and "error" not in entry and group in (None, entry["set"])
        ]

    def find(self, contender: str, case: str = "basic", group: str = "peers") -> Entry | None:
        """Returns an entry, or `None` if it was not timed."""
        for entry in self.entries(group):
            if (entry["contender"], entry["case"]) == (contender, case):
                return entry
        return None

    def best(self, contenders: Iterable[str]) -> Entry | None:
        """Returns the entry of the fastest contender, or `None` if none was timed."""
        found = [entry for name in contenders if (entry := self.find(name)) is not None]
        return min(found, key=wall, default=None)

    def own_peers(self) -> list[str]:
        """Returns the names of the contenders that come from the backend."""
        names = [entry["contender"] for entry in self.entries("peers")]
        return [name for name in names if name not in NOT_OF_BACKEND]


def load(folder: pathlib.Path) -> list[Run]:
    """Returns the runs of all files in a folder."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    files = [file for file in files if file.get("benchmark") == "step_time"]
    files.sort(
        key=lambda file: (
            ORDER.index(file["backend"]),
            file["settings"]["dtype"] != "float32",
            list(MODELS).index(file["model"]["name"]),
        )
    )
    runs = [
        Run(file, mode)
        for file in files
        for mode in dict.fromkeys(entry["mode"] for entry in file["entries"])
    ]
    # All models of a mode stand together.
    titles = list(dict.fromkeys(run.title for run in runs))
    return sorted(runs, key=lambda run: titles.index(run.title))


def wall(entry: Entry) -> float:
    """Returns the median milliseconds of a step."""
    return entry["wall_ms"]["median"]


def times(entry: Entry | None, peer: Entry | None) -> float | None:
    """Returns the ratio of the times of two steps of a set."""
    if entry is None or peer is None:
        return None
    return measuring.ratio(entry["rounds"]["wall"], peer["rounds"]["wall"])["ratio"]


def cpu_seconds(entry: Entry | None, *parts: str) -> float | None:
    """Returns the CPU seconds of parts of the start-up, or of all parts after the build."""
    if entry is None or not entry.get("start_up"):
        return None
    parts = parts or tuple(part for part in entry["start_up"] if part != "build")
    if not set(parts) <= entry["start_up"].keys():
        return None
    return sum(statistics.median(entry["start_up"][part]["cpu"]) for part in parts)
