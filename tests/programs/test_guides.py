"""The guides and the README's example are programs, and they run."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

import keras_groupopt

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
GUIDES = sorted((REPOSITORY / "guides").glob("*.py"))
BACKENDS = ("tensorflow", "jax", "torch")


def on_one_backend(position: int, guide: pathlib.Path) -> Any:
    """A guide runs on one of the backends, or on each of them if it asks which one it is on."""
    marks = pytest.mark.backends(BACKENDS[position % 3], reason="each guide runs on one backend")
    asks = "keras.backend.backend()" in guide.read_text(encoding="utf-8")
    return pytest.param(guide, id=guide.name, marks=[] if asks else marks)


@pytest.mark.parametrize("guide", [on_one_backend(*row) for row in enumerate(GUIDES)])
def test_a_guide_runs(guide, new_process):
    new_process(guide)


@pytest.mark.once
@pytest.mark.parametrize("guide", GUIDES, ids=[guide.name for guide in GUIDES])
def test_a_guide_names_what_there_is(guide):
    names = set(re.findall(r"\bkgo((?:\.\w+)+)", guide.read_text(encoding="utf-8")))
    assert names
    for name in names:
        found = keras_groupopt
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_the_example_of_the_readme_runs(new_process):
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert examples
    new_process("\n".join(examples))
