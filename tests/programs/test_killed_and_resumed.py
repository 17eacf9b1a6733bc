"""Runs that are killed while they train and while they save, and files that appear at once.

`KILLS=200` kills each way that often.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

import keras
import numpy as np
import pytest
import saving_models

import keras_groupopt as kgo

HARNESS = pathlib.Path(__file__).with_name("kill_resume.py")


def only(backend: str) -> Any:
    return pytest.mark.backends(backend, reason="each way runs on one backend")


@pytest.mark.parametrize(
    ("way", "kills", "loses_files"),
    [
        pytest.param("backup", 12, False, id="BackupAndRestore", marks=only("torch")),
        pytest.param("checkpoint", 8, True, id="ModelCheckpoint", marks=only("jax")),
    ],
)
def test_a_run_that_is_killed_ends_where_a_whole_run_ends(new_process, way, kills, loses_files):
    kills = int(os.environ.get("KILLS", kills))
    printed = new_process(HARNESS, "--way", way, "--kills", str(kills))
    report = json.loads(printed.splitlines()[-1])
    assert report["differences"] == []
    assert report["kills"] == kills
    assert report["kills_within_a_save"] > 0
    assert report["runs"] > 0
    if not loses_files:
        assert report["damaged_files"] == 0


class Broken(keras.layers.Layer):
    """Cannot be saved."""

    def save_own_variables(self, store: Any) -> None:
        store["half"] = np.zeros(3)
        raise RuntimeError("the disk is full")


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.weights.h5"
    model = saving_models.compiled()
    kgo.save_weights(model, str(path))
    before = path.read_bytes()
    broken = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), Broken()])
    with pytest.raises(RuntimeError, match="the disk is full"):
        kgo.save_weights(broken, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_save_replaces_what_a_kill_left_and_what_was_there(tmp_path):
    path = tmp_path / "model.weights.h5"
    for name in (path.name, ".model.partial.weights.h5"):
        (tmp_path / name).write_bytes(b"half a file")
    model = saving_models.train(saving_models.compiled())
    kgo.save_weights(model, path)
    assert os.listdir(tmp_path) == [path.name]
    loaded = saving_models.train(saving_models.compiled(seed=2), 1)
    loaded.load_weights(path)
    saving_models.assert_equal(loaded, model)


@pytest.mark.parametrize(
    ("model", "path", "error", "message"),
    [
        (keras.Sequential, "model.h5", ValueError, "`path` must end in `.weights.h5`. Received: "),
        (keras.Sequential, "model.keras", ValueError, "path='model.keras'"),
        (keras.layers.Flatten, "a.weights.h5", TypeError, "`model` must be a Keras model."),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, monkeypatch, model, path, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(message)):
        kgo.save_weights(model(), path)
    assert os.listdir(tmp_path) == []


def fit(folder: pathlib.Path, epochs: int, **options: Any) -> tuple[keras.Model, list[int]]:
    model = saving_models.compiled()
    backup = kgo.BackupAndRestore(folder, **options)
    history = model.fit(
        saving_models.X, saving_models.Y, epochs=epochs, verbose=0, callbacks=[backup]
    )
    return model, history.epoch


def test_a_damaged_backup_falls_back_to_the_one_before(tmp_path):
    fit(tmp_path, 4, delete_checkpoint=False)
    assert sorted(os.listdir(tmp_path)) == ["epoch-3.weights.h5", "epoch-4.weights.h5"]
    newest = tmp_path / "epoch-4.weights.h5"
    newest.write_bytes(newest.read_bytes()[:3000])
    with pytest.warns(UserWarning, match=r"the one before it was loaded: epoch-3\.weights\.h5"):
        _, epochs = fit(tmp_path, 5, delete_checkpoint=False)
    assert epochs == [3, 4]
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(OSError, match="file signature not found"):
        fit(tmp_path, 6)


def test_backups_are_deleted_at_the_end_and_the_next_fit_starts_from_its_beginning(tmp_path):
    folder = tmp_path / "new" / "folder"
    fit(folder, 2, delete_checkpoint=False)
    model, epochs = fit(folder, 3)
    assert epochs == [2]
    assert not folder.exists()
    again = model.fit(saving_models.X, saving_models.Y, epochs=2, verbose=0)
    assert again.epoch == [0, 1]


def test_a_run_that_was_over_is_not_trained_again(tmp_path):
    model, _ = fit(tmp_path, 2, delete_checkpoint=False)
    again, epochs = fit(tmp_path, 2, delete_checkpoint=False)
    assert epochs == []
    again.optimizer.build(again.trainable_variables)
    saving_models.assert_equal(again, model)


def test_backups_need_a_folder_and_a_built_model(tmp_path):
    with pytest.raises(ValueError, match="`backup_dir` must be the path of a folder"):
        kgo.BackupAndRestore("")
    callback = kgo.BackupAndRestore(tmp_path)
    callback.set_model(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="`BackupAndRestore` needs a built model"):
        callback.on_train_begin()
