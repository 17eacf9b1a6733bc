"""The table of gradient rules, and small models for them: a new rule is one row of `RULES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import saving_models
import sharpness_reference as reference
from keras import ops

import keras_groupopt as kgo


@keras.saving.register_keras_serializable(package="sharpness_cases")
class Against(kgo.GradientRule):
    """A rule as one would write it: the gradient at rho against the gradient, weighted by signs."""

    rho = kgo.Hyperparameter()

    def __init__(self, rho: Any = 0.1, exclude_from_perturbation: Any = ()) -> None:
        super().__init__(exclude_from_perturbation)
        self.rho = rho

    def gradients(self, batch: kgo.Batch) -> Sequence[Any]:
        rho = batch.scalar("rho")
        return batch.gradients_at(
            [ops.cast(rho, g.dtype) * ops.sign(ops.convert_to_tensor(g)) for g in batch.gradients]
        )


# name: (a rule of this rho and these options, its paper, ε for the weights 3 and 4 and rho 0.5)
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[float, float]]] = {
    "SAM": (kgo.SAM, reference.SAM, (0.3, 0.4)),
    "ASAM": (
        kgo.ASAM,
        lambda rho: reference.ASAM(rho, 0.01),
        (0.5 * 3.01**2 * 3 / np.hypot(9.03, 16.04), 0.5 * 4.01**2 * 4 / np.hypot(9.03, 16.04)),
    ),
    "LookSAM": (
        lambda rho, **options: kgo.LookSAM(rho, every=2, **options),
        lambda rho: reference.LookSAM(rho, 2, 0.7),
        (0.3, 0.4),
    ),
    "GSAM": (kgo.GSAM, lambda rho: reference.GSAM(rho, 0.4), (0.3, 0.4)),
    "own": (Against, reference.Signs, (0.5, 0.5)),
}


def rule_of(name: str, rho: Any = 0.1, **options: Any) -> Any:
    return RULES[name][0](rho, **options)


def half_square(y_true: Any, y_pred: Any) -> Any:
    """Half the square of the output: with an input of 1 the gradient of a weight is the weight."""
    return 0.5 * ops.sum(ops.square(y_pred - y_true), axis=-1)


def weight(value: float, name: str, **options: Any) -> keras.Layer:
    """A layer of one weight."""
    constant = keras.initializers.Constant(value)
    options = {"use_bias": False, "kernel_initializer": constant, "name": name} | options
    return keras.layers.Dense(1, **options)


def weights_model(**values: float) -> keras.Model:
    """A weight per name, and an output for each, by name.

    After a step of SGD at rate 1 on ½‖w‖², the weights are −ε: w − (w + ε).
    """
    inputs = keras.Input((1,))
    return keras.Model(inputs, {name: weight(v, name)(inputs) for name, v in values.items()})


def sgd(model: Any, rate: float = 1.0, **options: Any) -> Any:
    return kgo.GroupedOptimizer(model=model, rule="sgd", learning_rate=rate, **options)


def step_on_weights(model: Any, steps: int = 1, **options: Any) -> dict[str, Any]:
    """Fits a compiled `weights_model` for so many steps; returns the history."""
    ones = np.ones((steps, 1), "float32")
    targets = dict.fromkeys(model.output_names, 0.0 * ones)
    settings = {"batch_size": 1, "verbose": 0, **options}
    return model.fit(ones, targets, **settings).history


def values_of(model: Any) -> list[float]:
    return [float(value.reshape(())) for value in model.get_weights()]


def network(kind: str = "nested") -> keras.Model:
    """The network of `network_reference`."""
    return saving_models.fill(saving_models.MODELS[kind]())
