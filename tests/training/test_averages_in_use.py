"""Averages in the weights' place: while validating, stopping early, saving and predicting.

One weight, an input of ones, a loss that is the output and SGD at rate 1: each step takes 1 off the
weight, so weights and averages are known numbers.
"""

from __future__ import annotations

import gc
from typing import Any

import chosen_gradients
import keras
import numpy as np
import pytest
import rate_meter
from models import arrays, assert_equal, state
from saving_models import load, save

import keras_groupopt as kgo

STEPS = 4
# After 4 steps from 0: Keras' average starts at the first step's weight, ours at the first weight.
RAW, AVERAGE, KERAS_AVERAGE = -4.0, -3.0625, -3.125
low_precision = pytest.mark.filterwarnings("ignore:Weights in float16/bfloat16 lose")
VALIDATION = (np.ones((2, 1), "float32"), np.zeros((2, 1), "float32"))


# TensorFlow would trace the step of each model: only tests of compiled steps ask for that.
EAGERLY = keras.backend.backend() == "tensorflow"


def compiled(
    start: float = 0.0, dtype: Any = None, eagerly: bool = EAGERLY, **options: Any
) -> keras.Model:
    model = chosen_gradients.towers("tower", start=start, **({"dtype": dtype} if dtype else {}))
    settings = {"rule": "sgd", "learning_rate": 1.0, "ema": kgo.EMA(0.5), **options}
    optimizer = kgo.GroupedOptimizer(model=model, **settings)
    model.compile(optimizer, loss=rate_meter.mean_output, run_eagerly=eagerly)
    return model


def fit(model: keras.Model, epochs: int = 1, **options: Any) -> dict[str, list[float]]:
    return chosen_gradients.fit(model, 1.0, STEPS, epochs=epochs, **options).history


def weight(model: keras.Model) -> float:
    return float(np.ravel(model.get_weights()[0])[0])


def inner(model: keras.Model) -> Any:
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def averages(model: keras.Model) -> list[np.ndarray]:
    return arrays(mean for mean, _ in inner(model)._average_pairs())


def network(dropout: float = 0.0, eagerly: bool = EAGERLY, **options: Any) -> keras.Model:
    """A model with batch normalization, and a random state that Keras does not save."""
    keras.utils.set_random_seed(0)
    first, head = keras.layers.Dense(4, name="first"), keras.layers.Dense(2, name="head")
    norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
    dropped = keras.layers.Dropout(dropout, seed=1)
    model = keras.Sequential([keras.Input((3,)), first, norm, dropped, head])
    settings = {"rule": "adam", "learning_rate": 0.05, "ema": kgo.EMA(0.75), "model": model}
    optimizer = kgo.GroupedOptimizer(**{**settings, **options})
    model.compile(optimizer, loss="mse", run_eagerly=eagerly)
    return model


_numbers = np.random.default_rng(0)
X = _numbers.normal(1.0, 2.0, size=(24, 3)).astype("float32")
Y = _numbers.normal(size=(24, 2)).astype("float32")


def train(model: keras.Model, epochs: int = 1, **options: Any) -> dict[str, list[float]]:
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, epochs=epochs, **settings).history


def raising(hook: str, error: type[BaseException]) -> keras.callbacks.Callback:
    """Raises in one hook; the exceptions Keras raises to stop loops are not among them."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("on purpose")

    return keras.callbacks.LambdaCallback(**{hook: fail})


class Seen(keras.callbacks.Callback):
    """Keeps the weight at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(weight(self.model))


# A `with` block, and the callback in `evaluate` and `predict` -------------------------------------


def test_evaluate_and_predict_see_the_averages_in_a_block_or_with_the_callback_only():
    model = compiled(eagerly=False)
    fit(model)

    def seen(*callbacks: Any) -> tuple[float, ...]:
        loss = model.evaluate(*VALIDATION, verbose=0, callbacks=[make() for make in callbacks])
        after = weight(model)
        x, made = VALIDATION[0], [make() for make in callbacks]
        return loss, after, model.predict(x, verbose=0, callbacks=made)[0, 0], weight(model)

    assert seen() == (RAW,) * 4
    with kgo.averaged_weights(model):
        # Functions compiled before the block see them too.
        assert seen() == (AVERAGE,) * 4
        # A block within a block does nothing.
        with kgo.averaged_weights(model):
            assert weight(model) == AVERAGE
        assert weight(model) == AVERAGE
    for _ in range(2):
        assert seen(kgo.UseAveragedWeights) == (AVERAGE, RAW, AVERAGE, RAW)
        assert seen() == (RAW,) * 4


@low_precision
@pytest.mark.parametrize(
    ("dtype", "error"),
    [("float32", ValueError), ("bfloat16", None), ("mixed_float16", KeyboardInterrupt)],
)
def test_weights_averages_and_all_state_come_back_bit_for_bit(dtype, error):
    keras.config.set_dtype_policy(dtype)
    # Adam's second moment does not move in bfloat16.
    rule = kgo.rule("sgd", momentum=0.5)
    model = network(0.25, rule=rule)
    train(model)
    before = state(model)
    if error is None:
        with kgo.averaged_weights(model):
            model.evaluate(X, Y, verbose=0)
            assert not np.array_equal(state(model)[0], before[0])
    else:
        with pytest.raises(error), kgo.averaged_weights(model):
            raise error
    assert_equal(state(model), before)
    train(model)
    straight = network(0.25, rule=rule)
    train(straight)
    train(straight)
    assert_equal(state(model), state(straight))


@low_precision
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_averages_are_cast_to_weights_of_low_precision(dtype):
    model = compiled(start=1.0, dtype=dtype, ema=kgo.EMA(0.999), learning_rate=0.125)
    fit(model)
    (average,) = averages(model)
    assert average.dtype == np.float32
    with kgo.averaged_weights(model):
        (seen,) = model.get_weights()
    expected = keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.array(average), dtype))
    assert_equal([seen], [expected])
    assert weight(model) == 0.5


def test_a_second_ctrl_c_does_not_keep_the_weights_from_coming_back(monkeypatch):
    model = network()
    train(model)
    before = state(model)
    victim = model.trainable_variables[-1]
    original = type(victim).assign
    interrupts = []

    def assign(variable: Any, value: Any) -> Any:
        if variable is victim and not interrupts:
            interrupts.append(True)
            raise KeyboardInterrupt
        return original(variable, value)

    block = kgo.averaged_weights(model)
    block.__enter__()
    monkeypatch.setattr(type(victim), "assign", assign)
    with pytest.raises(KeyboardInterrupt):
        block.__exit__(None, None, None)
    monkeypatch.undo()
    assert interrupts
    assert_equal(state(model), before)


def test_training_within_the_block_is_an_error_and_keeps_the_weights():
    model = compiled()
    fit(model)
    message = r"Do not train inside.* 4 optimizer steps were taken"
    with pytest.raises(ValueError, match=message), kgo.averaged_weights(model):
        fit(model)
    assert weight(model) == RAW


def plain() -> keras.Model:
    model = chosen_gradients.towers("tower")
    model.compile("sgd", loss="mse")
    return model


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(plain, TypeError, r"needs a GroupedOptimizer\. Rec.*SGD", id="plain"),
        pytest.param(compiled, ValueError, "needs a built optimizer", id="not built"),
        pytest.param(
            lambda: fitted(compiled(ema=None)), ValueError, r"ema=kgo\.EMA\(0\.999\)", id="without"
        ),
    ],
)
def test_a_model_without_averages_is_refused(make, error, message, tmp_path):
    model = make()
    x = VALIDATION[0]
    with pytest.raises(error, match=message), kgo.averaged_weights(model):
        pass
    with pytest.raises(error, match=message):
        kgo.save_averaged(model, tmp_path / "x.keras")
    assert not (tmp_path / "x.keras").exists()
    with pytest.raises(error, match=message):
        model.predict(x, verbose=0, callbacks=[kgo.UseAveragedWeights()])
    if "built" not in message:
        with pytest.raises(error, match=message):
            fit(model, callbacks=[kgo.UseAveragedWeights()])


def fitted(model: keras.Model) -> keras.Model:
    fit(model)
    return model


# `fit` with the callback --------------------------------------------------------------------------


def test_validation_uses_the_averages_and_training_does_not():
    model = compiled(eagerly=False)
    seen = Seen()
    history = fit(model, 2, validation_data=VALIDATION, callbacks=[kgo.UseAveragedWeights(), seen])
    average_of_2 = AVERAGE
    for step in range(5, 9):
        average_of_2 = (average_of_2 - step) / 2
    assert history["val_loss"] == [AVERAGE, average_of_2]
    assert seen.weights == [RAW, 2 * RAW]
    assert weight(model) == 2 * RAW
    # What it put in place of `evaluate` is gone.
    assert "evaluate" not in vars(model)
    assert model.evaluate(*VALIDATION, verbose=0) == 2 * RAW


class Looking(keras.callbacks.Callback):
    """Predicts with the averages after each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raw = self.model.get_weights()
        with kgo.averaged_weights(self.model):
            self.model.predict_on_batch(X)
            assert not np.array_equal(raw[0], self.model.get_weights()[0])


@pytest.mark.parametrize(
    ("dtype", "use"),
    [
        ("mixed_float16", kgo.UseAveragedWeights),
        ("float32", lambda: kgo.UseAveragedWeights(batch_norm=X)),
        ("mixed_float16", Looking),
    ],
    ids=["callback", "callback that estimates", "block in the middle of an epoch"],
)
def test_training_is_that_of_a_fit_without_averages_in_use(dtype, use):
    keras.config.set_dtype_policy(dtype)
    straight = network(0.25, eagerly=False)
    train(straight, 3)
    model = network(0.25, eagerly=False)
    history = train(model, 3, validation_data=(X, Y), callbacks=[use()])
    assert_equal(state(model), state(straight))
    if use is not Looking:
        with kgo.averaged_weights(model):
            after = model.evaluate(X, Y, verbose=0, batch_size=8)
        np.testing.assert_allclose(history["val_loss"][-1], after, rtol=1e-5)


USE_EMA = {"use_ema": True, "ema_momentum": 0.5, "ema": None}


@pytest.mark.parametrize(
    ("use", "monitor", "options", "best"),
    [
        pytest.param("first", "val_loss", {}, AVERAGE, id="callback first"),
        pytest.param("last", "val_loss", {}, AVERAGE, id="callback last"),
        pytest.param("first", "val_loss", USE_EMA, KERAS_AVERAGE, id="use_ema"),
        pytest.param("first", "loss", {}, RAW, id="a training value"),
        pytest.param("none", "val_loss", {}, RAW, id="no callback"),
    ],
)
def test_early_stopping_restores_what_it_saw_measured(use, monitor, options, best):
    model = compiled(**options)
    # The loss falls with every step: the first epoch is the "best".
    stopping = keras.callbacks.EarlyStopping(
        monitor, mode="max", patience=1, restore_best_weights=True
    )
    own = [] if use == "none" else [kgo.UseAveragedWeights()]
    callbacks = [*own, stopping] if use == "first" else [stopping, *own]
    history = fit(model, 3, validation_data=VALIDATION, callbacks=callbacks)
    assert len(history["val_loss"]) == 2
    assert weight(model) == best
    assert stopping.best == history[monitor][0]
    if monitor == "val_loss":
        assert stopping.best == best
    if use == "none":
        fit(model)
        assert weight(model) == best - STEPS


def test_a_checkpoint_passed_to_the_callback_is_an_export_of_the_averages(tmp_path):
    model = compiled()
    averaged, raw = str(tmp_path / "averaged.keras"), str(tmp_path / "raw.keras")
    use = kgo.UseAveragedWeights([keras.callbacks.ModelCheckpoint(averaged, save_best_only=True)])
    seen = Seen()
    callbacks = [use, keras.callbacks.ModelCheckpoint(raw), seen]
    fit(model, validation_data=VALIDATION, callbacks=callbacks)
    assert seen.weights == [RAW]
    export = keras.saving.load_model(averaged)
    assert weight(export) == export.evaluate(*VALIDATION, verbose=0) == AVERAGE
    # A run from it is a new one: no state that belongs to other weights.
    assert int(export.optimizer.iterations) == 0
    fit(export)
    assert weight(export) == AVERAGE - 4
    run = keras.saving.load_model(raw)
    assert weight(run) == RAW
    assert int(run.optimizer.iterations) == STEPS
    assert averages(run)[0] == AVERAGE


def test_callbacks_passed_to_the_callback_act_on_batches_too(tmp_path):
    model = compiled()
    path = str(tmp_path / "{batch}.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    ended = []
    record = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs))
    fit(model, callbacks=[kgo.UseAveragedWeights([checkpoint, record])])
    assert weight(model) == RAW
    found = []
    for batch in (2, 4):
        other = chosen_gradients.towers("tower")
        other.load_weights(path.format(batch=batch))
        found.append(weight(other))
    assert found == [-1.25, AVERAGE]
    assert len(ended) == 1


# Exceptions ---------------------------------------------------------------------------------------


class Unreadable(keras.utils.PyDataset):
    """Validation data of which the second batch cannot be read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if index:
            raise OSError("on purpose")
        return VALIDATION


@pytest.mark.parametrize(
    ("hook", "inside", "error"),
    [
        ("on_test_begin", False, KeyboardInterrupt),
        ("on_test_batch_end", False, KeyboardInterrupt),
        ("on_test_batch_end", False, ValueError),
        ("on_test_end", False, KeyboardInterrupt),
        ("on_epoch_end", False, ValueError),
        ("on_epoch_end", True, KeyboardInterrupt),
        ("on_train_batch_end", True, ValueError),
        ("data", False, OSError),
    ],
)
def test_the_weights_are_back_before_an_exception_gets_out_of_fit(hook, inside, error):
    model = compiled()
    failing = [raising(hook, error)] if hook != "data" else []
    callbacks = [kgo.UseAveragedWeights(failing if inside else [])] + failing * (not inside)
    data = Unreadable() if hook == "data" else VALIDATION
    try:
        fit(model, 3, validation_data=data, callbacks=callbacks)
    except error:
        # Where people save what there is.
        assert weight(model) == (-1.0 if hook == "on_train_batch_end" else RAW)
        assert hook == "data" or model.evaluate(*VALIDATION, verbose=0) == weight(model)
    else:
        pytest.fail("no exception")
    if hook != "data":
        assert "evaluate" not in vars(model)
        history = fit(model, validation_data=VALIDATION, callbacks=[kgo.UseAveragedWeights()])
        assert history["val_loss"][0] > weight(model)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize("place", ["the step", "a callback"])
def test_an_exception_of_evaluate_or_predict_brings_the_weights_back(place, call, monkeypatch):
    model, given = compiled(), VALIDATION if call == "evaluate" else VALIDATION[:1]
    fit(model, validation_data=VALIDATION)
    model.predict(VALIDATION[0], verbose=0)
    hook = {"evaluate": "on_test_batch_begin", "predict": "on_predict_batch_begin"}[call]
    callbacks = [kgo.UseAveragedWeights(), raising(hook, KeyboardInterrupt)]
    if place == "the step":
        name = {"evaluate": "test_function", "predict": "predict_function"}[call]
        monkeypatch.setattr(model, name, callbacks.pop().__dict__[hook])
    try:
        getattr(model, call)(*given, verbose=0, callbacks=callbacks)
    except KeyboardInterrupt:
        assert place == "a callback" or weight(model) == RAW
    else:
        pytest.fail("no exception")
    # After one in another callback they are back when the traceback is gone.
    gc.collect()
    assert weight(model) == RAW
    monkeypatch.undo()
    # Keras on JAX loses the values of metrics in an `evaluate` that fails.
    model.reset_metrics()
    use = kgo.UseAveragedWeights()
    assert model.predict(VALIDATION[0], verbose=0, callbacks=[use])[0, 0] == AVERAGE
    assert weight(model) == RAW


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_an_export_holds_the_averages_and_no_state(suffix, tmp_path):
    model = compiled()
    fit(model)
    path = tmp_path / f"averaged{suffix}"
    before = state(model)
    kgo.save_averaged(model, path)
    assert_equal(state(model), before)
    export = load(path, compiled)
    assert weight(export) == AVERAGE
    fit(export)
    assert weight(export) == AVERAGE - 4
    assert int(export.optimizer.iterations) == STEPS
    # The new run's average begins at the averages it started from.
    assert averages(export)[0] == 2 * AVERAGE


def test_an_export_in_mixed_precision_holds_no_state(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = network()
    train(model)
    kgo.save_averaged(model, tmp_path / "averaged.keras")
    assert "save_own_variables" not in vars(model.optimizer)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        export = keras.saving.load_model(tmp_path / "averaged.keras")
    assert int(inner(export).iterations) == 0
    with kgo.averaged_weights(model):
        assert_equal(export.get_weights(), model.get_weights())


@pytest.mark.parametrize(
    ("suffix", "named", "dtype"),
    [
        pytest.param(".keras", True, "float32", id="model="),
        pytest.param(".weights.h5", False, "float32", id="no model="),
        pytest.param(".weights.h5", True, "mixed_float16", id="mixed_float16"),
    ],
)
def test_a_new_run_starts_from_the_averages_in_the_file_of_a_run(suffix, named, dtype, tmp_path):
    keras.config.set_dtype_policy(dtype)
    model = network(**({} if named else {"model": None}))
    use = kgo.UseAveragedWeights()
    train(model, 2, callbacks=[use])
    path = save(model, tmp_path / f"run{suffix}")
    with kgo.averaged_weights(model):
        expected = model.get_weights()
    other = network(rule="sgd", ema=None, weight_decay=0.5, anchor="initial")
    kgo.load_averages(other, path)
    assert_equal(other.get_weights(), expected)
    assert other.optimizer is not None
    assert int(inner(other).iterations) == 0
    bare = keras.models.clone_model(other)
    kgo.load_averages(bare, path)
    assert_equal(bare.get_weights(), expected)


def test_averages_loaded_into_a_built_optimizer_are_what_decay_pulls_toward(tmp_path):
    model = compiled()
    fit(model)
    model.save(tmp_path / "run.keras")
    other = compiled(weight_decay=0.5, anchor="initial", exclude_from_decay=())
    other.optimizer.build(other.trainable_variables)
    kgo.load_averages(other, tmp_path / "run.keras")
    assert float(other.optimizer.anchor_drift()["default"]) == 0.0


def other_layers() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="fist")])


def other_shapes() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="tower")])


def more_layers() -> keras.Model:
    tower = keras.layers.Dense(1, use_bias=False, name="tower")
    model = keras.Sequential([keras.Input((1,)), tower, keras.layers.Dense(3, name="more")])
    model.compile(kgo.GroupedOptimizer(), loss="mse")
    return model


@pytest.mark.parametrize(
    ("model", "file", "error", "message"),
    [
        (compiled, "missing.keras", FileNotFoundError, "must be an existing file"),
        (compiled, "run.txt", ValueError, "must be a file that ends in one of"),
        (compiled, "averaged.keras", ValueError, "must be a file with averages"),
        (compiled, "damaged.keras", ValueError, "must be a whole file"),
        (compiled, "damaged.weights.h5", ValueError, "must be a whole file"),
        (other_layers, "run.keras", ValueError, "tower/kernel is not in the model"),
        (other_shapes, "run.keras", ValueError, r"tower/kernel: saved as \[1, 1\], now \[2, 1\]"),
        # What Keras refuses.
        (more_layers, "run.weights.h5", ValueError, "more"),
    ],
)
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_a_file_whose_averages_do_not_fit_leaves_the_model_alone(
    model, file, error, message, tmp_path
):
    run = compiled()
    fit(run)
    kgo.save_averaged(run, tmp_path / "averaged.keras")
    for suffix in (".keras", ".weights.h5"):
        whole = save(run, tmp_path / f"run{suffix}").read_bytes()
        (tmp_path / f"damaged{suffix}").write_bytes(whole[: len(whole) // 2])
    made = model()
    before, optimizer = made.get_weights(), getattr(made, "optimizer", None)
    with pytest.raises(error, match=message):
        kgo.load_averages(made, tmp_path / file)
    assert_equal(made.get_weights(), before)
    assert getattr(made, "optimizer", None) is optimizer


# Batch normalization ------------------------------------------------------------------------------


def statistics(model: keras.Model) -> list[np.ndarray]:
    norm = model.get_layer("norm")
    return arrays([norm.moving_mean, norm.moving_variance])


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        # Three steps an epoch: half to the third power of an average is left after each.
        ({"ema": kgo.EMA(0.5)}, (1 / 512, 7 / 512, 7 / 64, 7 / 8)),
        ({"ema": kgo.EMA(0.5, start=3)}, (0, 1 / 64, 7 / 64, 7 / 8)),
        (
            {"ema": kgo.EMA(0.9, warmup=True, every=3)},
            (0.1 * 2 / 11 / 4, 0.9 * 2 / 11 / 4, 9 / 11 / 4, 3 / 4),
        ),
        ({"ema": kgo.SWA()}, (0, 1 / 3, 1 / 3, 1 / 3)),
        (USE_EMA, (0, 1 / 64, 7 / 64, 7 / 8)),
    ],
    ids=["EMA", "start", "warm-up", "SWA", "use_ema"],
)
def test_statistics_are_averaged_at_the_end_of_epochs_as_far_as_the_weights(options, shares):
    model = network(**options)
    raw = [statistics(model)]
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: raw.append(statistics(model))
    )
    train(model, 3, callbacks=[record, kgo.UseAveragedWeights()])
    with kgo.averaged_weights(model):
        found = statistics(model)
    assert_equal(statistics(model), raw[-1])
    for number, value in enumerate(found):
        expected = sum(share * one[number] for share, one in zip(shares, raw, strict=True))
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_statistics_begin_anew_with_averages_that_are_not_in_the_state_that_is_loaded():
    without = network(ema=None)
    train(without)
    model = network(ema=kgo.EMA(0.5))
    train(model, 2, callbacks=[kgo.UseAveragedWeights()])
    model.optimizer.load_state_dict(without.optimizer.state_dict())
    first = statistics(model)
    with kgo.averaged_weights(model):
        assert_equal(statistics(model), first)
    train(model, callbacks=[kgo.UseAveragedWeights()])
    last = statistics(model)
    with kgo.averaged_weights(model):
        for value, start, end in zip(statistics(model), first, last, strict=True):
            np.testing.assert_allclose(value, start / 8 + end * 7 / 8, rtol=1e-5, atol=1e-6)


def test_without_the_callback_or_with_raw_the_statistics_are_those_of_the_weights():
    model = network()
    train(model, callbacks=[kgo.UseAveragedWeights()])
    train(model, callbacks=[kgo.UseAveragedWeights(batch_norm="raw")])
    raw = statistics(model)
    with kgo.averaged_weights(model):
        assert_equal(statistics(model), raw)


def assert_estimated(found: list[np.ndarray], model: keras.Model, size: int) -> None:
    """Statistics are the mean over samples, of batches of a size."""
    kernel, bias = (w.astype("float64") for w in model.get_layer("first").get_weights())
    parts = [X[start : start + size] @ kernel + bias for start in range(0, len(X), size)]
    for value, reduced in zip(found, (np.mean, np.var), strict=True):
        expected = sum(len(part) * reduced(part, axis=0) for part in parts) / len(X)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_statistics_are_estimated_for_the_averages_and_taken_back_with_them():
    model = network(0.25)
    train(model, 2)
    before = state(model)
    momentum = model.get_layer("norm").momentum
    with kgo.averaged_weights(model):
        kgo.update_batch_norm(model, X, batch_size=8)
        assert_estimated(statistics(model), model, 8)
    assert_equal(state(model), before)
    assert model.get_layer("norm").momentum == momentum
    # The callback does the same before each validation, and keeps it.
    train(model, callbacks=[kgo.UseAveragedWeights(batch_norm=X)])
    with kgo.averaged_weights(model):
        kept = statistics(model)
        kgo.update_batch_norm(model, X)
        assert_equal(statistics(model), kept)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return X[10 * index : 10 * index + 10], Y[10 * index : 10 * index + 10]


def pairs() -> Any:
    """Batches `(x, y)` without end."""
    while True:
        yield from (Batches()[index] for index in range(3))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: (X, {"batch_size": 10}), id="array"),
        pytest.param(lambda: (Batches(), {}), id="PyDataset"),
        pytest.param(lambda: (pairs(), {"steps": 3}), id="iterator"),
        pytest.param(lambda: (keras.ops.array(X), {"batch_size": 10}), id="tensor"),
    ],
)
def test_statistics_are_the_mean_over_samples_and_nothing_else_changes(data):
    model = network(0.25)
    model.optimizer.build(model.trainable_variables)
    norm = model.get_layer("norm")
    norm.moving_mean.assign(np.full(4, np.nan, "float32"))
    keep = [variable for variable in model.variables if "moving" not in variable.name]
    own = [*keep, *model.optimizer.variables, *model.metrics_variables]
    before = arrays(own)
    source, options = data()
    kgo.update_batch_norm(model, source, **options)
    assert_equal(arrays(own), before)
    assert_estimated(statistics(model), model, 10)


def failing() -> Any:
    yield X[:8]
    raise OSError("on purpose")


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (lambda: [], {}, ValueError, "`data` must have at least one batch"),
        (failing, {}, OSError, "on purpose"),
        (lambda: X[:, :2], {}, ValueError, "shape"),
        (lambda: X, {"steps": 0}, ValueError, "`steps` must be an integer >= 1"),
        (lambda: X, {"batch_size": 1.5}, TypeError, "`batch_size` must be an integer >= 1"),
    ],
    ids=["empty", "failing", "other shape", "no steps", "half a sample"],
)
def test_statistics_stay_where_they_cannot_be_estimated(data, options, error, message):
    model = network(0.25)
    model.set_weights([_numbers.normal(size=value.shape) for value in model.get_weights()])
    before = state(model)
    with pytest.raises(error, match=message):
        kgo.update_batch_norm(model, data(), **options)
    assert_equal(state(model), before)
    assert model.get_layer("norm").momentum == 0.5


def test_statistics_of_frozen_layers_are_not_estimated():
    model = network()
    model.get_layer("norm").trainable = False
    with pytest.raises(ValueError, match="must have batch normalization that is not frozen"):
        kgo.update_batch_norm(model, X)


# Repeated `fit`, and Keras' own averages ----------------------------------------------------------


def test_three_fits_of_one_epoch_equal_one_of_three():
    keras.config.set_dtype_policy("mixed_float16")

    def options() -> dict[str, Any]:
        return {"validation_data": (X, Y), "callbacks": [kgo.UseAveragedWeights()]}

    straight, model = network(eagerly=False), network(eagerly=False)
    expected = train(straight, 3, **options())
    histories = [train(model, **options()) for _ in range(3)]
    assert_equal(state(model), state(straight))
    assert_equal(averages(model), averages(straight))
    for key, values in expected.items():
        assert [history[key][0] for history in histories] == values


def test_averages_made_in_the_first_compiled_step_start_as_the_weights_before_it():
    # Keras' LossScaleOptimizer on TensorFlow builds the optimizer inside it there.
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(start=10.0, eagerly=False)
    model.set_weights([np.full((1, 1), 8.0)])
    fit(model)
    assert (weight(model), averages(model)[0]) == (8.0 + RAW, 8.0 + AVERAGE)


def test_keras_averages_replace_the_weights_at_the_end_of_a_fit_and_not_in_a_checkpoint(tmp_path):
    model = compiled(eagerly=False, ema=None, use_ema=True, ema_momentum=0.5)
    path = str(tmp_path / "{epoch}.weights.h5")
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path, save_weights_only=True)])
    saved = chosen_gradients.towers("tower")
    saved.load_weights(path.format(epoch=1))
    assert (weight(saved), weight(model)) == (RAW, KERAS_AVERAGE)


def test_a_fit_without_a_step_leaves_weights_that_were_set_before_it():
    model = compiled(ema=None, use_ema=True)
    model.optimizer.build(model.trainable_variables)
    model.set_weights([np.full((1, 1), 7.0)])
    fit(model, epochs=1, initial_epoch=1)
    assert weight(model) == 7.0
