"""`PlateauRatio`: what it lowers is read from how far the weights move."""

from __future__ import annotations

import math
from typing import Any

import keras
import pytest
import rate_meter
from rate_meter import RATIO, Rates

import keras_groupopt as kgo

SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.5, 0.25])
# No loss is better by so much: every epoch but the first is one without an improvement.
NEVER = {"monitor": "loss", "factor": 0.5, "patience": 1, "min_delta": 1e6}


def trained(epochs: int, plateau: dict[str, Any], **options: Any) -> tuple[Rates, keras.Model]:
    model = rate_meter.compiled(**options)
    rates = Rates()
    rate_meter.fit(model, epochs, callbacks=[rates, kgo.PlateauRatio(**plateau)])
    return rates, model


@pytest.mark.parametrize(
    ("policy", "plateau", "rate", "head", "backbone"),
    [
        # The schedule halves the base after the sixth step, in the third epoch's end.
        ("mixed_float16", {}, SCHEDULE, [0.5, 0.5, 0.25, 0.0625], [1, 1, 0.5, 0.125]),
        ("float32", {"groups": ["backbone"]}, 0.5, [0.5] * 4, [1, 1, 0.5, 0.25]),
        (
            "float32",
            {"min_ratio": 0.375},
            0.5,
            [0.5, 0.5, 0.25, *[0.1875] * 3],
            [1, 1, 0.5, *[0.375] * 3],
        ),
    ],
    ids=["beside a schedule", "of groups that are named", "down to a floor"],
)
def test_ratios_of_all_groups_or_those_named_are_lowered_and_keep_their_proportions(
    policy, plateau, rate, head, backbone
):
    keras.config.set_dtype_policy(policy)
    rates, model = trained(len(head), NEVER | plateau, learning_rate=rate)
    assert rates.by_group == {
        "head": head,
        "backbone": [0.5 * RATIO * share for share in backbone],
    }
    if "min_ratio" in plateau:
        ratios = {n: float(r) for n, r in model.optimizer.learning_rate_ratios.items()}
        assert ratios == {"backbone": 0.375 * RATIO, "head": 0.375}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patience": 2}, [1, 1, 1, 0.5, 0.5]),
        ({"cooldown": 2}, [1, 1, 0.5, 0.5, 0.25]),
        ({"mode": "max", "min_delta": 1e-4}, [1, 1, 0.5, 0.25, 0.125]),
        ({"mode": "min", "min_delta": 1e-4}, [1, 1, 1, 1, 1]),
        ({"monitor": "mean_output", "min_delta": 1e-4, "mode": "min"}, [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_when_ratios_are_lowered_is_decided_as_by_keras(options, expected):
    settings = {**NEVER, **options}
    histories = []
    for callback in (kgo.PlateauRatio(**settings), keras.callbacks.ReduceLROnPlateau(**settings)):
        model = rate_meter.make_model()
        metrics = [rate_meter.mean_output]
        model.compile(rate_meter.make_optimizer(model), rate_meter.mean_output, metrics=metrics)
        rates = Rates()
        rate_meter.fit(model, 5, callbacks=[rates, callback])
        histories.append(rates.by_group)
    assert histories[0] == histories[1]
    assert histories[0]["head"] == [0.5 * share for share in expected]


def test_lowered_ratios_are_saved_and_the_floor_stays_that_of_the_declared_ratio(tmp_path):
    _, model = trained(3, {**NEVER, "min_ratio": 0.375})
    model.save(tmp_path / "run.keras")
    loaded = keras.saving.load_model(tmp_path / "run.keras")
    rates = Rates()
    plateau = kgo.PlateauRatio(**{**NEVER, "min_ratio": 0.375})
    rate_meter.fit(loaded, 3, callbacks=[rates, plateau])
    # Counters start over: the first epoch of a `fit` is the best one so far.
    assert rates.by_group["head"] == [0.1875, 0.1875, 0.1875]
    assert float(loaded.optimizer.learning_rate_ratios["backbone"]) == 0.375 * RATIO


def test_a_ratio_that_was_set_by_hand_is_lowered_from_there():
    model = rate_meter.compiled()
    plateau = kgo.PlateauRatio(**NEVER)
    rate_meter.fit(model, 1, callbacks=[plateau])
    model.optimizer.set_learning_rate_ratio("head", 2.0)
    rate_meter.fit(model, 2, callbacks=[plateau])
    assert float(model.optimizer.learning_rate_ratios["head"]) == 1.0


def test_it_says_what_it_lowers_on_request(capsys):
    trained(2, {**NEVER, "verbose": 1})
    said = "Epoch 2: PlateauRatio lowers learning_rate_ratio to: backbone 0.125, head 0.5."
    assert capsys.readouterr().out.strip() == said


def test_logs_are_left_alone():
    model = rate_meter.compiled(learning_rate=SCHEDULE)
    callbacks = [kgo.PlateauRatio(**NEVER), kgo.GroupLogger()]
    history = rate_meter.fit(model, 2, callbacks=callbacks)
    assert history["learning_rate"] == [0.5, 0.5]
    assert history["learning_rate_head"] == [0.5, 0.25]


def test_a_model_without_input_shape_is_lowered_too():
    model = keras.Sequential([keras.layers.Dense(1, name="head")])
    model.compile(kgo.GroupedOptimizer(rule="sgd"), loss=rate_meter.mean_output)
    rate_meter.fit(model, 2, callbacks=[kgo.PlateauRatio(**NEVER)])
    assert float(model.optimizer.learning_rate_ratios["default"]) == 0.5


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"factor": 1.0}, ValueError, "`factor` must be below 1"),
        ({"factor": 0.0}, ValueError, "`factor` must be a positive finite number"),
        ({"factor": "half"}, TypeError, "`factor` must be"),
        ({"min_ratio": 1.0}, ValueError, r"`min_ratio` must be a number in \[0, 1\)"),
        ({"min_ratio": -0.1}, ValueError, "`min_ratio` must be a number in"),
        ({"patience": -1}, ValueError, "`patience` must be an integer >= 0"),
        ({"cooldown": 0.5}, TypeError, "`cooldown` must be an integer"),
        ({"min_delta": math.nan}, ValueError, "`min_delta` must be"),
        ({"mode": "up"}, ValueError, '`mode` must be one of "auto", "min", "max"'),
        ({"monitor": None}, TypeError, "`monitor` must be the name of a metric"),
        ({"groups": "head"}, TypeError, r"Write `groups=\['head'\]`"),
        ({"groups": []}, ValueError, "`groups` must hold a name"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        kgo.PlateauRatio(**options)


def with_ratio(ratio: Any) -> keras.Model:
    model = rate_meter.make_model()
    frozen = ratio is None
    group = kgo.Group("body", "backbone", learning_rate_ratio=ratio, frozen=frozen)
    model.compile(kgo.GroupedOptimizer([group], model=model), loss=rate_meter.mean_output)
    return model


def plain() -> keras.Model:
    model = rate_meter.make_model()
    model.compile("sgd", loss=rate_meter.mean_output)
    return model


@pytest.mark.parametrize(
    ("make", "groups", "error", "message"),
    [
        (plain, None, TypeError, "needs a GroupedOptimizer. Received: SGD"),
        (lambda: with_ratio(0.5), ["boddy"], ValueError, r"'boddy' in .* nearest is \"body\""),
        (lambda: with_ratio(None), ["body"], ValueError, '"body" in PlateauRatio, which is frozen'),
        (lambda: with_ratio(SCHEDULE), None, TypeError, '"body", whose ratio is a schedule'),
        (lambda: with_ratio(SCHEDULE), ["body"], TypeError, "Name the others in `groups=`"),
    ],
)
def test_groups_that_cannot_be_lowered_are_refused_before_a_step(make, groups, error, message):
    model = make()
    with pytest.raises(error, match=message):
        rate_meter.fit(model, callbacks=[kgo.PlateauRatio("loss", groups=groups)])
    assert int(model.optimizer.iterations) == 0
