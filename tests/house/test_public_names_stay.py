"""What is public stays: each name, how it is called, and what a class has."""

from __future__ import annotations

import itertools
import json

import pytest
from public_surface import FILE, public, surface

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))
PRESENT = surface()


def test_every_public_name_is_still_there():
    assert sorted(set(RECORDED["names"]) - set(PRESENT["names"])) == []


@pytest.mark.parametrize("name", RECORDED["signatures"])
def test_a_public_name_is_still_called_as_before(name):
    """What comes new is optional, and stands behind what may be given by position."""
    recorded, present = RECORDED["signatures"][name], PRESENT["signatures"][name]
    by_position = list(itertools.takewhile(lambda text: not text.startswith("*"), recorded))
    assert present[: len(by_position)] == by_position
    assert [text for text in recorded if text not in [*present, "*"]] == []
    new = [text for text in present if text not in recorded]
    assert [text for text in new if "=" not in text and not text.startswith("*")] == []


@pytest.mark.parametrize("name", RECORDED["members"])
def test_a_public_class_still_has_its_methods_and_fields(name):
    present = {*PRESENT["members"][name], *dir(public()[name])}
    assert sorted(set(RECORDED["members"][name]) - present) == []
