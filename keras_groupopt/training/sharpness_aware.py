"""The mixin for models whose training step lets a gradient rule choose the gradients."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from keras_groupopt.base import compat
from keras_groupopt.base.checks import is_schedule
from keras_groupopt.schedules.horizon import needs_horizon
from keras_groupopt.training.attachment import Attachment
from keras_groupopt.training.gradient_rule import GradientRule, SingleGradient, check_rule

_backend = importlib.import_module(f"keras_groupopt.training.{keras.backend.backend()}")


class SharpnessAware(_backend.TrainStep):  # type: ignore[name-defined]
    """Mixin for models: `fit` trains with the gradients of a gradient rule.

    Put it before the model's class, and pass `gradient_rule=` on to its `__init__`, as in the
    example. Without a rule the model trains as usual:

        class Classifier(kgo.SharpnessAware, keras.Model): ...

    For each batch, a rule such as `kgo.SAM` takes a second pass at perturbed weights. Then the
    weights are as before, bit for bit. Statistics of batch normalization, states of random
    generators, metrics and logs come from the first pass. The second pass has its dropout masks.
    Losses of layers (`add_loss`, regularizers) count in both. With gradient accumulation each
    micro-batch is perturbed by its own gradient. Under a distribution the perturbation uses the
    gradient over all replicas. If gradients of either pass are not finite, the optimizer gets them,
    and skips the step.

    The logs of `fit` get `gradient_norm`, the mean norm of the batches' gradients over all groups
    that are not frozen, also of variables that are not perturbed. With a rule that perturbs they
    also get `sam_gap`, the mean of the perturbed loss minus the loss over the batches that took a
    second pass. Each is NaN if there was no such batch with finite values. Evaluation takes one
    pass, and logs neither. If the model has metrics of these names, the logs show those.

    `.keras` files hold the rule and its present numbers, which are also part of the state of a
    `GroupedOptimizer`. Weights files fit the plain model. `keras.models.clone_model` copies layers
    and no rule: pass the clone to `kgo.sharpness_aware`.

    Args:
        *args: As for the model's class.
        gradient_rule: A `kgo.GradientRule`. Default: `kgo.SingleGradient()`,
            ordinary training.
        **kwargs: As for the model's class.

    Raises:
        TypeError: If `gradient_rule` is not a gradient rule.
        ValueError: If the rule belongs to another model.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> class Classifier(kgo.SharpnessAware, keras.Model):
    ...     def __init__(self, units, **options):
    ...         super().__init__(**options)
    ...         self.head = keras.layers.Dense(units, name="head")
    ...     def call(self, inputs):
    ...         return self.head(inputs)
    >>> model = Classifier(2, gradient_rule=kgo.SAM(0.05))
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    >>> model.gradient_rule.rho
    0.05
    """

    _attachment: Any = None
    # Whether the model is evaluating, and whether only the user's metrics are asked for.
    _evaluating = False
    _only_of_user = False

    def __init__(
        self, *args: Any, gradient_rule: GradientRule | None = None, **kwargs: Any
    ) -> None:
        rule = SingleGradient() if gradient_rule is None else gradient_rule
        if any(isinstance(argument, GradientRule) for argument in args):
            raise TypeError(
                "A gradient rule must be passed by name. Received: one by position. Write "
                "`gradient_rule=`."
            )
        check_rule(rule)
        if not isinstance(self, keras.Model):
            raise TypeError(
                "`kgo.SharpnessAware` must be a base beside a model's class. Received: "
                f"{type(self).__name__}, which is not a model. Write `class {type(self).__name__}"
                "(kgo.SharpnessAware, keras.Model)`."
            )
        super().__init__(*args, **kwargs)
        self._attachment = Attachment(rule, self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if keras.Model in order and order.index(keras.Model) < order.index(SharpnessAware):
            names = ", ".join(base.__name__ for base in cls.__bases__)
            raise TypeError(
                "`kgo.SharpnessAware` must come before the model's class, or it has no part in "
                f"training. Received: class {cls.__name__}({names})."
            )

    @property
    def gradient_rule(self) -> GradientRule:
        """The rule; its numbers can be set while the model trains."""
        return self._attachment.rule

    @gradient_rule.setter
    def gradient_rule(self, rule: GradientRule) -> None:
        check_rule(rule)
        if self.compiled:
            raise AttributeError(
                "`gradient_rule` must be set before the model is compiled. Received: "
                f"gradient_rule={rule.label} for a compiled model. Compile "
                "`kgo.sharpness_aware(model, rule)`, which shares the layers; with "
                "`optimizer=model.optimizer` it keeps the optimizer's state."
            )
        self._attachment = Attachment(rule, self)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model, as Keras does.

        Raises:
            TypeError: If the rule keeps state beside the weights, and the optimizer is not a
                `GroupedOptimizer`.
        """
        super().compile(*args, **kwargs)
        try:
            self._attachment.keep_in(self.optimizer)
        except BaseException:
            self.compiled = False
            raise

    def compile_from_config(self, config: Any) -> None:
        """Compiles the model as it was when it was saved."""
        cls = type(self)
        plain = cls.compile_from_config is SharpnessAware.compile_from_config
        if plain and cls.compile is not SharpnessAware.compile:
            warnings.warn(
                f"{cls.__name__} was loaded without being compiled, as its `compile` is its own: "
                "override `get_compile_config` and `compile_from_config` too, or call `compile`.",
                stacklevel=2,
            )
            return
        # Keras' method would not recognize this `compile`, and would pass it other arguments.
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as Keras does, and warns if the rule had no part in it."""
        if self.compiled:
            self._attachment.check_optimizer()
        before = self._radius()
        history: Any = super().fit(*args, **kwargs)
        if before == 0 == self._radius():
            warnings.warn(
                f"{self.gradient_rule.label} perturbed nothing at the first and the last step of "
                "this training, as `rho` was 0 there. Its schedule counts optimizer steps: does it "
                "begin beyond the end?",
                stacklevel=2,
            )
        # There may be no epoch left to train, or no variable.
        trained = bool(history.epoch) and bool(self.trainable_variables)
        if trained and self.gradient_rule.perturbs and not self._attachment.used:
            warnings.warn(
                f"{self.gradient_rule.label} had no part in this training: "
                f"{type(self).__name__} has a `train_step` of its own. Call "
                "`super().train_step(...)` in it.",
                stacklevel=2,
            )
        return history

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one batch, as Keras does."""
        if self.compiled:
            self._attachment.check_optimizer()
        return super().train_on_batch(*args, **kwargs)

    def _radius(self) -> float | None:
        """Returns a scheduled `rho` at the last step done, or before training at the first."""
        rho = getattr(self.gradient_rule, "rho", None)
        if not is_schedule(rho) or needs_horizon(rho) or not self.compiled:
            return None
        step = max(int(keras.ops.convert_to_numpy(self.optimizer.iterations)) - 1, 0)
        return float(keras.ops.convert_to_numpy(rho(step)))  # type: ignore[misc]

    @contextlib.contextmanager
    def _while(self, flag: str) -> Iterator[None]:
        before = getattr(self, flag)
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, before)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model, as Keras does."""
        with self._while("_evaluating"):
            return super().evaluate(*args, **kwargs)

    def test_step(self, *args: Any) -> Any:
        """Evaluates one batch, as Keras does."""
        with self._while("_evaluating"):
            return super().test_step(*args)

    @property
    def metrics(self) -> list[Any]:
        """The model's metrics, and those of the training step."""
        # Keras also reads this while it makes the model, when there is no attachment yet.
        own = self._attachment is not None and self.compiled and not self._only_of_user
        return [*super().metrics, *(self._attachment.metrics if own else ())]

    @property
    def metrics_variables(self) -> list[Any]:
        """The variables of the metrics, which a compiled step takes and returns."""
        own = () if self._attachment is None else self._attachment.own_variables
        return [*super().metrics_variables, *own]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the values of the metrics; those of the training step only in training."""
        # The user's metrics may have the same names, and take precedence.
        with self._while("_only_of_user"):
            results = dict(super().get_metrics_result())
        if not self._evaluating:
            for metric in self._attachment.metrics:
                results.setdefault(metric.name, metric.result())
        return results

    def get_config(self) -> dict[str, Any]:
        """Returns the model's config, with the gradient rule's."""
        cls = type(self.gradient_rule)
        if keras.saving.get_registered_object(keras.saving.get_registered_name(cls)) is not cls:
            warnings.warn(
                f"{cls.__name__} is not registered: `load_model` will need "
                f"`custom_objects={{'{cls.__name__}': {cls.__name__}}}`. Decorate it with "
                "`@keras.saving.register_keras_serializable()`.",
                stacklevel=2,
            )
        rule = keras.saving.serialize_keras_object(self.gradient_rule)
        return {**super().get_config(), "gradient_rule": rule}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the model that `get_config` described.

        Args:
            config: The config.
            custom_objects: Classes and functions that Keras does not know, by name. Default: none.
        """
        config = dict(config)
        rule = config.pop("gradient_rule", None)
        with compat.custom_objects(custom_objects):
            model = super().from_config(config)
            if isinstance(rule, dict):
                rule = keras.saving.deserialize_keras_object(rule)
            if rule is not None:
                model.gradient_rule = rule
        return model
