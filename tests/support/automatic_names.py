"""A model whose layers all have automatic names, trained, and described for another process."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
from chosen_gradients import groups_of, mean_output, weights

import keras_groupopt as kgo


def shift_names() -> None:
    """Makes and deletes layers, models and optimizers, as a notebook would have done before."""
    for _ in range(3):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(3)])
        keras.layers.BatchNormalization()
        keras.optimizers.SGD()
    gc.collect()


def make_model() -> keras.Model:
    """Two towers from the same code and a head, added up; all weights 0."""
    zeros = {"kernel_initializer": "zeros"}
    inputs = keras.Input((1,))
    outputs = [
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, **zeros)])(inputs)
        for _ in range(2)
    ]
    outputs += [keras.layers.Dense(1, **zeros)(inputs) for _ in range(2)]
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
    return json.loads(
        json.dumps(
            {
                "groups": groups_of(optimizer),
                "plan": optimizer.plan.to_dict(),
                "config": config,
                "state": optimizer_state(optimizer),
                "weights": weights(model),
                "names": [layer.name for layer in model.layers],
            }
        )
    )


def optimizer_state(optimizer: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(v)).tolist() for v in optimizer.variables]


def continued(path: Path | str) -> dict[str, Any]:
    """The report after two more steps of a saved model, or of saved weights."""
    if str(path).endswith(".keras"):
        model = keras.models.load_model(path, custom_objects={"mean_output": mean_output})
    else:
        model = make_model()
        model.compile(optimizer=make_optimizer(model), loss=mean_output)
        model.load_weights(path)
    fit(model, 2)
    return report(model)
