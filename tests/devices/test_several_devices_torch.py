"""torch on several processes: `DistributedDataParallel` gives the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from devices_torch import ROWS
from finding import found_by

pytestmark = pytest.mark.backends("torch", reason="only torch has DistributedDataParallel")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found with 2 processes."""
    return found_by("devices_torch.py", tmp_path_factory.mktemp("devices"))


@pytest.mark.parametrize("row", ROWS)
def test_two_processes_give_the_numbers_of_one_and_agree_to_the_bit(found, row):
    assert found[row]["difference"] < 1e-6
    assert found[row]["identical"]


def test_a_model_saved_by_one_process_goes_on_in_all(found):
    assert found["loaded"]["difference"] < 1e-6
    assert found["loaded"]["identical"]


def test_gradients_that_torch_adds_up_are_those_of_one_batch(found):
    assert found["no_sync"]["difference"] < 1e-6
    assert found["no_sync"]["identical"]


def test_an_overflow_in_one_process_is_skipped_in_all(found):
    assert found["overflow"]["difference"] < 1e-6
    assert found["overflow"]["identical"]
