"""Reported faults of weight decay, seen in the weights after `fit`."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from chosen_gradients import (
    UnusedHead,
    fit,
    fit_ones,
    mean_output,
    ones_model,
    towers,
    train,
    weights,
)

import keras_groupopt as kgo


def sgd(model: keras.Model, groups=(), **options) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(
        groups, model=model, **{"rule": "sgd", "learning_rate": 1.0} | options
    )


def moments(optimizer: kgo.GroupedOptimizer) -> list[np.ndarray]:
    """The values of all first and second moments."""
    slots = [v for v in optimizer.variables if "momentum" in v.path or "velocity" in v.path]
    assert slots
    return [keras.ops.convert_to_numpy(slot) for slot in slots]


# What decays -----------------------------------------------------------------------------------


def test_biases_and_norms_do_not_decay_unless_asked():
    after = fit_ones(model := ones_model(), sgd(model, weight_decay=0.1))
    np.testing.assert_allclose(after["head/kernel"], 0.9, rtol=1e-6)
    for path in ("head/bias", "ln_final/gamma"):
        np.testing.assert_array_equal(after[path], 1.0)
    np.testing.assert_array_equal(after["ln_final/beta"], 0.0)


def test_an_empty_exclusion_decays_everything():
    after = fit_ones(model := ones_model(), sgd(model, weight_decay=0.1, exclude_from_decay=()))
    for path in ("head/kernel", "head/bias", "ln_final/gamma"):
        np.testing.assert_allclose(after[path], 0.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("excluded", "unchanged"),
    [
        ("ln_final", {"ln_final/gamma"}),
        ("head", {"head/kernel", "head/bias"}),
        ("head/bias", {"head/bias"}),
        (kgo.regex("ln_.*"), {"ln_final/gamma"}),
        (kgo.variable_name("gamma") | "head/bias", {"ln_final/gamma", "head/bias"}),
    ],
    ids=repr,
)
def test_an_exclusion_by_path_means_the_same_on_every_backend(excluded, unchanged):
    """Keras compares names with the whole path on TensorFlow, with the last name elsewhere."""
    model = ones_model()
    after = fit_ones(model, sgd(model, weight_decay=0.1, exclude_from_decay=excluded))
    for path in ("head/kernel", "head/bias", "ln_final/gamma"):
        expected = 1.0 if path in unchanged else 0.9
        np.testing.assert_allclose(after[path], expected, rtol=0 if expected == 1 else 1e-6)


@pytest.mark.parametrize("built", [False, True], ids=["before build", "after build"])
def test_an_exclusion_by_keras_own_method_is_refused_at_any_time(built):
    """It was accepted after build, and took effect or not by what a cache held."""
    model = towers("w", start=1.0)
    optimizer = sgd(model, weight_decay=0.1)
    if built:
        optimizer.build(model.trainable_variables)
    for arguments in ({"var_list": model.trainable_variables}, {"var_names": ["w"]}):
        with pytest.raises(ValueError, match=r"is not used by GroupedOptimizer.*`exclude_from_de"):
            optimizer.exclude_from_weight_decay(**arguments)
    assert train(model, optimizer, 0.0) == {"w/kernel": pytest.approx(0.9)}


@pytest.mark.parametrize(
    ("exclude", "others"), [(None, 0.9), ("tokens", 1.0)], ids=["default", "excluded"]
)
def test_rows_of_an_embedding_that_no_token_names_decay_unless_excluded(exclude, others):
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(3, 1, embeddings_initializer="ones", name="tokens"),
            keras.layers.Flatten(),
        ]
    )
    options = {} if exclude is None else {"exclude_from_decay": exclude}
    optimizer = sgd(model, weight_decay=0.1, **options)
    model.compile(optimizer=optimizer, loss=mean_output)
    model.fit(np.zeros((1, 1), "int32"), np.zeros((1, 1)), verbose=0)
    rows = weights(model)["tokens/embeddings"][:, 0]
    np.testing.assert_allclose(rows, [others - 1.0, others, others], atol=1e-6)


# Missing gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", ["zero", "given"])
def test_a_variable_without_a_gradient_does_not_decay(anchor):
    model = towers("a", "b", start=1.0)
    source = {"a/kernel": np.zeros((1, 1)), "b/kernel": np.zeros((1, 1))}
    optimizer = sgd(model, weight_decay=0.1, anchor="zero" if anchor == "zero" else source)
    with pytest.warns(UserWarning, match="No gradient for b/kernel: these variables neither move"):
        optimizer.apply([keras.ops.zeros((1, 1)), None], model.trainable_variables)
    assert weights(model) == {"a/kernel": pytest.approx(0.9), "b/kernel": 1.0}


@pytest.mark.filterwarnings("ignore:No gradient for unused/kernel")
def test_an_unused_head_neither_decays_nor_stops_others_in_fit(backend):
    model = UnusedHead(start=1.0)
    model.build((None, 1))
    groups = {"used": "used", "unused": "unused"}
    optimizer = sgd(model, groups, weight_decay=0.1, global_clipnorm=1.0)
    model.compile(optimizer=optimizer, loss=mean_output)
    model.fit(np.full((2, 1), 3.0), np.zeros((2, 1)), batch_size=1, verbose=0)
    # JAX gives zeros where there is no gradient, and so decays.
    unused = 0.81 if backend == "jax" else 1.0
    after = {"used/kernel": 0.9 * (0.9 - 1.0) - 1.0, "unused/kernel": unused}
    assert weights(model) == pytest.approx(after)
    assert int(optimizer.iterations) == 2


# How much it decays ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [kgo.rule("sgd", momentum=0.9), "adamw", "radam", "lion"], ids=str)
def test_decay_is_decoupled_and_leaves_the_moments_alone(rule):
    """One backend once put decay into the gradient, where Adam rescales it."""
    model = towers("w", start=1.0)
    optimizer = sgd(model, rule=rule, learning_rate=0.1, weight_decay=0.1)
    assert train(model, optimizer, 0.0) == {"w/kernel": pytest.approx(0.99, rel=1e-6)}
    for moment in moments(optimizer):
        np.testing.assert_array_equal(moment, 0.0)


def test_decay_follows_the_scheduled_rate_and_the_ratio():
    """Decay without the rate goes on when the schedule has reached 0, and the weights collapse."""
    model = towers("full", "half", start=1.0)
    optimizer = sgd(
        model,
        [kgo.Group("half", "half", learning_rate_ratio=0.5)],
        rule="adam",
        learning_rate=keras.optimizers.schedules.CosineDecay(1e-2, 100),
        weight_decay=0.1,
    )
    after = train(model, optimizer, 0.0, steps=100)
    rates = 1e-2 * 0.5 * (1 + np.cos(np.pi * np.arange(100) / 100))
    assert after == {
        "full/kernel": pytest.approx(np.prod(1 - rates * 0.1), rel=1e-5),
        "half/kernel": pytest.approx(np.prod(1 - 0.5 * rates * 0.1), rel=1e-5),
    }
    assert after["full/kernel"] == pytest.approx(0.951, abs=1e-3)


def test_a_rate_of_zero_means_no_decay():
    model = towers("w", start=0.7)
    optimizer = sgd(model, rule="adamw", learning_rate=0.0, weight_decay=0.1)
    assert train(model, optimizer, 3.0, steps=5) == {"w/kernel": float(np.float32(0.7))}


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


# Low precision ---------------------------------------------------------------------------------


def test_bfloat16_weights_that_swallow_decay_are_warned_about_by_path():
    """A decay of 1e-4 is below the rounding step of 1 in bfloat16: nothing happens, ever."""
    keras.config.set_dtype_policy("bfloat16")
    model = towers("w", start=1.0)
    optimizer = sgd(model, rule="adamw", learning_rate=1e-3, weight_decay=0.1)
    with pytest.warns(UserWarning, match="lose updates and decay.*: w/kernel.*`mixed_`"):
        optimizer.build(model.trainable_variables)


def test_mixed_bfloat16_decays_its_float32_weights():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = towers("w", start=1.0)
    optimizer = sgd(model, rule="adamw", learning_rate=1e-3, weight_decay=0.1)
    after = train(model, optimizer, 0.0, steps=100)
    assert after == {"w/kernel": pytest.approx((1 - 1e-4) ** 100, rel=1e-5)}


# Anchors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "start", "expected"), [("sgd", 2.0, 1.95), ("adam", 2.0, 1.95), ("adam", 1.0, 1.0)]
)
def test_decay_toward_an_anchor_pulls_by_the_distance_from_it(rule, start, expected):
    """w − 0.5 · 0.1 · (w − 1); nothing at the anchor itself, and nothing in the moments."""
    model = towers("w", start=start)
    group = kgo.Group("w", "w", weight_decay=0.1, anchor={"w/kernel": np.ones((1, 1))})
    optimizer = sgd(model, [group], rule=rule, learning_rate=0.5)
    after = train(model, optimizer, 0.0)["w/kernel"]
    assert after == pytest.approx(expected, rel=1e-6) if start == 2.0 else after == 1.0
    if rule == "adam":
        for moment in moments(optimizer):
            np.testing.assert_array_equal(moment, 0.0)


def test_a_backbone_is_pulled_to_its_initial_weights_and_a_new_head_to_zero():
    """The random start of a head is nothing to be pulled back to."""
    model = towers("backbone", "head", start={"backbone": 2.0, "head": 1.0})
    optimizer = sgd(
        model,
        [
            kgo.Group("backbone", "backbone", weight_decay=0.1, anchor="initial"),
            kgo.Group("head", "head", weight_decay=0.01),
        ],
    )
    assert train(model, optimizer, [1.0, 0.0]) == {
        "backbone/kernel": pytest.approx(1.0),  # moved by its gradient alone, from its anchor
        "head/kernel": pytest.approx(0.99),
    }
    fit(model, [0.0, 0.0])
    assert weights(model) == {
        "backbone/kernel": pytest.approx(1.1),  # a tenth of the way back
        "head/kernel": pytest.approx(0.9801),
    }
    assert {name: float(drift) for name, drift in optimizer.anchor_drift().items()} == {
        "backbone": pytest.approx(0.9)
    }


# Resuming --------------------------------------------------------------------------------------


def compiled(declared: float, start: float = 0.0) -> keras.Model:
    """Two towers, built, of which one decays."""
    model = towers("a", "b", start=start)
    groups = [kgo.Group("a", "a", weight_decay=declared), kgo.Group("b", "b")]
    model.compile(optimizer=sgd(model, groups), loss=mean_output)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    ("file", "declared", "set_to", "expected"),
    [
        ("run.keras", None, None, 0.81),
        ("run.weights.h5", 0.1, None, 0.81),
        ("run.weights.h5", 0.5, None, 0.45),
        ("run.keras", None, 0.25, 0.675),
        ("run.weights.h5", 0.1, 0.25, 0.675),
    ],
)
def test_a_resumed_run_decays_as_saved_or_as_declared_now(
    tmp_path, caplog, file, declared, set_to, expected
):
    """What was set while training is resumed; a declaration that differs wins, and is logged."""
    model = compiled(0.1, start=1.0)
    fit(model, 0.0)
    assert weights(model) == {"a/kernel": pytest.approx(0.9), "b/kernel": 1.0}
    if set_to is not None:
        model.optimizer.set_weight_decay("a", set_to)
    with caplog.at_level(logging.WARNING, logger="keras_groupopt"):
        if declared is None:
            model.save(tmp_path / file)
            custom = {"mean_output": mean_output}
            model = keras.models.load_model(tmp_path / file, custom_objects=custom)
        else:
            model.save_weights(tmp_path / file)
            model = compiled(declared)
            model.load_weights(tmp_path / file)
    said = "weight_decay/a: declared as 0.1 when it was saved, now 0.5"
    assert (said in caplog.text) == (declared == 0.5)
    fit(model, 0.0)
    assert weights(model) == {"a/kernel": pytest.approx(expected), "b/kernel": 1.0}
