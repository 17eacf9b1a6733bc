"""What the rules of this package share: checked numbers, and scalars made once per step."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from keras_groupopt.rules import checks

Tensor = Any

_LIMITS = ("clipnorm", "clipvalue", "global_clipnorm")


class UpdateRule(keras.optimizers.Optimizer):
    """A `keras.optimizers.Optimizer` that a rule of this package is a subclass of.

    Slots have the dtype of their variable. The arithmetic is done in float32 at least. A subclass
    names in `arguments` what its constructor takes beside these, and keeps each under its name.

    Args:
        learning_rate: The step size: a number of at least 0, a Keras learning-rate schedule, or a
            callable without arguments.
        **kwargs: What every Keras optimizer takes.

    Raises:
        ValueError: If a number among them is negative or not finite.
    """

    arguments: ClassVar[tuple[str, ...]] = ()
    weight_decay: float | None

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        if isinstance(learning_rate, numbers.Real):
            # Keras refuses integers and NumPy scalars.
            learning_rate = checks.amount("learning_rate", learning_rate)
        if kwargs.get("weight_decay") is not None:
            kwargs["weight_decay"] = checks.amount("weight_decay", kwargs["weight_decay"])
        for name in _LIMITS:
            if kwargs.get(name) is not None:
                kwargs[name] = checks.positive(name, kwargs[name])
        super().__init__(learning_rate=learning_rate, **kwargs)
        self._this_step: _ThisStep = _ThisStep()

    def apply(self, grads: Sequence[Tensor], trainable_variables: Any = None) -> None:
        """Move all variables by one step.

        Args:
            grads: One gradient per variable; a variable whose gradient is `None` stays.
            trainable_variables: The variables, if not all of those the optimizer was built with.
        """
        self._this_step.scalars = {}
        try:
            super().apply(grads, trainable_variables)
        finally:
            # They may be tensors of a graph that ends here.
            self._this_step.scalars = None

    def once(self, dtype: str, make: Callable[[Tensor], Any]) -> Any:
        """Returns scalars of this step, made once for all variables of a dtype.

        For many small variables they cost more than the moments.

        Args:
            dtype: The dtype.
            make: From the step, counted from 1 and in `dtype`, to the scalars.
        """
        shared = self._this_step.scalars
        if shared is None:
            return make(self.step_number(dtype))
        if dtype not in shared:
            shared[dtype] = make(self.step_number(dtype))
        return shared[dtype]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Returns a context whose scalars of this step are its own, such as a trace within it."""
        shared = self._this_step.scalars
        self._this_step.scalars = {}
        try:
            yield
        finally:
            self._this_step.scalars = shared

    def step_number(self, dtype: str) -> Tensor:
        """Returns the number of this step, counted from 1, as a scalar of `dtype`."""
        return ops.cast(self.iterations, dtype) + 1.0

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments.

        Returns:
            A dictionary of plain values, from which `from_config` makes an equal optimizer.
        """
        config: dict[str, Any] = super().get_config()
        return config | {name: getattr(self, name) for name in self.arguments}

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Move one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape; on TensorFlow it may be
                `IndexedSlices`.
            variable: The variable, one of those the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        index, dtype = self._get_variable_index(variable), self.arithmetic_dtype(variable)
        # Slices become a dense tensor, so that repeated rows are summed before any square.
        dense = ops.cast(ops.reshape(gradient, variable.shape), dtype)
        update = self._update(index, dense, variable, ops.cast(learning_rate, dtype), dtype)
        self.assign_sub(variable, ops.cast(update, variable.dtype))

    def _update(
        self, index: Any, gradient: Tensor, variable: Any, rate: Tensor, dtype: str
    ) -> Tensor:
        """Returns what is to be taken off a variable, and moves its slots.

        Args:
            index: The variable's place among those the optimizer was built with.
            gradient: Its gradient, dense and in `dtype`.
            variable: The variable.
            rate: The rate of this step, in `dtype`.
            dtype: What the arithmetic is done in.
        """
        raise NotImplementedError

    def _moved(self, slot: Any, value: Tensor, share: Any) -> Tensor:
        """Moves a mean by a share of the way to `value`, and returns it in the dtype of that."""
        old = ops.cast(slot, value.dtype)
        new = old + (value - old) * share
        self.assign(slot, ops.cast(new, slot.dtype))
        return new

    @staticmethod
    def arithmetic_dtype(variable: Any) -> str:
        """Returns the dtype that a variable is moved in."""
        return str(keras.backend.result_type(variable.dtype, "float32"))


class _ThisStep:
    """What the variables of one `apply` share, by dtype; `None` outside of it.

    An object of our own, since Keras tracks containers that are set on an optimizer.
    """

    scalars: dict[str, Any] | None = None
