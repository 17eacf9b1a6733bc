"""Keras' own callbacks, unchanged, on a grouped optimizer; `GroupLogger` and `PlateauRatio`.

What a group's rate was is read from its weights, never from what is reported.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import models
import numpy as np
import pytest
import rate_meter
from models import assert_equal, number, state
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


ANCHORED = [
    kgo.Group("backbone", "backbone", anchor="initial", weight_decay=2.0**-12),
    kgo.Group("head", "head", weight_decay=2.0**-12),
]


def grouped(model: keras.Model, groups: Sequence[kgo.Group] = ()) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(groups, model=model, rule="sgd", learning_rate=0.5)


def compiled(
    groups: Sequence[kgo.Group] = (), start: float = 0.0, trainable: bool = True
) -> keras.Model:
    model = rate_meter.make_model(start)
    model.get_layer("backbone").trainable = trainable
    model.compile(optimizer=grouped(model, groups), loss=rate_meter.mean_output)
    return model


# Rates that callbacks set -------------------------------------------------------------------------


Scheduler, Plateau = keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau
# No loss is better by so much: every epoch but the first is one without an improvement.
NEVER = {"monitor": "loss", "factor": 0.5, "patience": 1, "min_delta": 1e6}


def by_epoch() -> Any:
    return Scheduler(lambda epoch: 2.0**-epoch)


class ChangeRatio(keras.callbacks.Callback):
    """Sets the ratio of the backbone in the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.optimizer.set_learning_rate_ratio("backbone", 0.5)


# What acts while training, and the rates in each epoch.
SET: dict[str, tuple[Callable[[], Any], list[float], list[float]]] = {
    "by epoch": (by_epoch, [1.0, 0.5, 0.25], [0.25, 0.125, 0.0625]),
    "by rate": (lambda: Scheduler(lambda epoch, rate: rate * 0.5), [0.25, 0.125], [2**-4, 2**-5]),
    "plateau": (
        lambda: Plateau(min_lr=0.125, **NEVER),
        [0.5, 0.5, 0.25, 0.125, 0.125],
        [0.125, 0.125, 2**-4, 2**-5, 2**-5],
    ),
    "ratio": (ChangeRatio, [0.5, 0.5], [0.125, 0.25]),
}


@pytest.mark.parametrize(
    ("policy", "callback"),
    [
        ("float32", "by epoch"),
        ("mixed_float16", "by epoch"),
        ("mixed_float16", "by rate"),
        ("mixed_float16", "plateau"),
        ("float32", "ratio"),
    ],
    indirect=["policy"],
)
def test_the_rates_that_a_callback_sets_move_the_weights_and_are_logged_and_written(
    policy, callback, tmp_path
):
    make, head, backbone = SET[callback]
    model = rate_meter.compiled(learning_rate=0.5)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == wrapped(policy)
    rates, path = Rates(), tmp_path / "log.csv"
    # Keras' scheduler acts when an epoch begins, the other when it ends.
    callbacks = [rates, make()] if callback == "plateau" else [make(), rates]
    callbacks = [kgo.GroupLogger(), *callbacks, keras.callbacks.CSVLogger(str(path))]
    history = rate_meter.fit(model, len(head), callbacks=callbacks)
    assert rates.by_group == {"head": head, "backbone": backbone}
    assert history["learning_rate"] == head
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for group, moved in rates.by_group.items():
        logged = history[f"learning_rate_{group}"]
        assert logged == moved == [float(row[f"learning_rate_{group}"]) for row in rows]
        assert {type(value) for value in logged} == {float}
    assert not any(name.startswith("drift") for name in history)


@pytest.mark.parametrize(
    "callback", [lambda: Plateau(**NEVER), by_epoch], ids=["on a plateau", "by epoch"]
)
def test_a_callback_that_sets_the_rate_beside_a_scheduled_base_is_a_clear_error(callback):
    model = rate_meter.compiled(learning_rate=SCHEDULE([2], [0.5, 0.25]))
    with pytest.raises(TypeError, match=r"base `learning_rate` is a schedule.*cannot be set"):
        rate_meter.fit(model, 3, callbacks=[callback()])


def test_a_scheduled_rate_is_readable_and_iterations_count_in_whole_numbers(policy):
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)
    model = rate_meter.compiled(learning_rate=schedule)
    rate_meter.fit(model)
    assert number(model.optimizer.learning_rate) == pytest.approx(0.5 / 3)
    iterations = model.optimizer.iterations
    assert int(iterations.numpy()) == rate_meter.BATCHES
    assert keras.backend.is_int_dtype(iterations.dtype)


# Logs ---------------------------------------------------------------------------------------------


def test_group_logger_logs_schedules_and_lowered_ratios_at_the_end_of_each_epoch():
    model = rate_meter.compiled(learning_rate=SCHEDULE([3], [0.5, 0.25]))
    callbacks = [kgo.PlateauRatio(**NEVER), kgo.GroupLogger()]
    history = rate_meter.fit(model, 3, callbacks=callbacks)
    assert history["learning_rate"] == [0.5, 0.25, 0.25]
    assert history["learning_rate_head"] == [0.5, 0.125, 0.0625]
    assert history["learning_rate_backbone"] == [0.5 * RATIO, 0.125 * RATIO, 0.0625 * RATIO]


@pytest.mark.parametrize(
    ("groups", "logged"),
    [
        (
            [kgo.Group("backbone", "backbone", frozen=True), kgo.Group("head", "head")],
            {"learning_rate_head"},
        ),
        (
            [kgo.Group("my part", "backbone"), kgo.Group("my:part", "head")],
            {"learning_rate_my_part", "learning_rate_my_part_2"},
        ),
        (None, set()),
    ],
    ids=["a frozen group", "names that look alike", "a plain optimizer"],
)
def test_group_logger_logs_a_rate_for_each_group_that_moves(groups, logged):
    model = rate_meter.make_model()
    plain = keras.optimizers.SGD(0.5)
    optimizer = plain if groups is None else grouped(model, groups)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    history = rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    assert set(history) == {"loss", "learning_rate", *logged}
    assert history["learning_rate"] == [0.5]


@pytest.mark.backends("tensorflow", reason="the callback writes with TensorFlow")
def test_tensorboard_shows_the_rates_of_groups_over_epochs(policy, tmp_path):
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    model = rate_meter.compiled(learning_rate=0.5)
    board = keras.callbacks.TensorBoard(str(tmp_path))
    rates = Rates()
    rate_meter.fit(model, 2, callbacks=[kgo.GroupLogger(), by_epoch(), rates, board])
    assert rates.by_group == {"head": [1.0, 0.5], "backbone": [RATIO, RATIO / 2]}
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


@pytest.mark.parametrize(
    ("policy", "logger_at_first"),
    [("float32", True), ("mixed_float16", False)],
    indirect=["policy"],
)
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
    model = compiled()
    model.get_layer("backbone").trainable = False
    rates = Rates()
    rate_meter.fit(model, callbacks=[kgo.GroupLogger(), rates])
    assert rates.by_group == {"head": [0.5], "backbone": [0.0]}


@pytest.mark.parametrize(
    ("policy", "from_file"), [("float32", True), ("mixed_float16", False)], indirect=["policy"]
)
def test_a_variable_unknown_to_the_optimizer_is_refused_before_any_step(
    policy, from_file, tmp_path
):
    model = compiled(trainable=False)
    rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    if from_file:
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
    before = rate_meter.weights(model)
    model.get_layer("backbone").trainable = True
    # A file holds the flag of the layer itself, not of the model around it.
    model.get_layer("backbone").get_layer("dense").trainable = True
    with pytest.raises(ValueError, match="unknown backbone/dense/kernel"):
        rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
    np.testing.assert_equal(rate_meter.weights(model), before)


def test_a_model_without_input_shape_is_logged_from_its_first_epoch():
    model = keras.Sequential([keras.layers.Dense(1, name="head")])
    optimizer = kgo.GroupedOptimizer({"head": kgo.Group("head", "**/head")}, learning_rate=0.5)
    model.compile(optimizer=optimizer, loss=rate_meter.mean_output)
    for _ in range(2):
        history = rate_meter.fit(model, callbacks=[kgo.GroupLogger()])
        assert history["learning_rate_head"] == [0.5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras makes NumPy 2 warn
def test_drift_is_logged_from_the_weights_before_the_first_step(policy):
    model = compiled(ANCHORED)
    model.optimizer.build(model.trainable_variables)
    model.get_layer("backbone").set_weights([np.full((2, 1), 3.0)])
    callbacks = [kgo.GroupLogger(drift=True)]
    rate_meter.fit(model, callbacks=callbacks)
    history = rate_meter.fit(model, 2, callbacks=callbacks)
    moved = np.linalg.norm(rate_meter.weights(model)["backbone"] - 3.0)
    assert history["drift_backbone"][1] == pytest.approx(moved, rel=1e-6)
    assert history["drift_backbone"][0] > 0
    assert "drift_head" not in history


# Checkpoints --------------------------------------------------------------------------------------


def stateful() -> keras.Model:
    """Anchors, moments, averages, statistics: everything whose loss would show in the next step."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(3, name="backbone"), keras.layers.BatchNormalization(momentum=0.5)]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(2, name="head")])
    groups = [
        kgo.Group("backbone", "backbone", learning_rate_ratio=RATIO, anchor="initial"),
        kgo.Group("head", "head", rule=kgo.rule("sgd", momentum=0.5), weight_decay=0.0),
    ]
    settings = {"rule": "adam", "learning_rate": 0.125, "weight_decay": 0.5, "ema": kgo.EMA(0.5)}
    models.compiled(model, *groups, **settings)
    # Keras' wrapper does not keep its own two values for later, as our optimizer does.
    model.optimizer.build(model.trainable_variables)
    return model


class Interruption(keras.callbacks.Callback):
    """Stops a run in the middle of its second epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch and batch:
            raise KeyboardInterrupt

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


@pytest.mark.parametrize(
    ("policy", "ours"), [("float32", "last"), ("mixed_float16", "first")], indirect=["policy"]
)
def test_a_run_goes_on_from_the_files_of_keras_callbacks(policy, ours, tmp_path):
    """With rates that a callback sets, and with averages in use where the files are written."""

    def run(model: keras.Model, *saving: keras.callbacks.Callback, **options: Any) -> Any:
        halving = Scheduler(lambda epoch, rate: rate * 0.5)
        own = [kgo.UseAveragedWeights(), kgo.GroupLogger()]
        callbacks = [*own, halving, *saving] if ours == "first" else [halving, *saving, *own]
        options |= {"batch_size": 16, "validation_data": (models.X, models.Y)}
        return models.fit(model, 3, callbacks=callbacks, **options).history.history

    def checkpoint(name: str) -> Any:
        path = str(tmp_path / name)
        return keras.callbacks.ModelCheckpoint(path, save_weights_only=name.endswith("h5"))

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    straight = stateful()
    history = run(straight, checkpoint("{epoch}.keras"), checkpoint("{epoch}.weights.h5"))
    from_weights = stateful()
    from_weights.load_weights(tmp_path / "2.weights.h5")
    for resumed in (keras.saving.load_model(tmp_path / "2.keras"), from_weights):
        again = run(resumed, initial_epoch=2)
        assert_equal(state(resumed), state(straight))
        assert again["val_loss"] == history["val_loss"][2:]
    with pytest.raises(KeyboardInterrupt):
        run(stateful(), backup(), Interruption())
    resumed = stateful()
    assert run(resumed, backup())["val_loss"] == history["val_loss"][1:]
    assert_equal(state(resumed), state(straight))


# Ratios that `PlateauRatio` lowers ----------------------------------------------------------------

FALLING = SCHEDULE([5], [0.5, 0.25])


def trained(epochs: int, plateau: dict[str, Any], **options: Any) -> tuple[Rates, keras.Model]:
    model = rate_meter.compiled(**options)
    rates = Rates()
    rate_meter.fit(model, epochs, callbacks=[rates, kgo.PlateauRatio(**plateau)])
    return rates, model


@pytest.mark.parametrize(
    ("policy", "plateau", "rate", "head", "backbone"),
    [
        # The schedule halves the base after the sixth step, in the third epoch's end.
        ("mixed_float16", {}, FALLING, [0.5, 0.5, 0.25, 0.0625], [1, 1, 0.5, 0.125]),
        ("float32", {"groups": ["backbone"]}, 0.5, [0.5] * 4, [1, 1, 0.5, 0.25]),
        (
            "float32",
            {"min_ratio": 0.375},
            0.5,
            [0.5, 0.5, 0.25, *[0.1875] * 3],
            [1, 1, 0.5, *[0.375] * 3],
        ),
    ],
    ids=["beside a schedule", "of groups that are named", "down to a floor"],
)
def test_ratios_of_all_groups_or_those_named_are_lowered_and_keep_their_proportions(
    policy, plateau, rate, head, backbone
):
    keras.config.set_dtype_policy(policy)
    rates, model = trained(len(head), NEVER | plateau, learning_rate=rate)
    assert rates.by_group == {
        "head": head,
        "backbone": [0.5 * RATIO * share for share in backbone],
    }
    if "min_ratio" in plateau:
        ratios = {n: float(r) for n, r in model.optimizer.learning_rate_ratios.items()}
        assert ratios == {"backbone": 0.375 * RATIO, "head": 0.375}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patience": 2}, [1, 1, 1, 0.5, 0.5]),
        ({"cooldown": 2}, [1, 1, 0.5, 0.5, 0.25]),
        ({"mode": "max", "min_delta": 1e-4}, [1, 1, 0.5, 0.25, 0.125]),
        ({"mode": "min", "min_delta": 1e-4}, [1, 1, 1, 1, 1]),
        ({"monitor": "mean_output", "min_delta": 1e-4, "mode": "min"}, [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_when_ratios_are_lowered_is_decided_as_by_keras(options, expected):
    settings = {**NEVER, **options}
    histories = []
    for callback in (kgo.PlateauRatio(**settings), keras.callbacks.ReduceLROnPlateau(**settings)):
        model = rate_meter.make_model()
        metrics = [rate_meter.mean_output]
        model.compile(rate_meter.make_optimizer(model), rate_meter.mean_output, metrics=metrics)
        rates = Rates()
        rate_meter.fit(model, 5, callbacks=[rates, callback])
        histories.append(rates.by_group)
    assert histories[0] == histories[1]
    assert histories[0]["head"] == [0.5 * share for share in expected]


def test_lowered_ratios_are_saved_and_the_floor_stays_that_of_the_declared_ratio(tmp_path):
    _, model = trained(3, {**NEVER, "min_ratio": 0.375})
    model.save(tmp_path / "run.keras")
    loaded = keras.saving.load_model(tmp_path / "run.keras")
    rates = Rates()
    plateau = kgo.PlateauRatio(**{**NEVER, "min_ratio": 0.375})
    rate_meter.fit(loaded, 3, callbacks=[rates, plateau])
    # Counters start over: the first epoch of a `fit` is the best one so far.
    assert rates.by_group["head"] == [0.1875, 0.1875, 0.1875]
    assert float(loaded.optimizer.learning_rate_ratios["backbone"]) == 0.375 * RATIO


def test_a_ratio_that_was_set_by_hand_is_lowered_from_there():
    model = rate_meter.compiled()
    plateau = kgo.PlateauRatio(**NEVER)
    rate_meter.fit(model, 1, callbacks=[plateau])
    model.optimizer.set_learning_rate_ratio("head", 2.0)
    rate_meter.fit(model, 2, callbacks=[plateau])
    assert float(model.optimizer.learning_rate_ratios["head"]) == 1.0


def test_it_says_what_it_lowers_on_request(capsys):
    trained(2, {**NEVER, "verbose": 1})
    said = "Epoch 2: PlateauRatio lowers learning_rate_ratio to: backbone 0.125, head 0.5."
    assert capsys.readouterr().out.strip() == said


def test_a_model_without_input_shape_is_lowered_too():
    model = keras.Sequential([keras.layers.Dense(1, name="head")])
    model.compile(kgo.GroupedOptimizer(rule="sgd"), loss=rate_meter.mean_output)
    rate_meter.fit(model, 2, callbacks=[kgo.PlateauRatio(**NEVER)])
    assert float(model.optimizer.learning_rate_ratios["default"]) == 0.5


# Errors -------------------------------------------------------------------------------------------

Ratio, Finder, Averages = kgo.PlateauRatio, kgo.LearningRateFinder, kgo.UseAveragedWeights
Backup, OWN_LIST = keras.callbacks.BackupAndRestore, "Put it in `fit`'s own list"


@pytest.mark.once
@pytest.mark.parametrize(
    ("callback", "options", "error", "message"),
    [
        (Ratio, {"factor": 1.0}, ValueError, "`factor` must be below 1"),
        (Ratio, {"factor": 0.0}, ValueError, "`factor` must be a positive finite number"),
        (Ratio, {"factor": "half"}, TypeError, "`factor` must be"),
        (Ratio, {"min_ratio": 1.0}, ValueError, r"`min_ratio` must be a number in \[0, 1\)"),
        (Ratio, {"min_ratio": -0.1}, ValueError, "`min_ratio` must be a number in"),
        (Ratio, {"patience": -1}, ValueError, "`patience` must be an integer >= 0"),
        (Ratio, {"cooldown": 0.5}, TypeError, "`cooldown` must be an integer"),
        (Ratio, {"min_delta": math.nan}, ValueError, "`min_delta` must be"),
        (Ratio, {"mode": "up"}, ValueError, '`mode` must be one of "auto", "min", "max"'),
        (Ratio, {"monitor": None}, TypeError, "`monitor` must be the name of a metric"),
        (Ratio, {"groups": "head"}, TypeError, r"Write `groups=\['head'\]`"),
        (Ratio, {"groups": []}, ValueError, "`groups` must hold a name"),
        (Finder, {"minimum": 0.0}, ValueError, "`minimum` must be a positive finite number"),
        (Finder, {"minimum": "1"}, TypeError, "`minimum` must be"),
        (Finder, {"maximum": math.inf}, ValueError, "`maximum` must be a positive finite number"),
        (Finder, {"minimum": 1.0, "maximum": 0.5}, ValueError, "`maximum` must be above `minimum`"),
        (Finder, {"steps": 2}, ValueError, "`steps` must be an integer >= 3"),
        (Finder, {"steps": 10.0}, TypeError, "`steps` must be an integer"),
        (Finder, {"smoothing": 1.0}, ValueError, r"`smoothing` must be a number in \[0, 1\)"),
        (Finder, {"divergence": 1.0}, ValueError, "`divergence` must be above 1"),
        (Finder, {"groups": "head"}, TypeError, r"Write `groups=\['head'\]`"),
        (Averages, {"callbacks": [1]}, TypeError, "list of Keras callbacks"),
        (Averages, {"callbacks": [Backup("x")]}, ValueError, OWN_LIST),
        (Averages, {"callbacks": kgo.BackupAndRestore("x")}, ValueError, OWN_LIST),
        (Averages, {"callbacks": kgo.UseAveragedWeights()}, ValueError, "UseAveragedWeights. Put"),
        *(
            (Averages, {"batch_norm": value}, ValueError, '`batch_norm` must be "average"')
            for value in ("mean", True, None)
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(callback, options, error, message):
    with pytest.raises(error, match=message):
        callback(**options)


@pytest.mark.parametrize(
    "options", [{}, {"use_ema": True}, {"ema": kgo.EMA(0.5)}], ids=["none", "use_ema", "ema"]
)
def test_swap_ema_weights_is_refused_with_the_better_way(options):
    model = rate_meter.compiled(**options)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.raises(ValueError, match=re.escape("Use `kgo.UseAveragedWeights()`")):
        rate_meter.fit(model, callbacks=[swap])


def with_ratio(ratio: Any) -> Any:
    group = kgo.Group("body", "backbone", learning_rate_ratio=ratio, frozen=ratio is None)
    return kgo.GroupedOptimizer([group])


def several() -> Any:
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5)))


Logger, DRIFT = kgo.GroupLogger, {"drift": True}
NEEDS_3_15 = pytest.mark.needs_keras("3.15", reason="no MultiOptimizer")


@pytest.mark.parametrize(
    ("make", "callback", "options", "error", "message"),
    [
        (keras.optimizers.SGD, Logger, DRIFT, TypeError, r"`GroupLogger\(drift=True\)` needs a Gr"),
        pytest.param(
            several, Logger, {}, TypeError, "one `learning_rate`. Received: Multi", marks=NEEDS_3_15
        ),
        (keras.optimizers.SGD, Ratio, {}, TypeError, "needs a GroupedOptimizer. Received: SGD"),
        (0.5, Ratio, {"groups": ["boddy"]}, ValueError, r"'boddy' in .* nearest is \"body\""),
        (None, Ratio, {"groups": ["body"]}, ValueError, '"body" in PlateauRatio, which is frozen'),
        (FALLING, Ratio, {}, TypeError, '"body", whose ratio is a schedule'),
        (FALLING, Ratio, {"groups": ["body"]}, TypeError, "Name the others in `groups=`"),
    ],
)
def test_what_a_callback_cannot_read_or_set_is_refused_before_a_step(
    make, callback, options, error, message
):
    """`make` makes an optimizer, or is the ratio of one with a group."""
    model = rate_meter.make_model()
    is_ratio = make in (None, 0.5, FALLING)
    model.compile(with_ratio(make) if is_ratio else make(), loss=rate_meter.mean_output)
    with pytest.raises(error, match=message):
        rate_meter.fit(model, callbacks=[callback(**options)])
    assert int(model.optimizer.iterations) == 0
