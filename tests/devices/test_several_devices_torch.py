"""torch on several processes: `DistributedDataParallel` gives the numbers of one process."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from device_runs import ROWS

pytestmark = pytest.mark.backends("torch", reason="only torch has DistributedDataParallel")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, new_process_in: Any) -> dict[str, Any]:
    """What the program found with 2 processes."""
    program = pathlib.Path(__file__).with_name("devices_torch.py")
    return json.loads(new_process_in(tmp_path_factory.mktemp("devices"), program))


@pytest.mark.parametrize(
    "row",
    [
        *ROWS,
        "GSAM",
        pytest.param("loaded", id="a model saved by one process goes on in all"),
        pytest.param("no_sync", id="gradients that torch adds up are those of one batch"),
        pytest.param("overflow", id="an overflow in one process is skipped in all"),
    ],
)
def test_two_processes_give_the_numbers_of_one_and_agree_to_the_bit(found, row):
    assert found[row]["difference"] < 1e-6
    assert found[row]["identical"]
