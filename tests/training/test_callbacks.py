"""Keras' own callbacks, unchanged, on a grouped optimizer; and `GroupLogger`.

What a group's rate was is read from its weights, never from what is reported.
"""

from __future__ import annotations

import csv
import re
import warnings

import keras
import numpy as np
import pytest
import rate_meter
from rate_meter import RATIO, Rates

import keras_groupopt as kgo

POLICIES = ("float32", "mixed_float16")
SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    keras.config.set_dtype_policy(request.param)
    return request.param


def wrapped(policy: str) -> bool:
    return policy == "mixed_float16"


def check_rates(rates: Rates, expected: list[float]) -> None:
    assert rates.by_group["head"] == expected
    assert rates.by_group["backbone"] == [rate * RATIO for rate in expected]


# Rates that callbacks set -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param(lambda epoch: 2.0**-epoch, [1.0, 0.5, 0.25], id="of the epoch"),
        pytest.param(lambda epoch, rate: rate * 0.5, [0.25, 0.125, 0.0625], id="of the rate"),
    ],
)
def test_learning_rate_scheduler_sets_the_base_and_ratios_hold(policy, schedule, expected):
    model = rate_meter.compiled(learning_rate=0.5)
    rates = Rates()
    history = rate_meter.fit(
        model, 3, callbacks=[keras.callbacks.LearningRateScheduler(schedule), rates]
    )
    check_rates(rates, expected)
    assert history["learning_rate"] == expected


def test_reduce_lr_on_plateau_reduces_the_base_and_ratios_hold(policy):
    model = rate_meter.compiled(learning_rate=0.5)
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=1e6, min_lr=0.125
    )
    rates = Rates()
    history = rate_meter.fit(model, 5, callbacks=[rates, plateau])
    check_rates(rates, [0.5, 0.5, 0.25, 0.125, 0.125])
    assert history["learning_rate"] == [0.5, 0.5, 0.25, 0.125, 0.125]


def test_reduce_lr_on_plateau_beside_a_scheduled_base_is_a_clear_error(policy):
    model = rate_meter.compiled(learning_rate=SCHEDULE([2], [0.5, 0.25]))
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=1e6)
    with pytest.raises(TypeError, match=r"base `learning_rate` is a schedule.*cannot be set"):
        rate_meter.fit(model, 3, callbacks=[plateau])


def test_learning_rate_scheduler_beside_a_scheduled_base_is_a_clear_error(policy):
    model = rate_meter.compiled(learning_rate=SCHEDULE([2], [0.5, 0.25]))
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    with pytest.raises(TypeError, match=r"base `learning_rate` is a schedule.*cannot be set"):
        rate_meter.fit(model, 1, callbacks=[scheduler])


@pytest.mark.parametrize("rate", [1, np.float32(1.0), np.array(1)], ids=repr)
def test_whole_numbers_and_numpy_scalars_are_rates(rate):
    model = rate_meter.compiled(learning_rate=rate)
    rates = Rates()
    rate_meter.fit(model, callbacks=[rates])
    check_rates(rates, [1.0])
    model.optimizer.learning_rate = 2
    rate_meter.fit(model, callbacks=[rates])
    check_rates(rates, [1.0, 2.0])


def test_a_scheduled_rate_is_readable_as_it_is_now(policy):
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)
    model = rate_meter.compiled(learning_rate=schedule)
    rate_meter.fit(model)
    rate = keras.ops.convert_to_numpy(model.optimizer.learning_rate)
    assert float(rate) == pytest.approx(0.5 / 3)


def test_iterations_count_the_steps_in_whole_numbers(policy):
    model = rate_meter.compiled()
    rate_meter.fit(model, 3)
    iterations = model.optimizer.iterations
    assert int(iterations.numpy()) == 3 * rate_meter.BATCHES
    assert keras.backend.is_int_dtype(iterations.dtype)


# Logs ---------------------------------------------------------------------------------------------


def test_group_logger_logs_the_rates_that_moved_the_weights(policy):
    model = rate_meter.compiled(learning_rate=0.5)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == wrapped(policy)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 2.0**-epoch)
    rates = Rates()
    history = rate_meter.fit(model, 3, callbacks=[kgo.GroupLogger(), scheduler, rates])
    assert history["learning_rate"] == [1.0, 0.5, 0.25]
    for group, moved in rates.by_group.items():
        logged = history[f"learning_rate_{group}"]
        assert logged == moved
        assert {type(value) for value in logged} == {float}
    assert not any(name.startswith("drift") for name in history)


def test_group_logger_logs_a_schedule_at_the_end_of_each_epoch():
    model = rate_meter.compiled(learning_rate=SCHEDULE([3], [0.5, 0.25]))
    history = rate_meter.fit(model, 3, callbacks=[kgo.GroupLogger()])
    assert history["learning_rate_head"] == [0.5, 0.25, 0.25]
    assert history["learning_rate_backbone"] == [0.5 * RATIO, 0.25 * RATIO, 0.25 * RATIO]


def test_group_logger_logs_a_ratio_that_changes_while_training():
    model = rate_meter.compiled(learning_rate=0.5)
    change = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: (
            model.optimizer.set_learning_rate_ratio("backbone", 0.5) if epoch == 1 else None
        )
    )
    rates = Rates()
    history = rate_meter.fit(model, 2, callbacks=[kgo.GroupLogger(), change, rates])
    assert rates.by_group["backbone"] == history["learning_rate_backbone"] == [0.125, 0.25]
    assert rates.by_group["head"] == history["learning_rate_head"] == [0.5, 0.5]


def test_group_logger_says_nothing_of_a_frozen_group():
    model = rate_meter.make_model()
    groups = [kgo.Group("backbone", "backbone", frozen=True), kgo.Group("head", "head")]
    model.compile(
        optimizer=kgo.GroupedOptimizer(groups, model=model, learning_rate=0.5),
        loss=rate_meter.mean_output,
    )
    history = rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    assert set(history) == {"loss", "learning_rate", "learning_rate_head"}


def test_group_logger_logs_drift_from_the_anchor_on_request(policy):
    model = rate_meter.make_model(1.0)
    groups = [
        kgo.Group("backbone", "backbone", anchor="initial", weight_decay=2.0**-12),
        kgo.Group("head", "head", weight_decay=2.0**-12),
    ]
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="sgd", learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    start = rate_meter.weights(model)["backbone"]
    history = rate_meter.fit(model, 2, callbacks=[kgo.GroupLogger(drift=True)])
    end = rate_meter.weights(model)["backbone"]
    assert history["drift_backbone"][1] == pytest.approx(np.linalg.norm(end - start), rel=1e-6)
    assert history["drift_backbone"][0] > 0
    assert "drift_head" not in history


def test_log_names_take_any_group_name_and_stay_apart():
    model = rate_meter.make_model()
    groups = [kgo.Group("my part", "backbone"), kgo.Group("my:part", "head")]
    optimizer = kgo.GroupedOptimizer(groups, model=model)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    history = rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    assert set(history) == {
        "loss",
        "learning_rate",
        "learning_rate_my_part",
        "learning_rate_my_part_2",
    }


def test_group_logger_gives_a_plain_optimizer_its_one_rate(policy):
    model = rate_meter.make_model()
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=rate_meter.mean_output)
    history = rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    assert history["learning_rate"] == [0.5]
    assert set(history) == {"loss", "learning_rate"}


@pytest.mark.parametrize(
    ("optimizer", "drift", "message"),
    [
        (lambda: keras.optimizers.SGD(0.5), True, r"`GroupLogger\(drift=True\)` needs a Grouped"),
        pytest.param(
            lambda: keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5))
            ),
            False,
            "one `learning_rate`. Received: MultiOptimizer",
            marks=pytest.mark.needs_keras("3.15", reason="no MultiOptimizer"),
        ),
    ],
    ids=["drift of a plain optimizer", "MultiOptimizer"],
)
def test_group_logger_refuses_optimizers_it_cannot_read(optimizer, drift, message):
    model = rate_meter.make_model()
    model.compile(optimizer=optimizer(), loss=rate_meter.mean_output)
    with pytest.raises(TypeError, match=message):
        rate_meter.fit(model, callbacks=[kgo.GroupLogger(drift=drift)])


def test_csv_logger_writes_the_rates_of_groups(policy, tmp_path):
    model = rate_meter.compiled(learning_rate=0.5)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 2.0**-epoch)
    path = tmp_path / "log.csv"
    rate_meter.fit(
        model,
        2,
        callbacks=[kgo.GroupLogger(), scheduler, keras.callbacks.CSVLogger(str(path))],
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["learning_rate"]) for row in rows] == [1.0, 0.5]
    assert [float(row["learning_rate_head"]) for row in rows] == [1.0, 0.5]
    assert [float(row["learning_rate_backbone"]) for row in rows] == [RATIO, 0.5 * RATIO]


@pytest.mark.backends("tensorflow", reason="the callback writes with TensorFlow")
def test_tensorboard_shows_the_rates_of_groups_over_epochs(policy, tmp_path):
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    model = rate_meter.compiled(learning_rate=0.5)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 2.0**-epoch)
    board = keras.callbacks.TensorBoard(str(tmp_path))
    rates = Rates()
    rate_meter.fit(model, 2, callbacks=[kgo.GroupLogger(), scheduler, rates, board])
    check_rates(rates, [1.0, 0.5])
    events = event_accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    expected = {"learning_rate": [1.0, 0.5], "learning_rate_backbone": [RATIO, RATIO / 2]}
    for name, values in expected.items():
        logged = events.Tensors(f"epoch_{name}")
        assert [float(tensor_util.make_ndarray(event.tensor_proto)) for event in logged] == values
        assert [event.step for event in logged] == [0, 1]


# Checks before training ---------------------------------------------------------------------------


def test_group_logger_gives_an_optimizer_without_a_model_the_real_names():
    model = rate_meter.compiled(named_model=False)
    rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    model.get_layer("head").trainable = False
    with pytest.raises(ValueError, match=r"Received: changed head/kernel\."):
        rate_meter.fit(model, callbacks=[kgo.GroupLogger()])


@pytest.mark.parametrize("logger_at_first", [True, False])
def test_trainable_changed_after_a_fit_must_be_compiled(policy, logger_at_first):
    model = rate_meter.compiled()
    callbacks = [kgo.GroupLogger()]
    rate_meter.fit(model, callbacks=callbacks if logger_at_first else [])
    model.get_layer("backbone").trainable = False
    with pytest.raises(
        ValueError, match=r"(?s)changed backbone/dense/kernel\. Call `model\.compile\(optimizer="
    ):
        rate_meter.fit(model, callbacks=callbacks)
    frozen = rate_meter.weights(model)["backbone"]
    model.compile(optimizer=model.optimizer, loss=rate_meter.mean_output)
    rates = Rates()
    rate_meter.fit(model, callbacks=[*callbacks, rates])
    np.testing.assert_array_equal(rate_meter.weights(model)["backbone"], frozen)
    assert rates.by_group == {"head": [0.5], "backbone": [0.0]}
    # And back again: the state is still there.
    model.get_layer("backbone").trainable = True
    model.compile(optimizer=model.optimizer, loss=rate_meter.mean_output)
    rate_meter.fit(model, callbacks=[*callbacks, rates])
    assert rates.by_group == {"head": [0.5, 0.5], "backbone": [0.0, 0.5 * RATIO]}


def test_trainable_changed_before_the_first_fit_is_fine():
    model = rate_meter.make_model()
    optimizer = kgo.GroupedOptimizer(model=model, rule="sgd", learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    model.get_layer("backbone").trainable = False
    rates = Rates()
    rate_meter.fit(model, callbacks=[kgo.GroupLogger(), rates])
    assert rates.by_group == {"head": [0.5], "backbone": [0.0]}


def test_a_variable_unknown_to_the_optimizer_is_refused_before_any_step(policy):
    model = rate_meter.make_model()
    model.get_layer("backbone").trainable = False
    optimizer = kgo.GroupedOptimizer(model=model, rule="sgd", learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    before = rate_meter.weights(model)
    model.get_layer("backbone").trainable = True
    with pytest.raises(ValueError, match="unknown backbone/dense/kernel"):
        rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    after = rate_meter.weights(model)
    np.testing.assert_array_equal(after["backbone"], before["backbone"])
    np.testing.assert_array_equal(after["head"], before["head"])


def test_a_loaded_model_is_attached_and_its_unknown_variables_are_named(policy, tmp_path):
    model = rate_meter.make_model()
    model.get_layer("backbone").trainable = False
    optimizer = kgo.GroupedOptimizer(model=model, rule="sgd", learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    rate_meter.fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    before = rate_meter.weights(loaded)
    # On the layer itself: the flag of the model around it is not saved, and so is True already.
    loaded.get_layer("backbone").get_layer("dense").trainable = True
    with pytest.raises(ValueError, match="unknown backbone/dense/kernel"):
        rate_meter.fit(loaded, callbacks=[kgo.GroupLogger()])
    for name, weight in rate_meter.weights(loaded).items():
        np.testing.assert_array_equal(weight, before[name])


def test_a_model_without_input_shape_is_logged_from_its_first_epoch():
    model = keras.Sequential([keras.layers.Dense(1, name="head")])
    optimizer = kgo.GroupedOptimizer({"head": kgo.Group("head", "**/head")}, learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    for _ in range(2):
        history = rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
        assert history["learning_rate_head"] == [0.5]


def model_with_weights_set_after_build() -> keras.Model:
    model = rate_meter.make_model()
    groups = [
        kgo.Group("backbone", "backbone", anchor="initial", weight_decay=2.0**-12),
        kgo.Group("head", "head"),
    ]
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="sgd", learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    optimizer.build(model.trainable_variables)
    model.get_layer("backbone").set_weights([np.full((2, 1), 3.0)])
    return model


def test_weights_loaded_after_build_are_told_from_their_anchors():
    model = model_with_weights_set_after_build()
    logger = kgo.GroupLogger()
    logger.set_model(model)

    def begin() -> None:
        with warnings.catch_warnings():  # Keras makes NumPy 2 warn
            warnings.simplefilter("ignore", DeprecationWarning)
            logger.on_train_begin()

    with pytest.warns(UserWarning, match=r'"backbone".*`optimizer\.capture_anchors\(\)`'):
        begin()


def test_captured_anchors_and_later_fits_raise_no_such_warning():
    model = model_with_weights_set_after_build()
    model.optimizer.capture_anchors()
    rate_meter.fit(model, callbacks=[kgo.GroupLogger(drift=True)])
    history = rate_meter.fit(model, callbacks=[kgo.GroupLogger(drift=True)])
    moved = np.linalg.norm(rate_meter.weights(model)["backbone"] - 3.0)
    assert history["drift_backbone"] == [pytest.approx(moved, rel=1e-6)]


# Checkpoints --------------------------------------------------------------------------------------


def stateful(model: keras.Model) -> kgo.GroupedOptimizer:
    """Anchors, moments, a counter: everything whose loss would show in the next step."""
    groups = [
        kgo.Group("backbone", "backbone", learning_rate_ratio=RATIO, anchor="initial"),
        kgo.Group("head", "head", rule=kgo.rule("sgd", momentum=0.5), weight_decay=0.0),
    ]
    return kgo.GroupedOptimizer(
        groups, model=model, rule="adam", learning_rate=0.125, weight_decay=0.5
    )


def stateful_model() -> keras.Model:
    model = rate_meter.make_model(1.0)
    model.compile(optimizer=stateful(model), loss=rate_meter.mean_output)
    return model


def halve(epoch: int, rate: float) -> float:
    return rate * 0.5


def assert_same_state(actual: keras.Model, expected: keras.Model) -> None:
    for name, weight in rate_meter.weights(expected).items():
        np.testing.assert_array_equal(rate_meter.weights(actual)[name], weight)
    pairs = zip(actual.optimizer.variables, expected.optimizer.variables, strict=True)
    for variable, other in pairs:
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), err_msg=other.path)


@pytest.mark.parametrize("name", ["{epoch}.keras", "{epoch}.weights.h5"])
def test_a_model_checkpoint_goes_on_as_the_straight_run(policy, tmp_path, name):
    straight = stateful_model()
    path = str(tmp_path / name)
    callbacks = [
        keras.callbacks.LearningRateScheduler(halve),
        keras.callbacks.ModelCheckpoint(path, save_weights_only=name.endswith("h5")),
    ]
    rate_meter.fit(straight, 3, callbacks=callbacks)
    if name.endswith(".keras"):
        resumed = keras.saving.load_model(path.format(epoch=2))
    else:
        resumed = stateful_model()
        if wrapped(policy):
            # Keras' wrapper does not keep its own two values for later, as our optimizer does.
            resumed.optimizer.build(resumed.trainable_variables)
        resumed.load_weights(path.format(epoch=2))
    scheduler = keras.callbacks.LearningRateScheduler(halve)
    rate_meter.fit(resumed, 3, initial_epoch=2, callbacks=[scheduler])
    assert_same_state(resumed, straight)


class Interruption(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == 3 or self.seen == 3:
            raise KeyboardInterrupt
        self.seen += 1

    def on_train_begin(self, logs=None):
        self.seen = 0


def test_an_interrupted_fit_restored_from_backup_equals_the_straight_run(policy, tmp_path):
    straight = stateful_model()
    rate_meter.fit(straight, 3, callbacks=[keras.callbacks.LearningRateScheduler(halve)])

    def callbacks() -> list[keras.callbacks.Callback]:
        return [
            kgo.GroupLogger(),
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
            keras.callbacks.LearningRateScheduler(halve),
        ]

    interrupted = stateful_model()
    with pytest.raises(KeyboardInterrupt):
        rate_meter.fit(interrupted, 3, callbacks=[*callbacks(), Interruption()])
    resumed = stateful_model()
    history = rate_meter.fit(resumed, 3, callbacks=callbacks())
    assert len(history["loss"]) == 2
    assert_same_state(resumed, straight)


def test_early_stopping_restores_the_best_weights(policy):
    model = rate_meter.compiled(learning_rate=0.5)
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(rate_meter.weights(model))
    )
    # The loss goes down with every step, so the first epoch is the "best" one.
    stopping = keras.callbacks.EarlyStopping(
        monitor="loss", mode="max", patience=2, restore_best_weights=True
    )
    rate_meter.fit(model, 9, callbacks=[record, stopping])
    assert len(seen) == 3
    for name, best in seen[0].items():
        np.testing.assert_array_equal(rate_meter.weights(model)[name], best)
    rates = Rates()
    rate_meter.fit(model, callbacks=[rates])
    check_rates(rates, [0.5])


@pytest.mark.parametrize(
    "options", [{}, {"use_ema": True}, {"ema": kgo.EMA(0.5)}], ids=["none", "use_ema", "ema"]
)
def test_swap_ema_weights_is_refused_with_the_better_way(options):
    model = rate_meter.compiled(**options)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.raises(ValueError, match=re.escape("Use `kgo.UseAveragedWeights()`")):
        rate_meter.fit(model, callbacks=[swap])
