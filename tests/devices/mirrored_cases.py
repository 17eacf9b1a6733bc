"""Two replicas with different data give the numbers of one device, and what else holds there.

`test_several_devices.py` runs this file in a process of its own: logical devices must be set
before TensorFlow starts.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from mirrored_runs import (
    HALF,
    MICRO_BATCHES,
    ROWS,
    SIZE,
    WHOLE,
    apart,
    data,
    each,
    farthest,
    fit,
    make,
    scaled,
    sgd,
    synchronized,
    values,
    variables_of,
)
from saving_models import load, save

import keras_groupopt as kgo

pytestmark = pytest.mark.filterwarnings("ignore:Steps skipped")

LIMIT = 1e-6


@pytest.fixture(scope="session")
def devices() -> list[str]:
    import tensorflow as tf

    (processor,) = tf.config.list_physical_devices("CPU")
    device = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(processor, [device, device])
    return ["CPU:0", "CPU:1"]


@pytest.fixture(scope="session")
def strategy(devices: list[str]) -> Any:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(devices)


def made(row: dict[str, Any], scope: Any = None) -> keras.Model:
    with contextlib.nullcontext() if scope is None else scope:
        return make(row)


def both(row: dict[str, Any], strategy: Any) -> tuple[keras.Model, keras.Model]:
    """The model of a row on one device, not compiled, and on two."""
    return made(row | {"eager": True}), made(row, strategy.scope())


# Rows of which a second `fit` measures, in a step that was compiled without.
MEASURED = ("the whole", "clipping in groups, and averages of Keras", "an embedding")


@pytest.mark.parametrize("name", ROWS)
def test_two_replicas_give_the_numbers_of_one_device(strategy, name):
    row = ROWS[name]
    logs = []
    one, two = both(row, strategy)
    for model in (one, two):
        fit(model, 0, MICRO_BATCHES, row.get("broken"))
    assert int(one.optimizer.iterations) >= 3
    assert farthest(values(two), values(one)) < (2e-3 if name in HALF else LIMIT)
    assert apart(two) == []
    if name not in MEASURED:
        return
    for model in (one, two):
        logger = kgo.GroupLogger(gradient_norm=True, update_ratio=True, clip_share=True)
        logs.append(fit(model, epochs=2, callbacks=[logger]).history)
    assert {"global_gradient_norm", "clip_share", "update_ratio_a"} <= logs[0].keys()
    assert_same_logs(*logs)


def assert_same_logs(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for key, right in one.items():
        np.testing.assert_allclose(two[key], right, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("kind", ["OneDeviceStrategy", "MirroredStrategy"])
def test_a_strategy_of_one_device_gives_the_numbers_without_it(devices, kind):
    import tensorflow as tf

    place = devices[1] if kind == "OneDeviceStrategy" else devices[1:]
    scope = getattr(tf.distribute, kind)(place).scope()
    one, other = made(WHOLE | {"eager": True}), made(WHOLE, scope)
    for model in (one, other):
        fit(model)
    assert farthest(values(other), values(one)) < LIMIT


def test_a_run_saved_on_two_devices_goes_on_there_and_on_one(strategy, tmp_path):
    row = ROWS["loss scale"] | {"eager": True}
    one, two = both(row, strategy)
    for model in (one, two):
        fit(model, 0, 5)
    fit(one, 5)
    for name in ("run.keras", "run.weights.h5"):
        path = save(two, tmp_path / name)
        for eager, scope in ((False, strategy.scope()), (True, contextlib.nullcontext())):
            with scope:
                # Its first step on two devices, which builds the optimizer, is compiled.
                again = load(path, lambda eager=eager: make(row | {"eager": eager}))
            fit(again, 5)
            assert farthest(values(again), values(one)) < LIMIT


def test_callbacks_see_and_do_the_same_on_two_devices(strategy):
    histories = []
    models = both(WHOLE, strategy)
    for model in models:
        callbacks = [
            kgo.UseAveragedWeights(),
            kgo.GroupLogger(drift=True, skipped=True),
            kgo.FlushAccumulation(),
        ]
        history = fit(model, epochs=2, validation_data=data(0, 2), callbacks=callbacks)
        histories.append(history.history)
    one, two = models
    assert int(one.optimizer.iterations) == 10
    assert_same_logs(*histories)
    assert farthest(values(two), values(one)) < LIMIT
    assert apart(two) == []


def test_a_search_for_rates_leaves_the_copies_of_every_device_as_they_were(strategy):
    row = {"model": synchronized, "groups": each(b=sgd(), c=sgd())}
    one, two = both(row, strategy)
    found = []
    for model in (one, two):
        fit(model)
        finder = kgo.LearningRateFinder(1e-3, 1.0, steps=4, groups=["b", None])
        x, y = data()
        before = [[np.array(copy) for copy in copies_of(v)] for v in variables_of(model)]
        found.append(finder.find(model, x, y, batch_size=SIZE, shuffle=False))
        after = [[np.array(copy) for copy in copies_of(v)] for v in variables_of(model)]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(new, old)
    for name, curve in found[0].curves.items():
        assert found[1].curves[name].losses == pytest.approx(curve.losses, rel=1e-4)


def copies_of(variable: Any) -> Any:
    return getattr(variable.value, "values", [variable.value])


def test_averages_anchors_and_a_rebuild_follow_outside_of_the_scope(strategy):
    models = both(WHOLE | {"eager": True}, strategy)
    for model in models:
        fit(model, 0, 5)
        before = values(model)
        with kgo.averaged_weights(model):
            assert farthest(values(model), before) > 1e-3
        assert farthest(values(model), before) == 0
        model.optimizer.capture_anchors()
        model.optimizer.rebuild(model, [kgo.Group("a", "a", anchor="initial"), kgo.Group("c", "c")])
        fit(model, 5)
    one, two = models
    assert farthest(values(two), values(one)) < LIMIT
    assert apart(two) == []


def loop(model: keras.Model, strategy: Any, compiled: bool, watched: bool) -> Any:
    """Returns a training step without `fit`, of the model's variables or of one device's."""
    import tensorflow as tf

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            squares = tf.reduce_mean((model(x) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(squares)
        variables = tape.watched_variables() if watched else model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply(gradients, variables, sample_count=tf.shape(x)[0])

    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    return tf.function(step) if compiled else step


@pytest.mark.parametrize(
    ("compiled", "wrap", "watched"),
    [(True, None, False), (False, scaled, False), (False, None, True), (False, scaled, True)],
)
def test_a_loop_of_ones_own_builds_once_and_weighs_samples_of_all_replicas(
    strategy, compiled, wrap, watched
):
    import tensorflow as tf

    row = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.3, "ema": kgo.EMA(0.5)}
    row = {**row, "groups": WHOLE["groups"][:1], "wrap": wrap}
    models = both(row, strategy)
    for model, owner in zip(models, (tf.distribute.get_strategy(), strategy), strict=True):
        if watched:
            model.optimizer.build(model.trainable_variables)
        step = loop(model, owner, compiled, watched)
        x, y = data(0, 4)
        for start, stop in ((0, 4), (4, 16), (16, 20), (20, 32)):
            parts = [tf.constant(each[start:stop]) for each in (x, y)]
            if owner is strategy:
                parts = [halved(owner, part) for part in parts]
            step(*parts)
    one, two = models
    assert int(one.optimizer.iterations) == 2
    assert farthest(values(two), values(one)) < LIMIT
    assert apart(two) == []


def halved(strategy: Any, tensor: Any) -> Any:
    """One half of a batch for each replica."""
    size = len(tensor) // 2

    def part(context: Any) -> Any:
        place = context.replica_id_in_sync_group
        return tensor[size * place : size * (place + 1)]

    return strategy.experimental_distribute_values_from_function(part)


def per_replica(strategy: Any, *values: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def test_of_gradients_that_are_next_values_the_largest_over_replicas_counts(strategy):
    import tensorflow as tf

    with strategy.scope():
        scale, weight = keras.Variable([1.0, 1.0]), keras.Variable([1.0, 1.0])
        scale.overwrite_with_gradient = True
        optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1.0)
        optimizer.build([scale, weight])
    gradients = per_replica(strategy, tf.constant([3.0, 5.0]), tf.constant([4.0, 2.0]))
    strategy.run(lambda g: optimizer.apply([g, g], [scale, weight]), args=(gradients,))
    for variable, right in ((scale, [4.0, 5.0]), (weight, [-6.0, -6.0])):
        for copy in variable.value.values:
            np.testing.assert_array_equal(copy, right)


def test_tensors_applied_outside_of_a_replica_go_to_every_device(strategy):
    import tensorflow as tf

    one, two = both(WHOLE, strategy)
    gradients = [tf.fill(variable.shape, 0.25) for variable in one.trainable_variables]
    for model in (one, two):
        model.optimizer.build(model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
    one.optimizer.apply(gradients, one.trainable_variables)
    with strategy.scope():
        two.optimizer.apply(gradients, two.trainable_variables)
    assert int(one.optimizer.iterations) == 1
    assert farthest(values(two), values(one)) == 0
    assert apart(two) == []
    gradients[0] = per_replica(strategy, gradients[0], gradients[0])
    with strategy.scope(), pytest.raises(ValueError, match=r"Call it within `strategy.run`"):
        two.optimizer.apply(gradients, two.trainable_variables)


@pytest.mark.parametrize("eager", [True, False])
def test_a_step_that_raises_moves_nothing_on_any_device(strategy, eager):
    row = {"on_nonfinite": "raise", "global_clipnorm": 1.0, "eager": eager}
    model = made(row, strategy.scope())
    fit(model, 0, 1)
    before = values(model)
    with pytest.raises(FloatingPointError, match='first in group "default"'):
        fit(model, 0, 1, 0)
    skipped = [np.asarray(copy) for copy in model.optimizer.skipped_steps.value.values]
    assert skipped == [1, 1]
    model.optimizer.skipped_steps.assign(0)
    assert farthest(values(model), before) == 0
    assert apart(model) == []


def test_a_model_or_optimizer_made_outside_of_the_scope_is_refused(strategy):
    row = {"rule": "adam"}
    outside = kgo.GroupedOptimizer(**row)
    model = made(row, strategy.scope())
    model.compile(outside, loss="mse")
    with pytest.raises(ValueError, match="must be made under the strategy"):
        fit(model)
    alone = made(row)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"must be made under the strategy.*a/kernel"),
    ):
        kgo.GroupedOptimizer(model=alone, **row).build(alone.trainable_variables)


def test_a_build_within_a_replica_says_where_to_build(strategy):
    model = made(WHOLE, strategy.scope())
    with pytest.raises(ValueError, match=r"build\(model.trainable_variables\)` under `strategy"):
        strategy.run(lambda: model.optimizer.build(model.trainable_variables))


def test_a_strategy_without_equal_copies_is_refused_before_a_step(devices):
    import tensorflow as tf

    central = tf.distribute.experimental.CentralStorageStrategy(devices)
    model = made({"rule": "adam"}, central.scope())
    before = model.get_weights()
    with pytest.raises(NotImplementedError, match="CentralStorageStrategy with 2 replicas"):
        fit(model)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_averages_of_batch_statistics_stay_equal_on_two_devices(strategy):
    layers = keras.layers
    with strategy.scope():
        parts = layers.Dense(5, name="a"), layers.BatchNormalization(), layers.Dense(2, name="d")
        model = keras.Sequential([keras.Input((4,)), *parts])
        model.compile(kgo.GroupedOptimizer(model=model, ema=kgo.EMA(0.5)), loss="mse")
    fit(model, epochs=2, callbacks=[kgo.UseAveragedWeights()], validation_data=data(0, 2))
    before = values(model)
    with kgo.averaged_weights(model):
        assert farthest(values(model), before) > 1e-5
        assert apart(model) == []
    assert farthest(values(model), before) == 0
    assert apart(model) == []


def test_what_the_second_replica_alone_sees_is_skipped_though_keras_looks_at_the_first(strategy):
    one, two = both({"wrap": ROWS["loss scale of Keras"]["wrap"]}, strategy)
    for model in (one, two):
        fit(model, 0, MICRO_BATCHES, 2)
    weights = [model.get_weights() for model in (two, one)]
    assert farthest(*weights) < LIMIT
    assert np.asarray(two.optimizer.inner_optimizer.skipped_steps) == 1
    assert apart(two) == []
