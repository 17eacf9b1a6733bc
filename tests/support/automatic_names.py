"""A model whose layers all have automatic names, trained, and described for another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
from chosen_gradients import groups_of, mean_output, weights
from models import arrays

import keras_groupopt as kgo


def make_model() -> keras.Model:
    """Two towers from the same code and a head, added up; all weights 0."""

    def dense() -> keras.Layer:
        return keras.layers.Dense(1, kernel_initializer="zeros")

    inputs = keras.Input((1,))
    outputs = [keras.Sequential([keras.Input((1,)), dense()])(inputs) for _ in range(2)]
    outputs += [dense()(inputs) for _ in range(2)]
    return keras.Model(inputs, keras.layers.Add()(outputs))


def make_optimizer(model: keras.Model | None) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(
        [
            kgo.Group("first", "sequential", learning_rate_ratio=0.5),
            kgo.Group("second", "sequential_1", learning_rate_ratio=0.25, weight_decay=0.5),
            kgo.Group("head", "dense_1/kernel", frozen=True),
        ],
        model=model,
        rule=kgo.rule("sgd", momentum=0.5),
        learning_rate=1.0,
    )


def fit(model: keras.Model, steps: int) -> None:
    model.fit(np.ones((steps, 1)), np.zeros((steps, 1)), batch_size=1, shuffle=False, verbose=0)


def train(with_model: bool) -> keras.Model:
    """Two steps from zero."""
    model = make_model()
    model.compile(optimizer=make_optimizer(model if with_model else None), loss=mean_output)
    fit(model, 2)
    return model


def report(model: keras.Model) -> dict[str, Any]:
    """What must be the same in every process, and, last, what must not."""
    optimizer = model.optimizer
    config = optimizer.get_config()
    config.pop("name")  # automatic too
    found = {
        "groups": groups_of(optimizer),
        "plan": optimizer.plan.to_dict(),
        "config": config,
        "state": [value.tolist() for value in arrays(optimizer.variables)],
        "weights": weights(model),
        "names": [layer.name for layer in model.layers],
    }
    return json.loads(json.dumps(found))


def continued(path: Path | str) -> dict[str, Any]:
    """The report after two more steps of a saved model, or of saved weights."""
    if str(path).endswith(".keras"):
        model = keras.models.load_model(path)
    else:
        model = make_model()
        model.compile(optimizer=make_optimizer(model), loss=mean_output)
        model.load_weights(path)
    fit(model, 2)
    return report(model)
