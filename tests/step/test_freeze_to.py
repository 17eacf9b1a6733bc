"""`optimizer.freeze_to(n)`, in fastai's sense."""

from __future__ import annotations

import keras
import models
import numpy as np
import pytest
from models import arrays, assert_equal, fit

import keras_groupopt as kgo


def compiled(groups=None, **options):
    layers = keras.layers
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, name="stem"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, name="body"),
            layers.Dense(2, name="head"),
        ]
    )
    # Declared from the top down: the model's order counts.
    groups = groups or {"head": "head", "body": "body", "stem": ["stem", "norm"]}
    options = {"rule": "adam", "learning_rate": 0.01, "global_clipnorm": 0.1} | options
    return models.compiled(model, groups=groups, **options)


def moved_layers(model, **options):
    before = arrays(model)
    fit(model, batch_size=16, **options)
    return {
        variable.path.split("/")[-2]
        for variable, old, new in zip(model.weights, before, arrays(model), strict=True)
        if np.any(old != new)
    }


@pytest.mark.parametrize(
    ("n", "trained", "built"),
    [
        (-1, ["head"], False),
        (-2, ["body", "head"], True),
        (1, ["body", "head"], False),
        (0, ["stem", "body", "head"], True),
        (-3, ["stem", "body", "head"], False),
    ],
)
def test_only_the_last_groups_move(n, trained, built):
    model = compiled()
    if built:
        fit(model)
    assert model.optimizer.freeze_to(n) == trained
    # The statistics of BatchNorm are no business of an optimizer.
    assert moved_layers(model) - {"norm"} == set(trained)
    names = {v.path.split("/")[-2] for v in model.trainable_variables} - {"norm"}
    assert names == set(trained)


def test_frozen_groups_keep_their_state():
    def moments():
        return model.optimizer.state_dict()["groups"]["body"]["body/kernel"]["momentums"]

    model = fit(compiled())
    before = moments()
    model.optimizer.freeze_to(-1)
    fit(model)
    assert np.array_equal(before, moments())
    model.optimizer.freeze_to(0)
    assert moved_layers(model) == {"stem", "norm", "body", "head"}
    assert not np.array_equal(before, moments())


def test_a_callback_may_open_group_after_group():
    model = compiled(ema=kgo.EMA(0.5))
    opened = []

    class Open(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            opened.append(self.model.optimizer.freeze_to(-1 - epoch))

    assert moved_layers(model, epochs=2, callbacks=[Open()]) - {"norm"} == {"body", "head"}
    assert opened == [["head"], ["body", "head"]]


def test_a_saved_model_is_frozen_as_it_was(tmp_path):
    model = fit(compiled())
    model.optimizer.freeze_to(-1)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert moved_layers(loaded) - {"norm"} == moved_layers(model) - {"norm"} == {"head"}
    loaded.optimizer.bind(loaded)
    for each in (model, loaded):
        each.optimizer.freeze_to(0)
        fit(each, batch_size=16)
    assert_equal(model, loaded)


def test_what_others_froze_stays_frozen():
    model = compiled({"head": "head", "stem": kgo.Group("stem", ["stem", "norm"], frozen=True)})
    fit(model)
    next(v for v in model.get_layer("body").variables if v.name == "bias").trainable = False
    assert model.optimizer.freeze_to(-1) == ["head"]
    assert model.optimizer.freeze_to(0) == ["default", "head"]
    assert not model.get_layer("body").bias.trainable
    assert moved_layers(model) == {"norm", "body", "head"}


def test_a_model_with_a_gradient_rule_can_be_frozen():
    model = kgo.sharpness_aware(compiled(), kgo.SAM(0.05))
    keras_optimizer = kgo.GroupedOptimizer({"head": "head"}, model=model, rule="sgd")
    model.compile(optimizer=keras_optimizer, loss="mse")
    fit(model)
    assert keras_optimizer.freeze_to(-1) == ["head"]
    assert moved_layers(model) - {"norm"} == {"head"}
    model.compile(optimizer=keras_optimizer, loss="mse")
    assert moved_layers(model) - {"norm"} == {"head"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (
                lambda own, n=n: own.freeze_to(n),
                ValueError,
                r"must leave a group .*: stem, body, head",
            )
            for n in (3, -4, 100)
        ),
        (lambda own: own.freeze_to("head"), TypeError, "`n` must be an integer"),
        (lambda _: kgo.GroupedOptimizer().freeze_to(0), ValueError, "`freeze_to` needs a model"),
    ],
)
def test_what_is_no_group_or_has_no_model_is_refused(call, error, message):
    model = compiled()
    with pytest.raises(error, match=message):
        call(model.optimizer)
    assert len(model.trainable_variables) == 8


def test_a_rebuild_needs_all_groups():
    model = compiled()
    model.optimizer.freeze_to(-1)
    with pytest.raises(ValueError, match=r"Call `optimizer.freeze_to\(0\)` first"):
        model.optimizer.rebuild(model)
