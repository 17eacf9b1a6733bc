"""The base of this package's rules: checked arguments, slots, and scalars made once per step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.arguments import set_checked
from keras_groupopt.base.checks import check_number, check_positive, optional
from keras_groupopt.rules.scalars import scalar

Tensor = Any

_OPTIONS = {
    "weight_decay": optional(check_number),
    "clipnorm": optional(check_positive),
    "clipvalue": optional(check_positive),
    "global_clipnorm": optional(check_positive),
}


class Untracked:
    """Holds values of an optimizer that Keras must neither track nor save.

    Keras looks into containers and optimizers that are attributes, but not into this object.
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class NumbersIn:
    """The numbers of a rule: Python numbers, or scalars of one dtype if schedules drive them.

    Args:
        dtype: The dtype.
        rule: The rule, whose arguments are the attributes.
    """

    def __init__(self, dtype: str, rule: Any) -> None:
        self.dtype = dtype
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return scalar(getattr(self._rule, name), self.dtype)


class UpdateRule(keras.optimizers.Optimizer):
    """The base class of this package's rules.

    Slots have the dtype of their variable. The arithmetic is done in float32 or wider.

    A subclass declares the arguments of its constructor as fields (`base/arguments.py`), names its
    slots in `slots`, and defines `_update`.

    Args:
        learning_rate: The step size: a number of at least 0, a Keras learning-rate schedule, or a
            callable without arguments.
        **kwargs: The options of every Keras optimizer.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument has the wrong type.
    """

    # The names of the state variables that each variable has, by attribute.
    slots: ClassVar[Mapping[str, str]] = {}
    # The attributes that a fused step takes, in its order; none without a fused step.
    fused_slots: ClassVar[tuple[str, ...]] = ()

    weight_decay: float | None
    # The arguments of the constructor beside those of every Keras optimizer.
    arguments: ClassVar[tuple[dataclasses.Field[Any], ...]] = ()
    default_learning_rate: ClassVar[float] = 0.001

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields = {n: v for n, v in vars(cls).items() if isinstance(v, dataclasses.Field)}
        for name, argument in fields.items():
            argument.name = name
            delattr(cls, name)
        if fields:
            cls.arguments = (*cls.arguments, *fields.values())
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        where = type(self).__name__
        if isinstance(learning_rate, (str, type, keras.optimizers.Optimizer)):
            wraps = any(argument.name == "rule" for argument in self.arguments)
            advice = f"Name the rule: `{where}(rule=...)`." if wraps else ""
            raise TypeError(
                "`learning_rate` must be a number, a schedule or a function without arguments. "
                f"Received: learning_rate={learning_rate!r} in {where}. {advice}".rstrip()
            )
        if isinstance(learning_rate, numbers.Real):
            # Keras refuses integers and NumPy scalars.
            learning_rate = check_number("learning_rate", learning_rate, where=where)
        for name, check in _OPTIONS.items():
            if name in kwargs:
                kwargs[name] = check(name, kwargs[name], where=where)
        super().__init__(learning_rate=learning_rate, **kwargs)
        # The scalars that the variables of one `apply` share, by dtype; `None` outside of `apply`.
        self._this_step: Any = Untracked(scalars=None)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of each variable.

        Args:
            variables: The trainable variables, as `keras.Variable`s.
        """
        if self.built:
            return
        super().build(variables)
        made = self.add_optimizer_variables(variables, list(self.slots.values()))
        for attribute, slot in zip(self.slots, made, strict=True):
            setattr(self, attribute, slot)
        self._build_more(variables)

    def _build_more(self, variables: Sequence[Any]) -> None:
        """Creates the state that is not in `slots`."""

    def _add_scalars(self, slot: Sequence[Any], name: str) -> list[Any]:
        """Creates a float32 scalar for each variable that has a slot."""
        return [
            None if own is None else self.add_variable((), dtype="float32", name=name)
            for own in slot
        ]

    def _add_copies(self, variables: Sequence[Any], name: str) -> list[Any]:
        """Creates a slot that starts as a copy of each variable."""
        return [
            None
            if compat.overwritten_by_gradient(variable)
            else self.add_variable_from_reference(
                variable, name=name, initializer=backend.copy_of(variable)
            )
            for variable in variables
        ]

    def apply(self, grads: Sequence[Tensor], trainable_variables: Any = None) -> None:
        """Moves all variables by one step.

        Args:
            grads: One gradient per variable; a variable whose gradient is `None` stays.
            trainable_variables: The variables. Default: all that the optimizer was built with.
        """
        self._this_step.scalars = {}
        try:
            super().apply([backend.as_computable(g) for g in grads], trainable_variables)
        finally:
            # They may be tensors of a graph that ends here.
            self._this_step.scalars = None

    def corrections(self, dtype: str) -> Any:
        """Returns what `_corrections` does, made once per step for all variables of a dtype.

        For many small variables these scalars cost more than the moments.

        Args:
            dtype: The dtype of the arithmetic.
        """
        shared = self._this_step.scalars
        if shared is not None and dtype in shared:
            return shared[dtype]
        step = ops.cast(self.iterations, dtype) + 1.0
        made = self._corrections(step, NumbersIn(dtype, self))
        if shared is not None:
            shared[dtype] = made
        return made

    def _corrections(self, step: Tensor, own: Any) -> Any:
        """Returns scalars that depend on the step, which is counted from 1.

        Args:
            step: The step, in the dtype of the arithmetic.
            own: The numbers of this rule in that dtype, and the dtype; see `NumbersIn`.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Returns a context with scalars of its own, for a trace within the step."""
        shared = self._this_step.scalars
        self._this_step.scalars = {}
        try:
            yield
        finally:
            self._this_step.scalars = shared

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments.

        Returns:
            A dictionary of plain values, from which `from_config` makes an equal optimizer.
        """
        config: dict[str, Any] = super().get_config()
        return config | {field.name: getattr(self, field.name) for field in self.arguments}

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Moves one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape; on TensorFlow it may be
                `IndexedSlices`.
            variable: A variable that the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        at, dtype = compat.place_in(self, variable), self.arithmetic_dtype(variable)
        # Slices become a dense tensor, so that repeated rows are summed before any square.
        dense = ops.cast(ops.reshape(gradient, variable.shape), dtype)
        rate = ops.cast(learning_rate, dtype)
        update = self._update(at, dense, variable, rate, NumbersIn(dtype, self))
        self.assign_sub(variable, ops.cast(update, variable.dtype))

    def _update(self, at: int, gradient: Tensor, variable: Any, rate: Tensor, own: Any) -> Tensor:
        """Moves a variable's slots, and returns what to subtract from the variable.

        Args:
            at: The variable's place among those the optimizer was built with.
            gradient: Its gradient, dense and in the dtype of the arithmetic.
            variable: The variable.
            rate: The rate of this step, in that dtype.
            own: The numbers of this rule in that dtype, and the dtype; see `NumbersIn`.
        """
        raise NotImplementedError

    def _moved(self, slot: Any, value: Tensor, share: Any) -> Tensor:
        """Moves a mean by a share of the way to `value`, and returns it in the dtype of `value`."""
        old = ops.cast(slot, value.dtype)
        new = old + (value - old) * share
        self.assign(slot, ops.cast(new, slot.dtype))
        return new

    @staticmethod
    def arithmetic_dtype(variable: Any) -> str:
        """Returns the dtype of the arithmetic that moves a variable."""
        return str(keras.backend.result_type(variable.dtype, "float32"))


def _constructor(cls: type[UpdateRule]) -> Callable[..., None]:
    """Returns an `__init__` that takes a rate, the arguments of a rule, and Keras' options."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults: dict[str, Any] = {"learning_rate": cls.default_learning_rate}
    defaults |= {argument.name: argument.default for argument in cls.arguments}
    signature = inspect.Signature(
        [
            inspect.Parameter("self", kind),
            *(inspect.Parameter(name, kind, default=value) for name, value in defaults.items()),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    )

    def construct(self: UpdateRule, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        UpdateRule.__init__(self, values["learning_rate"], **values["kwargs"])
        set_checked(self, cls.arguments, values)

    construct.__signature__ = signature  # type: ignore[attr-defined]
    return construct
