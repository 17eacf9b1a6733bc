"""The benchmark runs, its contenders do the same work, and its figures mean what they say."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from types import ModuleType

import keras
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
# Those of torch and TensorFlow come with the backend; Optax is a tool of this repository's.
BACKEND_PEERS = {
    "torch": {"torch_loop", "torch_foreach", "torch_fused", "torch_fused_one_group"},
    "jax": {"optax_adamw", "optax_multi_transform", "optax_flatten"}
    if importlib.util.find_spec("optax")
    else set(),
    "tensorflow": {"resource_apply_adam"},
}
MODES = {"torch": "eager", "jax": "compiled", "tensorflow": "graph"}
# `MultiOptimizer` is younger than the oldest Keras that is supported.
KERAS_PEERS = {"adamw"} | (
    {"multi_optimizer"} if hasattr(keras.optimizers, "MultiOptimizer") else set()
)
OURS = {"grouped", "grouped_plain"}
CASES = {"basic", "no_clip", "no_decay", "anchors", "ema", "micro_step", "checked"}


@pytest.fixture
def script(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports one of the benchmark's own modules, as its script does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    # Tests have a module of this name too.
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return importlib.import_module


@pytest.fixture(scope="module")
def measured(tmp_path_factory, new_process_in) -> pathlib.Path:
    """A folder with the result of a run of everything, on a small model."""
    folder = tmp_path_factory.mktemp("results")
    # With a tiny epsilon it makes no difference where it is added.
    options = ("--model", "small", "--rounds", "2", "--steps", "4", "--epsilon", "1e-16")
    what = ("--modes", MODES[os.environ["KERAS_BACKEND"]], "--sets", "peers", "switches")
    new_process_in(folder, FOLDER / "step_time.py", *options, "--folder", str(folder), *what)
    return folder


def test_step_time_times_all_contenders_and_switches(measured, backend):
    (path,) = measured.iterdir()
    assert path.name == f"{backend}_small.json"
    result = json.loads(path.read_text())
    assert result["versions"]["keras"] == keras.version()
    assert {"python", "numpy", backend} <= result["versions"].keys()
    machine = {"system", "processor", "cores", "devices", "load_average", "load_average_after"}
    assert machine <= result["machine"].keys()
    model = {"name": "small", "trainable_variables": 14, "trainable_values": 300810}
    assert result["model"] == {**model, "bytes": 4 * 300810}
    found = {(e["set"], e["case"], e["contender"]): e for e in result["entries"]}
    assert not [entry for entry in found.values() if "error" in entry]
    limits = set() if result["machine"]["devices"] else {"copy"}
    contenders = OURS | KERAS_PEERS | BACKEND_PEERS[backend] | limits
    expected = {("peers", "basic", name) for name in contenders}
    expected |= {("switches", case, name) for case in CASES for name in OURS}
    assert found.keys() == expected | {("switches", "basic", n) for n in {"addition"} | limits}
    for entry in found.values():
        for clock in ("wall", "cpu"):
            spread = entry[f"{clock}_ms"]
            assert 0 <= spread["minimum"] <= spread["quartile_1"] <= spread["quartile_3"]
            assert [len(rounds) for rounds in entry["rounds"][clock]] == [2]


def test_contenders_arrive_at_the_same_weights_with_state_of_the_same_size(measured):
    (path,) = measured.iterdir()
    result = json.loads(path.read_text())
    copies = {"anchors": 3, "ema": 3, "micro_step": 3}
    for entry in result["entries"]:
        name, case = entry["contender"], entry["case"]
        if name in ("copy", "addition"):
            continue
        assert "first_call" in entry["start_up"]
        state = entry["state_bytes"] / result["model"]["bytes"]
        assert state == pytest.approx(copies.get(case, 2), abs=1e-3)
        reference = {"grouped": "grouped_plain", "adamw": None}.get(name, "adamw")
        if entry["set"] == "switches" and name == "grouped_plain":
            reference = None
        assert entry.get("compared_with") == reference
        # A clip per group would be another step: the peer of Keras does without.
        if reference is not None and name != "multi_optimizer":
            assert entry["largest_weight_difference"] < 1e-5


def test_the_report_says_what_was_measured_and_which_limits_are_met(measured, new_process, backend):
    printed = new_process(FOLDER / "report.py", str(measured), "--details")
    where = f"| {backend} {MODES[backend]} | small |"
    own_limits = {
        "torch": ("step / torch.optim.AdamW(fused=True) |",),
        "jax": ("step / best of Keras and Optax |", "trace / Keras", "compile / Keras"),
        "tensorflow": ("step / Keras AdamW |", "start-up / Keras AdamW, CPU |"),
    }
    for row in (*own_limits[backend], "step with clip / without", "micro-step / addition"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{where} {row}")]
        assert line.endswith(("| met |", "| not met |"))
    assert f"{where} state / weights, bytes | 2.00 | 2 | met |" in printed
    for name in OURS | KERAS_PEERS | BACKEND_PEERS[backend]:
        assert f"{where} peers | basic | {name} |" in printed


def test_the_report_replaces_its_section_and_nothing_else(measured, new_process, tmp_path):
    pytest.importorskip("matplotlib")
    folder, readme = tmp_path / "results", tmp_path / "README.md"
    shutil.copytree(measured, folder)
    readme.write_text("before\n\n<!-- performance -->\nold\n<!-- /performance -->\nafter\n")
    texts = []
    for _ in range(2):
        new_process(FOLDER / "report.py", str(folder), "--write", str(readme))
        texts.append((readme.read_text(), (folder / "performance.svg").read_text()))
    # Written again from the same files, nothing changes.
    assert texts[0] == texts[1]
    text, picture = texts[0]
    assert text.startswith("before\n\n<!-- performance -->\n\nOne `apply`")
    assert text.endswith("\n\n<!-- /performance -->\nafter\n")
    assert "old" not in text
    assert "(results/performance.svg)" in text
    assert "ours" in picture
    assert "## All entries" in (folder / "README.md").read_text()


def test_the_memory_of_a_step_is_measured_in_a_process_of_its_own(new_process, backend):
    which = ("--memory-of", MODES[backend], "basic", "grouped")
    printed = new_process(FOLDER / "step_time.py", "--model", "small", *which)
    found = json.loads(printed.splitlines()[-1])
    if pathlib.Path("/proc/self/clear_refs").exists():
        assert found["peak_mib"] > 50
        assert found["temporary_copies"] >= 0


def test_saved_files_weighs_and_times_files(new_process, tmp_path):
    output = tmp_path / "new folder" / "result.json"
    arguments = ("--model", "small", "--repeats", "1", "--output", str(output))
    assert new_process(FOLDER / "saved_files.py", *arguments) == ""
    files = json.loads(output.read_text())["files"]
    # Averages are one more copy of the weights, in ours as in Keras' file.
    for ours, peer in (("grouped", "adamw"), ("grouped_averaged", "adamw_averaged")):
        assert files[ours]["bytes_ratio"]["ratio"] <= files[ours]["bytes_ratio"]["limit"] == 1.02
        assert files[peer]["keras_bytes"] > 1_000_000
        assert files[ours]["load_weights_seconds"]["minimum"] > 0


def test_training_step_times_each_rule_through_fit_and_measures_peak_memory(new_process, tmp_path):
    output = tmp_path / "result.json"
    arguments = ("--model", "small", "--rules", "sam", "looksam", "--batch", "2")
    few = ("--builds", "1", "--repeats", "1")
    new_process(FOLDER / "training_step.py", *arguments, *few, "--output", str(output))
    result = json.loads(output.read_text())
    assert result["steps"].keys() == {"plain", "sam", "looksam"}
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


@pytest.mark.once
def test_a_ratio_is_taken_round_by_round_and_a_spread_is_that_of_all_rounds(script):
    measuring = script("measuring")
    # In the second round the machine was ten times slower, for both.
    found = measuring.ratio(
        [[2.0, 20.0, 2.0], [8.0, 8.0, 80.0]], [[1.0, 10.0, 1.0], [1.0, 1.0, 10.0]]
    )
    assert found["of_builds"] == [2.0, 8.0]
    assert found["ratio"] == pytest.approx(math.sqrt(2.0 * 8.0))
    assert (found["quartile_1"], found["quartile_3"]) == (2.0, 8.0)
    assert found["of_minima"] == 2.0
    names = ("median", "quartile_1", "quartile_3", "minimum")
    for rounds, expected in (
        ([[5.0, 1.0, 2.0], [4.0, 3.0]], (3.0, 2.0, 4.0, 1.0)),
        ([[2.0]], (2.0,) * 4),
    ):
        assert measuring.spread(rounds) == dict(zip(names, expected, strict=True))
    # A step may say which part of it counts.
    times = measuring.in_turn({"part": lambda: (3.0, 2.0)}, 2)
    assert times == {"part": {"wall": [3.0, 3.0], "cpu": [2.0, 2.0]}}


@pytest.mark.once
def test_steps_take_turns_and_the_wall_clock_sees_a_wait_that_cpu_time_does_not(script):
    calls = []
    steps = {"short": lambda: calls.append("short"), "long": lambda: time.sleep(0.02)}
    times = script("measuring").in_turn(steps, 4)
    assert calls == ["short"] * 4
    assert {name: len(found["wall"]) for name, found in times.items()} == {"short": 4, "long": 4}
    assert min(times["long"]["wall"]) >= 20.0
    assert min(times["long"]["cpu"]) < 20.0


@pytest.mark.once
@pytest.mark.parametrize("arguments", [("--rounds", "0"), ("--builds", "0"), ("--steps", "0")])
def test_step_time_refuses_to_measure_nothing(arguments, script, capsys):
    with pytest.raises(SystemExit):
        script("step_time").arguments(list(arguments))
    assert "must be at least 1" in capsys.readouterr().err
