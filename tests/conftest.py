"""Fixtures of the test suite; what doctests share with it is in the conftest.py above."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# Markers by place. The tests of pure parts, and the doctests of those parts, run on one backend.
MARKERS = {
    "once": (
        *(f"tests/{folder}/" for folder in ("selectors", "plan", "schedules", "house")),
        *(f"keras_groupopt/{folder}/" for folder in ("base", "selectors", "plan", "schedules")),
    ),
    "program": ("tests/programs/",),
    # These use the most of Keras' API; with the oldest Keras, they are what has failed.
    "keras_api": (
        "tests/checkpoint/",
        "tests/rules/test_contracts.py",
        "tests/step/test_fit.py",
        "tests/step/test_loss_scale.py",
        "tests/step/test_rebuild.py",
        "tests/training/",
    ),
}

# No deadline: the first example may pay for a compilation. In CI the same examples each time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def backend() -> str:
    """The name of the backend this run is on."""
    return os.environ["KERAS_BACKEND"]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(REPOSITORY).as_posix()
        for marker, places in MARKERS.items():
            if place.startswith(places) and not (marker == "once" and needs_its_backend(item)):
                item.add_marker(marker)
        for reason in reasons_to_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def needs_its_backend(item: pytest.Item) -> bool:
    """Returns whether a test among those that run once, on torch, must run elsewhere too."""
    if item.get_closest_marker("every_backend"):
        return True
    return any("torch" not in marker.args for marker in item.iter_markers("backends"))


def reasons_to_skip(item: pytest.Item) -> Iterator[str]:
    """Yields why a test cannot run on this backend or with this Keras."""
    backend, keras = os.environ["KERAS_BACKEND"], importlib.metadata.version("keras")
    for marker in item.iter_markers("backends"):
        if backend not in marker.args:
            yield f"not on {backend}: {marker.kwargs['reason']}"
    for marker in item.iter_markers("needs_keras"):
        if numbers(keras) < numbers(*marker.args):
            yield f"not with Keras {keras}: {marker.kwargs['reason']}"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.fixture
def new_process(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Runs Python code, or a script, in a process of its own; returns what it printed.

    `new_process("print(1)")`, `new_process(path, "--steps", "2", env={"NAME": "value"})`. The
    backend is the same, the working folder is the test's `tmp_path`. A failure shows all that the
    process wrote.
    """
    return functools.partial(run_in, tmp_path)


@pytest.fixture(scope="session")
def new_process_in() -> Callable[..., str]:
    """As `new_process`, with the working folder as the first argument."""
    return run_in


def run_in(
    folder: pathlib.Path,
    program: str | pathlib.Path,
    *arguments: str,
    env: dict[str, str] | None = None,
) -> str:
    paths = [
        str(REPOSITORY),
        str(REPOSITORY / "tests" / "support"),
        *(path for path in sys.path if path.endswith("without_tensorflow")),
    ]
    command = [str(program)] if isinstance(program, pathlib.Path) else ["-c", program]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
        check=False,
    )
    if done.returncode:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout
