"""Reported faults of rates, clipping and decay per group, seen in the weights after `fit`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from cases import Jump
from chosen_gradients import (
    UnusedHead,
    fit,
    fit_ones,
    fit_rows,
    mean_output,
    ones_model,
    towers,
    train,
    weights,
)
from models import numpy_of, sgd

import keras_groupopt as kgo

Group = kgo.Group


def cosine(first: float, steps: int) -> np.ndarray:
    """The rates of a cosine decay to 0, in float64."""
    return first * 0.5 * (1 + np.cos(np.pi * np.arange(steps) / steps))


# Known numbers ---------------------------------------------------------------------------------

APART = {"a": "a", "b": "b"}
ONE_AND_TWO = {"a": "a", "b": Group("b", "b", learning_rate_ratio=2.0)}
BLOCKS = {f"block_{index}": 0.75 ** (12 - index) for index in range(12)}
CosineDecay = keras.optimizers.schedules.CosineDecay
WARM = CosineDecay(0.0, decay_steps=100, warmup_target=0.1, warmup_steps=10)
WARM_SUM = 0.01 * np.arange(10).sum() + cosine(0.1, 100).sum()
DECAYED = 0.1 * cosine(1e-2, 100)


def pair(**clipping: float) -> list[kgo.Group]:
    return [Group("pair", ["a", "b"], **clipping)]


# Groups, options, the weights before, the gradients of each step, and the weights after.
Row = tuple[Any, dict[str, Any], dict[str, float], Sequence[Sequence[float]], Sequence[float]]
ZEROS = {"a": 0.0, "b": 0.0}
KNOWN: dict[str, Row] = {
    "a schedule brings no group to the rate of another": (
        *(ONE_AND_TWO, {"learning_rate": WARM}, ZEROS),
        *([[1.0, 1.0]] * 110, [-WARM_SUM, -2 * WARM_SUM]),
    ),
    "a ratio multiplies the rate once and not at every step": (
        *([Group("w", "w", learning_rate_ratio=0.75)], {"learning_rate": 0.1}, {"w": 0.0}),
        *([[1.0]] * 50, [-3.75]),
    ),
    "each block moves by its power": (
        [Group(name, name, learning_rate_ratio=ratio) for name, ratio in BLOCKS.items()],
        *({"learning_rate": 1e-3}, dict.fromkeys(BLOCKS, 0.0)),
        *([[1.0] * 12], [-1e-3 * ratio for ratio in BLOCKS.values()]),
    ),
    # `MultiOptimizer` takes the norm inside each part: steps 1 and 1.
    "a norm over one group": ((), {"global_clipnorm": 1.0}, ZEROS, [[3.0, 4.0]], [-0.6, -0.8]),
    "a norm over two": (APART, {"global_clipnorm": 1.0}, ZEROS, [[3.0, 4.0]], [-0.6, -0.8]),
    "a norm below it": (APART, {"global_clipnorm": 10.0}, ZEROS, [[3.0, 4.0]], [-3.0, -4.0]),
    "a norm of each": (APART, {"clipnorm": 1.0}, ZEROS, [[3.0, 4.0]], [-1.0, -1.0]),
    "values": ((), {"clipvalue": 3.5}, ZEROS, [[3.0, 4.0]], [-3.0, -3.5]),
    # (3, 4) within the group first, then its (0.6, 0.8) with the other's 1: norm √2.
    "a group's norm acts before that of all": (
        *(pair(global_clipnorm=1.0), {"global_clipnorm": 1.0}, ZEROS | {"c": 0.0}),
        *([[3.0, 4.0, 1.0]], [-0.6 / 2**0.5, -0.8 / 2**0.5, -1 / 2**0.5]),
    ),
    **{
        f"a group's {name} acts before the norm of all": (
            *(pair(**{name: 1.0}), {"global_clipnorm": 1.0}, ZEROS | {"c": 0.0}),
            *([[3.0, 4.0, 1.0]], [-1 / 3**0.5] * 3),
        )
        for name in ("clipnorm", "clipvalue")
    },
    # Decay without the rate goes on when the schedule has reached 0, and the weights collapse.
    "decay follows the scheduled rate and the ratio": (
        [Group("half", "half", learning_rate_ratio=0.5)],
        {"rule": "adam", "learning_rate": CosineDecay(1e-2, 100), "weight_decay": 0.1},
        *({"full": 1.0, "half": 1.0}, [[0.0, 0.0]] * 100),
        [np.prod(1 - DECAYED), np.prod(1 - DECAYED / 2)],
    ),
    "a rate of zero means no decay": (
        *((), {"rule": "adamw", "learning_rate": 0.0, "weight_decay": 0.1}, {"w": 0.75}),
        *([[3.0]] * 5, [0.75]),
    ),
    # The random start of a head is nothing to be pulled back to. The first step of the backbone is
    # its gradient alone, from its anchor; the second a tenth of the way back.
    "a backbone is pulled to its initial weights and a new head to zero": (
        [
            Group("backbone", "backbone", weight_decay=0.1, anchor="initial"),
            Group("head", "head", weight_decay=0.01),
        ],
        *({}, {"backbone": 2.0, "head": 1.0}, [[1.0, 0.0], [0.0, 0.0]], [1.1, 0.9801]),
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_the_weights_after_fit_are_these_numbers(case):
    groups, options, start, gradients, expected = KNOWN[case]
    model = towers(*start, start=start)
    model.compile(sgd(model, groups, **options), loss=mean_output)
    fit_rows(model, *gradients)
    after = list(weights(model).values())
    assert after == pytest.approx(list(expected), rel=2e-6 + 1e-7 * len(gradients), abs=0)


# Rates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [keras.optimizers.SGD, keras.optimizers.Adam, kgo.RAdam])
def test_an_instance_brings_its_own_schedule(rule):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    moved = []
    for own in ({"rule": rule(schedule)}, {"rule": rule, "learning_rate": schedule}):
        model = towers("a", "b")
        moved.append(train(model, sgd(model, [Group("a", "a", **own)]), steps=3))
    assert moved[0] == moved[1]
    if rule is keras.optimizers.SGD:
        assert moved[0]["a/kernel"] == -1.25


def test_a_group_unfrozen_while_training_starts_at_the_present_rate_of_the_schedule():
    """It got an arbitrary rate, or the schedule began again for it."""
    model = towers("backbone", "head")
    group = Group("backbone", "backbone", learning_rate_ratio=Jump(0.0, 0.1, at=50))
    rule, schedule = kgo.rule("sgd", momentum=0.9), CosineDecay(1.0, 100)
    optimizer = sgd(model, [group], rule=rule, learning_rate=schedule)
    assert train(model, optimizer, [0.0, 1.0], steps=50)["backbone/kernel"] == 0.0
    fit(model, [1.0, 1.0])
    after = weights(model)
    # 0.1 times the rate at step 50, which is half of the first.
    assert after["backbone/kernel"] == pytest.approx(-0.1 * 0.5, rel=1e-4)
    # The head's momentum went on: its trajectory is that of a run without the other group.
    velocity = position = 0.0
    for rate in cosine(1.0, 100)[:51]:
        velocity = 0.9 * velocity - rate
        position += velocity
    assert after["head/kernel"] == pytest.approx(position, rel=1e-4)


@pytest.mark.parametrize("one", [1, np.float16(1), np.array(1)], ids=repr)
def test_a_whole_number_as_rate_is_a_float_that_can_be_halved(one):
    """An integer rate kept its type, and half of it was 0."""
    model = towers("w")
    optimizer = sgd(model, [Group("w", "w", learning_rate_ratio=one)], learning_rate=one)
    model.compile(optimizer=optimizer, loss=mean_output)
    # The loss falls, which `mode="max"` takes for no improvement.
    halve = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=0, mode="max", min_delta=0.0
    )
    fit(model, epochs=3, callbacks=[halve])
    # Rates 1, 1, 1/2: the callback acts from the end of the second epoch.
    assert weights(model) == {"w/kernel": pytest.approx(-2.5)}
    assert float(optimizer.learning_rate) == pytest.approx(0.25)


# Missing gradients, and other precisions -------------------------------------------------------


@pytest.mark.backends("tensorflow", "torch", reason="JAX has no float64 by default")
@pytest.mark.parametrize(
    ("options", "gradient", "expected"),
    [
        *(({name: 0.5}, 3.0, -0.5) for name in ("global_clipnorm", "clipnorm", "clipvalue")),
        ({"learning_rate": 1e-3, "weight_decay": 1e-4}, 0.0, -1.5e-7),
    ],
    ids=str,
)
def test_gradients_and_decay_of_float64_are_of_float64(options, gradient, expected):
    variable = keras.Variable(np.full((1, 1), 1.5), dtype="float64", name="kernel")
    sgd(**options).apply([keras.ops.full((1, 1), gradient, dtype="float64")], [variable])
    assert numpy_of(variable)[0, 0] - 1.5 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("groups", [APART, ()], ids=["a group without any", "one group"])
def test_missing_gradients_have_no_part_in_the_norm_and_stop_no_other_group(groups):
    """A group whose gradients are all missing aborted the step."""
    model = towers("a", "b", start=1.0)
    optimizer = sgd(model, groups, global_clipnorm=1.0, weight_decay=0.5)
    gradients = [keras.ops.full((1, 1), 3.0), None]
    with pytest.warns(UserWarning, match="No gradient for b/kernel: these variables neither move"):
        optimizer.apply(gradients, model.trainable_variables)
    assert weights(model) == {"a/kernel": pytest.approx(0.5 - 1.0), "b/kernel": 1.0}
    optimizer.apply(gradients, model.trainable_variables)  # said once, not at every step
    assert weights(model)["b/kernel"] == 1.0
    with pytest.raises(ValueError, match="At least one gradient must be given"):
        optimizer.apply([None, None], model.trainable_variables)
    assert int(optimizer.iterations) == 2


@pytest.mark.filterwarnings("ignore:No gradient for unused/kernel")
def test_an_unused_head_neither_decays_nor_stops_others_in_fit(backend):
    model = UnusedHead(start=1.0)
    model.build((None, 1))
    groups = {"used": "used", "unused": "unused"}
    optimizer = sgd(model, groups, weight_decay=0.1, global_clipnorm=1.0)
    train(model, optimizer, 3.0, steps=2)
    # JAX gives zeros where there is no gradient, and so decays.
    unused = 0.81 if backend == "jax" else 1.0
    after = {"used/kernel": 0.9 * (0.9 - 1.0) - 1.0, "unused/kernel": unused}
    assert weights(model) == pytest.approx(after)
    assert int(optimizer.iterations) == 2


# Decay -----------------------------------------------------------------------------------------

DECAYING = {"head/kernel": 0.9, "head/bias": 0.9, "ln_final/gamma": 0.9, "ln_final/beta": 0.0}


@pytest.mark.parametrize(
    ("options", "unchanged"),
    [
        ({}, {"head/bias", "ln_final/gamma"}),
        ({"exclude_from_decay": ()}, set()),
        ({"exclude_from_decay": "ln_final"}, {"ln_final/gamma"}),
        ({"exclude_from_decay": "head"}, {"head/kernel", "head/bias"}),
        ({"exclude_from_decay": "head/bias"}, {"head/bias"}),
        ({"exclude_from_decay": kgo.regex("ln_.*")}, {"ln_final/gamma"}),
        (
            {"exclude_from_decay": kgo.variable_name("gamma") | "head/bias"},
            {"ln_final/gamma", "head/bias"},
        ),
    ],
    ids=str,
)
def test_biases_and_norms_or_what_is_excluded_by_path_do_not_decay(options, unchanged):
    """Keras compares names with the whole path on TensorFlow, with the last name elsewhere."""
    after = fit_ones(model := ones_model(), sgd(model, weight_decay=0.1, **options))
    for path, expected in (DECAYING | dict.fromkeys(unchanged, 1.0)).items():
        np.testing.assert_allclose(after[path], expected, rtol=1e-6 * (expected == 0.9))


@pytest.mark.parametrize(
    ("options", "others"),
    [({}, 0.9), ({"exclude_from_decay": "tokens"}, 1.0)],
    ids=["default", "excluded"],
)
def test_rows_of_an_embedding_that_no_token_names_decay_unless_excluded(options, others):
    table = keras.layers.Embedding(3, 1, embeddings_initializer="ones", name="tokens")
    inputs = keras.Input((1,), dtype="int32")
    model = keras.Sequential([inputs, table, keras.layers.Flatten()])
    model.compile(optimizer=sgd(model, weight_decay=0.1, **options), loss=mean_output)
    model.fit(np.zeros((1, 1), "int32"), np.zeros((1, 1)), verbose=0)
    rows = weights(model)["tokens/embeddings"][:, 0]
    np.testing.assert_allclose(rows, [others - 1.0, others, others], atol=1e-6)


AT_ONE = {"w/kernel": np.ones((1, 1))}


@pytest.mark.parametrize(
    ("rule", "anchor", "start", "expected"),
    [
        *((rule, None, 1.0, 0.95) for rule in ("adamw", "radam", "lion")),
        (kgo.rule("sgd", momentum=0.9), None, 1.0, 0.95),
        # w − 0.5 · 0.1 · (w − 1), and nothing at the anchor itself.
        (kgo.rule("sgd", momentum=0.9), AT_ONE, 2.0, 1.95),
        ("adam", AT_ONE, 2.0, 1.95),
        ("adam", AT_ONE, 1.0, 1.0),
    ],
    ids=str,
)
def test_decay_is_decoupled_and_leaves_the_moments_alone(rule, anchor, start, expected):
    """One backend once put decay into the gradient, where Adam rescales it."""
    group = Group("w", "w", weight_decay=0.1, anchor=anchor)
    after = pytest.approx(expected, rel=1e-6 if expected != start else 0, abs=0)
    for fused in (True, False):
        model = towers("w", start=start)
        optimizer = sgd(model, [group], rule=rule, learning_rate=0.5, fused=fused)
        assert train(model, optimizer, 0.0) == {"w/kernel": after}
        moments = [v for v in optimizer.variables if "momentum" in v.path or "velocity" in v.path]
        assert moments
        assert not any(np.any(numpy_of(moment)) for moment in moments)


def test_decay_beside_a_regularizer_is_warned_of_and_both_act():
    regularizer = keras.regularizers.L2(0.1)
    model, other = (towers("w", start=1.0, kernel_regularizer=regularizer) for _ in range(2))
    optimizer = sgd(model, weight_decay=0.1)
    with pytest.warns(UserWarning, match="have a regularizer and decay as well: w/kernel"):
        optimizer.build(model.trainable_variables)
    # 1 − 0.1 from decay − 2 · 0.1 from the penalty's gradient.
    assert train(model, optimizer, 0.0) == {"w/kernel": pytest.approx(0.7)}
    excluded = sgd(other, weight_decay=0.1, exclude_from_decay="w")
    assert train(other, excluded, 0.0) == {"w/kernel": pytest.approx(0.8)}


def test_bfloat16_weights_that_swallow_decay_are_warned_about_and_mixed_ones_decay():
    """A decay of 1e-4 is below the rounding step of 1 in bfloat16: nothing happens, ever."""
    options = {"rule": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}
    model = towers("w", start=1.0, dtype="bfloat16")
    with pytest.warns(UserWarning, match="lose updates and decay.*: w/kernel.*`mixed_`"):
        sgd(model, **options).build(model.trainable_variables)
    model = towers("w", start=1.0, dtype="mixed_bfloat16")
    after = train(model, sgd(model, **options), 0.0, steps=100)
    assert after == {"w/kernel": pytest.approx((1 - 1e-4) ** 100, rel=1e-5)}


@pytest.mark.parametrize(("declared", "expected"), [(0.1, 0.675), (0.5, 0.45)])
def test_a_resumed_run_decays_as_was_set_or_as_declared_otherwise_now(
    tmp_path, caplog, declared, expected
):
    """What was set while training is resumed; a declaration that differs wins, and is logged."""

    def decaying(weight_decay: float) -> keras.Model:
        model = towers("a", "b", start=1.0)
        groups = [Group("a", "a", weight_decay=weight_decay), Group("b", "b")]
        model.compile(optimizer=sgd(model, groups), loss=mean_output)
        model.optimizer.build(model.trainable_variables)
        return model

    model = decaying(0.1)
    fit(model, 0.0)
    model.optimizer.set_weight_decay("a", 0.25)
    model.save_weights(tmp_path / "run.weights.h5")
    resumed = decaying(declared)
    with caplog.at_level(logging.WARNING, logger="keras_groupopt"):
        resumed.load_weights(tmp_path / "run.weights.h5")
    said = "weight_decay/a: declared as 0.1 when it was saved, now 0.5"
    assert (said in caplog.text) == (declared == 0.5)
    fit(resumed, 0.0)
    assert weights(resumed) == {"a/kernel": pytest.approx(expected), "b/kernel": 1.0}
