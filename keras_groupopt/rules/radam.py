"""RAdam: Adam that waits until its second moment can be trusted.

In the first steps Adam divides by a second moment estimated from a handful of gradients. RAdam
measures how many gradients the estimate is worth, moves without it while there are too few, and
then lets it in by degrees. That is what a warm-up of the learning rate is for, so it needs none.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

# A tensor is of the backend's own type, which is known only when Keras has been imported.
Tensor = Any

# The paper's bound: with fewer than about five gradients the variance has no closed form.
_SHORTEST_AVERAGE = 5.0


@keras.saving.register_keras_serializable(package="keras_groupopt")
class RAdam(keras.optimizers.Optimizer):
    """Adam whose adaptive part is switched on, and rectified, as its variance becomes known.

    With gradient `g`, step `t` counted from 1, η = `learning_rate`, β₁ = `beta_1`,
    β₂ = `beta_2` and ε = `epsilon`:

        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g²
        ρ∞ = 2 / (1 - β₂) - 1
        ρ  = ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ)                                 (gradients `v` is worth)
        r  = √( (ρ - 4)(ρ - 2) ρ∞ / ((ρ∞ - 4)(ρ∞ - 2) ρ) )            (rectification)

        w ← w - η m / (1 - β₁ᵗ) · r √(1 - β₂ᵗ) / (√v + ε)             if ρ > 5
        w ← w - η m / (1 - β₁ᵗ)                                       otherwise

    The numbers are those of `torch.optim.RAdam`. With the default `beta_2` the first five steps
    are not adaptive; with `beta_2` of 2/3 or less no step ever is.

    Moments have the dtype of their variable. The arithmetic is done in float32 at least, so a
    bfloat16 variable is divided by a true bias correction and not by `1 - 1`.

    Args:
        learning_rate: The step size η: a number, a Keras learning-rate schedule, or a callable
            without arguments. Default: 0.001.
        beta_1: Decay of the mean of the gradients per step, in [0, 1). Default: 0.9.
        beta_2: Decay of the mean of the squared gradients per step, in [0, 1). Default: 0.999.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-8.
        **kwargs: What every Keras optimizer takes: `weight_decay` (decoupled), `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`, `name`.

    Raises:
        ValueError: `beta_1` or `beta_2` is not in [0, 1), or `epsilon` is negative.

    Example:
        >>> import keras
        >>> from keras_groupopt.rules import RAdam
        >>> weight = keras.Variable([1.0, 2.0])
        >>> gradient = keras.ops.convert_to_tensor([0.5, -0.25])
        >>> optimizer = RAdam(learning_rate=0.1)
        >>> optimizer.apply([gradient], [weight])
        >>> [round(float(value), 4) for value in keras.ops.convert_to_numpy(weight)]
        [0.95, 2.025]

    Reference:
        Liu et al. 2019, "On the Variance of the Adaptive Learning Rate and Beyond",
        arXiv:1908.03265.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        if isinstance(learning_rate, numbers.Real):
            # Keras refuses integers and NumPy scalars.
            learning_rate = float(learning_rate)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta_1: float = _checked("beta_1", beta_1, below=1.0)
        self.beta_2: float = _checked("beta_2", beta_2, below=1.0)
        self.epsilon: float = _checked("epsilon", epsilon, below=math.inf)
        self._this_step: _ThisStep = _ThisStep()

    def build(self, variables: Sequence[Any]) -> None:
        """Create the two moments of each variable.

        Args:
            variables: The trainable variables, as `keras.Variable`s of any shape.
        """
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

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

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        """Move one variable by one step.

        Args:
            gradient: The gradient, of the variable's shape; on TensorFlow it may be
                `IndexedSlices`.
            variable: The variable, one of those the optimizer was built with.
            learning_rate: The rate of this step, a scalar.
        """
        index = self._get_variable_index(variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        dtype = keras.backend.result_type(variable.dtype, "float32")
        # Slices become a dense tensor here, so that repeated rows are summed before the square.
        gradient = ops.cast(ops.reshape(gradient, variable.shape), dtype)
        old_m, old_v = ops.cast(momentum, dtype), ops.cast(velocity, dtype)
        m = old_m + (gradient - old_m) * (1.0 - self.beta_1)
        v = old_v + (ops.square(gradient) - old_v) * (1.0 - self.beta_2)
        self.assign(momentum, m)
        self.assign(velocity, v)

        correction, trusted, factor = self._scalars(dtype)
        rate = ops.cast(learning_rate, dtype) / correction
        rate = ops.where(trusted, rate * factor / (ops.sqrt(v) + self.epsilon), rate)
        self.assign_sub(variable, ops.cast(m * rate, variable.dtype))

    def _scalars(self, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
        """1 - β₁ᵗ, whether ρ > 5, and r √(1 - β₂ᵗ), at this step."""
        shared = {} if self._this_step.scalars is None else self._this_step.scalars
        if dtype not in shared:
            step = ops.cast(self.iterations, dtype) + 1.0
            correction = _bias_correction(self.beta_1, step)
            shared[dtype] = (correction, *_rectification(self.beta_2, step))
        return shared[dtype]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments.

        Returns:
            A dictionary of plain values, from which `from_config` makes an equal optimizer.
        """
        config: dict[str, Any] = super().get_config()
        config.update(beta_1=self.beta_1, beta_2=self.beta_2, epsilon=self.epsilon)
        return config


class _ThisStep:
    """What the variables of one `apply` share, by dtype; `None` outside of it.

    For many small variables the scalars cost more than the moments. An object of our own, since
    Keras tracks containers that are set on an optimizer.
    """

    scalars: dict[str, tuple[Tensor, Tensor, Tensor]] | None = None


def _checked(name: str, value: Any, below: float) -> float:
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if not 0 <= number < below:
        rule = f"less than {below:g}" if below < math.inf else "finite"
        raise ValueError(
            f"`{name}` must be a number of at least 0 and {rule}. Received: {name}={value!r}"
        )
    return number


def _decay_exponent(beta: float) -> float:
    """L in βᵗ = exp(-L t), taken in double precision: float32 does not tell 1 - 0.999 well."""
    return -math.log(beta) if beta > 0 else math.inf


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 - βᵗ without cancellation."""
    return -ops.expm1(step * -_decay_exponent(beta))


def _rectification(beta: float, step: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the second moment may be used at this step, and r √(1 - βᵗ) if it may."""
    longest = 2.0 / (1.0 - beta) - 1.0
    if longest <= _SHORTEST_AVERAGE:
        return False, 1.0
    length = _average_length(beta, longest, step)
    # Where it may not be used the value is not, but it must not be the root of a negative number.
    usable = ops.maximum(length, _SHORTEST_AVERAGE)
    constant = longest / ((longest - 4.0) * (longest - 2.0))
    squared = (usable - 4.0) * (usable - 2.0) / usable * constant
    return length > _SHORTEST_AVERAGE, ops.sqrt(squared * _bias_correction(beta, step))


def _average_length(beta: float, longest: float, step: Tensor) -> Tensor:
    """ρ at a step, to float32 rounding.

    As written, ρ is a small difference of two large numbers in the early steps (1999 - 1993 for
    β = 0.999), and float32 would leave a hundredth of r to chance. There the terms that cancel are
    removed by hand: with βᵗ = exp(-x), x = L t, and 1 / (exp x - 1) = 1/x - 1/2 + x/12 - x³/720 …,

        ρ = t (1 - x/6 + x³/360) + ρ∞ - 2/L        (error x⁵/15120)
    """
    exponent = _decay_exponent(beta)
    late = longest - 2.0 * step / ops.expm1(step * exponent)
    cubic = (exponent**3 / 360.0) * ops.square(step) - exponent / 6.0
    early = step * (1.0 + step * cubic) + (longest - 2.0 / exponent)
    return ops.where(step * exponent < 0.25, early, late)
