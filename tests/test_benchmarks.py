"""The benchmark runs, its contenders do the same work, and its figures mean what they say."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import time
from collections.abc import Callable
from types import ModuleType

import keras
import pytest

STEP_TIME = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "step_time.py"
OURS = {"grouped", "grouped_default_exclusion"}
# `MultiOptimizer` is younger than the oldest Keras that is supported.
PEERS = {"adamw"} | (
    {"multi_optimizer", "multi_optimizer_again"}
    if hasattr(keras.optimizers, "MultiOptimizer")
    else set()
)


@pytest.fixture
def script(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports one of the benchmark's own modules, as its script does."""
    monkeypatch.syspath_prepend(str(STEP_TIME.parent))
    return importlib.import_module


def test_step_time_writes_figures_of_every_contender(new_process, tmp_path, backend):
    output = tmp_path / "new folder" / "result.json"
    arguments = ("--model", "small", "--builds", "2", "--repeats", "2", "--warm-up", "2")
    printed = new_process(STEP_TIME, *arguments, "--output", str(output))
    assert printed == ""
    result = json.loads(output.read_text())

    assert result["backend"] == backend
    assert result["versions"]["keras"] == keras.version()
    assert {"python", "numpy", backend} <= result["versions"].keys()
    assert {"system", "processor", "cores", "load_average"} <= result["machine"].keys()
    assert result["model"]["trainable_variables"] == 14
    assert (result["settings"]["builds"], result["settings"]["repeats"]) == (2, 2)

    assert set(result["steps"]) == {"no_clip", "global_clip"}
    for case, contenders in result["steps"].items():
        timed = {name for name, found in contenders.items() if "error" not in found}
        assert timed == OURS | PEERS
        for name in timed:
            found = contenders[name]
            assert len(found["build_seconds"]) == len(found["first_step_seconds"]) == 2
            for clock in ("wall_ms", "cpu_ms"):
                assert 0 <= found[clock]["minimum"] <= found[clock]["quartile_1"]
                assert found[clock]["quartile_1"] <= found[clock]["median"]
                assert found[clock]["median"] <= found[clock]["quartile_3"]
            for peer in ({"multi_optimizer", "adamw"} & PEERS) - {name}:
                assert found[f"ratio_to_{peer}"]["wall"]["ratio"] > 0
        # The two do the same arithmetic; the one with the exclusion, on purpose, does not.
        differences = {name: contenders[name]["largest_weight_difference"] for name in timed}
        assert differences["adamw"] == 0.0
        assert differences["grouped"] < 1e-6
        assert differences["grouped_default_exclusion"] > 1e-6
        if case == "no_clip":
            assert all(differences[peer] < 1e-6 for peer in PEERS)

    assert result["file_size"]["ratio"] <= 1.02
    assert result["file_size"]["met"]
    assert result["file_size"]["bytes"]["adamw"] > 1_000_000
    limits = {name: found["limit"] for name, found in result["targets"].items()}
    assert limits["global_clip: grouped / adamw"] == 1.1
    assert ("no_clip: grouped / multi_optimizer" in limits) == ("multi_optimizer" in PEERS)


def test_running_state_times_micro_steps_averages_checks_and_files(new_process, tmp_path, backend):
    output = tmp_path / "result.json"
    arguments = ("--model", "small", "--builds", "1", "--repeats", "2", "--file-repeats", "1")
    new_process(STEP_TIME.with_name("running_state.py"), *arguments, "--output", str(output))
    result = json.loads(output.read_text())
    assert result["backend"] == backend
    steps = result["steps"]
    assert {"apply", "apply_checked", "apply_averaged", "micro_step", "addition"} <= steps.keys()
    assert all(found["wall_ms"]["minimum"] >= 0 for found in steps.values())
    assert steps["micro_step"]["ratio_to_addition"]["limit"] == 3.0
    files = result["files"]
    # Averages are one more copy of the weights, in ours as in Keras' file.
    for ours, peer in (("grouped", "adamw"), ("grouped_averaged", "adamw_averaged")):
        assert files[ours]["keras_bytes"] < 1.02 * files[peer]["keras_bytes"]
        assert files[ours]["load_weights_seconds"]["minimum"] > 0


def test_training_step_times_each_rule_through_fit_and_measures_peak_memory(new_process, tmp_path):
    output = tmp_path / "result.json"
    arguments = ("--model", "small", "--rules", "plain_again", "sam", "looksam", "--batch", "2")
    few = ("--builds", "1", "--repeats", "1")
    new_process(STEP_TIME.with_name("training_step.py"), *arguments, *few, "--output", str(output))
    result = json.loads(output.read_text())
    assert result["steps"].keys() == {"plain", "plain_again", "sam", "looksam"}
    for name, found in result["steps"].items():
        assert found["wall_ms"]["minimum"] > 0
        assert name == "plain" or found["ratio_to_plain"]["cpu"]["ratio"] > 0
    assert result["memory"].keys() == result["steps"].keys()
    (kind,) = result["memory"]["sam"]["above_plain_in_copies"]
    assert result["memory"]["sam"][kind] >= result["memory"]["sam"]["weights_mib"] > 0
    limits = {name: found["limit"] for name, found in result["targets"].items()}
    assert limits == {
        "time: sam / plain": 2.1,
        "time: looksam / plain": 1.35,
        f"memory: sam - plain, {kind}": 2.0,
    }


def test_a_ratio_is_taken_round_by_round_and_averaged_over_builds(script):
    # In the second round the machine was ten times slower, for both.
    found = script("measuring").ratio(
        [[2.0, 20.0, 2.0], [8.0, 8.0, 80.0]], [[1.0, 10.0, 1.0], [1.0, 1.0, 10.0]]
    )
    assert found["of_builds"] == [2.0, 8.0]
    assert found["ratio"] == pytest.approx(math.sqrt(2.0 * 8.0))
    assert (found["quartile_1"], found["quartile_3"]) == (2.0, 8.0)
    assert found["of_minima"] == 2.0


def test_a_spread_is_that_of_all_rounds(script):
    found = script("measuring").spread([[5.0, 1.0, 2.0], [4.0, 3.0]])
    assert found == {"median": 3.0, "quartile_1": 2.0, "quartile_3": 4.0, "minimum": 1.0}


def test_a_step_may_say_which_part_of_it_counts(script):
    times = script("measuring").in_turn({"part": lambda: (3.0, 2.0)}, 2)
    assert times == {"part": {"wall": [3.0, 3.0], "cpu": [2.0, 2.0]}}


def test_one_round_has_a_spread(script):
    found = script("measuring").spread([[2.0]])
    assert found == {"median": 2.0, "quartile_1": 2.0, "quartile_3": 2.0, "minimum": 2.0}


def test_steps_take_turns_and_the_wall_clock_sees_a_wait_that_cpu_time_does_not(script):
    calls = []
    steps = {"short": lambda: calls.append("short"), "long": lambda: time.sleep(0.02)}
    times = script("measuring").in_turn(steps, 4)
    assert calls == ["short"] * 4
    assert {name: len(found["wall"]) for name, found in times.items()} == {"short": 4, "long": 4}
    assert min(times["long"]["wall"]) >= 20.0
    assert min(times["long"]["cpu"]) < 20.0


@pytest.mark.parametrize("arguments", [("--repeats", "0"), ("--builds", "0"), ("--warm-up", "0")])
def test_step_time_refuses_to_measure_nothing(arguments, script, capsys):
    with pytest.raises(SystemExit):
        script("step_time").arguments(list(arguments))
    assert "must be at least 1" in capsys.readouterr().err
