"""Schedules: equal to torch's step by step, exact to the last step, saved, and used anywhere."""

from __future__ import annotations

import importlib
import math
from typing import Any

import keras
import numpy as np
import pytest
import rate_meter
import schedule_cases as cases
from bad_input import pattern
from bad_schedules import BAD_RUNS, BAD_SCHEDULES
from keras.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    PiecewiseConstantDecay,
    PolynomialDecay,
)
from schedule_cases import BASE, EQUAL, RATIO, run_of_torch, theirs

import keras_groupopt as kgo
from keras_groupopt.schedules import (
    SWA,
    Chained,
    Cyclic,
    Lambda,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Scaled,
    Sequential,
    Step,
    WarmupStableDecay,
)
from keras_groupopt.schedules.horizon import end_of, horizon, length_of, needs_horizon


def values(schedule: Any, steps: Any) -> np.ndarray:
    return np.array([float(schedule(step)) for step in steps])


def traced(schedule: Any) -> Any:
    """The schedule as a compiled step calls it, with the step as an argument."""
    backend = keras.backend.backend()
    if backend == "torch":
        return schedule
    library = importlib.import_module(backend)
    compiled = (library.jit if backend == "jax" else library.function)(lambda step: schedule(step))
    return lambda step: compiled(keras.ops.convert_to_tensor(step, "int32"))


# Equal to torch -----------------------------------------------------------------------------------


@pytest.mark.every_backend
@pytest.mark.parametrize(("mine", "other", "steps"), EQUAL)
def test_a_schedule_equals_that_of_torch_also_compiled_and_after_saving(mine, other, steps):
    expected = np.array(
        [[group["lr"] for group in groups] for groups in run_of_torch(other, steps)]
    )
    schedule = mine()
    rates = values(schedule, range(steps))
    np.testing.assert_allclose(rates, expected[:, 0], rtol=2e-6, atol=3e-8)
    np.testing.assert_allclose(rates * RATIO, expected[:, 1], rtol=2e-6, atol=3e-8)
    assert keras.ops.convert_to_tensor(schedule(1)).dtype == schedule(1).dtype
    assert keras.backend.standardize_dtype(schedule(1).dtype) == "float32"
    assert tuple(schedule(1).shape) == ()
    config = keras.saving.serialize_keras_object(schedule)
    restored = keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(restored) == config
    some = [0, 1, 5, 12, 13, steps - 1, 10 * steps]
    np.testing.assert_allclose(values(traced(restored), some), values(schedule, some), rtol=1e-6)


MOMENTUM = {"base_momentum": 0.8, "max_momentum": 0.9}
MOMENTUMS = {
    "one-cycle": (
        lambda: OneCycle.momentum(40, 0.8, 0.9),
        lambda o: theirs.OneCycleLR(o, 1.0, 40, **MOMENTUM),
    ),
    "one-cycle, three phases": (
        lambda: OneCycle.momentum(40, three_phase=True, curve="linear", warmup_fraction=0.2),
        lambda o: theirs.OneCycleLR(
            o, 1.0, 40, pct_start=0.2, anneal_strategy="linear", three_phase=True
        ),
    ),
    "cyclic": (
        lambda: Cyclic(0.9, 0.8, 4, 5),
        lambda o: theirs.CyclicLR(o, 0.1, 1.0, 4, 5, **MOMENTUM),
    ),
}


@pytest.mark.parametrize(("schedule", "make"), MOMENTUMS.values(), ids=MOMENTUMS)
def test_a_second_schedule_is_the_momentum_that_torch_moves_beside_the_rate(schedule, make):
    expected = [groups[0]["momentum"] for groups in run_of_torch(make, 40)]
    np.testing.assert_allclose(values(schedule(), range(40)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "mine"),
    [
        (lambda o: theirs.OneCycleLR(o, BASE, total_steps=40), lambda: OneCycle(BASE, 40)),
        (
            lambda o: theirs.CosineAnnealingLR(o, 40, eta_min=0.01),
            lambda: CosineDecay(BASE, 40, alpha=0.01 / BASE),
        ),
    ],
    ids=["OneCycleLR", "eta_min"],
)
def test_where_torch_loses_the_ratio_of_two_groups_the_first_group_still_agrees(make, mine):
    rates = np.array([[g["lr"] for g in groups] for groups in run_of_torch(make, 40)])
    ratios = rates[:, 1] / rates[:, 0]
    assert np.max(np.abs(ratios - RATIO)) > 0.1
    # A group of ours is this curve times its ratio, whatever the curve.
    np.testing.assert_allclose(values(mine(), range(40)), rates[:, 0], rtol=1e-5)


# Formulas that torch does not have ---------------------------------------------------------------


@pytest.mark.parametrize("curve", ["linear", "cosine", "root"])
def test_warmup_stable_decay_warms_up_holds_and_decays(curve):
    falls = {
        "linear": lambda d: d,
        "cosine": lambda d: math.sin(math.pi * d / 2) ** 2,
        "root": math.sqrt,
    }
    expected = (
        [0.1 + (1 - 0.1) * t / 5 for t in range(5)]
        + [1.0] * 15
        + [1 + (0.2 - 1) * falls[curve](d / 10) for d in range(10)]
        + [0.2] * 5
    )
    for decay_steps in (10, 1 / 3):
        schedule = WarmupStableDecay(1.0, 30, decay_steps, 5, 0.1, 0.2, curve)
        np.testing.assert_allclose(values(schedule, range(35)), expected, rtol=1e-6)


def test_a_polynomial_warms_up_and_keeps_its_end():
    schedule = Polynomial(1.0, 30, end_learning_rate=0.1, power=2, warmup_steps=10)
    expected = [t / 10 for t in range(10)]
    expected += [0.1 + 0.9 * ((30 - t) / 20) ** 2 for t in range(10, 30)] + [0.1] * 5
    np.testing.assert_allclose(values(schedule, range(35)), expected, rtol=1e-6)


@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_a_warmup_ends_where_the_schedule_begins(curve):
    rise = {"linear": lambda d: d, "cosine": lambda d: math.sin(math.pi * d / 2) ** 2}[curve]
    cosine = CosineDecay(1.0, 20)
    expected = [0.2 + 0.8 * rise(t / 4) for t in range(4)] + list(values(cosine, range(21)))
    schedule = kgo.warmup(cosine, 4, start=0.2, curve=curve)
    np.testing.assert_allclose(values(schedule, range(25)), expected, rtol=1e-6)


TEN_MILLION = 10_000_000
LATE = [1, 2, 2_999_999, 3_000_000, 5_000_001, 9_999_990, 9_999_998, 9_999_999]


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("schedule", "exact"),
    [
        (Linear(0.1, TEN_MILLION), lambda t: 0.1 * (1 - t / TEN_MILLION)),
        (Linear(0.0, TEN_MILLION, 0.1), lambda t: 0.1 * t / TEN_MILLION),
        (Polynomial(0.1, TEN_MILLION, power=2), lambda t: 0.1 * (1 - t / TEN_MILLION) ** 2),
        (
            Polynomial(0.0, TEN_MILLION, 0.1, power=2),
            lambda t: 0.1 * t / TEN_MILLION * (2 - t / TEN_MILLION),
        ),
        (
            OneCycle(0.1, TEN_MILLION, 0.0, end_learning_rate=0.0),
            lambda t: 0.1 * math.sin(math.pi / 2 * (TEN_MILLION - 1 - t) / TEN_MILLION) ** 2,
        ),
        (kgo.warmup(0.1, TEN_MILLION), lambda t: 0.1 * t / TEN_MILLION),
        (Step(0.1, 1000, 0.999), lambda t: 0.1 * 0.999 ** (t // 1000)),
        (
            Cyclic(0.0, 0.1, 3, 4),
            lambda t: 0.1 * (t % 7 / 3 if t % 7 <= 3 else (7 - t % 7) / 4),
        ),
        (
            WarmupStableDecay(0.1, TEN_MILLION, 1_000_000, decay_curve="root"),
            lambda t: 0.1 if t < 9e6 else 0.1 * (1 - math.sqrt((t - 9e6) / 1e6)),
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "at") else "",
)
def test_a_schedule_is_exact_to_float32_in_ten_million_steps(schedule, exact):
    expected = [exact(step) for step in LATE]
    # The float64 formulas themselves lose digits in 1 − t / T, so the last value is off by 1e-9.
    np.testing.assert_allclose(values(schedule, LATE), expected, rtol=2e-6, atol=1e-16)


# The length of a run ------------------------------------------------------------------------------


FITTED = [
    (lambda n: Linear(1.0, n), 30),
    (lambda n: Polynomial(1.0, n, 0.1, 2.0, warmup_steps=4), 30),
    (lambda n: OneCycle(1.0, n), 30),
    (lambda n: OneCycle(1.0, n, 0.4, three_phase=True), 30),
    (lambda n: WarmupStableDecay(1.0, n, 0.3, 4), 30),
    (lambda n: WarmupStableDecay(1.0, n, 6, 4, decay_curve="root"), 30),
    (lambda n: kgo.warmup(Linear(1.0, n if n == "fit" else n - 5), 5), 30),
    (lambda n: Sequential([0.5, Linear(1.0, n if n == "fit" else n - 10)], [10]), 30),
    (lambda n: Sequential([Linear(1.0, n if n == "fit" else 10), kgo.constant(0.5)], [10]), None),
    (lambda n: Scaled(Chained([0.5, Linear(1.0, n)]), 2.0), 30),
    (lambda n: SWA(Linear(1.0, n), 0.4, 20, 5), 25),
]


@pytest.mark.every_backend
@pytest.mark.parametrize(("make", "end"), FITTED)
def test_a_schedule_asked_to_ends_with_the_run(make, end):
    fitted, known = make("fit"), make(30)
    expected = values(known, range(33))
    with horizon(30):
        np.testing.assert_array_equal(values(fitted, range(33)), expected)
        assert end_of(fitted) == end_of(known)
        assert end is None or end_of(fitted) == end
    total = keras.Variable(30, dtype="int32", trainable=False)
    with horizon(total):
        np.testing.assert_allclose(values(traced(fitted), range(33)), expected, rtol=2e-6)


@pytest.mark.parametrize(("make", "end"), FITTED)
def test_a_run_too_short_to_be_refused_in_a_compiled_step_has_finite_values(make, end):
    del end
    with horizon(keras.ops.convert_to_tensor(2, "int32")):
        found = values(make("fit"), range(33))
    assert np.all(np.isfinite(found))
    assert np.all((found >= 0) & (found <= 1))


@pytest.mark.backends("torch", reason="torch.compile")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_torch_compiles_a_step_with_its_run_as_one_graph():
    schedule = kgo.warmup(Sequential([0.5, OneCycle(1.0, "fit")], [10]), 5)

    def rate(step, total):
        with horizon(total):
            return schedule(step)

    library = importlib.import_module("torch")
    compiled = library.compile(rate, backend="eager", fullgraph=True)
    for step, total in ((3, 30), (17, 30), (17, 40)):
        found = compiled(*(library.tensor(n, dtype=library.int32) for n in (step, total)))
        assert float(found) == pytest.approx(float(rate(step, total)), rel=1e-6)


FIT, FITLESS = Linear(1.0, "fit"), Linear(1.0, 30)
NEEDS = [
    *(FIT, kgo.warmup(Scaled(OneCycle(1.0, "fit"), 0.5), 5), Sequential([0.1, FIT], [10])),
    *(Chained([1.0, Polynomial(1.0, "fit")]), SWA(WarmupStableDecay(1.0, "fit"), 0.1, 5)),
]


@pytest.mark.parametrize("schedule", NEEDS, ids=repr)
def test_a_schedule_that_ends_with_the_run_has_no_values_outside_of_one(schedule):
    assert needs_horizon(schedule)
    assert end_of(schedule) is None or isinstance(schedule, SWA)
    with pytest.raises(ValueError, match=r'total_steps="fit" in \w+, outside of a run\. Give'):
        schedule(0)


@pytest.mark.parametrize(
    "schedule", [FITLESS, Sequential([FIT, 0.1], [10]), CosineDecay(1.0, 30), 0.1, None], ids=repr
)
def test_other_schedules_do_not_need_a_run(schedule):
    assert not needs_horizon(schedule)


def test_a_run_within_a_run_has_its_own_length_and_gives_the_other_back():
    schedule = Linear(1.0, "fit")
    with horizon(10):
        with horizon(np.int64(2)):
            assert float(schedule(1)) == 0.5
            assert end_of(schedule) == 2
        with pytest.raises(ZeroDivisionError), horizon(4):
            1 / 0  # noqa: B018
        assert float(schedule(1)) == np.float32(0.9)
        with horizon(None), pytest.raises(ValueError, match="outside of a run"):
            schedule(1)


@pytest.mark.parametrize(
    ("schedule", "end", "length"),
    [
        (0.1, 0, None),
        (kgo.constant(0.1), 0, None),
        (Step(0.1, 30), None, None),
        (MultiStep(0.1, [30, 80]), 80, None),
        (Linear(0.1, 100), 100, 100),
        (OneCycle(0.1, 100), 100, 100),
        (Cyclic(0.1, 0.2), None, None),
        (Lambda(cases.harmonic), None, None),
        (kgo.warmup(0.1, 10), 10, None),
        (kgo.warmup(Linear(0.1, 100), 10), 110, 110),
        (Sequential([Step(0.1, 30), Linear(0.1, 100)], [50]), 150, 150),
        (Sequential([Linear(0.1, 100), 0.1], [50]), 50, None),
        (Chained([Linear(0.1, 100, 0.05), MultiStep(1.0, [150])]), 150, 100),
        (Chained([Linear(0.1, 100), Step(1.0, 3)]), None, 100),
        (Scaled(Linear(0.1, 100), 2.0), 100, 100),
        (SWA(Step(0.1, 30), 0.05, 80, 5), 85, None),
        (CosineDecay(0.1, 100), 100, 100),
        (CosineDecay(0.0, 100, warmup_target=0.1, warmup_steps=10), 110, 110),
        (CosineDecay(0.1, 100, warmup_steps=10), 100, 100),
        (PolynomialDecay(0.1, 100), 100, 100),
        (PolynomialDecay(0.1, 100, cycle=True), None, None),
        (PiecewiseConstantDecay([30, 80], [0.3, 0.2, 0.1]), 81, None),
        (ExponentialDecay(0.1, 100, 0.9), None, None),
        (InverseTimeDecay(0.1, 100, 0.9), None, None),
        (CosineDecayRestarts(0.1, 100), None, None),
    ],
    ids=lambda value: str(value) if isinstance(value, (int, float)) else type(value).__name__,
)
def test_the_end_of_a_schedule_is_the_step_after_which_its_value_stays(schedule, end, length):
    assert (end_of(schedule), length_of(schedule)) == (end, length)
    if end and callable(schedule):
        after = values(schedule, [end, end + 1, 2 * end, 10 * end])
        np.testing.assert_allclose(after, after[0], rtol=1e-6)
        assert abs(float(schedule(end - 2)) - after[0]) > 1e-9


def test_a_custom_schedule_has_no_known_end():
    class CosineDecay(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return step

        def get_config(self):
            return {"decay_steps": 3, "warmup_target": None}

    assert end_of(CosineDecay()) is None
    assert not needs_horizon(CosineDecay())


# In training --------------------------------------------------------------------------------------


def expected_weights(steps: int, rate: Any, decay: Any) -> float:
    weight = 1.0
    for step in range(steps):
        weight -= rate(step) * decay(step) * weight + rate(step)
    return weight


@pytest.mark.every_backend
@pytest.mark.parametrize("accumulation", [None, 2])
def test_a_schedule_drives_rate_ratio_and_decay_by_optimizer_steps(accumulation):
    base, own = Linear(0.5, "fit", 0.1), kgo.warmup(Step(0.25, 2, 0.5), 2)
    ratio, decay = MultiStep(1.0, [2], 0.5), Lambda(cases.harmonic, 0.1)
    model = rate_meter.make_model(1.0)
    steps = 6
    with horizon(steps):
        optimizer = kgo.GroupedOptimizer(
            [
                kgo.Group("backbone", "**/dense", learning_rate_ratio=ratio),
                kgo.Group("head", "head", learning_rate=own, weight_decay=decay),
            ],
            model=model,
            rule="sgd",
            learning_rate=base,
            gradient_accumulation_steps=accumulation,
        )
        model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
        rate_meter.fit(model, epochs=(accumulation or 1) * steps // rate_meter.BATCHES)
    assert int(optimizer.iterations) == steps
    rates = [0.5 + (0.1 - 0.5) * t / steps for t in range(steps)]
    backbone = expected_weights(steps, lambda t: rates[t] * (1.0 if t < 2 else 0.5), lambda _: 0.0)
    owns = [0.0, 0.125, 0.25, 0.25, 0.125, 0.125]
    head = expected_weights(steps, lambda t: owns[t], lambda t: 0.1 / (1 + t))
    found = [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    np.testing.assert_allclose(found[0], backbone, rtol=1e-5)
    np.testing.assert_allclose(found[1], head, rtol=1e-5)


def test_schedules_come_back_with_the_optimizer_from_its_config_and_from_a_file(tmp_path):
    model = rate_meter.make_model()
    base = kgo.warmup(Sequential([OneCycle(0.5, 10), SWA(Chained([0.5, 0.1]), 0.1, 3)], [10]), 2)
    optimizer = kgo.GroupedOptimizer(
        [
            kgo.Group(
                "backbone",
                "**/dense",
                learning_rate_ratio=Scaled(WarmupStableDecay(1.0, 10), 0.5),
                weight_decay=Lambda(cases.inverse_root),
            ),
            kgo.Group("head", "head", learning_rate=Cyclic(0.1, 0.2, 3, scale=cases.harmonic)),
        ],
        model=model,
        rule="sgd",
        learning_rate=base,
        ema=kgo.EMA(kgo.warmup(0.9, 5)),
    )
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    rate_meter.fit(model)
    config = optimizer.get_config()
    assert kgo.GroupedOptimizer.from_config(config).get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert loaded.get_config() == config
    assert float(loaded.learning_rate) == float(base(2))


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "error", "text"), BAD_SCHEDULES)
def test_a_schedule_refuses_what_it_cannot_mean(make, error, text):
    with pytest.raises(error, match=pattern(text)):
        make()


@pytest.mark.parametrize(("make", "total", "text"), BAD_RUNS)
def test_a_schedule_refuses_a_run_that_is_too_short_for_it(make, total, text):
    schedule = make()
    with horizon(total), pytest.raises(ValueError, match=pattern(text)):
        schedule(0)


def test_a_function_that_is_not_registered_warns_at_once_and_cannot_be_saved():
    with pytest.warns(UserWarning, match=r"cannot be saved whole.*`function` of Lambda.*Decorate"):
        schedule = Lambda(lambda step: 0.5)
    assert float(schedule(3)) == 0.5
    with pytest.raises(ValueError, match=r"function of Lambda must be registered to be saved"):
        kgo.GroupedOptimizer(learning_rate=schedule).get_config()
    config = keras.saving.serialize_keras_object(Lambda(cases.harmonic))
    config["config"]["function"] = {"function": "nobody>knows"}
    with pytest.raises(ValueError, match='"nobody>knows", saved as Lambda, must be registered'):
        keras.saving.deserialize_keras_object(config)
