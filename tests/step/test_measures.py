"""What `GroupLogger` logs of the steps on request, against a simulation in NumPy.

The model is the one of `rate_meter`: the gradient of both its groups is the mean of the batch's
inputs, whatever the weights are.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import models
import numpy as np
import pytest
import rate_meter
from models import assert_equal, sgd
from rate_meter import BATCH_SIZE, RATIO
from saving_models import load, save

import keras_groupopt as kgo

BATCHES, EPOCHS, RATE = 5, 2, 0.125
GROUPS = {"backbone": RATIO, "head": 1.0}
_generator = np.random.default_rng(3)
X = _generator.normal(size=(BATCHES * BATCH_SIZE, 2)).astype("float32")
Y = np.zeros((len(X), 1), "float32")
ALL = {"gradient_norm": True, "update_ratio": True}


def compiled(
    backbone: dict[str, Any] | None = None, wrap: Any = lambda inner: inner, **options: Any
) -> keras.Model:
    model = rate_meter.make_model(1.0)
    own = {"learning_rate_ratio": RATIO, **(backbone or {})}
    groups = [kgo.Group("backbone", "backbone", **own), kgo.Group("head", "head")]
    optimizer = sgd(model, groups, learning_rate=RATE, **options)
    model.compile(optimizer=wrap(optimizer), loss=rate_meter.mean_output)
    return model


def fit(model: keras.Model, *callbacks: Any, x: Any = X, epochs: int = EPOCHS) -> dict[str, Any]:
    options = {"x": x, "y": Y[: len(x)], "batch_size": BATCH_SIZE, "callbacks": list(callbacks)}
    return models.fit(model, epochs, **options).history.history


def clipped(gradient: np.ndarray, limits: dict[str, Any]) -> np.ndarray:
    if "clipvalue" in limits:
        return np.clip(gradient, -limits["clipvalue"], limits["clipvalue"])
    for name in ("clipnorm", "global_clipnorm"):
        if name in limits:
            return gradient * min(1.0, limits[name] / np.linalg.norm(gradient))
    return gradient


def simulated(
    x: np.ndarray = X, backbone: dict[str, Any] | None = None, **options: Any
) -> dict[str, list[float]]:
    """What each epoch should log."""
    window, limit = options.get("gradient_accumulation_steps", 1), options.get("global_clipnorm")
    decay = options.get("weight_decay", 0.0)
    weights, counts = {name: np.ones(2) for name in GROUPS}, dict.fromkeys(GROUPS, 0)
    pending: list[np.ndarray] = []
    logs: dict[str, list[float]] = {}
    for _ in range(EPOCHS):
        steps: dict[str, list[float]] = {}
        for batch in x.astype("float64").reshape(-1, BATCH_SIZE, 2):
            if not np.isfinite(batch).all():
                continue
            pending.append(batch.mean(axis=0))
            if len(pending) < window:
                continue
            gradient, pending = np.mean(pending, axis=0), []
            own = {"backbone": clipped(gradient, backbone or {}), "head": gradient}
            norm = np.sqrt(sum(np.sum(g**2) for g in own.values()))
            found = {"global_gradient_norm": np.sqrt(2) * np.linalg.norm(gradient)}
            if limit is not None:
                found["clip_share"] = float(norm > limit)
            if backbone:
                found["clip_share_backbone"] = float((own["backbone"] != gradient).any())
            for name, ratio in GROUPS.items():
                scale = 1.0 if limit is None else min(1.0, limit / norm)
                step = RATE * ratio * (decay * weights[name] + scale * own[name])
                found[f"gradient_norm_{name}"] = np.linalg.norm(gradient)
                found[f"update_ratio_{name}"] = np.linalg.norm(step) / np.linalg.norm(weights[name])
                weights[name] = weights[name] - step
                counts[name] += scale < 1.0 or bool((own[name] != gradient).any())
            for name, value in found.items():
                steps.setdefault(name, []).append(value)
        for name, values in steps.items():
            logs.setdefault(name, []).append(float(np.mean(values)))
        for name in GROUPS if options.get("count_clipped_steps") else ():
            logs.setdefault(f"clipped_steps_{name}", []).append(counts[name])
    return logs


def with_broken_batch() -> np.ndarray:
    x = X.copy()
    x[BATCH_SIZE] = np.inf
    return x


LIMIT = 0.8
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not looked at": {"on_nonfinite": "propagate"},
    "global clip": {"global_clipnorm": LIMIT},
    "global clip, not looked at": {"global_clipnorm": LIMIT, "on_nonfinite": "propagate"},
    "clip of a group": {"backbone": {"global_clipnorm": 0.5}},
    "clip per variable, and over all": {"backbone": {"clipnorm": 0.5}, "global_clipnorm": LIMIT},
    "clip of values": {"backbone": {"clipvalue": 0.35}, "gradient_accumulation_steps": 2},
    "windows over epochs": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5},
    "decay": {"weight_decay": 0.5, "exclude_from_decay": ()},
    "loss scale": {"wrap": kgo.LossScaleOptimizer, "global_clipnorm": LIMIT},
    "loss scale of Keras": {"wrap": keras.optimizers.LossScaleOptimizer},
}


@pytest.mark.filterwarnings("ignore:Steps skipped")
@pytest.mark.filterwarnings("ignore:1 steps of epoch")
@pytest.mark.parametrize(
    ("name", "is_compiled_before"),
    [(name, place % 2 == 1) for place, name in enumerate(CASES)],
)
def test_logs_are_means_over_the_optimizer_steps_of_each_epoch(name, is_compiled_before):
    broken = "not looked" not in name
    x = with_broken_batch() if broken else X
    clips = any("clip_share" in key for key in simulated(x, **CASES[name]))
    case = CASES[name] | {"count_clipped_steps": clips}
    model, before = compiled(**case), dict.fromkeys(GROUPS, 0)
    if is_compiled_before:
        weights = model.get_weights()
        fit(model, x=X[: 2 * BATCH_SIZE], epochs=1)
        model.set_weights(weights)
        before |= counts(model)
    expected = simulated(x, **case)
    history = fit(model, kgo.GroupLogger(**ALL, clip_share=clips), x=x)
    measured = {key: history[key] for key in history if "learning_rate" not in key}
    del measured["loss"]
    assert measured.keys() == expected.keys()
    for key, values in expected.items():
        if key.startswith("clipped_steps"):
            values = [value + before[key.removeprefix("clipped_steps_")] for value in values]
        np.testing.assert_allclose(measured[key], values, rtol=1e-5, err_msg=key)


def counts(model: keras.Model) -> dict[str, int]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {name: int(count) for name, count in optimizer.clipped_steps.items()}


def test_the_simulated_clips_are_neither_always_nor_never():
    for case in CASES.values():
        for key, shares in simulated(with_broken_batch(), **case).items():
            assert "share" not in key or 0.0 < np.mean(shares) < 1.0


def test_what_is_not_asked_for_is_not_measured_and_what_is_changes_no_step():
    plain, logged, measured = (compiled(global_clipnorm=LIMIT) for _ in range(3))
    fit(plain)
    history = fit(logged, kgo.GroupLogger())
    fit(measured, kgo.GroupLogger(**ALL, clip_share=True))
    rates = {f"learning_rate_{name}" for name in GROUPS}
    assert history.keys() == {"loss", "learning_rate"} | rates
    assert len(logged.optimizer.variables) == len(plain.optimizer.variables)
    assert counts(logged) == {}
    for model in (logged, measured):
        assert_equal(model, plain, rtol=1e-6)


def test_a_group_whose_weights_are_all_zero_has_no_update_ratio_in_that_step():
    model = compiled()
    model.get_layer("head").set_weights([np.zeros((2, 1), "float32")])
    first = fit(model, kgo.GroupLogger(update_ratio=True), x=X[:BATCH_SIZE], epochs=2)
    assert math.isnan(first["update_ratio_head"][0])
    assert first["update_ratio_head"][1] > 0
    assert first["update_ratio_backbone"][0] > 0


def test_an_epoch_without_an_optimizer_step_logs_no_number():
    model = compiled(gradient_accumulation_steps=3)
    history = fit(model, kgo.GroupLogger(**ALL), x=X[: 2 * BATCH_SIZE])
    assert math.isnan(history["gradient_norm_head"][0])
    assert history["gradient_norm_head"][1] > 0


def test_a_flushed_window_is_a_step_of_its_epoch():
    model = compiled(gradient_accumulation_steps=3)
    x = X[: 2 * BATCH_SIZE]
    history = fit(model, kgo.FlushAccumulation(), kgo.GroupLogger(**ALL), x=x, epochs=1)
    norm = np.linalg.norm(x.astype("float64").mean(axis=0))
    assert history["gradient_norm_head"] == [pytest.approx(norm, rel=1e-5)]


@pytest.mark.filterwarnings("ignore:No gradient for unused/")
def test_groups_that_never_move_are_left_out_and_those_without_a_gradient_are_zero():
    inputs = keras.Input((2,))
    used = keras.layers.Dense(1, name="used")(inputs)
    unused = keras.layers.Dense(1, name="unused")(inputs)
    frozen = keras.layers.Dense(1, name="frozen")(used)
    model = keras.Model(inputs, [frozen, unused])
    groups = [kgo.Group(n, n, frozen=n == "frozen") for n in ("frozen", "unused", "used")]
    model.compile(kgo.GroupedOptimizer(groups, model=model), loss=[rate_meter.mean_output, None])
    history = model.fit(X, Y, verbose=0, callbacks=[kgo.GroupLogger(**ALL)]).history
    assert not any(name.endswith("_frozen") for name in history)
    assert history["gradient_norm_unused"] == history["update_ratio_unused"] == [0.0]
    assert history["gradient_norm_used"] == history["global_gradient_norm"]


def test_a_model_without_input_shape_is_measured_from_its_first_step():
    model = keras.Sequential([keras.layers.Dense(1, name="head")])
    model.compile(sgd(), loss=rate_meter.mean_output)
    history = fit(model, kgo.GroupLogger(**ALL))
    assert all(value > 0 for value in history["gradient_norm_default"])


# State --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "is_saved_with"),
    [(".keras", True), (".weights.h5", True), (".weights.h5", False)],
)
def test_files_hold_counts_but_no_measurements_and_load_with_and_without(
    tmp_path, suffix, is_saved_with
):
    def new() -> keras.Model:
        model = compiled(**counted)
        if not is_saved_with:
            model.optimizer.measure("gradient_norm")
            model.optimizer.build(model.trainable_variables)
        return model

    logger = kgo.GroupLogger(**ALL)
    counted = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    counted["count_clipped_steps"] = True
    straight = compiled(**counted)
    fit(straight, *([logger] if is_saved_with else []))
    path = save(straight, tmp_path / f"run{suffix}")
    assert "measured" not in str(kgo.read_manifest(path))
    resumed = load(path, new)
    resumed.optimizer.build(resumed.trainable_variables)
    assert counts(resumed) == counts(straight)
    assert min(counts(straight).values()) > 0
    history = fit(resumed, *([] if is_saved_with else [logger]))
    fit(straight)
    assert ("global_gradient_norm" in history) != is_saved_with
    assert_equal(resumed, straight, rtol=1e-6)


def test_counts_start_at_0_with_a_file_without_them(tmp_path):
    path = tmp_path / "uncounted.keras"
    model = compiled(global_clipnorm=LIMIT)
    fit(model)
    model.save(path)
    resumed = compiled(global_clipnorm=LIMIT, count_clipped_steps=True)
    kgo.load_weights(resumed, path)
    resumed.optimizer.build(resumed.trainable_variables)
    assert counts(resumed) == dict.fromkeys(GROUPS, 0)


def test_a_tree_of_state_can_be_restored_without_measuring():
    measured = compiled()
    fit(measured, kgo.GroupLogger(**ALL))
    tree = measured.get_state_tree()
    plain = compiled()
    plain.optimizer.build(plain.trainable_variables)
    plain.set_state_tree(tree)
    assert int(plain.optimizer.iterations) == int(measured.optimizer.iterations)


def test_measuring_goes_on_after_compile_and_rebuild():
    model = compiled()
    logger = kgo.GroupLogger(**ALL)
    first = fit(model, logger)
    model.compile(model.optimizer, loss=rate_meter.mean_output)
    again = fit(model, logger)
    model.optimizer.rebuild(model, {"head": "head", "backbone": kgo.Group("backbone", "backbone")})
    assert model.optimizer.measurements()["gradient_norm"].keys() == {"head", "backbone", None}
    last = fit(model, logger)
    for history in (again, last):
        assert history["global_gradient_norm"] == pytest.approx(first["global_gradient_norm"])


def test_a_loop_of_ones_own_reads_and_resets():
    model = compiled(global_clipnorm=1.0)
    optimizer = model.optimizer
    optimizer.measure("gradient_norm", "update_ratio", "clip_share")
    variables = model.trainable_variables
    for size in (1.0, 3.0):
        optimizer.apply([keras.ops.full(v.shape, size) for v in variables], variables)
    measured = optimizer.measurements()
    assert measured["gradient_norm"][None] == pytest.approx(4.0)
    assert measured["gradient_norm"]["head"] == pytest.approx(2.0 * math.sqrt(2))
    assert measured["clip_share"] == {None: 1.0}
    optimizer.reset_measurements()
    optimizer.apply([keras.ops.full(v.shape, 0.25) for v in variables], variables)
    measured = optimizer.measurements()
    assert measured["gradient_norm"][None] == pytest.approx(0.5)
    assert measured["clip_share"] == {None: 0.0}


def test_the_name_of_a_group_in_logs_does_not_depend_on_what_is_logged():
    model = rate_meter.make_model(1.0)
    groups = [
        kgo.Group("my part", "backbone"),
        kgo.Group("my:part", "head", anchor="initial", weight_decay=0.1, clipnorm=1.0),
    ]
    model.compile(kgo.GroupedOptimizer(groups, model=model), loss=rate_meter.mean_output)
    history = fit(model, kgo.GroupLogger(drift=True, clip_share=True))
    own = {"learning_rate", "drift", "clip_share"}
    assert {f"{name}_my_part_2" for name in own} | {"learning_rate_my_part"} <= history.keys()
    assert not {"drift_my_part", "clip_share_my_part"} & history.keys()


# Averages and gradient rules ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        (kgo.EMA(0.5), [0.5, 0.5]),
        (kgo.EMA(0.99, warmup=True), [6 / 15, 11 / 20]),
        (kgo.SWA(), [5 / 6, 10 / 11]),
        (kgo.EMA(0.5, start=7), [0.0, 0.5]),
    ],
    ids=["fixed", "warming up", "equal weights", "not begun"],
)
def test_the_momentum_of_the_averages_is_logged_on_request(average, expected):
    history = fit(compiled(ema=average), kgo.GroupLogger(ema_momentum=True))
    assert history["ema_momentum"] == pytest.approx(expected, rel=1e-6)


def test_numbers_of_a_gradient_rule_are_logged_at_the_present_step():
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)
    model = kgo.sharpness_aware(rate_meter.make_model(1.0), kgo.ASAM(schedule, eta=0.25))
    model.compile(rate_meter.make_optimizer(model), loss=rate_meter.mean_output)
    history = fit(model, kgo.GroupLogger(**ALL, gradient_rule=True))
    assert history["sam_rho"] == pytest.approx([0.5 / 6, 0.5 / 11])
    assert history["sam_eta"] == [0.25, 0.25]
    assert {"sam_gap", "gradient_norm", "global_gradient_norm"} <= history.keys()
    # Of this model, a perturbation changes no gradient.
    assert history["global_gradient_norm"] == pytest.approx(history["gradient_norm"], rel=1e-5)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "asked", "error", "message"),
    [
        (compiled, "clip_share", ValueError, '"clip_share" needs an optimizer that clips'),
        (compiled, "ema_momentum", ValueError, r"ema_momentum=True\)` needs an optimizer that av"),
        (compiled, "gradient_rule", TypeError, "needs a model with a gradient rule"),
        *(
            (lambda: plain_model(), name, TypeError, rf"`GroupLogger\({name}=True\)` needs a G")
            for name in ("gradient_norm", "update_ratio", "clip_share", "ema_momentum", "skipped")
        ),
        (
            lambda: compiled(wrap=keras.optimizers.LossScaleOptimizer),
            *("skipped", TypeError, r"Compile with `kgo\.LossScaleOptimizer"),
        ),
    ],
)
def test_what_cannot_be_logged_is_refused_before_a_step(make, asked, error, message):
    model = make()
    with pytest.raises(error, match=message):
        fit(model, kgo.GroupLogger(**{asked: True}))
    assert int(model.optimizer.iterations) == 0


def plain_model() -> keras.Model:
    model = rate_meter.make_model()
    model.compile(keras.optimizers.SGD(0.5), loss=rate_meter.mean_output)
    return model


def test_a_measurement_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r'must be one of "gradient_norm", "update_ratio", "clip_'):
        compiled().optimizer.measure("gradient")
