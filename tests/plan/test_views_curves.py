"""A plan over time: numbers that training then follows, the table of them, and the picture."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from typing import Any

import keras
import numpy as np
import plan_dicts
import pytest
import rate_meter
from chosen_gradients import towers

import keras_groupopt as kgo
from keras_groupopt.plan.sampled_rates import curves, run_length, sampled
from keras_groupopt.plan.views.plot import figure
from keras_groupopt.schedules import Cyclic, Linear, MultiStep, OneCycle, Sequential, Step

STEPS = 8


def plan_of(*groups: Any, **options: Any) -> kgo.Plan:
    layers = [keras.layers.Dense(2, name=name) for name in ("stem", "backbone", "head")]
    model = keras.Sequential([keras.Input((2,)), *layers])
    return kgo.GroupedOptimizer(list(groups), model=model, **options).plan


def three_groups(drop: int = 4, **options: Any) -> kgo.Plan:
    """A frozen group, one whose ratio drops at a step, and one with a rate of its own."""
    return plan_of(
        kgo.Group("stem", "stem", frozen=True),
        kgo.Group("backbone", "backbone", learning_rate_ratio=MultiStep(0.5, [drop], 0.1)),
        kgo.Group("head", "head", learning_rate=kgo.constant(0.25), weight_decay=0.0625),
        **{"learning_rate": Linear(1.0, STEPS), **options},
    )


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in found["groups"]}


def rates(plan: kgo.Plan, steps: Any, *total: int, group: str = "default") -> list[float]:
    """The highest rate of a group at each of these steps."""
    return by_name(curves(plan, steps, *total))[group]["learning_rate"]["highest"]


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.every_backend
def test_the_curves_of_a_plan_are_rates_ratios_decays_and_momentums():
    plan = three_groups(weight_decay=Linear(0.5, 4), ema=kgo.EMA(kgo.warmup(0.5, 4)))
    found = curves(plan, [0, 3, 4, 8])
    groups = by_name(found)
    assert found["steps"] == [0, 3, 4, 8]
    assert found["shared"] == {"ema.momentum": [0.0, 0.375, 0.5, 0.5]}
    frozen = {"learning_rate": None, "ratio": None, "weight_decay": None, "arguments": {}}
    assert groups["stem"] == {"name": "stem", "frozen": True, **frozen}
    for name, rates, ratios, decays in (
        ("backbone", [0.5, 0.3125, 0.025, 0.0], [0.5, 0.5, 0.05, 0.05], [0.5, 0.125, 0.0, 0.0]),
        ("head", [0.25] * 4, [1.0] * 4, [0.0625] * 4),
    ):
        own = groups[name]
        for edge in ("lowest", "highest"):
            np.testing.assert_allclose(own["learning_rate"][edge], rates, rtol=1e-6)
            np.testing.assert_allclose(own["ratio"][edge], ratios, rtol=1e-6)
        np.testing.assert_allclose(own["weight_decay"], decays, rtol=1e-6)


@keras.saving.register_keras_serializable(package="test_views_curves")
def at_most_half(base: Any) -> Any:
    return keras.ops.minimum(base, 0.5)


def test_ratios_within_a_group_spread_its_rate():
    rule = kgo.rule("adam", beta_1=Linear(0.8, STEPS, 0.4))
    plan = plan_of(
        kgo.Group("body", ["stem", "backbone"], rule=rule, learning_rate_ratio=0.5),
        kgo.Group("head", "head", learning_rate=kgo.from_base(at_most_half)),
        learning_rate=Linear(1.0, STEPS),
        ratios=[("stem", 0.1), ("backbone/bias", MultiStep(1.0, [4], 4.0)), ("head", 2.0)],
    )
    plan = dataclasses.replace(plan, gradient_rule={"SAM.rho": Linear(0.1, STEPS), "SAM.eta": 1.0})
    found = curves(plan, [0, 2, 4, 6])
    assert list(found["shared"]) == ["SAM.rho"]
    np.testing.assert_allclose(found["shared"]["SAM.rho"], [0.1, 0.075, 0.05, 0.025], rtol=1e-6)
    body, head = (by_name(found)[name] for name in ("body", "head"))
    base = np.array([1.0, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(body["ratio"]["lowest"], [0.05] * 4)
    np.testing.assert_allclose(body["ratio"]["highest"], [0.5, 0.5, 2.0, 2.0])
    np.testing.assert_allclose(body["learning_rate"]["lowest"], base * 0.05, rtol=1e-6)
    highest = base * [0.5, 0.5, 2.0, 2.0]
    np.testing.assert_allclose(body["learning_rate"]["highest"], highest, rtol=1e-6)
    np.testing.assert_allclose(body["arguments"]["beta_1"], [0.8, 0.7, 0.6, 0.5], rtol=1e-6)
    for edge in ("lowest", "highest"):
        np.testing.assert_allclose(head["learning_rate"][edge], [1.0, 1.0, 1.0, 0.5], rtol=1e-6)
    assert head["arguments"] == {}


@pytest.mark.every_backend
def test_training_moves_weights_by_the_rates_of_the_curves():
    model = rate_meter.make_model()
    optimizer = kgo.GroupedOptimizer(
        {"backbone": kgo.Group("backbone", "**/dense", learning_rate_ratio=Step(0.5, 2, 0.5))},
        model=model,
        rule="sgd",
        learning_rate=OneCycle(1.0, STEPS),
    )
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    rate_meter.fit(model, epochs=STEPS // rate_meter.BATCHES)
    moved = [float(np.mean(keras.ops.convert_to_numpy(w))) for w in model.trainable_variables]
    for name, move in zip(("backbone", "default"), moved, strict=True):
        taken = rates(optimizer.plan, range(STEPS), group=name)
        assert -move == pytest.approx(sum(taken), rel=1e-5)


@keras.saving.register_keras_serializable(package="test_views_curves")
def half() -> float:
    return 0.5


def test_a_base_that_is_a_function_is_asked_for_its_rate():
    assert rates(plan_of(learning_rate=half), [0, 9]) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("schedule", "exact"),
    [
        (MultiStep(1.0, [3001, 7777], 0.1), [3000, 3001, 7776, 7777]),
        (Cyclic(0.1, 1.0, 333), [333, 666, 9990]),
        (kgo.warmup(Linear(1.0, 5000), 777), [777, 5777]),
    ],
    ids=["jumps", "peaks", "bends"],
)
def test_a_drawing_has_points_where_a_curve_jumps_or_bends(schedule, exact):
    found = sampled(plan_of(learning_rate=schedule), 10_000)
    steps, (line,) = found["steps"], [g["learning_rate"]["highest"] for g in found["groups"]]
    assert len(steps) < 800
    every = [float(schedule(step)) for step in exact]
    np.testing.assert_allclose(np.interp(exact, steps, line), every, atol=0.01)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that only an eager step can call."""

    def __call__(self, step: Any) -> Any:
        return 1.0 if int(step) < 4 else 0.5

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.every_backend
def test_a_schedule_that_asks_for_the_step_in_python_is_drawn_too():
    assert rates(plan_of(learning_rate=Halving()), [3, 4, 5]) == [1.0, 0.5, 0.5]


def test_a_plan_is_drawn_anew_for_a_run_of_another_length():
    plan = plan_of(kgo.Group("head", "head", learning_rate=Linear(1.0, "fit")))
    for total in (8, 16, 8):
        assert rates(plan, [4], total, group="head") == [1 - 4 / total]


@pytest.mark.parametrize(("total", "count"), [(1, 2), (30, 31)])
def test_a_short_run_is_drawn_step_by_step(total, count):
    assert sampled(plan_of(learning_rate=Step(1.0, 1)), total)["steps"] == list(range(count))


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"learning_rate": Linear(1.0, 50)}, None, 50),
        ({"learning_rate": Linear(1.0, 50)}, 20, 20),
        ({"learning_rate": Linear(1.0, 50), "weight_decay": Linear(1.0, 70)}, None, 70),
        ({"learning_rate": keras.optimizers.schedules.CosineDecay(1.0, 60)}, None, 60),
        ({"learning_rate": Step(1.0, 50), "ema": kgo.EMA(kgo.warmup(0.9, 40))}, None, 40),
    ],
)
def test_a_run_is_as_long_as_the_last_schedule_unless_said(options, steps, expected):
    assert run_length(plan_of(**options), steps) == expected


# The table ---------------------------------------------------------------------------------------


RATES = """\
Learning rate at optimizer step
┏━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━━━━┳━━━━━━━━┓
┃          ┃        ┃  2,000 ┃         ┃  8,000 ┃
┃ Group    ┃      0 ┃   25 % ┃   5,000 ┃  100 % ┃
┡━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━━╇━━━━━━━━┩
│ stem     │ frozen │ frozen │  frozen │ frozen │
│ backbone │    0.5 │  0.375 │ 0.01875 │      0 │
│ head     │   0.25 │   0.25 │    0.25 │   0.25 │
└──────────┴────────┴────────┴─────────┴────────┘
"""


def printed(plan: kgo.Plan, *arguments: Any, **options: Any) -> str:
    lines: list[str] = []
    plan.summary(*arguments, print_fn=lines.append, line_length=80, **options)
    return "\n".join(lines) + "\n"


def test_the_summary_prints_the_rates_at_shares_and_steps():
    plan = three_groups(4000, learning_rate=Linear(1.0, 8000))
    text = printed(plan, at=[0, 0.25, 5000, 1.0])
    assert text == f"{printed(plan)}\n{RATES}"


def test_schedules_that_end_with_the_run_end_with_the_steps_of_the_summary():
    fitted, known = (
        plan_of(kgo.Group("head", "head", learning_rate=Linear(1.0, n))) for n in ("fit", 8000)
    )
    points = [0, 0.25, 5000, 1.0]
    assert printed(fitted, at=points, steps=8000) == printed(known, at=points)


def test_many_points_go_on_in_further_tables():
    text = printed(three_groups(), at=[place / 20 for place in range(21)])
    assert text.count("Group ") > 2
    assert max(map(len, text.splitlines())) <= 80
    assert len(re.findall(r"\d %", text.split("Learning rate at")[1])) == 21


@pytest.mark.parametrize("points", [0.5, 4, np.int64(4), [np.float32(0.5)], (4,)])
def test_one_point_is_a_number_or_in_any_sequence(points):
    text = printed(three_groups(), at=points).split("Learning rate at")[1]
    assert "backbone │ 0.025" in re.sub(" +", " ", text)


FIT = [kgo.Group("head", "head", learning_rate=Linear(1.0, "fit"))]


@pytest.mark.parametrize(
    ("groups", "arguments", "error", "message"),
    [
        ([], {"at": []}, ValueError, r"at least one\. Received: at=\[\]"),
        ([], {"at": [1.5]}, ValueError, r"floats in \[0, 1\].*at=\[1\.5\].*write an integer"),
        ([], {"at": [-1]}, ValueError, r"integers >= 0\)\. Received: at=\[-1\]"),
        ([], {"at": [float("nan")]}, ValueError, r"Received: at=\[nan\]"),
        ([], {"at": [True]}, TypeError, r"Received: at=\[True\]"),
        ([], {"at": "0.5"}, TypeError, r"Received: at='0\.5'"),
        ([], {"at": object()}, TypeError, "`at` must hold shares of the run"),
        ([], {"at": [0.5], "steps": 0}, ValueError, "`steps` must be an integer >= 1"),
        ([], {"at": [0.5], "steps": 0.5}, TypeError, "`steps` must be an integer >= 1"),
        ([], {"steps": 10}, ValueError, r"`steps` must come with `at`\. Received: steps=10 alone"),
        ([], {"at": [0.5]}, ValueError, "steps=None and no schedule that ends. Pass the optimizer"),
        (FIT, {"at": [5]}, ValueError, r'steps=None and total_steps="fit" in one of its schedules'),
    ],
)
def test_points_that_mean_nothing_are_refused(groups, arguments, error, message):
    with pytest.raises(error, match=message):
        plan_of(*groups).summary(**arguments, print_fn=print)


# The picture -------------------------------------------------------------------------------------


def axes_of(plan: kgo.Plan, *arguments: Any, **options: Any) -> list[Any]:
    pytest.importorskip("matplotlib")
    return plan.plot(*arguments, **options).axes


def lines_of(axis: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {line.get_label(): line.get_data() for line in axis.get_lines() if len(line.get_xdata())}


def test_the_picture_shows_each_curve_with_names_and_units(tmp_path):
    rule = kgo.rule("adam", beta_1=0.9)
    plan = three_groups(weight_decay=Linear(0.5, 4), ema=kgo.EMA(kgo.warmup(0.5, 4)), rule=rule)
    axes = axes_of(plan, path=tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    labels = ["learning rate", "ratio", "weight decay", "ema.momentum"]
    assert [axis.get_ylabel() for axis in axes] == labels
    assert axes[-1].get_xlabel() == "optimizer steps"
    found = by_name(curves(plan, range(STEPS + 1)))
    for name in ("backbone", "head"):
        steps, rates = lines_of(axes[0])[name]
        np.testing.assert_array_equal(steps, range(STEPS + 1))
        np.testing.assert_array_equal(rates, found[name]["learning_rate"]["highest"])
        np.testing.assert_array_equal(lines_of(axes[2])[name][1], found[name]["weight_decay"])
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend == ["backbone", "head", "stem (frozen)"]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes[0].get_lines()[:2]}
    assert len({colour for colour, _ in looks}) == len({style for _, style in looks}) == 2


def test_the_picture_leaves_out_what_says_nothing():
    axes = axes_of(plan_of(learning_rate=Linear(1.0, STEPS)))
    assert [axis.get_ylabel() for axis in axes] == ["learning rate"]


@pytest.mark.parametrize(
    ("ratio", "log", "scale"),
    [(1e-3, None, "log"), (0.1, None, "linear"), (0.1, True, "log"), (1e-3, False, "linear")],
)
def test_rates_far_apart_are_drawn_on_a_logarithmic_scale(ratio, log, scale):
    plan = plan_of(kgo.Group("stem", "stem", learning_rate_ratio=ratio), learning_rate=0.1)
    axis = axes_of(plan, steps=100, log=log)[0]
    assert axis.get_yscale() == scale
    low, high = axis.get_ylim()
    assert low < 0.1 * ratio < 0.1 < high


def test_a_decay_to_zero_keeps_a_logarithmic_scale_readable():
    group = kgo.Group("stem", "stem", learning_rate_ratio=1e-3)
    to_zero = Sequential([Linear(1.0, 10), 0.0], [10])
    axis = axes_of(plan_of(group, learning_rate=to_zero), 20)[0]
    assert axis.get_yscale() == "log"
    assert 1e-7 < axis.get_ylim()[0] < 1e-3


def test_a_group_of_several_rates_is_a_band_and_a_range():
    pytest.importorskip("matplotlib")
    spread = {"lowest": [0.1, 0.05], "highest": [1.0, 0.5]}
    group = {"name": "body", "frozen": False, "learning_rate": spread, "ratio": spread}
    group |= {"weight_decay": None, "arguments": {"beta_1": [0.9, 0.8]}}
    found = {"steps": [0, 10], "shares": [None, None], "shared": {}, "groups": [group]}
    axes = figure(found).axes
    assert [axis.get_ylabel() for axis in axes] == ["learning rate", "ratio", "beta_1"]
    drawn = [list(line.get_ydata()) for line in axes[0].get_lines()]
    assert drawn == [spread["highest"], spread["lowest"]]
    assert len(axes[0].collections) == 1
    assert "0.05 … 0.5" in plan_dicts.printed(plan_of().to_dict(), rates=found)


def test_twenty_groups_have_twenty_looks():
    model = towers(*(f"layer{n}" for n in range(20)))
    groups = [kgo.Group(f"g{n}", f"layer{n}") for n in range(20)]
    axis = axes_of(kgo.GroupedOptimizer(groups, model=model).plan, 100)[0]
    looks = {(line.get_color(), line.get_linestyle()) for line in axis.get_lines()}
    assert len(looks) == 20


def test_a_picture_opens_no_window_and_goes_into_any_file(monkeypatch):
    pytest.importorskip("matplotlib")
    # What opens windows.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    file = io.BytesIO()
    plan_of(learning_rate=0.1).plot(10).savefig(file, format="svg")
    assert b"<svg" in file.getvalue()


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install keras-groupopt\[plots\]"):
        plan_of(learning_rate=0.1).plot(10)
