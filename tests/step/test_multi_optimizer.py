"""What `keras.optimizers.MultiOptimizer` does not do, and this package does.

Each claim is two tests: ours does the right thing; and, on the Keras it was measured on,
`MultiOptimizer` does what we say it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from chosen_gradients import UnusedHead, fit, mean_output, no_gradient, towers, train, weights

import keras_groupopt as kgo

SGD = keras.optimizers.SGD

MEASURED = keras.__version__.startswith("3.15.")
on_measured_keras = pytest.mark.skipif(
    not MEASURED, reason="MultiOptimizer was measured on Keras 3.15"
)


def multi(parts: dict[str, Any], default: Any = None) -> Any:
    """A `MultiOptimizer`, with a default that does not move anything."""
    mapping = keras.optimizers.OptimizerMap(default or SGD(0.0), dict(parts))
    return keras.optimizers.MultiOptimizer(mapping)


def sgd(model: keras.Model | None, groups: Any, **options: Any) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(
        groups, model=model, **{"rule": "sgd", "learning_rate": 1.0} | options
    )


# A backbone nested in a model ------------------------------------------------------------------


def nested() -> keras.Model:
    """A functional backbone in a functional model, all weights 1."""
    ones = {"use_bias": False, "kernel_initializer": "ones"}
    inner = keras.Input((1,))
    backbone = keras.Model(
        inner, keras.layers.Dense(1, name="Conv1", **ones)(inner), name="backbone"
    )
    outer = keras.Input((1,))
    return keras.Model(outer, keras.layers.Dense(1, name="head", **ones)(backbone(outer)))


def decays(optimizer_for: Callable[[keras.Model], Any]) -> dict[str, Any]:
    """The weights after one step in which only decay acts."""
    model = nested()
    model.compile(optimizer=optimizer_for(model), loss=no_gradient)
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    return weights(model)


@pytest.mark.parametrize(
    "selector", ["backbone", "backbone/**", kgo.regex("backbone/.*")], ids=repr
)
def test_a_pattern_reaches_the_weights_of_a_nested_backbone(selector):
    after = decays(
        lambda model: sgd(model, [kgo.Group("backbone", selector, weight_decay=0.5)], rule="sgd")
    )
    assert after == {"backbone/Conv1/kernel": 0.5, "head/kernel": 1.0}


def test_a_pattern_that_reaches_nothing_is_an_error():
    model = nested()
    with pytest.raises(ValueError, match="must match at least one variable"):
        _ = sgd(model, {"encoder": "encoder/.*"}).plan


@on_measured_keras
def test_multi_optimizer_trains_a_nested_backbone_by_the_default_without_a_word():
    backbone = SGD(1.0, weight_decay=0.5)
    after = decays(lambda _: multi({"backbone/.*": backbone}))
    assert after == {"backbone/Conv1/kernel": 1.0, "head/kernel": 1.0}
    assert not backbone.built


# One rate for all ------------------------------------------------------------------------------


def test_the_rate_can_be_read_and_set_and_ratios_hold():
    model = towers("a", "b")
    optimizer = sgd(model, [kgo.Group("a", "a", learning_rate_ratio=0.5)], learning_rate=0.1)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model)
    assert weights(model) == {"a/kernel": pytest.approx(-0.05), "b/kernel": pytest.approx(-0.1)}
    optimizer.learning_rate = 1.0
    fit(model)
    assert weights(model) == {"a/kernel": pytest.approx(-0.55), "b/kernel": pytest.approx(-1.1)}


@on_measured_keras
def test_multi_optimizer_has_no_rate():
    optimizer = multi({"a/.*": SGD(0.1)})
    with pytest.raises(AttributeError, match="cannot be accessed"):
        _ = optimizer.learning_rate
    with pytest.raises(AttributeError, match="cannot be set"):
        optimizer.learning_rate = 0.1


def to_a_quarter() -> keras.callbacks.Callback:
    return keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)


def test_a_callback_that_sets_one_rate_keeps_the_groups_apart():
    model = towers("a", "b")
    optimizer = sgd(model, [kgo.Group("a", "a", learning_rate_ratio=0.5)])
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model, callbacks=[to_a_quarter()])
    assert weights(model) == {"a/kernel": -0.125, "b/kernel": -0.25}


@on_measured_keras
def test_a_callback_that_sets_one_rate_flattens_multi_optimizer():
    model = towers("a", "b")
    model.compile(optimizer=multi({"a/.*": SGD(0.5), "b/.*": SGD(1.0)}), loss=mean_output)
    fit(model, callbacks=[to_a_quarter()])
    assert weights(model) == {"a/kernel": -0.25, "b/kernel": -0.25}


# One norm over all -----------------------------------------------------------------------------


def test_gradients_3_and_4_at_a_limit_of_1_make_steps_of_06_and_08():
    model = towers("a", "b")
    optimizer = sgd(model, {"a": "a", "b": "b"}, global_clipnorm=1.0)
    assert train(model, optimizer, [3.0, 4.0]) == {
        "a/kernel": pytest.approx(-0.6),
        "b/kernel": pytest.approx(-0.8),
    }


@on_measured_keras
def test_multi_optimizer_takes_the_norm_inside_each_part():
    model = towers("a", "b")
    parts = {f"{name}/.*": SGD(1.0, global_clipnorm=1.0) for name in "ab"}
    assert train(model, multi(parts), [3.0, 4.0]) == {
        "a/kernel": pytest.approx(-1.0),
        "b/kernel": pytest.approx(-1.0),
    }


# A part without gradients ----------------------------------------------------------------------


def test_a_part_whose_gradients_are_all_missing_stops_nobody():
    model = towers("a", "b")
    optimizer = sgd(model, {"a": "a", "b": "b"})
    with pytest.warns(UserWarning, match="No gradient for b/kernel"):
        optimizer.apply([keras.ops.full((1, 1), 3.0), None], model.trainable_variables)
    assert weights(model) == {"a/kernel": -3.0, "b/kernel": 0.0}


@on_measured_keras
def test_multi_optimizer_aborts_the_step_after_moving_the_first_part():
    model = towers("a", "b")
    optimizer = multi({"a/.*": SGD(1.0), "b/.*": SGD(1.0)})
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([keras.ops.full((1, 1), 3.0), None], model.trainable_variables)
    assert weights(model) == {"a/kernel": -3.0, "b/kernel": 0.0}
    assert int(optimizer.iterations) == 0


@pytest.mark.backends("tensorflow", "torch", reason="JAX gives zeros where there is no gradient")
@pytest.mark.filterwarnings("ignore:No gradient for unused/kernel")
def test_a_head_that_the_loss_does_not_use_stops_no_fit():
    model = UnusedHead()
    model.build((None, 1))
    assert train(model, sgd(model, {"used": "used", "unused": "unused"})) == {
        "used/kernel": -1.0,
        "unused/kernel": 0.0,
    }


# Files -----------------------------------------------------------------------------------------


def mobile() -> keras.Model:
    """Inverted residual blocks in the manner of MobileNetV2, 50,000 weights."""
    inner = x = keras.Input((8, 8, 3))
    for number, filters in enumerate((16, 64)):
        x = keras.layers.Conv2D(4 * filters, 1, use_bias=False, name=f"expand_{number}")(x)
        x = keras.layers.BatchNormalization(name=f"expand_norm_{number}")(x)
        x = keras.layers.DepthwiseConv2D(3, padding="same", name=f"depthwise_{number}")(x)
        x = keras.layers.Conv2D(2 * filters, 1, use_bias=False, name=f"project_{number}")(x)
    backbone = keras.Model(inner, keras.layers.GlobalAveragePooling2D()(x), name="mobile")
    outer = keras.Input((8, 8, 3))
    return keras.Model(outer, keras.layers.Dense(5, name="head")(backbone(outer)))


def saved_size(optimizer_for: Callable[[keras.Model], Any], path: Path) -> int:
    model = mobile()
    model.compile(optimizer=optimizer_for(model), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    return path.stat().st_size


def test_state_is_written_once(tmp_path):
    plain = saved_size(lambda _: keras.optimizers.Adam(), tmp_path / "plain.keras")
    groups = {"backbone": "mobile", "head": "head"}
    ours = saved_size(
        lambda model: kgo.GroupedOptimizer(groups, model=model, rule="adam"),
        tmp_path / "ours.keras",
    )
    assert ours <= 1.02 * plain


@on_measured_keras
def test_multi_optimizer_writes_state_twice(tmp_path):
    plain = saved_size(lambda _: keras.optimizers.Adam(), tmp_path / "plain.keras")
    parts = {"head/.*": keras.optimizers.Adam()}
    theirs = saved_size(lambda _: multi(parts, keras.optimizers.Adam()), tmp_path / "multi.keras")
    assert theirs > 1.5 * plain


def step_of_reordered_parts(optimizer_for: Callable[[str], Any], folder: Path) -> dict[str, float]:
    """One step with momentum after loading state that was saved with the parts in another order."""
    model = towers("a", "b")
    train(model, optimizer_for("ab"))
    model.save_weights(folder / "state.weights.h5")
    other = towers("a", "b")
    other.compile(optimizer=optimizer_for("ba"), loss=mean_output)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(folder / "state.weights.h5")
    before = weights(other)
    fit(other, 0.0)
    after = weights(other)
    return {name: after[f"{name}/kernel"] - before[f"{name}/kernel"] for name in "ab"}


RATES = {"a": 1.0, "b": 0.125}


def test_state_is_restored_by_name_and_not_by_position(tmp_path, caplog):
    def optimizer_for(order: str) -> kgo.GroupedOptimizer:
        groups = [kgo.Group(name, name, learning_rate_ratio=RATES[name]) for name in order]
        return sgd(None, groups, rule=kgo.rule("sgd", momentum=0.5))

    with caplog.at_level(logging.WARNING, logger="keras_groupopt"):
        moved = step_of_reordered_parts(optimizer_for, tmp_path)
    # Momentum alone: half of the first step.
    assert moved == {"a": -0.5, "b": -0.0625}
    assert not caplog.records


@on_measured_keras
def test_multi_optimizer_exchanges_state_and_rates_of_reordered_parts(tmp_path):
    def optimizer_for(order: str) -> Any:
        return multi({f"{name}/.*": SGD(RATES[name], momentum=0.5) for name in order})

    assert step_of_reordered_parts(optimizer_for, tmp_path) == {"a": -0.0625, "b": -0.5}


# Decay -----------------------------------------------------------------------------------------


def biased() -> keras.Model:
    layer = keras.layers.Dense(1, name="head", kernel_initializer="ones", bias_initializer="ones")
    return keras.Sequential([keras.Input((1,)), layer])


def decayed(model: keras.Model, optimizer: Any) -> dict[str, Any]:
    model.compile(optimizer=optimizer, loss=no_gradient)
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    return weights(model)


def test_decay_leaves_out_what_is_excluded_by_path():
    model = biased()
    group = kgo.Group("head", "head", weight_decay=0.5, exclude_from_decay="head/bias")
    assert decayed(model, sgd(model, [group])) == {"head/kernel": 0.5, "head/bias": 1.0}


@on_measured_keras
def test_multi_optimizer_accepts_an_exclusion_and_decays_all_the_same():
    optimizer = multi({}, SGD(1.0, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert decayed(biased(), optimizer) == {"head/kernel": 0.5, "head/bias": 0.5}


def test_decay_pulls_to_the_initial_weights_where_asked():
    model = towers("a", "b", start=1.0)
    optimizer = sgd(
        model,
        [
            kgo.Group("a", "a", weight_decay=0.5, anchor="initial"),
            kgo.Group("b", "b", weight_decay=0.5),
        ],
    )
    assert train(model, optimizer, [1.0, 0.0]) == {"a/kernel": 0.0, "b/kernel": 0.5}
    fit(model, 0.0)
    assert weights(model) == {"a/kernel": 0.5, "b/kernel": 0.25}


# A plan to look at -----------------------------------------------------------------------------


def test_who_goes_where_can_be_seen_before_training():
    model = nested()
    optimizer = sgd(
        model, [kgo.Group("backbone", "backbone", learning_rate_ratio=0.5, weight_decay=0.25)]
    )
    lines: list[str] = []
    optimizer.plan.summary(expand=True, print_fn=lines.append)
    table = "\n".join(lines)
    for text in ("backbone/Conv1/kernel", "head/kernel", "1 × 0.5", "0.25", "default"):
        assert text in table
