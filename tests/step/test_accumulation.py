"""N micro-batches are one large batch: in each rule, eager and compiled, in `fit`, saved midway."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import models
import numpy as np
import pytest
from cases import (
    DECAY,
    OPTIONS,
    PATHS,
    RATE,
    RULES,
    Case,
    by_path,
    gradients,
    initial_weights,
    make_model,
    numpy_of,
    stairs,
    take_step,
    weights_of,
)
from chosen_gradients import fit as fit_towers
from chosen_gradients import mean_output, towers
from comparing import assert_close, assert_same, counters_of, state_of, stepper
from models import sgd
from saving_models import save

import keras_groupopt as kgo

Given = Mapping[str, np.ndarray | None]

# Of the window: its sums, their weight, and how many there are.
OF_WINDOW = ("accumulator", "micro_batches", "accumulated_weight")

RULE = {case.name: case for case in RULES}
SAID_BY_GROUPS = ["clipnorm_then_global_clipnorm", "loss_scale", "instances", "everything_at_once"]

# What the whole can say beside accumulation, all at once.
EVERYTHING = {
    "weight_decay": DECAY,
    "anchor": "initial",
    "exclude_from_decay": (),
    "learning_rate": stairs(RATE),
    "global_clipnorm": 2.0,
    "ema": kgo.EMA(0.75, warmup=True),
}
# What is trained, and how: each rule with all of that, and what a group can say beside it.
ROWS = [
    *((case, EVERYTHING, "eager") for case in RULES),
    *((case, {}, "eager") for case in OPTIONS if case.name in SAID_BY_GROUPS),
    *((RULE[name], EVERYTHING, "compiled") for name in ("nadam", "lamb", "third_party")),
]


def batch(case: Case, step: int, count: int = 2) -> tuple[Given, list[Given]]:
    """One batch's gradients, and those of the micro-batches it is the mean of.

    On a grid, where sums and means are exact, so that equal can mean bit for bit.
    """
    random = np.random.default_rng(step)
    mean = {path: _on_grid(g) for path, g in case.gradients(step).items()}
    micro: list[Given] = []
    for _ in range(count // 2):
        off = {path: _on_grid(random.normal(size=g.shape)) for path, g in mean.items()}
        micro += [{p: np.asarray(g + s * off[p]) for p, g in mean.items()} for s in (1.0, -1.0)]
    return mean, micro


def _on_grid(values: Any) -> np.ndarray:
    return np.asarray(np.round(np.asarray(values) * 256) / 256, "float32")


def outside_window(optimizer: Any) -> dict[str, np.ndarray]:
    """All state but the window's own."""
    state = state_of(optimizer)
    return {key: state[key] for key in state if not key.lstrip("@").endswith(OF_WINDOW)}


def sums(optimizer: Any) -> dict[str, np.ndarray]:
    """The accumulators, by layer path."""
    return {
        key.replace("|", "/").removesuffix("/@accumulator").partition("/")[2]: value
        for key, value in state_of(optimizer).items()
        if key.endswith("@accumulator")
    }


@pytest.fixture
def missing_is_expected() -> Iterator[None]:
    """Lets the optimizer warn about missing gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No gradient for")
        yield


# Equal to one batch ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "options", "way"), ROWS, ids=[f"{case.name}-{way}" for case, _, way in ROWS]
)
def test_micro_batches_are_one_batch_and_move_nothing_in_between(case, options, way):
    whole, parts, count = make_model(), make_model(), 2 if way == "eager" else 4
    plain = case.optimizer(whole, **options)
    optimizer = case.optimizer(parts, **options, gradient_accumulation_steps=count)
    step = stepper(optimizer, parts, way, traced_once=True)
    # To the bit where the same operations run.
    equal = assert_same if way == "eager" else functools.partial(assert_close, tolerance=5e-6)
    for number in range(2):
        mean, micro = batch(case, number, count)
        take_step(plain, whole, mean)
        before, state = weights_of(parts), outside_window(optimizer)
        for place, given in enumerate(micro[:-1], start=1):
            step(given)
            assert_same(weights_of(parts), before)
            assert_same(outside_window(optimizer), state)
            assert int(optimizer.micro_batches) == place
        step(micro[-1])
        equal(weights_of(parts), weights_of(whole))
        equal(outside_window(optimizer), state_of(plain))
        assert counters_of(optimizer) == {number + 1}
    assert not any(np.any(value) for value in sums(optimizer).values())


# Known numbers --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Steps skipped")
@pytest.mark.parametrize(
    ("scaled", "eager"),
    [
        (lambda inner: inner, False),
        (functools.partial(kgo.LossScaleOptimizer, initial_scale=1.0), False),
        (functools.partial(kgo.LossScaleOptimizer, initial_scale=1.0), True),
        (functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=1.0), False),
    ],
    ids=["alone", "loss scale", "loss scale, eager", "loss scale of Keras"],
)
def test_the_next_micro_batch_takes_the_place_of_one_that_overflows(scaled, eager):
    """ACC-08: gradients 1, inf, 3, 1, 1 at a scale of 1."""
    model = towers("weight")
    inner = sgd(model, gradient_accumulation_steps=2)
    optimizer = scaled(inner)
    model.compile(optimizer, loss=mean_output, run_eagerly=eager)
    found = []
    for value in (1.0, np.inf, 3.0, 1.0, 1.0):
        fit_towers(model, value)
        weight = models.number(model.trainable_variables[0])
        found.append((weight, int(inner.micro_batches), int(inner.iterations)))
    assert found == [(0.0, 1, 0), (0.0, 1, 0), (-2.0, 0, 1), (-2.0, 1, 1), (-3.0, 0, 2)]
    # Keras' own wrapper counts nothing.
    assert getattr(optimizer, "dynamic_scale", 0.5) == 0.5
    assert getattr(optimizer, "skipped_steps", 1) == 1


@pytest.mark.parametrize(
    ("way", "kind"),
    [("eager", int), ("compiled", np.float32), ("eager", keras.ops.convert_to_tensor)],
)
def test_micro_batches_weigh_by_their_sample_count(way, kind):
    """ACC-04: 3 samples of gradient 1, none of 9 and one of 5 have the mean 2."""
    model = make_model()
    optimizer = sgd(model, gradient_accumulation_steps=3)
    step = stepper(optimizer, model, way)
    for _ in range(2):
        before = weights_of(model)
        for value, count in ((1.0, 3), (9.0, 0), (5.0, 1)):
            step({p: np.full_like(w, value) for p, w in before.items()}, kind(count))
    assert_close(weights_of(model), {p: w - 2.0 for p, w in before.items()})


def test_a_sparse_gradient_of_an_embedding_is_summed_over_micro_batches():
    """ACC-10: rows 0 and 1 get 3 + 4 and 1 + 1 in a window of two."""
    ids, factors = keras.Input((2,), dtype="int32"), keras.Input((2, 1))
    rows = keras.layers.Embedding(3, 1, embeddings_initializer="ones", name="rows")
    model = keras.Model([ids, factors], keras.layers.Flatten()(rows(ids) * factors))
    optimizer = sgd(gradient_accumulation_steps=2)
    model.compile(optimizer, loss=lambda y, out: keras.ops.sum(out, axis=-1))
    x = [np.array([[0, 0], [1, 1]], "int32"), np.float32([[3, 4], [1, 1]])[..., None]]
    model.fit(x, np.zeros((2, 2), "float32"), batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(rows.get_weights()[0], [[-2.5], [0.0], [1.0]])


@pytest.mark.parametrize(
    ("values", "expected", "way"),
    [
        ([2, 5], 5, "eager"),
        ([5, 2], 5, "compiled"),
        ([2, None], 2, "compiled"),
        ([None, 5], 5, "eager"),
        ([None, None], None, "compiled"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("missing_is_expected")
def test_a_variable_that_its_gradient_overwrites_gets_the_largest_of_the_window(
    values, expected, way
):
    """ACC-11: untouched by rate, decay, clipping and averages."""
    model = make_model()
    scale = by_path(model)["head/bias"]
    scale.overwrite_with_gradient = True
    options = EVERYTHING | {"gradient_accumulation_steps": 2}
    optimizer = kgo.GroupedOptimizer(model=model, rule="adam", **options)
    step = stepper(optimizer, model, way)
    for value in values:
        assert_same({"": numpy_of(scale)}, {"": initial_weights()["head/bias"]})
        full = None if value is None else np.full(3, value, "float32")
        step(gradients(0) | {"head/bias": full})
    wanted = initial_weights()["head/bias"] if expected is None else np.full(3, expected)
    np.testing.assert_array_equal(numpy_of(scale), wanted)
    assert not [pair for pair in optimizer._average_pairs() if pair[1] is scale]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_low_precision_have_sums_and_averages_of_float32(dtype):
    model = make_model(dtype)
    optimizer = sgd(model, gradient_accumulation_steps=3, ema=kgo.EMA(0.5))
    with pytest.warns(UserWarning, match="lose updates"):
        optimizer.build(model.trainable_variables)
    small = 2.0**-12
    for value in (1.0, small):
        take_step(optimizer, model, {p: np.full_like(w, value) for p, w in gradients(0).items()})
    for value in sums(optimizer).values():
        assert value.dtype == "float32"
        np.testing.assert_array_equal(value, 1.0 + small)
    take_step(optimizer, model, {p: 2 - small - np.ones_like(w) for p, w in gradients(0).items()})
    before = weights_of(make_model(dtype))
    for path, weight in weights_of(model).items():
        assert weight.dtype == before[path].dtype
        expected = before[path].astype("float32") - 2 / 3
        np.testing.assert_allclose(weight.astype("float32"), expected, atol=2.0**-7)
    assert {numpy_of(mean).dtype.name for mean, _ in optimizer._average_pairs()} == {"float32"}


# Missing gradients, and variables that do not come ---------------------------------------------

HEAD = [path for path in PATHS if path.startswith("head")]
LATER, FIRST, NEVER = ([1.0, None], 0.5), ([None, 1.0], 0.5), ([None, None], None)


@pytest.mark.parametrize(
    ("rest", "left_out", "way"),
    [
        (LATER, False, "compiled"),
        (LATER, True, "eager"),
        (FIRST, False, "eager"),
        (FIRST, True, "compiled"),
        (NEVER, False, "compiled"),
        (NEVER, True, "eager"),
    ],
)
@pytest.mark.usefixtures("missing_is_expected")
def test_a_micro_batch_without_a_gradient_loses_nothing(rest, left_out, way, backend):
    if left_out and way == "compiled" and backend != "tensorflow":
        pytest.skip("a stateless step takes the values of all variables")
    values, mean = rest
    case = RULE["nadam"]
    whole, parts = make_model(), make_model()
    options = EVERYTHING | {"ema": kgo.EMA(0.5)}
    plain = case.optimizer(whole, **options)
    optimizer = case.optimizer(parts, **options, gradient_accumulation_steps=2)
    step = stepper(optimizer, parts, way)
    full = {path: _on_grid(g) for path, g in gradients(0).items()}
    rest_of = {path: g for path, g in full.items() if path not in HEAD}
    rest_of |= {} if left_out else dict.fromkeys(HEAD)
    # A step of all variables first: a moment would move a weight without a gradient.
    take_step(plain, whole, full)
    for _ in range(2):
        step(full)
    for value in values:
        step(full if value else rest_of)
    take_step(plain, whole, full | {p: None if mean is None else full[p] * mean for p in HEAD})
    assert_close(weights_of(parts), weights_of(whole), 5e-6)
    assert_close(outside_window(optimizer), state_of(plain), 5e-6)
    assert counters_of(optimizer) == {2}
    assert not any(np.any(value) for value in sums(optimizer).values())


def test_a_gradient_of_a_variable_that_is_frozen_in_the_window_is_dropped():
    model = make_model()
    optimizer = sgd(model, gradient_accumulation_steps=2)
    everything = by_path(model)
    ones = {path: np.ones_like(w) for path, w in initial_weights().items()}
    take_step(optimizer, model, ones)
    model.head.trainable = False
    rest = {path: g for path, g in ones.items() if path not in HEAD}
    stepper(optimizer, model, "eager")(rest)
    expected = {p: w - (p not in HEAD) for p, w in initial_weights().items()}
    for path, weight in everything.items():
        np.testing.assert_allclose(numpy_of(weight), expected[path], rtol=1e-6)
    assert not any(np.any(value) for value in sums(optimizer).values())


def test_a_frozen_group_has_no_accumulators_and_the_plan_counts_what_there_is():
    model = make_model()
    case = RULE["adam"]
    options = {"gradient_accumulation_steps": 2, "ema": kgo.SWA()}
    optimizer = case.optimizer(model, frozen=["backbone"], **options)
    preview = {v.path: v.state_bytes for v in optimizer.plan.variables}
    for given in batch(case, 0)[1]:
        take_step(optimizer, model, given)
    assert sorted(sums(optimizer)) == sorted(HEAD)
    assert {v.path: v.state_bytes for v in optimizer.plan.variables} == preview
    beside = [v for v in optimizer.variables if v.shape != ()]
    of_gain = [v for v in optimizer.variables if "gain" in v.path]
    held = sum(4 * int(np.prod(v.shape)) for v in [*beside, *of_gain])
    assert sum(preview.values()) == held


# A window left open ---------------------------------------------------------------------------


def fitted(*callbacks: Any, epochs: int = 2, **options: Any) -> tuple[float, int, keras.Model]:
    """A weight after epochs of the gradients 1 to 5, two of which make a step."""
    model = towers("weight")
    model.compile(sgd(model, **{"gradient_accumulation_steps": 2, **options}), loss=mean_output)
    x = np.arange(1.0, 6.0, dtype="float32")[:, None]
    models.fit(model, epochs, x=x, y=0 * x, batch_size=1, callbacks=list(callbacks))
    return models.number(model.weights[0]), int(model.optimizer.iterations), model


def test_a_window_carries_over_into_the_next_epoch_or_is_flushed():
    # (1, 2), (3, 4), (5, 1), (2, 3), (4, 5) or (1, 2), (3, 4), (5) twice.
    assert fitted()[:2] == (-15.0, 5)
    assert fitted(kgo.FlushAccumulation())[:2] == (-20.0, 6)
    weight, iterations, model = fitted(epochs=1)
    assert (weight, iterations) == (-5.0, 2)
    assert model.optimizer.flush()
    assert models.number(model.weights[0]) == -10.0
    before = state_of(model.optimizer)
    assert not model.optimizer.flush()
    assert_same(state_of(model.optimizer), before)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.usefixtures("missing_is_expected")
def test_a_flush_moves_what_came_in_its_window_whatever_came_before(way):
    """Steps with and without a gradient of the head: each is compiled, and any may be the last."""
    case = RULE["sgd_momentum"]
    whole, parts = make_model(), make_model()
    plain = case.optimizer(whole, **EVERYTHING)
    optimizer = case.optimizer(parts, **EVERYTHING, gradient_accumulation_steps=3)
    step = stepper(optimizer, parts, way)
    full = {path: _on_grid(g) for path, g in gradients(0).items()}
    # A gradient that is zero is one: the weight decays.
    full["backbone/bias"][:] = 0.0
    part = full | dict.fromkeys(HEAD)
    for window in ([part, full, full], [part], [full]):
        for given in window:
            step(given)
        optimizer.flush()
    for given in (full | {p: full[p] * np.float32(2 / 3) for p in HEAD}, part, full):
        take_step(plain, whole, given)
    assert_close(weights_of(parts), weights_of(whole), 5e-6)
    assert counters_of(optimizer) == {3}


def test_flushing_needs_a_grouped_optimizer_and_nothing_else():
    assert fitted(kgo.FlushAccumulation(), gradient_accumulation_steps=None)[:2] == (-30.0, 10)
    model = towers("weight")
    model.compile("sgd", loss=mean_output)
    with pytest.raises(TypeError, match=r"needs a GroupedOptimizer. Received: SGD"):
        model.fit(np.ones((1, 1)), np.ones((1, 1)), callbacks=[kgo.FlushAccumulation()], verbose=0)


def test_a_window_and_averages_that_were_loaded_are_flushed_as_those_that_were_saved(tmp_path):
    model, again = make_model(), make_model()
    options = EVERYTHING | {"ema": kgo.SWA(every=2, start=1), "gradient_accumulation_steps": 2}
    for each in (model, again):
        each.compile(RULE["adam"].optimizer(each, **options), loss="mse")
    for number in range(5):
        take_step(model.optimizer, model, gradients(number))
    again.load_weights(save(model, tmp_path / "model.weights.h5"))
    again.optimizer.build(again.trainable_variables)
    for each in (model, again):
        assert int(each.optimizer.micro_batches) == 1
        assert each.optimizer.flush()
        for number in range(5, 9):
            take_step(each.optimizer, each, gradients(number))
    assert_same(weights_of(again), weights_of(model))
    assert_same(state_of(again.optimizer), state_of(model.optimizer))
    assert "@averages_made" in state_of(again.optimizer)


def test_state_without_a_window_empties_the_one_that_is_open(tmp_path):
    case = RULE["sgd_momentum"]
    model, other = make_model(), make_model()
    for each, steps in ((model, None), (other, 2)):
        each.compile(case.optimizer(each, gradient_accumulation_steps=steps), loss="mse")
        take_step(each.optimizer, each, gradients(0))
    other.load_weights(save(model, tmp_path / "model.weights.h5"))
    assert int(other.optimizer.micro_batches) == 0
    mean, micro = batch(case, 1)
    take_step(model.optimizer, model, mean)
    for given in micro:
        take_step(other.optimizer, other, given)
    assert_same(weights_of(other), weights_of(model))


# Declared, and refused ------------------------------------------------------------------------

SAMPLES = "`sample_count` must be a finite number >= 0"
ALL_OR_NONE = r"with every micro-batch (.|\n)* or with none(.|\n)*flush\(\)"


@pytest.mark.parametrize(
    ("first", "value", "error", "said"),
    [
        (2, -1, ValueError, f"{SAMPLES}. Received: sample_count=-1 in `apply`"),
        (2, float("nan"), ValueError, SAMPLES),
        (2, "4", TypeError, SAMPLES),
        (2, True, TypeError, SAMPLES),
        (2, np.ones(2), TypeError, SAMPLES),
        (2, keras.ops.ones((2,)), ValueError, "`sample_count` must be a scalar"),
        (None, 3, ValueError, ALL_OR_NONE),
        (3, None, ValueError, ALL_OR_NONE),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_sample_count_that_is_none_or_comes_alone_is_refused_and_loses_nothing(
    first, value, error, said
):
    model = make_model()
    optimizer = kgo.GroupedOptimizer(model=model, gradient_accumulation_steps=2)
    step = stepper(optimizer, model, "eager")
    step(gradients(0), first)
    before = state_of(optimizer)
    with pytest.raises(error, match=said):
        step(gradients(1), value)
    assert_same(state_of(optimizer), before)
    # The next window may be of the other kind, whether the last one was flushed or full.
    assert optimizer.flush()
    for count in (None, None, 3, 3, None, None):
        step(gradients(1), count)
    assert int(optimizer.iterations) == 4
