"""A run stopped in the middle of a window goes on bit for bit, in another process."""

from __future__ import annotations

import json

import pytest
import resumed_runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of the stopped runs' files, and what each run came to without a stop."""
    folder = tmp_path_factory.mktemp("runs")
    results = {}
    for policy in resumed_runs.POLICIES:
        model = resumed_runs.stopped(policy)
        (folder / policy).mkdir()
        for name in resumed_runs.FILES:
            save = model.save if name.endswith(".keras") else model.save_weights
            save(folder / policy / name)
        assert int(model.optimizer.micro_batches) in (1, 2)
        resumed_runs.fit(model, resumed_runs.BEFORE, resumed_runs.AFTER)
        results[policy] = resumed_runs.described(model)
    return folder, results


def test_every_kind_of_state_is_in_what_is_compared(straight):
    _, results = straight
    for described in results.values():
        slots = {name.rpartition("/")[2] for name in described}
        assert {"momentums", "velocities", "@anchor", "@average", "@accumulator"} <= slots
        assert {"@iterations", "@averages_made", "@micro_batches", "@ema_momentum"} <= slots


def test_a_run_goes_on_bit_for_bit_in_another_process(straight, new_process):
    folder, results = straight
    code = f"""
import json, sys
import resumed_runs
print(json.dumps(resumed_runs.all_gone_on({str(folder)!r})))"""
    elsewhere = json.loads(new_process(code))
    assert len(elsewhere) == len(resumed_runs.POLICIES) * len(resumed_runs.FILES)
    for cell, described in elsewhere.items():
        expected = results[cell.split()[0]]
        differing = {name for name in expected if described.get(name) != expected[name]}
        assert differing == set(), cell
        assert set(described) == set(expected), cell
