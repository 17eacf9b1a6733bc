"""A model that gets its weights in `fit` trains as one that had them before."""

from __future__ import annotations

import keras
import pytest
from models import assert_equal, fit, state

import keras_groupopt as kgo

ANCHORED = {"ema": kgo.EMA(0.5), "anchor": "initial", "weight_decay": 0.5, "rule": "sgd"}
LOOKAHEAD = {"rule": kgo.rule("lookahead", rule="sgd", sync_period=2)}
OPTIONS = {
    "anchors and averages": ANCHORED,
    "accumulation": {**ANCHORED, "gradient_accumulation_steps": 2},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5},
    "lookahead": LOOKAHEAD,
    "schedule-free": {"rule": "schedulefreeadamw"},
}


def layers():
    return [
        keras.layers.Dense(width, kernel_initializer=keras.initializers.GlorotUniform(width))
        for width in (3, 2)
    ]


class Subclassed(keras.Model):
    """A model whose layers are built by the first call."""

    def __init__(self):
        super().__init__()
        self.enc, self.head = layers()

    def call(self, x):
        return self.head(self.enc(x))


def sequential():
    return keras.Sequential(layers())


def built():
    return keras.Sequential([keras.Input((4,)), *layers()])


LATE = {
    **{name: (sequential, options, {}) for name, options in OPTIONS.items()},
    "subclassed": (Subclassed, ANCHORED, {}),
    "eager": (sequential, ANCHORED, {"run_eagerly": True}),
    "compiled by XLA": (sequential, LOOKAHEAD, {"jit_compile": True}),
    "loss scale": (sequential, ANCHORED, {"scale": kgo.LossScaleOptimizer}),
    # It builds the optimizer in a branch of the compiled step.
    "loss scale of Keras": (
        built,
        ANCHORED,
        {"scale": keras.optimizers.LossScaleOptimizer, "jit_compile": True},
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_weights_that_come_with_the_first_step_start_anchors_and_averages(name):
    make, options, settings = LATE[name]
    settings = dict(settings)
    scale = settings.pop("scale", lambda inner: inner)
    if keras.backend.backend() == "torch":
        settings.pop("jit_compile", None)
    found = []
    # The reference has its weights and its optimizer's state before the first step, in no branch.
    for model, own in ((built(), {"jit_compile": False}), (make(), settings)):
        optimizer = scale(kgo.GroupedOptimizer(learning_rate=0.1, **options))
        model.compile(optimizer=optimizer, loss="mse", **own)
        if own is not settings:
            optimizer.build(model.trainable_variables)
        trained = state(fit(model, epochs=2))
        # The paths of a subclassed model are others, and so is its fingerprint.
        found.append([value for value in trained if value.dtype.kind == "f"])
    assert_equal(*found, rtol=1e-5, atol=1e-6)
