"""Several devices give the numbers of one, each backend in its own way.

On JAX each state is in its place too, and no step is compiled twice.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from device_runs import ROWS
from devices_jax import LIVE, LIVE_IN, RUNS

on_jax = pytest.mark.backends("jax", reason="keras.distribution runs on JAX")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, new_process_in: Any) -> dict[str, Any]:
    """What the program of the backend found on 4 devices, or with 2 processes."""
    program = pathlib.Path(__file__).with_name(f"devices_{os.environ['KERAS_BACKEND']}.py")
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return json.loads(new_process_in(tmp_path_factory.mktemp("devices"), program, env=env))


@pytest.mark.backends("tensorflow", reason="only TensorFlow has strategies of replicas")
def test_two_replicas_do_what_one_device_does(new_process):
    cases = pathlib.Path(__file__).with_name("mirrored_cases.py")
    run = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    assert " passed" in new_process(run, str(cases))


@pytest.mark.backends("torch", reason="only torch has DistributedDataParallel")
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


@on_jax
@pytest.mark.parametrize(("place", "row"), RUNS)
def test_four_devices_give_the_numbers_of_one_and_compile_one_step(found, place, row):
    result = found["rows"][f"{place}: {row}"]
    assert result["difference"] < 1e-6
    assert result["misplaced"] == []
    # On a CPU LookSAM has a step with a second pass, and one without.
    assert result["compiled"] == (1 if row == "LookSAM" else 0)


@on_jax
@pytest.mark.parametrize("action", LIVE)
@pytest.mark.parametrize("place", LIVE_IN)
def test_state_that_was_replaced_is_where_it_was(found, place, action):
    assert found["live"][f"{place}: {action}"] == []
    assert found["live"][f"{place}: {action}, trained"] == []


@on_jax
def test_a_compiled_loop_of_ones_own_keeps_the_layouts(found):
    result = found["custom loop"]
    assert result["difference"] < 1e-6
    assert result["misplaced"] == []
    assert result["compiled"] == 0


@on_jax
def test_keras_own_loss_scale_gives_the_numbers_of_one_device(found):
    # Loosely: sums over the batch are in float16, and in another order.
    assert found["half precision"]["difference"] < 1e-4


@on_jax
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
