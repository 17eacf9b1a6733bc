"""Gradient rules: small classes that turn the gradients of a batch into those to use."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from keras_groupopt.base.checks import check_count, check_scalar
from keras_groupopt.plan.group import as_exclusion
from keras_groupopt.plan.plan_dict import describe_scalar
from keras_groupopt.schedules import serialization
from keras_groupopt.selectors import Selector
from keras_groupopt.step.scalar import refuse_to_set_schedule
from keras_groupopt.training.batch import Batch

Tensor = Any
_NEW_RULE = "Compile `kgo.sharpness_aware(model, rule)` with a new rule."


class Hyperparameter:
    """A number >= 0, or a schedule over optimizer steps, as an attribute of a gradient rule.

    A number can be set while the model trains, without compiling the step anew. In a rule's
    `gradients` read it as `batch.scalar(name)`.

    Raises:
        ValueError: If a value that is set is negative or not finite.
        TypeError: If a value is neither a number nor a schedule. Once the model is compiled, if a
            schedule is set, or a number in the place of a schedule.

    Example:
    >>> import keras_groupopt as kgo
    >>> rule = kgo.SAM(0.05)
    >>> rule.rho = 0.1
    >>> rule.rho
    0.1
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, rule: Any, owner: type | None = None) -> Any:
        if rule is None:
            return self
        return rule._present(self._name)

    def __set__(self, rule: Any, value: Any) -> None:
        check_made(rule)
        rule._declare(self._name, value)


class GradientRule:
    """Base class of rules that decide which gradient of a batch the optimizer gets.

    A subclass defines one method, `gradients`, and declares:

    * an attribute `name = kgo.Hyperparameter()` per number or schedule, set in `__init__`;
    * `slots`, the names of arrays beside each perturbed weight (float32, zeros at first), which a
      `GroupedOptimizer` keeps and saves;
    * `selectors`, the names of attributes that hold selectors;
    * `every`, an integer, if each `every`-th optimizer step differs from the others.
      `batch.is_due` is true in these steps.

    Other arguments of `__init__` belong in `get_config`. To save a model, register the class with
    `keras.saving.register_keras_serializable`.

    Args:
        exclude_from_perturbation: A selector of variables that are never perturbed and not counted
            in norms. They too get the gradient of the last pass. Frozen groups are never
            perturbed. Default: none.

    Raises:
        TypeError: If `exclude_from_perturbation` is not a selector.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> class SignPerturbation(kgo.GradientRule):
    ...     rho = kgo.Hyperparameter()
    ...     def __init__(self, rho=0.01, exclude_from_perturbation=()):
    ...         super().__init__(exclude_from_perturbation)
    ...         self.rho = rho
    ...     def gradients(self, batch):
    ...         rho = batch.scalar("rho")
    ...         return batch.gradients_at([rho * keras.ops.sign(g) for g in batch.gradients])
    >>> SignPerturbation(0.5).get_config()
    {'exclude_from_perturbation': [], 'rho': 0.5}
    """

    slots: ClassVar[tuple[str, ...]] = ()
    selectors: ClassVar[tuple[str, ...]] = ("exclude_from_perturbation",)
    # Whether `gradients` is called at all.
    perturbs: ClassVar[bool] = True
    # Each `every`-th optimizer step is due. The number is fixed once the model is compiled.
    every: int = 1
    _attachment: weakref.ref[Any] | None = None

    def __init__(self, exclude_from_perturbation: Any = ()) -> None:
        self._declared: dict[str, Any] = {}
        # Numbers that were set to another value than the declared one before a variable holds it.
        self._current: dict[str, float] = {}
        self.exclude_from_perturbation = exclude_from_perturbation

    def gradients(self, batch: Batch) -> Sequence[Tensor]:
        """Returns the gradients to use, one per gradient in `batch.gradients`.

        Args:
            batch: The gradients of the first pass, and a way to take another one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method `gradients(self, batch)`. Define it."
        )

    @property
    def label(self) -> str:
        """The rule with its present hyperparameters, as text."""
        pairs = [f"{name}={describe_scalar(getattr(self, name))}" for name in self._declared]
        excluded = self.exclude_from_perturbation
        if isinstance(excluded, Selector):
            pairs.append(f"exclude_from_perturbation={excluded.describe()}")
        return f"{type(self).__name__}({', '.join(pairs)})"

    def __repr__(self) -> str:
        return self.label

    @property
    def declared(self) -> dict[str, Any]:
        """The declared value of each hyperparameter, by name."""
        return dict(self._declared)

    @property
    def current(self) -> dict[str, float]:
        """The present value of each number that differs from the declared one, by name."""
        present = {name: getattr(self, name) for name in self._declared}
        return {name: value for name, value in present.items() if value != self._declared[name]}

    def _present(self, name: str) -> Any:
        if name not in self._declared:
            raise AttributeError(f"`{name}` of {type(self).__name__} is not set.")
        scalar = self._scalar(name)
        if scalar is None or scalar.variable is None:
            return self._current.get(name, self._declared[name])
        # The shortest decimal that rounds to the float32 value: 0.05, not 0.05000000074505806.
        return float(str(np.float32(keras.ops.convert_to_numpy(scalar.variable))))

    def _declare(self, name: str, value: Any) -> None:
        value = check_scalar(name, value, where=type(self).__name__)
        if value is None:
            raise TypeError(
                f"`{name}` must be a number or a schedule over optimizer steps. Received: "
                f"{name}=None in {type(self).__name__}."
            )
        if not self._is_compiled():
            self._declared[name] = value
            self._current.pop(name, None)
            return
        if not isinstance(value, float):
            raise TypeError(
                f"`{name}` must be a number once the model is compiled, as a compiled step would "
                f"ignore the change. Received: {name}={describe_scalar(value)}. {_NEW_RULE}"
            )
        scalar = self._scalar(name)
        if scalar is not None:
            scalar.set(value)
            return
        # The optimizer is not built yet, and builds what was declared when the model was compiled.
        refuse_to_set_schedule(name, self._declared[name], value, type(self).__name__)
        self._current[name] = value
        self._attached().wanted.late[name] = value

    def _attached(self) -> Any:
        """Returns the attachment of the rule to its model, or `None`."""
        return None if self._attachment is None else self._attachment()

    def _is_compiled(self) -> bool:
        attachment = self._attached()
        return attachment is not None and attachment.wanted is not None

    def __setattr__(self, name: str, value: Any) -> None:
        # A compiled step has read these.
        if (name == "every" or name in self.selectors) and self._is_compiled():
            raise AttributeError(
                f"`{name}` must be set before the model is compiled, as a compiled step would "
                f"ignore the change. Received: {name}={value!r}. {_NEW_RULE}"
            )
        if name == "every":
            value = check_count(name, value, 1, where=type(self).__name__)
        elif name in self.selectors:
            try:
                value = as_exclusion(value) or ()
            except (TypeError, ValueError) as error:
                text = str(error).replace("exclude_from_decay", name)
                raise type(error)(f"In {type(self).__name__}: {text}") from error
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the present numbers, and belongs to no model.
        own = {"_declared": dict(self._declared), "_current": self.current, "_attachment": None}
        return {**vars(self), **own}

    def _scalar(self, name: str) -> Any:
        """Returns the scalar that holds a hyperparameter's present value, once it is made."""
        attachment = self._attached()
        state = None if attachment is None else attachment.state
        return None if state is None else state.scalars[name]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, and numbers that were set later, as plain JSON."""
        attachment = self._attached()
        catalog = None if attachment is None else attachment.catalog()
        config: dict[str, Any] = {}
        for name in self.selectors:
            selector = getattr(self, name)
            found = isinstance(selector, Selector)
            config[name] = selector.get_config(catalog) if found else []
        where = f"of {type(self).__name__}"
        for name, declared in self._declared.items():
            config[name] = serialization.serialize_scalar(declared, f"{name} {where}")
        return {**config, "current": self.current} if self.current else config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GradientRule:
        """Returns the rule that `get_config` described."""
        arguments = dict(config)
        current = arguments.pop("current", {})
        for name in cls.selectors:
            if isinstance(arguments.get(name), dict):
                arguments[name] = Selector.from_config(arguments[name])
        for name, value in arguments.items():
            if isinstance(inspect.getattr_static(cls, name, None), Hyperparameter):
                arguments[name] = serialization.deserialize_scalar(
                    value, f"{name} of {cls.__name__}"
                )
        rule = cls(**arguments)
        rule._current = dict(current)
        return rule


def check_made(rule: GradientRule) -> None:
    """Refuses a rule whose `__init__` did not call that of `GradientRule`.

    Raises:
        TypeError: If `__init__` was not called.
    """
    if "_declared" not in vars(rule):
        name = type(rule).__name__
        raise TypeError(
            f"`{name}.__init__` must call `super().__init__(exclude_from_perturbation)` first."
        )


def check_rule(rule: Any, argument: str = "gradient_rule") -> None:
    """Refuses what is not a gradient rule, and a rule whose `__init__` is not complete.

    Raises:
        TypeError: If it is refused.
    """
    if not isinstance(rule, GradientRule):
        swapped = isinstance(rule, keras.Model)
        example = rule.__name__ if isinstance(rule, type) else "kgo.SAM"
        advice = (
            "Swap the arguments." if swapped else f"Pass an instance, such as `{example}(...)`."
        )
        raise TypeError(
            f"`{argument}` must be a `kgo.GradientRule`. Received: "
            f"{argument}={rule!r} of type {type(rule).__name__}. {advice}"
        )
    check_made(rule)


@keras.saving.register_keras_serializable(package="keras_groupopt")
class SingleGradient(GradientRule):
    """The unchanged gradient of the batch: ordinary training, in one pass.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.SingleGradient()
    SingleGradient()
    """

    perturbs = False

    def __init__(self) -> None:
        super().__init__()

    def gradients(self, batch: Batch) -> Sequence[Tensor]:
        """Returns the gradients of the first pass."""
        return batch.gradients

    def get_config(self) -> dict[str, Any]:
        """Returns no arguments, as there are none."""
        return {}
