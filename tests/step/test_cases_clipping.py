"""Reported faults of gradient clipping, seen in the weights after `fit`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from chosen_gradients import mean_output, towers, train, weights
from models import assert_equal

import keras_groupopt as kgo


def sgd(model: keras.Model, groups=(), **options) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(
        groups, model=model, **{"rule": "sgd", "learning_rate": 1.0} | options
    )


@pytest.mark.parametrize(
    ("limit", "expected", "groups"),
    [
        ({"global_clipnorm": 1.0}, (0.6, 0.8), {}),
        ({"global_clipnorm": 1.0}, (0.6, 0.8), {"a": "a", "b": "b"}),
        ({"global_clipnorm": 10.0}, (3.0, 4.0), {"a": "a", "b": "b"}),
        ({"clipnorm": 1.0}, (1.0, 1.0), {"a": "a", "b": "b"}),
        ({"clipvalue": 3.5}, (3.0, 3.5), {}),
    ],
    ids=str,
)
def test_the_global_norm_is_over_everything_however_the_model_is_split(limit, expected, groups):
    """`MultiOptimizer` takes the norm inside each part: steps 1 and 1."""
    model = towers("a", "b")
    moved = train(model, sgd(model, groups, **limit), [3.0, 4.0])
    assert [-moved["a/kernel"], -moved["b/kernel"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        # (3, 4) within the group first, then its (0.6, 0.8) with the other's 1: norm √2.
        ({"global_clipnorm": 1.0}, (0.6 / 2**0.5, 0.8 / 2**0.5, 1 / 2**0.5)),
        ({"clipnorm": 1.0}, (1 / 3**0.5, 1 / 3**0.5, 1 / 3**0.5)),
        ({"clipvalue": 1.0}, (1 / 3**0.5, 1 / 3**0.5, 1 / 3**0.5)),
    ],
    ids=str,
)
def test_a_groups_own_clipping_acts_before_the_norm_over_all(own, expected):
    model = towers("a", "b", "c")
    group = kgo.Group("pair", ["a", "b"], **own)
    moved = train(model, sgd(model, [group], global_clipnorm=1.0), [3.0, 4.0, 1.0])
    assert [-moved[f"{name}/kernel"] for name in "abc"] == pytest.approx(expected)


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
    sgd(None, **options).apply([keras.ops.full((1, 1), gradient, dtype="float64")], [variable])
    moved = keras.ops.convert_to_numpy(variable)[0, 0] - 1.5
    assert moved == pytest.approx(expected, rel=1e-5)


def embedding_step(table: np.ndarray, kernel: np.ndarray, tokens: list[int], limit: dict):
    """One SGD step at rate 1, in float64: (table, kernel, bias) after it, the bias from 0."""
    classes = kernel.shape[1]
    flat = table[tokens].reshape(-1)
    of_kernel = np.repeat(flat[:, None] / classes, classes, axis=1)
    of_bias = np.full(classes, 1 / classes)
    of_table = np.zeros_like(table)
    for place, token in enumerate(tokens):
        of_table[token] += kernel.mean(axis=1).reshape(len(tokens), -1)[place]
    gradients = [of_table, of_kernel, of_bias]
    ((kind, bound),) = limit.items()
    norms = [np.linalg.norm(gradient) for gradient in gradients]
    if kind == "clipvalue":
        gradients = [np.clip(gradient, -bound, bound) for gradient in gradients]
    else:
        joint = [np.linalg.norm(norms)] * 3 if kind == "global_clipnorm" else norms
        assert joint[0] > bound  # so that clipping acts on the table
        gradients = [g * min(1.0, bound / n) for g, n in zip(gradients, joint, strict=True)]
    starts = [table, kernel, np.zeros(classes)]
    return [start - gradient for start, gradient in zip(starts, gradients, strict=True)]


@pytest.mark.parametrize(
    ("limit", "groups"),
    [
        ({"clipnorm": 0.5}, {}),
        ({"global_clipnorm": 0.5}, {"tokens": "tokens", "head": "head"}),
        ({"clipvalue": 0.05}, {"tokens": "tokens", "head": "head"}),
    ],
    ids=str,
)
def test_clipping_the_sparse_gradient_of_an_embedding_sums_repeated_rows_first(limit, groups):
    """It crashed on TensorFlow, or took the norm of slices that repeat a row."""
    tokens = [1, 1, 2]
    random = np.random.default_rng(0)
    table, kernel = random.normal(size=(10, 4)), random.normal(size=(12, 2))
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(10, 4, name="tokens"),
            keras.layers.Flatten(),
            keras.layers.Dense(2, name="head"),
        ]
    )
    model.set_weights([table, kernel, np.zeros(2)])
    model.compile(optimizer=sgd(model, groups, **limit), loss=mean_output)
    model.fit(np.array([tokens]), np.zeros((1, 2)), verbose=0)
    expected = embedding_step(table, kernel, tokens, limit)
    assert_equal(model, expected, rtol=0, atol=1e-6)


def test_a_frozen_group_has_no_part_in_the_norm():
    model = towers("a", "b")
    optimizer = sgd(model, [kgo.Group("b", "b", frozen=True)], global_clipnorm=1.0)
    assert train(model, optimizer, [3.0, 4.0]) == {
        "a/kernel": pytest.approx(-1.0),
        "b/kernel": 0.0,
    }


@pytest.mark.parametrize(
    ("limit", "groups"),
    [
        ({}, {"a": "a", "b": "b"}),
        ({"global_clipnorm": 1.0}, {"a": "a", "b": "b"}),
        ({"global_clipnorm": 1.0}, ()),
        ({"clipnorm": 1.0}, ()),
    ],
    ids=str,
)
def test_missing_gradients_have_no_part_in_the_norm_and_stop_no_other_group(limit, groups):
    """A group whose gradients are all missing aborted the step."""
    model = towers("a", "b")
    optimizer = sgd(model, groups, **limit)
    gradients = [keras.ops.full((1, 1), 3.0), None]
    with pytest.warns(UserWarning, match="No gradient for b/kernel"):
        optimizer.apply(gradients, model.trainable_variables)
    assert weights(model) == {"a/kernel": pytest.approx(-1.0 if limit else -3.0), "b/kernel": 0.0}
    assert int(optimizer.iterations) == 1
    optimizer.apply(gradients, model.trainable_variables)  # said once, not at every step
    assert weights(model)["b/kernel"] == 0.0
    with pytest.raises(ValueError, match="At least one gradient must be given"):
        optimizer.apply([None, None], model.trainable_variables)
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize(
    ("gradient", "groups"), [(np.inf, ()), (np.nan, {"a": "a", "b": "b"})], ids=str
)
def test_a_norm_that_is_not_finite_and_propagates_shows_in_every_weight(gradient, groups):
    model = towers("a", "b")
    optimizer = sgd(model, groups, global_clipnorm=1.0, on_nonfinite="propagate")
    moved = train(model, optimizer, [gradient, 1.0])
    assert np.isnan([moved["a/kernel"], moved["b/kernel"]]).all()
