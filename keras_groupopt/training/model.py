"""Functional and Sequential models that train with the gradients of a gradient rule."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base import compat
from keras_groupopt.training.gradient_rule import GradientRule, check_rule
from keras_groupopt.training.sharpness_aware import SharpnessAware

_register = keras.saving.register_keras_serializable(package="keras_groupopt")
# Methods of a model that define its training, and that a new model of its layers would not have.
_OWN_TRAINING = ("call", "compute_loss", "compute_metrics", "test_step", "train_step")


@_register
class SharpnessAwareModel(SharpnessAware, compat.Functional):
    """A functional model that trains with the gradients of a gradient rule.

    Otherwise it is `keras.Model(inputs, outputs)`. `kgo.SharpnessAware` describes the training
    step.

    Args:
        *args: `inputs` and `outputs`, as for `keras.Model`.
        gradient_rule: A `kgo.GradientRule`. Default: `kgo.SingleGradient()`,
            ordinary training.
        **kwargs: `name`, as for `keras.Model`.

    Raises:
        TypeError: If `gradient_rule` is not a gradient rule.
        ValueError: If the rule belongs to another model.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> inputs = keras.Input((4,))
    >>> outputs = keras.layers.Dense(2, name="head")(inputs)
    >>> model = kgo.SharpnessAwareModel(inputs, outputs, gradient_rule=kgo.ASAM(0.5))
    >>> model.gradient_rule
    ASAM(rho=0.5, eta=0.01)
    """


@_register
class SharpnessAwareSequential(SharpnessAware, keras.Sequential):
    """A Sequential model that trains with the gradients of a gradient rule.

    Args:
        *args: `layers`, as for `keras.Sequential`.
        gradient_rule: A `kgo.GradientRule`. Default: `kgo.SingleGradient()`,
            ordinary training.
        **kwargs: `name`, as for `keras.Sequential`.

    Raises:
        TypeError: If `gradient_rule` is not a gradient rule.
        ValueError: If the rule belongs to another model.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> model = kgo.SharpnessAwareSequential(
    ...     [keras.Input((4,)), keras.layers.Dense(2, name="head")], gradient_rule=kgo.SAM(0.1))
    >>> model.gradient_rule
    SAM(rho=0.1)
    """


def sharpness_aware(model: Any, rule: GradientRule) -> Any:
    """Returns a new model of the same layers that trains with the gradients of a gradient rule.

    Both models share the layers, and so the weights and their layer paths: training one model
    trains the other. The new model is not compiled. Compile it with `optimizer=model.optimizer` to
    keep the state of a `GroupedOptimizer`.

    Args:
        model: A functional or Sequential model. If your model is a subclass with methods for
            training, add `kgo.SharpnessAware` to its bases instead.
        rule: A `kgo.GradientRule`.

    Returns:
        A `SharpnessAwareModel` or `SharpnessAwareSequential`.

    Raises:
        TypeError: If `rule` is not a gradient rule, or `model` is another kind of model.
        ValueError: If `rule` belongs to another model.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> trained = kgo.sharpness_aware(model, kgo.SAM(0.05))
    >>> trained.get_layer("head") is model.get_layer("head")
    True
    """
    check_rule(rule, "rule")
    if not isinstance(model, keras.Model):
        swapped = isinstance(model, GradientRule)
        advice = "Swap the arguments." if swapped else "Pass a model."
        raise TypeError(
            f"`model` must be a functional or Sequential model. Received: model={model!r}. {advice}"
        )
    plain: Any = keras.Sequential if isinstance(model, keras.Sequential) else compat.Functional
    known = type(model) in (SharpnessAwareModel, SharpnessAwareSequential)
    own = [
        f"`{name}`"
        for name in _OWN_TRAINING
        if not known and getattr(type(model), name, None) is not getattr(plain, name)
    ]
    if not isinstance(model, plain) or own:
        name = type(model).__name__
        raise TypeError(
            "`model` must be a functional or Sequential model that trains as Keras does. "
            f"Received: {name}{' with its own ' * bool(own)}{', '.join(own)}. Make it "
            f"`class {name}(kgo.SharpnessAware, ...)`, and pass "
            f"`gradient_rule={type(rule).__name__}(...)`."
        )
    if isinstance(model, keras.Sequential):
        return SharpnessAwareSequential(
            compat.all_layers(model), name=model.name, gradient_rule=rule
        )
    inputs, outputs = compat.structures(model)
    return SharpnessAwareModel(inputs, outputs, name=model.name, gradient_rule=rule)
