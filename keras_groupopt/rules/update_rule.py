"""What the rules of this package share: checked numbers, and scalars made once per step."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
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

    @staticmethod
    def arithmetic_dtype(variable: Any) -> str:
        """Returns the dtype that a variable is moved in."""
        return str(keras.backend.result_type(variable.dtype, "float32"))

    @staticmethod
    def dense(gradient: Tensor, variable: Any, dtype: str) -> Tensor:
        """Returns a gradient as a tensor of `dtype` and of its variable's shape.

        Slices become a dense tensor, so that repeated rows are summed before any square.
        """
        return ops.cast(ops.reshape(gradient, variable.shape), dtype)


class _ThisStep:
    """What the variables of one `apply` share, by dtype; `None` outside of it.

    An object of our own, since Keras tracks containers that are set on an optimizer.
    """

    scalars: dict[str, Any] | None = None


def copy_of(variable: Any) -> Callable[..., Tensor]:
    """Returns an initializer that copies a variable: on JAX shared buffers cannot be donated."""

    def initializer(shape: Any, dtype: Any = None) -> Tensor:
        del shape
        value = ops.convert_to_tensor(variable)
        return ops.copy(ops.cast(value, dtype or value.dtype))

    return initializer
