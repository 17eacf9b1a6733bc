"""Schedules with `total_steps="fit"` end where `fit` does; shorter ones are said once."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from cases import Jump
from models import X, Y, arrays, dense, number
from models import compiled as compiled_with
from models import fit as fit_model

import keras_groupopt as kgo

BATCHES = 4


def linear(total_steps="fit"):
    """1 at the start, 0 at the end."""
    return kgo.schedules.WarmupStableDecay(
        0.0625, total_steps=total_steps, warmup_steps=0, decay_steps=BATCHES
    )


def compiled(rate=None, **options):
    rate = linear() if rate is None else rate
    return compiled_with(dense(a=3, b=2), learning_rate=rate, **{"rule": "adam", **options})


def fit(model, epochs=2, **options):
    return arrays(fit_model(model, epochs, batch_size=32 // BATCHES, **options))


def averages(model):
    return arrays(average for average, _ in model.optimizer._average_pairs())


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def total(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return int(number(optimizer.total_steps))


WHERE = {
    "the base rate": lambda total: {"rate": linear(total)},
    "a warm-up in front, and a decay": lambda total: {
        "rate": kgo.warmup(linear(total if total == "fit" else total - 2), 2),
        "weight_decay": linear(total),
    },
    "a group's rate, and a ratio": lambda total: {
        "rate": 0.01,
        "groups": [kgo.Group("a", "a", learning_rate=linear(total))],
        "ratios": [("b", linear(total))],
    },
    "an argument of a rule, and a momentum of averages": lambda total: {
        "rate": 0.01,
        "rule": kgo.rule("adam", beta_1=linear(total)),
        "ema": kgo.EMA(linear(total)),
    },
}


@pytest.mark.parametrize("options", WHERE.values(), ids=WHERE)
def test_it_equals_the_number_of_optimizer_steps(options):
    told, number = compiled(**options("fit")), compiled(**options(3 * BATCHES))
    assert equal(fit(told, 3), fit(number, 3))
    assert total(told) == 3 * BATCHES
    if told.optimizer.ema is not None:
        assert equal(averages(told), averages(number))


@pytest.mark.parametrize(
    ("wrap", "window"), [(lambda inner: inner, 2), (kgo.LossScaleOptimizer, 1)]
)
def test_it_counts_optimizer_steps_also_inside_a_loss_scale(wrap, window):
    model = compiled(gradient_accumulation_steps=window, wrap=wrap)
    fit(model, 3)
    assert total(model) == 3 * BATCHES // window


def test_a_gradient_rule_ends_with_the_run_too():
    def sharp(rho):
        model = kgo.sharpness_aware(compiled(0.01), kgo.SAM(rho))
        optimizer = kgo.GroupedOptimizer(model=model, rule="sgd", learning_rate=0.01)
        model.compile(optimizer=optimizer, loss="mse")
        return model

    assert equal(fit(sharp(linear())), fit(sharp(linear(2 * BATCHES))))


def test_a_resumed_run_ends_where_the_first_said(tmp_path):
    whole = fit(compiled(), 4)
    first = compiled()
    logger = kgo.GroupLogger()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    fit(first, 4, callbacks=[logger, Stop()])
    first.save(tmp_path / "model.keras")
    first.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert equal(fit(loaded, 4, initial_epoch=2), whole)
    again = compiled()
    again.load_weights(tmp_path / "model.weights.h5")
    assert equal(fit(again, 4, initial_epoch=2, callbacks=[logger]), whole)


def test_a_further_fit_goes_on_past_the_end_and_says_so():
    for callbacks in ([], [kgo.GroupLogger()]):
        model = compiled()
        fit(model)
        with pytest.warns(UserWarning, match="made for 8 optimizer steps, and the run has 16"):
            fit(model, callbacks=callbacks)
        assert total(model) == 8
    model.optimizer.total_steps = 24
    before = arrays(model)
    assert not equal(fit(model, callbacks=[kgo.GroupLogger()]), before)


def test_the_rate_and_the_length_are_known_from_the_beginning_of_the_first_fit():
    read = []

    class Read(keras.callbacks.Callback):
        def note(self, *_, **__):
            optimizer = self.model.optimizer
            read.append((number(optimizer.learning_rate), int(optimizer.total_steps)))

        on_train_begin = on_epoch_begin = on_train_batch_begin = note

    model = compiled(kgo.schedules.Linear(0.0625, total_steps="fit"))
    assert int(model.optimizer.total_steps) == 0
    fit(model, callbacks=[Read()])
    assert read[:3] == [(0.0625, 8)] * 3
    assert {steps for _, steps in read} == {8}


@pytest.mark.parametrize("options", [{}, {"ema": kgo.EMA(0.5, start=2)}], ids=["plain", "averages"])
def test_a_second_phase_starts_its_schedules_over_and_keeps_all_else(options):
    model = compiled(**options)
    fit(model)
    before, moments = arrays(model), arrays(model.optimizer.variables[-2:])
    held = averages(model) if options else []
    model.optimizer.restart_schedules()
    assert (total(model), number(model.optimizer.iterations)) == (0, 0)
    assert equal(arrays(model.optimizer.variables[-2:]), moments)
    rates = []

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(number(self.model.optimizer.learning_rate))

    fit(model, 3, callbacks=[Read()])
    assert (total(model), number(model.optimizer.iterations)) == (12, 12)
    assert rates[:2] == [0.0625, 0.0625]
    assert not equal(arrays(model), before)
    if options:
        # Averages go on, though the step that they begin at is still ahead of the count.
        assert not equal(averages(model), held)
        assert not equal(averages(model), arrays(model.trainable_variables))


def test_a_phase_past_the_end_of_its_schedules_is_told_before_it_trains():
    model = compiled()
    fit(model)
    model.optimizer.rebuild(model)
    told = []

    def count(batch, logs):
        told.append(sum("restart_schedules()" in str(each.message) for each in seen))

    with pytest.warns(UserWarning, match="made for 8 optimizer steps") as seen:
        fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=count)])
    assert set(told) == {1}


def test_a_schedule_that_is_new_to_a_resumed_run_ends_with_the_further_fit():
    model = compiled(0.01)
    fit(model)
    old = model.optimizer
    compiled_with(model, learning_rate=linear(), rule="adam")
    kgo.transfer_state(old, model.optimizer)
    fit(model)
    assert total(model) == 4 * BATCHES


def test_a_loop_of_ones_own_sets_it():
    def ones(model):
        return [keras.ops.ones(v.shape) for v in model.trainable_variables]

    models = [compiled(), compiled(linear(BATCHES))]
    models[0].optimizer.total_steps = BATCHES
    for model in models:
        for _ in range(BATCHES):
            model.optimizer.apply(ones(model), model.trainable_variables)
    assert equal(*map(arrays, models))


def test_what_is_not_known_is_refused_where_nothing_is_lost():
    model = compiled(model=None)
    before = arrays(model)
    with pytest.raises(ValueError, match="no model, whose `fit` could tell"):
        fit(model)
    assert equal(arrays(model), before)
    model = compiled()
    ones = [keras.ops.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match="as it knows no steps per epoch or was not called"):
        model.optimizer.apply(ones, model.trainable_variables)
    assert equal(arrays(model), before)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match='total_steps="fit"'):
        _ = model.optimizer.learning_rate
    model = compiled(0.01)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="for an optimizer without one"):
        model.optimizer.total_steps = 3
    with pytest.raises(ValueError, match="`total_steps` must be an integer >= 1"):
        model.optimizer.total_steps = 0


def test_a_loaded_optimizer_without_a_model_is_refused_if_it_never_knew(tmp_path):
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="no model, whose `fit` could tell"):
        fit(loaded)
    loaded.optimizer.bind(loaded)
    assert equal(fit(loaded), fit(compiled()))


COSINE = keras.optimizers.schedules.CosineDecay(0.01, 6)


@pytest.mark.parametrize("callbacks", [[], [kgo.GroupLogger()]], ids=["", "GroupLogger"])
@pytest.mark.parametrize(
    ("schedule", "epochs", "is_short"),
    [
        *((schedule, 2, True) for schedule in (COSINE, kgo.warmup(linear(4), 2))),
        (kgo.schedules.OneCycle(0.01, 6), 2, True),
        *((schedule, 2, False) for schedule in (0.01, Jump(0.1, 0.05), kgo.constant(0.01))),
        (COSINE, 1, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_schedule_shorter_than_the_run_is_said_once(schedule, epochs, is_short, callbacks):
    model = compiled(schedule)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(model, epochs, callbacks=callbacks)
    short = [str(one.message) for one in said if "is made for" in str(one.message)]
    assert [("6 optimizer steps, and the run has 8" in text) for text in short] == [True] * is_short
    if is_short:
        fit(model, epochs, callbacks=callbacks)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_a_fit_that_knows_no_end_is_refused_unless_another_told():
    def batches():
        for start in range(0, len(X), 8):
            yield X[start : start + 8], Y[start : start + 8]

    # Never told; by another `fit`, and anew; by hand.
    model = compiled()
    with pytest.raises(ValueError, match="as it knows no steps per epoch"):
        model.fit(batches(), verbose=0, shuffle=False)
    for steps, epochs in ((20, 3), (6, 0)):
        model = compiled()
        if epochs:
            fit(model, epochs)
        model.optimizer.total_steps = steps
        model.fit(batches(), epochs=1, verbose=0, shuffle=False)
        assert total(model) == steps
