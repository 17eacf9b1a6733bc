"""Runs a program of the tests that prints what it found as JSON, in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest


def found_by(program: str, folder: pathlib.Path, **env: str) -> dict[str, Any]:
    """Returns what the program printed.

    Args:
        program: The name of a file beside this one.
        folder: Where it runs.
        **env: Variables of its environment.
    """
    path = pathlib.Path(__file__).with_name(program)
    paths = [str(path.parents[2]), str(path.parents[1] / "support")]
    paths += [entry for entry in sys.path if entry.endswith("without_tensorflow")]
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env},
        check=False,
    )
    if done.returncode:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return json.loads(done.stdout)
