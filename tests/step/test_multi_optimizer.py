"""What `keras.optimizers.MultiOptimizer` does not do, and this package does.

Each row is a claim: a program, and what it comes to with our optimizer and with `MultiOptimizer`,
on the Keras it was measured on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import models
import pytest
from chosen_gradients import fit, mean_output, no_gradient, towers, train, weights
from models import sgd

import keras_groupopt as kgo

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
on_measured_keras = pytest.mark.skipif(
    not keras.__version__.startswith("3.15."), reason="MultiOptimizer was measured on Keras 3.15"
)


def multi(parts: dict[str, Any], default: Any = None) -> Any:
    """A `MultiOptimizer`, with a default that does not move anything."""
    mapping = keras.optimizers.OptimizerMap(default or SGD(0.0), dict(parts))
    return keras.optimizers.MultiOptimizer(mapping)


# Programs -------------------------------------------------------------------------------------


def nested() -> keras.Model:
    """A functional backbone in a functional model, all weights 1."""
    ones = {"use_bias": False, "kernel_initializer": "ones"}
    inner = keras.Input((1,))
    backbone = keras.Model(
        inner, keras.layers.Dense(1, name="Conv1", **ones)(inner), name="backbone"
    )
    outer = keras.Input((1,))
    return keras.Model(outer, keras.layers.Dense(1, name="head", **ones)(backbone(outer)))


def biased() -> keras.Model:
    layer = keras.layers.Dense(1, name="head", kernel_initializer="ones", bias_initializer="ones")
    return keras.Sequential([keras.Input((1,)), layer])


def two() -> keras.Model:
    return towers("a", "b")


def weights_after(
    make_model: Callable[[], keras.Model],
    optimizer_for: Callable[[keras.Model], Any],
    loss: Any = mean_output,
    **options: Any,
) -> dict[str, Any]:
    """The weights after one step."""
    model = make_model()
    model.compile(optimizer=optimizer_for(model), loss=loss)
    fit(model, **options)
    return weights(model)


def ours(*groups: kgo.Group, **options: Any) -> Callable[[keras.Model], Any]:
    return lambda model: sgd(model, groups, **options)


def excluding(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


DECAY_ALONE = {"loss": no_gradient}
DECAYING = {"weight_decay": 0.5}
ONE_RATE = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)]

# What is trained and how, with which optimizers of ours, what it comes to, and the same of Keras.
CLAIMS: dict[str, tuple[Any, dict[str, Any], list[Callable[[Any], Any]], Any, Any, Any]] = {
    "a pattern reaches the weights of a nested backbone": (
        *(nested, DECAY_ALONE),
        [
            ours(kgo.Group("backbone", selector, **DECAYING))
            for selector in ("backbone", "backbone/**", kgo.regex("backbone/.*"))
        ],
        {"backbone/Conv1/kernel": 0.5, "head/kernel": 1.0},
        lambda model: multi({"backbone/.*": SGD(1.0, **DECAYING)}),
        {"backbone/Conv1/kernel": 1.0, "head/kernel": 1.0},
    ),
    "a callback that sets one rate keeps the groups apart": (
        *(two, {"callbacks": ONE_RATE}),
        [ours(kgo.Group("a", "a", learning_rate_ratio=0.5))],
        {"a/kernel": -0.125, "b/kernel": -0.25},
        lambda model: multi({"a/.*": SGD(0.5), "b/.*": SGD(1.0)}),
        {"a/kernel": -0.25, "b/kernel": -0.25},
    ),
    "one norm is over all parts": (
        *(two, {"gradients": [3.0, 4.0]}),
        [ours(kgo.Group("a", "a"), kgo.Group("b", "b"), global_clipnorm=1.0)],
        {"a/kernel": -0.6, "b/kernel": -0.8},
        lambda model: multi({f"{name}/.*": SGD(1.0, global_clipnorm=1.0) for name in "ab"}),
        {"a/kernel": -1.0, "b/kernel": -1.0},
    ),
    "decay leaves out what is excluded": (
        *(biased, DECAY_ALONE),
        [ours(kgo.Group("head", "head", exclude_from_decay="head/bias", **DECAYING))],
        {"head/kernel": 0.5, "head/bias": 1.0},
        lambda model: excluding(multi({}, SGD(1.0, **DECAYING))),
        {"head/kernel": 0.5, "head/bias": 0.5},
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_our_optimizer_does_what_is_claimed(claim):
    make_model, options, makers, expected, _, _ = CLAIMS[claim]
    for make in makers:
        assert weights_after(make_model, make, **options) == pytest.approx(expected)


@on_measured_keras
@pytest.mark.parametrize("claim", CLAIMS)
def test_multi_optimizer_does_what_is_said_of_it(claim):
    make_model, options, _, _, make, expected = CLAIMS[claim]
    assert weights_after(make_model, make, **options) == pytest.approx(expected)


# What follows from that for Keras --------------------------------------------------------------


@on_measured_keras
def test_multi_optimizer_leaves_a_part_without_weights_unbuilt():
    backbone = SGD(1.0, weight_decay=0.5)
    weights_after(nested, lambda model: multi({"backbone/.*": backbone}))
    assert not backbone.built


@on_measured_keras
def test_multi_optimizer_has_no_rate():
    optimizer = multi({"a/.*": SGD(0.1)})
    with pytest.raises(AttributeError, match="cannot be accessed"):
        _ = optimizer.learning_rate
    with pytest.raises(AttributeError, match="cannot be set"):
        optimizer.learning_rate = 0.1


@on_measured_keras
def test_multi_optimizer_aborts_the_step_after_moving_the_first_part():
    model = towers("a", "b")
    optimizer = multi({"a/.*": SGD(1.0), "b/.*": SGD(1.0)})
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([keras.ops.full((1, 1), 3.0), None], model.trainable_variables)
    assert weights(model) == {"a/kernel": -3.0, "b/kernel": 0.0}
    assert int(optimizer.iterations) == 0


@on_measured_keras
def test_multi_optimizer_writes_state_twice(tmp_path):
    model = models.dense(first=256, second=128, head=5)
    sizes = []
    for optimizer in (Adam(), multi({"head/.*": Adam()}, Adam())):
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        model.save(tmp_path / "model.keras")
        sizes.append((tmp_path / "model.keras").stat().st_size)
    assert sizes[1] > 1.5 * sizes[0]


RATES = {"a": 1.0, "b": 0.125}


def groups_in(order: str) -> kgo.GroupedOptimizer:
    groups = [kgo.Group(name, name, learning_rate_ratio=RATES[name]) for name in order]
    return sgd(groups=groups, rule=kgo.rule("sgd", momentum=0.5))


def parts_in(order: str) -> Any:
    return multi({f"{name}/.*": SGD(RATES[name], momentum=0.5) for name in order})


@pytest.mark.parametrize(
    ("optimizer_for", "expected"),
    [
        # Momentum alone: half of the first step.
        (groups_in, {"a": -0.5, "b": -0.0625}),
        pytest.param(parts_in, {"a": -0.0625, "b": -0.5}, marks=on_measured_keras),
    ],
    ids=["ours", "MultiOptimizer"],
)
def test_state_of_reordered_parts_is_restored_by_name_here_and_exchanged_there(
    optimizer_for, expected, tmp_path, caplog
):
    model, other = towers("a", "b"), towers("a", "b")
    train(model, optimizer_for("ab"))
    model.save_weights(tmp_path / "state.weights.h5")
    other.compile(optimizer=optimizer_for("ba"), loss=mean_output)
    other.optimizer.build(other.trainable_variables)
    with caplog.at_level(logging.WARNING, logger="keras_groupopt"):
        other.load_weights(tmp_path / "state.weights.h5")
    before = weights(other)
    fit(other, 0.0)
    after = weights(other)
    assert {name: after[f"{name}/kernel"] - before[f"{name}/kernel"] for name in "ab"} == expected
    assert not caplog.records
