"""The same code means the same in every process, and a run goes on in another, bit for bit."""

from __future__ import annotations

import json

import automatic_names
import pytest
import resumed_runs
from automatic_names import continued, report, train
from resumed_runs import FILES
from saving_models import save

# One of the runs skips a micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Steps skipped")
PROGRAM = """
import json, sys
import keras, numpy, keras_groupopt
import automatic_names, path_cases, resumed_runs
path_cases.shift_automatic_names()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
optimizer = keras_groupopt.GroupedOptimizer(model=model, rule="adagrad")
optimizer.build(model.trainable_variables)
state = {0: {"sum": numpy.ones((2, 3))}, 1: {"sum": numpy.ones(2)}}
state = {"state": state, "param_groups": [{"params": [0, 1]}]}
keras_groupopt.load_torch_state(optimizer, state, ["head/kernel", "head/bias"])
print(json.dumps({
    "imports torch": "torch" in sys.modules,
    "made": [automatic_names.report(automatic_names.train(flag)) for flag in (True, False)],
    "continued": [automatic_names.continued(name) for name in resumed_runs.FILES],
    "resumed": resumed_runs.all_gone_on("."),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def here(folder):
    """The runs of this process: made, continued and resumed; files of them are in the folder."""
    model = train(with_model=True)
    found = {"made": [report(model), report(train(with_model=False))], "resumed": {}}
    found["stopped"] = report(model)["weights"]
    for name in FILES:
        save(model, folder / name)
    automatic_names.fit(model, 2)
    found["continued"] = report(model)
    for policy in resumed_runs.POLICIES:
        model = resumed_runs.stopped(policy)
        (folder / policy).mkdir()
        for name in FILES:
            save(model, folder / policy / name)
        assert int(model.optimizer.micro_batches) in (1, 2)
        resumed_runs.fit(model, resumed_runs.BEFORE, resumed_runs.AFTER)
        found["resumed"][policy] = resumed_runs.described(model)
    return found


@pytest.fixture(scope="module")
def there(here, folder, new_process_in):
    """The same of another process, which made other layers before."""
    return json.loads(new_process_in(folder, PROGRAM))


def test_paths_groups_config_and_steps_do_not_depend_on_the_process(here, there):
    for mine, other in zip(here["made"], there["made"], strict=True):
        assert other.pop("names") != mine.pop("names")
        assert other == mine
        assert mine["groups"] == {
            "first": ["sequential/dense/kernel", "sequential/dense/bias"],
            "second": ["sequential_1/dense/kernel", "sequential_1/dense/bias"],
            "head": ["dense_1/kernel"],
            "default": ["dense/kernel", "dense/bias", "dense_1/bias"],
        }
        # Two steps with momentum: 1 + 1.5 times the group's rate. The second tower's kernel decays
        # by an eighth in the second step.
        assert mine["weights"] == {
            "sequential/dense/kernel": -1.25,
            "sequential/dense/bias": -1.25,
            "sequential_1/dense/kernel": -0.625 + 0.25 / 8,
            "sequential_1/dense/bias": -0.625,
            "dense/kernel": -2.5,
            "dense/bias": -2.5,
            "dense_1/kernel": 0.0,
            "dense_1/bias": -2.5,
        }


def test_a_saved_model_continues_with_the_right_groups(here, there, folder):
    # Loaded twice in this process too.
    again = [continued(folder / "run.keras") for _ in range(2)]
    from_model, from_weights = there["continued"]
    expected = here["continued"]
    # A file of a model brings its names along; code gives new ones.
    assert from_weights.pop("names") != expected["names"]
    for found in (*again, from_model, from_weights):
        assert found == {name: expected[name] for name in found}
    moved = {path: value - here["stopped"][path] for path, value in expected["weights"].items()}
    # 1.75 + 1.875 times the group's rate: the momentum went on, and the ratios hold.
    for path, ratio in {
        "sequential/dense/kernel": 0.5,
        "sequential_1/dense/bias": 0.25,
        "dense/kernel": 1.0,
        "dense_1/kernel": 0.0,
    }.items():
        assert moved[path] == -3.625 * ratio


def test_a_run_stopped_in_the_middle_of_a_window_goes_on_bit_for_bit(here, there):
    assert len(there["resumed"]) == len(resumed_runs.POLICIES) * len(FILES)
    for cell, described in there["resumed"].items():
        expected = here["resumed"][cell.split()[0]]
        differing = {name for name in expected if described.get(name) != expected[name]}
        assert differing == set(), cell
        assert set(described) == set(expected), cell
        # Every kind of state is in what is compared.
        slots = {name.rpartition("/")[2] for name in described}
        assert {"momentums", "velocities", "@anchor", "@average", "@accumulator"} <= slots
        assert {"@iterations", "@averages_made", "@micro_batches", "@ema_momentum"} <= slots


@pytest.mark.backends("jax", "tensorflow", reason="Keras itself imports torch there")
def test_nothing_of_torch_is_imported_to_read_its_state(there):
    assert there["imports torch"] is False
