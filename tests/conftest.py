"""Fixtures of the test suite; what doctests share with it is in the conftest.py above."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import hypothesis
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# No deadline: the first example may pay for a compilation. In CI the same examples each time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def backend() -> str:
    """The name of the backend this run is on."""
    return os.environ["KERAS_BACKEND"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    current = os.environ["KERAS_BACKEND"]
    for item in items:
        for marker in item.iter_markers("backends"):
            if current not in marker.args:
                reason = marker.kwargs["reason"]
                item.add_marker(pytest.mark.skip(reason=f"not on {current}: {reason}"))
        for marker in item.iter_markers("needs_keras"):
            (oldest,) = marker.args
            installed = importlib.metadata.version("keras")
            if numbers(installed) < numbers(oldest):
                reason = marker.kwargs["reason"]
                item.add_marker(pytest.mark.skip(reason=f"not with Keras {installed}: {reason}"))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.fixture
def new_process(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Runs Python code, or a script, in a process of its own; returns what it printed.

    `new_process("print(1)")`, `new_process(path, "--steps", "2", env={"NAME": "value"})`. The
    backend is the same, the working folder is the test's `tmp_path`. A failure shows all that the
    process wrote.
    """

    def run(program: str | pathlib.Path, *arguments: str, env: dict[str, str] | None = None) -> str:
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
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
            check=False,
        )
        if done.returncode:
            pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done.stdout

    return run
