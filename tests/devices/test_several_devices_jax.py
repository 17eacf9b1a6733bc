"""JAX on several devices: numbers of one, each state in its place, and no step compiled twice."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from devices_jax import LIVE, LIVE_IN, RUNS

pytestmark = pytest.mark.backends("jax", reason="keras.distribution runs on JAX")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, new_process_in: Any) -> dict[str, Any]:
    """What the program found on 4 devices."""
    flags = "--xla_force_host_platform_device_count=4"
    program = pathlib.Path(__file__).with_name("devices_jax.py")
    folder = tmp_path_factory.mktemp("devices")
    return json.loads(new_process_in(folder, program, env={"XLA_FLAGS": flags}))


@pytest.mark.parametrize(("place", "row"), RUNS)
def test_four_devices_give_the_numbers_of_one_and_compile_one_step(found, place, row):
    result = found["rows"][f"{place}: {row}"]
    assert result["difference"] < 1e-6
    assert result["misplaced"] == []
    # On a CPU LookSAM has a step with a second pass, and one without.
    assert result["compiled"] == (1 if row == "LookSAM" else 0)


@pytest.mark.parametrize("action", LIVE)
@pytest.mark.parametrize("place", LIVE_IN)
def test_state_that_was_replaced_is_where_it_was(found, place, action):
    assert found["live"][f"{place}: {action}"] == []
    assert found["live"][f"{place}: {action}, trained"] == []


def test_a_compiled_loop_of_ones_own_keeps_the_layouts(found):
    result = found["custom loop"]
    assert result["difference"] < 1e-6
    assert result["misplaced"] == []
    assert result["compiled"] == 0


def test_keras_own_loss_scale_gives_the_numbers_of_one_device(found):
    # Loosely: sums over the batch are in float16, and in another order.
    assert found["half precision"]["difference"] < 1e-4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not in the mesh", "must name axes of the distribution's mesh. Received: ('other',)"),
        ("not divisible", "6 is not a multiple of batch=4. Name the axis at another dimension"),
        ("rank", "at most one axis per dimension. Received: (None, None, 'batch')"),
        ("twice", "must name each axis once. Received: ('batch', 'batch')"),
        ("two entries", "At most one entry of the layout map must match"),
    ],
)
def test_a_layout_that_cannot_be_applied_is_refused_and_the_state_named(found, name, said):
    assert said in found["refusals"][name]
    assert "for `default/head/kernel/momentums`" in found["refusals"][name]
