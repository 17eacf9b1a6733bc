"""The same code means the same groups in every process, whatever was made there before."""

from __future__ import annotations

import json

import automatic_names
from automatic_names import continued, report, train

BEGIN = """
import json, sys
import automatic_names
automatic_names.shift_names()
"""


def test_paths_groups_config_and_steps_do_not_depend_on_the_process(new_process):
    code = f"""{BEGIN}
made = [automatic_names.report(automatic_names.train(flag)) for flag in (True, False)]
print(json.dumps(made))"""
    for with_model, there in zip((True, False), json.loads(new_process(code)), strict=True):
        here = report(train(with_model))
        assert there.pop("names") != here.pop("names")
        assert there == here
        assert here["groups"] == {
            "first": ["sequential/dense/kernel", "sequential/dense/bias"],
            "second": ["sequential_1/dense/kernel", "sequential_1/dense/bias"],
            "head": ["dense_1/kernel"],
            "default": ["dense/kernel", "dense/bias", "dense_1/bias"],
        }
        # Two steps with momentum: 1 + 1.5 times the group's rate. The second tower's kernel decays
        # by an eighth in the second step.
        assert here["weights"] == {
            "sequential/dense/kernel": -1.25,
            "sequential/dense/bias": -1.25,
            "sequential_1/dense/kernel": -0.625 + 0.25 / 8,
            "sequential_1/dense/bias": -0.625,
            "dense/kernel": -2.5,
            "dense/bias": -2.5,
            "dense_1/kernel": 0.0,
            "dense_1/bias": -2.5,
        }


def test_a_saved_model_continues_in_another_process_with_the_right_groups(new_process, tmp_path):
    model = train(with_model=True)
    model.save(tmp_path / "run.keras")
    model.save_weights(tmp_path / "run.weights.h5")
    stopped = report(model)["weights"]
    automatic_names.fit(model, 2)
    here = report(model)
    names = here.pop("names")
    code = f"""{BEGIN}
made = [automatic_names.continued(path) for path in ("run.keras", "run.weights.h5")]
print(json.dumps(made))"""
    from_model, from_weights = json.loads(new_process(code))
    # A file of a model brings its names along; code gives new ones.
    assert from_model.pop("names") == names
    assert from_weights.pop("names") != names
    assert from_model == here
    assert from_weights == here
    moved = {path: value - stopped[path] for path, value in here["weights"].items()}
    # 1.75 + 1.875 times the group's rate: the momentum went on, and the ratios hold.
    for path, ratio in {
        "sequential/dense/kernel": 0.5,
        "sequential_1/dense/bias": 0.25,
        "dense/kernel": 1.0,
        "dense_1/kernel": 0.0,
    }.items():
        assert moved[path] == -3.625 * ratio


def test_a_saved_model_loaded_twice_continues_as_it_would_have(tmp_path):
    model = train(with_model=True)
    model.save(tmp_path / "run.keras")
    automatic_names.fit(model, 2)
    straight = report(model)
    for _ in range(2):
        assert continued(tmp_path / "run.keras") == straight
