"""Dynamic loss scaling: what is skipped, counted, saved, and seen through it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import rate_meter
import saving_models
from chosen_gradients import fit_rows, mean_output, towers, weights
from comparing import compiled_step
from models import arrays, assert_equal, number, sgd
from rate_meter import RATIO, Rates
from saving_models import either_way, load, save

import keras_groupopt as kgo

INF = float("inf")
NAN = float("nan")
WAYS = {"compiled": {}, "eager": {"run_eagerly": True}}


@pytest.fixture
def mixed() -> None:
    keras.config.set_dtype_policy("mixed_float16")


def own(optimizer: Any) -> tuple[float, ...]:
    """Scale, counter, skipped steps and the index of the group at fault."""
    names = ("dynamic_scale", "step_counter", "skipped_steps", "nonfinite_group_index")
    return tuple(number(getattr(optimizer, name)) for name in names)


# Single steps -------------------------------------------------------------------------------------


def scalars(*names: str) -> list[keras.Variable]:
    return [keras.Variable(0.0, dtype="float32", name=name) for name in names]


def around(variables: Sequence[Any], scale: float = 1.0, **options: Any) -> kgo.LossScaleOptimizer:
    """One group per variable, of SGD at rate 1."""
    inner = sgd(groups={variable.name: variable.name for variable in variables})
    return kgo.LossScaleOptimizer(inner, initial_scale=scale, **options)


def stepper(way: str, optimizer: Any, variables: Sequence[Any]) -> Callable[[Any], Any]:
    """A step on gradients, eager or as the backend's training loop compiles it."""
    optimizer.build(variables)
    if way == "compiled":
        return compiled_step(optimizer, list(variables))[0]
    return lambda gradients: optimizer.apply(gradients, variables)


each_way = pytest.mark.parametrize("way", WAYS)


def scaled(optimizer: Any, gradients: Sequence[float]) -> list[Any]:
    """The gradients of the scaled loss."""
    scale = number(optimizer.dynamic_scale)
    return [keras.ops.convert_to_tensor(g * scale, "float32") for g in gradients]


@pytest.mark.parametrize(
    ("why", "scale", "growth", "finite", "expected"),
    [
        ("doubles after each", 8.0, 1, [1, 1, 1], [16.0, 32.0, 64.0]),
        ("doubles after three", 8.0, 3, [1, 1, 1, 1, 1, 1], [8, 8, 16, 16, 16, 32]),
        ("a bad step starts again", 8.0, 2, [1, 0, 1, 1], [8.0, 4.0, 4.0, 8.0]),
        ("falls below one", 1.0, 9, [0, 0, 0, 1], [0.5, 0.25, 0.125, 0.125]),
        ("never becomes zero", 2.0**-126, 1, [0, 1], [2.0**-126, 2.0**-125]),
        ("never becomes infinite", 2.0**126, 1, [1, 0], [2.0**126, 2.0**125]),
        ("is no power of two", 3.0, 1, [1, 0, 0], [6.0, 3.0, 1.5]),
    ],
)
def test_the_scale_follows_its_rule(why, scale, growth, finite, expected):
    variables = scalars("weight")
    optimizer = around(variables, scale, dynamic_growth_steps=growth)
    seen = []
    for good in finite:
        optimizer.apply(scaled(optimizer, [2.0 if good else NAN]), variables)
        seen.append(number(optimizer.dynamic_scale))
    assert seen == expected
    assert number(optimizer.skipped_steps) == finite.count(0)
    assert number(variables[0]) == -2.0 * finite.count(1)


@each_way
@pytest.mark.parametrize(
    ("gradients", "index", "name"),
    [
        ([1.0, 1.0, 1.0], -1, None),
        ([NAN, 1.0, 1.0], 0, "a"),
        ([1.0, 1.0, -INF], 2, "c"),
        ([1.0, INF, NAN], 1, "b"),
    ],
)
def test_a_bad_step_moves_nothing_and_the_first_group_at_fault_is_kept(way, gradients, index, name):
    variables, skipped = scalars("a", "b", "c"), name is not None
    optimizer = around(variables)
    step = stepper(way, optimizer, variables)
    for given in ([1.0] * 3, gradients, [3.0] * 3):
        step(scaled(optimizer, given))
    # A bad step halves the scale, and the next one counts from 1.
    assert own(optimizer) == ((0.5, 1.0, 1.0, index) if skipped else (1.0, 3.0, 0.0, -1.0))
    assert [number(variable) for variable in variables] == [-4.0 if skipped else -5.0] * 3
    assert number(optimizer.iterations) == 3 - skipped
    assert optimizer.first_nonfinite_group == name


def test_a_missing_gradient_is_finite_and_missing_variables_may_be_left_out():
    variables = scalars("a", "b", "c")
    optimizer = around(variables)
    with pytest.warns(UserWarning, match="No gradient for b"):
        optimizer.apply([keras.ops.ones(()), None, keras.ops.ones(())], variables)
    optimizer.apply([keras.ops.full((), INF)], variables[1:2])
    optimizer.apply([keras.ops.ones(())], variables[2:])
    assert [number(variable) for variable in variables] == [-1.0, 0.0, -3.0]
    assert own(optimizer) == (0.5, 1.0, 1.0, 1.0)


@pytest.mark.backends("tensorflow", reason="no other backend has sparse gradients")
def test_a_sparse_gradient_is_looked_at_row_by_row():
    import tensorflow as tf

    table = keras.Variable(np.zeros((4, 2), "float32"), name="table")
    optimizer = around([table])
    for value in (2.0, INF):
        rows = tf.IndexedSlices(tf.fill((2, 2), value), tf.constant([1, 1]), tf.constant([4, 2]))
        optimizer.apply([rows], [table])
    np.testing.assert_array_equal(table.numpy()[:, 0], [0.0, -4.0, 0.0, 0.0])
    assert own(optimizer) == (0.5, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("count", [1, 3])
def test_counts_that_differ_are_refused_as_by_the_inner_optimizer(count):
    variables = scalars("a", "b")
    optimizer = around(variables)
    gradients = [keras.ops.ones(())] * count
    with pytest.raises(ValueError, match=f"{count} gradients for 2 variables"):
        optimizer.apply(gradients, variables)
    with pytest.raises(ValueError, match=f"{count} gradients for 2 variables"):
        optimizer.apply(gradients)
    assert own(optimizer) == (1.0, 0.0, 0.0, -1.0)


# Training -----------------------------------------------------------------------------------------


@each_way
def test_fit_skips_what_overflows_and_counts_it(mixed, way):
    model = rate_meter.make_model()
    # The scaled gradients are the scale itself, and float16 ends below 2¹⁶.
    optimizer = kgo.LossScaleOptimizer(
        rate_meter.make_optimizer(model), initial_scale=2.0**17, dynamic_growth_steps=2
    )
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output, **WAYS[way])
    assert model.optimizer is optimizer
    seen = []
    see = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(own(model.optimizer))
    )
    callbacks = [see, kgo.GroupLogger(skipped=True)]
    history = rate_meter.fit(model, 8, batch_size=8, callbacks=callbacks)
    assert history["skipped_steps"] == [1, 2, 2, 2, 3, 3, 3, 4]
    assert seen == [
        (2.0**16, 0.0, 1.0, 0.0),
        (2.0**15, 0.0, 2.0, 0.0),
        (2.0**15, 1.0, 2.0, 0.0),
        (2.0**16, 0.0, 2.0, 0.0),
        (2.0**15, 0.0, 3.0, 0.0),
        (2.0**15, 1.0, 3.0, 0.0),
        (2.0**16, 0.0, 3.0, 0.0),
        (2.0**15, 0.0, 4.0, 0.0),
    ]
    assert number(optimizer.iterations) == 4
    for name, rate in (("head", 0.5), ("backbone", 0.5 * RATIO)):
        np.testing.assert_array_equal(rate_meter.weights(model)[name], -4 * rate)
        assert history[f"learning_rate_{name}"] == [rate] * 8


def two_towers(**head: Any) -> keras.Model:
    """Two layers, each with an input of its own, which is its gradient."""
    model = towers("left", "right")
    groups = [kgo.Group("left", "left"), kgo.Group("right", "right", **head)]
    inner = sgd(model, groups, learning_rate=0.5)
    model.compile(kgo.LossScaleOptimizer(inner, initial_scale=1024), loss=mean_output)
    return model


def test_inputs_that_overflow_name_the_group_they_belong_to(mixed):
    model = two_towers()
    # The second right gradient is 1024 · 1e4, the third again at half the scale, as float16.
    fit_rows(model, [1, 1], [1, 1e4], [1, 1e4], [2, 1])
    assert weights(model) == {"left/kernel": -1.5, "right/kernel": -1.0}
    assert own(model.optimizer) == (256.0, 1.0, 2.0, 1.0)
    assert model.optimizer.first_nonfinite_group == "right"
    fit_rows(model, [np.nan, 1], [1, 1])
    assert weights(model) == {"left/kernel": -2.0, "right/kernel": -1.5}
    assert model.optimizer.first_nonfinite_group == "left"


def test_a_frozen_group_may_overflow(mixed):
    model = two_towers(frozen=True)
    fit_rows(model, [1, 1e4], [1, np.nan])
    assert weights(model) == {"left/kernel": -1.0, "right/kernel": 0.0}
    assert own(model.optimizer) == (1024.0, 2.0, 0.0, -1.0)


def test_callbacks_and_users_reach_the_inner_optimizer(mixed):
    model = rate_meter.make_model()
    inner = rate_meter.make_optimizer(None, learning_rate=0.5)
    optimizer = kgo.LossScaleOptimizer(inner, initial_scale=1.0)
    optimizer.bind(model)
    assert [group.name for group in optimizer.plan.groups] == ["backbone", "head"]
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    rates = Rates()
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 2.0**-epoch)
    history = rate_meter.fit(model, 3, callbacks=[kgo.GroupLogger(), scheduler, rates])
    assert rates.by_group["head"] == [1.0, 0.5, 0.25]
    assert rates.by_group["backbone"] == [RATIO, RATIO * 0.5, RATIO * 0.25]
    assert history["learning_rate_backbone"] == rates.by_group["backbone"]
    optimizer.learning_rate = 0.5
    optimizer.set_learning_rate_ratio("backbone", 0.5)
    assert {name: number(rate) for name, rate in optimizer.learning_rates.items()} == {
        "backbone": 0.25,
        "head": 0.5,
    }
    assert number(inner.learning_rate) == 0.5
    assert optimizer.iterations is inner.iterations


def test_what_the_inner_optimizer_refuses_is_refused_through_it():
    optimizer = kgo.LossScaleOptimizer(kgo.GroupedOptimizer(weight_decay=0.25))
    assert optimizer.weight_decay == 0.25
    with pytest.raises(AttributeError, match="`weight_decay` is fixed at construction"):
        optimizer.weight_decay = 0.5
    with pytest.raises(ValueError, match="`exclude_from_weight_decay` is not used"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(AttributeError, match="learning_ratio"):
        _ = optimizer.learning_ratio
    assert not hasattr(optimizer, "_declared")


# Saving -------------------------------------------------------------------------------------------


def wrapped(model: keras.Model | None, cls: Any = kgo.LossScaleOptimizer, **options: Any) -> Any:
    # The first gradients overflow, so that there is something to count.
    settings = {"initial_scale": 2.0**20, "dynamic_growth_steps": 3, **options}
    return cls(saving_models.optimizer(model), **settings)


def compiled(cls: Any = kgo.LossScaleOptimizer, seed: int = 1, **options: Any) -> keras.Model:
    model = saving_models.fill(saving_models.MODELS["nested"](), seed)
    model.compile(optimizer=wrapped(model, cls, **options), loss="mse")
    return model


@pytest.fixture
def trained(mixed) -> keras.Model:
    model = saving_models.fit(compiled(), 8)
    scale, _, skipped, group = own(model.optimizer)
    assert scale < 2.0**20
    assert 0 < skipped < 8
    assert group >= 0
    return model


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("model.keras", True),
        ("model.weights.h5", True),
        ("model.weights.h5", False),
        ("set_weights", True),
    ],
)
def test_a_run_comes_back_and_goes_on_bit_for_bit(trained, tmp_path, name, built):
    def new() -> keras.Model:
        model = compiled(seed=2)
        if built:
            model.optimizer.build(model.trainable_variables)
        return model

    if name == "set_weights":
        loaded = new()
        loaded.set_weights(trained.get_weights())
        loaded.optimizer.set_weights(arrays(trained.optimizer.variables))
    else:
        loaded = load(save(trained, tmp_path / name), new)
    assert type(loaded.optimizer) is kgo.LossScaleOptimizer
    if name == "model.keras":
        assert loaded.optimizer.get_config() == trained.optimizer.get_config()
    assert own(loaded.optimizer) == own(trained.optimizer)
    # State that waits for the build is saved again as it was loaded.
    again = load(save(loaded, tmp_path / "again.weights.h5"), lambda: compiled(seed=3))
    saving_models.fit(trained, 3)
    for model in (loaded, again):
        saving_models.assert_equal(saving_models.fit(model, 3), trained)


def datasets(path: Any) -> list[str]:
    found: list[str] = []
    with h5py.File(path) as file:
        file.visit(found.append)
        return [name for name in found if isinstance(file[name], h5py.Dataset)]


def test_state_is_written_once_where_a_grouped_optimizer_writes_it(trained, tmp_path):
    trained.save_weights(tmp_path / "model.weights.h5")
    names = {n for n in datasets(tmp_path / "model.weights.h5") if n.startswith("optimizer/")}
    outer = {name for name in names if name.startswith("optimizer/vars/")}
    assert outer == {
        f"optimizer/vars/{name}"
        for name in ("dynamic_scale", "step_counter", "skipped_steps", "nonfinite_group_index")
    }
    manifest = kgo.read_manifest(tmp_path / "model.weights.h5")
    assert manifest["iterations"] == number(trained.optimizer.iterations)
    assert names - outer == {
        f"optimizer/inner_optimizer/vars/{key.replace('/', '|')}"
        for key in (*manifest["state"], "@manifest")
    }


@either_way
def test_a_file_of_keras_own_class_is_read(mixed, tmp_path, build):
    theirs = saving_models.fit(compiled(keras.optimizers.LossScaleOptimizer), 8)
    theirs.save_weights(tmp_path / "model.weights.h5")
    ours = compiled(seed=2)
    if build:
        ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "model.weights.h5")
    scale, counter = number(theirs.optimizer.dynamic_scale), number(theirs.optimizer.step_counter)
    assert own(ours.optimizer) == (scale, counter, 0.0, -1.0)
    for model in (ours, theirs):
        saving_models.fit(model, 3)
    assert_equal(ours, theirs)


def test_keras_own_class_reads_the_inner_state_of_a_file_of_ours(trained, tmp_path):
    trained.save_weights(tmp_path / "model.weights.h5")
    theirs = compiled(keras.optimizers.LossScaleOptimizer, seed=2)
    theirs.optimizer.build(theirs.trainable_variables)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        theirs.load_weights(tmp_path / "model.weights.h5")
    inner = theirs.optimizer.inner_optimizer
    assert_equal(arrays(trained.optimizer.inner_optimizer.variables), arrays(inner.variables))


def test_a_run_in_float32_goes_on_in_mixed_float16_as_the_error_says(tmp_path):
    plain = saving_models.fit(saving_models.compiled(), 3)
    plain.save_weights(tmp_path / "model.weights.h5")
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(seed=2)
    with pytest.raises(ValueError, match="Compile with the GroupedOptimizer"):
        model.load_weights(tmp_path / "model.weights.h5")
    assert own(model.optimizer) == (2.0**20, 0.0, 0.0, -1.0)
    inner = saving_models.optimizer(model)
    model.compile(optimizer=inner, loss="mse", auto_scale_loss=False)
    model.load_weights(tmp_path / "model.weights.h5")
    model.compile(optimizer=kgo.LossScaleOptimizer(model.optimizer), loss="mse")
    saving_models.fit(model, 1)
    assert number(model.optimizer.iterations) == 4


POSITIVE, COUNT = "must be a positive finite number", "must be an integer >="


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dynamic_scale", np.float32(0), f"`dynamic_scale` {POSITIVE}"),
        ("dynamic_scale", np.float32(np.nan), f"`dynamic_scale` {POSITIVE}"),
        ("dynamic_scale", np.ones(2, "float32"), f"`dynamic_scale` {POSITIVE}"),
        ("step_counter", np.float32(1), f"`step_counter` {COUNT} 0"),
        ("skipped_steps", np.int32(-1), f"`skipped_steps` {COUNT} 0"),
        ("nonfinite_group_index", np.int32(-2), f"`nonfinite_group_index` {COUNT} -1"),
        ("skipped_steps", None, "without `skipped_steps`"),
    ],
)
def test_damaged_values_are_refused_and_nothing_is_assigned(name, value, message):
    variables = scalars("weight")
    optimizer = around(variables, 8.0)
    optimizer.apply([keras.ops.ones(())], variables)
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    del store[name]
    store |= {} if value is None else {name: value}
    other = around(variables, 2.0)
    with pytest.raises(ValueError, match=re.escape(message)):
        other.load_own_variables(store)
    assert own(other) == (2.0, 0.0, 0.0, -1.0)


def test_a_file_with_a_damaged_scale_leaves_model_and_optimizer_as_they_were(trained, tmp_path):
    path = tmp_path / "model.weights.h5"
    trained.save_weights(path)
    with h5py.File(path, "a") as file:
        file["optimizer/vars/dynamic_scale"][...] = -1.0
    model = saving_models.fit(compiled(seed=2), 1)
    with saving_models.refused(model, ValueError, f"`dynamic_scale` {POSITIVE}"):
        kgo.load_weights(model, path)


def test_a_model_that_was_never_trained_saves_no_state(mixed, tmp_path):
    model = compiled()
    model.save_weights(tmp_path / "model.weights.h5")
    assert not any("optimizer" in name for name in datasets(tmp_path / "model.weights.h5"))
    model.load_weights(tmp_path / "model.weights.h5")
    saving_models.fit(model, 8)
    with pytest.warns(UserWarning, match="weights but no optimizer state"):
        model.load_weights(tmp_path / "model.weights.h5")
