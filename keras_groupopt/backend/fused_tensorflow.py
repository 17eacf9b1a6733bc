"""Steps of whole lists on TensorFlow: its training operations, or few plain ones per variable.

What is the same for all variables (rates, bias corrections, factors of decay and clipping) is made
once per dtype and not per variable: in a graph every operation costs its trace and its launch.
Variables are known by their handles, since Keras' and TensorFlow's own assignments would add casts
and reads to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_groupopt.backend.fused_step import FusedStep, ListStep
from keras_groupopt.backend.tensorflow_replicas import raw

Tensor = Any
# Takes the handle of a variable, its scaled gradient, and the handles of its slots.
Move = Callable[..., None]

_raw_ops = tf.raw_ops
_DTYPES = (tf.float32, tf.float64)
# Beside it a root of a second moment vanishes, so that a quotient by their sum is one by it alone.
_BEYOND_ROOTS = {tf.float32: 2.0**80, tf.float64: 2.0**500}


def fused_step(kind: str) -> FusedStep | None:
    """Returns the step of a rule on a list of variables, by its name; `None` where none is."""
    prepare = _PREPARE.get(kind)
    if prepare is None:
        return None

    def fused(step: ListStep) -> None:
        moves: dict[Any, tuple[_Scalars, Move]] = {}
        for own, gradient in step.pairs:
            if gradient.dtype not in moves:
                scalars = _Scalars(gradient.dtype, step)
                moves[gradient.dtype] = scalars, prepare(step.rule, scalars)
            scalars, move = moves[gradient.dtype]
            weight = raw(own.variable).handle
            if scalars.decay is not None and own.is_decayed:
                _decay(scalars, weight, None if own.anchor is None else raw(own.anchor).handle)
            move(weight, scalars.scaled(gradient), *(raw(slot).handle for slot in own.fused_slots))

    return fused


def are_fusible(gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[bool]:
    """Returns for each gradient and its variable whether a fused step takes them."""
    return [
        isinstance(gradient, tf.Tensor)
        and gradient.dtype in _DTYPES
        and gradient.dtype == variable.dtype
        # A gradient that has to be broadcast is the rule's own affair.
        and gradient.shape.is_compatible_with(variable.shape)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


class _Scalars:
    """What a step needs of scalars and of operations, for the variables of one dtype.

    Args:
        dtype: The dtype.
        step: The step.
    """

    def __init__(self, dtype: Any, step: ListStep) -> None:
        self.dtype = dtype
        self.name = dtype.name
        self.rate = self.of(step.rate)
        self.scale = None if step.scale is None else self.of(step.scale)
        self.decay = None if step.decay is None else self.of(step.decay)

    def of(self, value: Any) -> Tensor:
        """Returns a number or a scalar in the dtype."""
        if isinstance(value, (int, float)):
            return tf.constant(value, self.dtype)
        return tf.cast(value, self.dtype)

    def rounded(self, value: float) -> Tensor:
        """Returns a number in the dtype as Keras makes it of one: by way of float32."""
        return tf.cast(value, self.dtype)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Returns a gradient times the step's scale."""
        return gradient if self.scale is None else _raw_ops.Mul(x=gradient, y=self.scale)

    def read(self, handle: Tensor) -> Tensor:
        """Returns the value of a variable."""
        return _raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype)

    def moved(self, slot: Tensor, value: Tensor, share: Tensor) -> Tensor:
        """Moves a mean by a share of the way to `value`, and returns it."""
        old = self.read(slot)
        new = old + (value - old) * share
        _raw_ops.AssignVariableOp(resource=slot, value=new)
        return new


def _decay(own: _Scalars, weight: Tensor, anchor: Tensor | None) -> None:
    """Does `w ← w − decay · (w − anchor)`."""
    value = own.read(weight)
    if anchor is None:
        _raw_ops.AssignSubVariableOp(resource=weight, value=_raw_ops.Mul(x=value, y=own.decay))
    else:
        difference = _raw_ops.Sub(x=value, y=own.read(anchor))
        _raw_ops.ResourceApplyGradientDescent(var=weight, alpha=own.decay, delta=difference)


# The rules ------------------------------------------------------------------------------------
# Each takes the rule and what is the same for its variables, and returns what moves one.


def _adam_move(
    own: _Scalars, rule: Any, rate: Tensor, powers: tuple[Tensor, Tensor], epsilon: Tensor
) -> Move:
    """Makes `m ← β₁ m + (1 − β₁) g`, `v ← β₂ v + (1 − β₂) g²`, and a step by one operation.

    With the powers p₁ and p₂ it is `w ← w − rate √(1 − p₂) / (1 − p₁) · m / (√v + ε)`.
    """
    beta_1, beta_2 = own.of(rule.beta_1), own.of(rule.beta_2)

    def move(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
        _raw_ops.ResourceApplyAdam(
            var=weight,
            m=m,
            v=v,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=rate,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=epsilon,
            grad=gradient,
        )

    return move


def _step_number(own: _Scalars, rule: Any) -> Tensor:
    """Returns the number of this step, counted from 1."""
    return own.of(tf.convert_to_tensor(raw(rule.iterations)) + 1)


def _of_rounded_betas(own: _Scalars, rule: Any, step: Tensor) -> Tensor:
    """Returns what steps by the operation are multiplied by to be those of the rule.

    It forms 1 − β of a β in float32, which for 0.999 is a hundred-thousandth too small. While
    gradients stay alike, moments are then off by what bias corrections of both β differ by.
    """

    def ratio(beta: float) -> Tensor:
        rounded = own.dtype.as_numpy_dtype(beta).item()
        if rounded == beta:
            return own.of(1.0)
        return tf.math.expm1(step * math.log(rounded)) / tf.math.expm1(step * math.log(beta))

    return tf.sqrt(ratio(rule.beta_2)) / ratio(rule.beta_1)


def _adam(rule: Any, own: _Scalars) -> Move:
    step = _step_number(own, rule)
    powers = (tf.pow(own.rounded(rule.beta_1), step), tf.pow(own.rounded(rule.beta_2), step))
    epsilon = own.of(rule.epsilon)
    if not rule.amsgrad:
        rate = own.rate * _of_rounded_betas(own, rule, step)
        return _adam_move(own, rule, rate, powers, epsilon)
    # The operation for it is none that XLA has.
    rate = own.rate * tf.sqrt(1.0 - powers[1]) / (1.0 - powers[0])
    shares = [own.of(1.0 - beta) for beta in (rule.beta_1, rule.beta_2)]

    def move(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, largest: Tensor) -> None:
        mean = own.moved(m, gradient, shares[0])
        top = tf.maximum(own.read(largest), own.moved(v, tf.square(gradient), shares[1]))
        _raw_ops.AssignVariableOp(resource=largest, value=top)
        step = mean * rate / (tf.sqrt(top) + epsilon)
        _raw_ops.AssignSubVariableOp(resource=weight, value=step)

    return move


def _radam(rule: Any, own: _Scalars) -> Move:
    correction, trusted, factor = rule.corrections(own.name)
    plain = own.rate / correction
    made_up = _of_rounded_betas(own, rule, _step_number(own, rule))
    # Without the second moment `plain · m` is left, exactly, as the number is a power of two.
    beyond = own.of(_BEYOND_ROOTS[own.dtype])
    rate = tf.where(trusted, plain * factor * made_up, plain * beyond)
    epsilon = tf.where(trusted, own.of(rule.epsilon), beyond)
    none = own.of(0.0)
    return _adam_move(own, rule, rate, (none, none), epsilon)


def _adan(rule: Any, own: _Scalars) -> Move:
    of_m, of_d, of_root = rule.corrections(own.name)
    of_m, of_d, of_root = of_m * own.rate, of_d * own.rate, own.of(of_root)
    beta_2, epsilon = own.of(rule.beta_2), own.of(rule.epsilon)
    shares = [own.of(1.0 - beta) for beta in (rule.beta_1, rule.beta_2, rule.beta_3)]
    one = tf.constant(1.0)

    def move(weight: Tensor, gradient: Tensor, *slots: Tensor) -> None:
        m, d, n, last, started = slots
        # The mark is 1, or 0 if there is no last gradient.
        mark = own.of(_raw_ops.ReadVariableOp(resource=started, dtype=tf.float32))
        change = (gradient - own.read(last)) * mark
        step = own.moved(m, gradient, shares[0]) * of_m
        step += own.moved(d, change, shares[1]) * of_d
        second = own.moved(n, tf.square(gradient + beta_2 * change), shares[2])
        step /= tf.sqrt(second) * of_root + epsilon
        _raw_ops.AssignVariableOp(resource=last, value=gradient)
        _raw_ops.AssignVariableOp(resource=started, value=one)
        _raw_ops.AssignSubVariableOp(resource=weight, value=step)

    return move


def _ademamix(rule: Any, own: _Scalars) -> Move:
    of_m, of_s, of_root, slow_share = rule.corrections(own.name)
    of_m, of_s, epsilon = of_m * own.rate, of_s * own.rate, own.of(rule.epsilon)
    shares = [own.of(1.0 - beta) for beta in (rule.beta_1, rule.beta_2)]

    def move(weight: Tensor, gradient: Tensor, m: Tensor, s: Tensor, v: Tensor) -> None:
        step = own.moved(m, gradient, shares[0]) * of_m + own.moved(s, gradient, slow_share) * of_s
        step /= tf.sqrt(own.moved(v, tf.square(gradient), shares[1])) * of_root + epsilon
        _raw_ops.AssignSubVariableOp(resource=weight, value=step)

    return move


def _sgd(rule: Any, own: _Scalars) -> Move:
    rate = own.rate
    if own.scale is not None:
        # Gradients enter only as multiples: the rate scales them, in one operation for all.
        rate, own.scale = rate * own.scale, None

    def plain(weight: Tensor, gradient: Tensor) -> None:
        _raw_ops.ResourceApplyGradientDescent(var=weight, alpha=rate, delta=gradient)

    if rule.momentum == 0:
        return plain
    momentum, nesterov = own.rounded(rule.momentum), bool(rule.nesterov)

    def with_momentum(weight: Tensor, gradient: Tensor, velocity: Tensor) -> None:
        _raw_ops.ResourceApplyKerasMomentum(
            var=weight,
            accum=velocity,
            lr=rate,
            grad=gradient,
            momentum=momentum,
            use_nesterov=nesterov,
        )

    return with_momentum


def _lion(rule: Any, own: _Scalars) -> Move:
    beta_1, beta_2 = own.rounded(rule.beta_1), own.rounded(rule.beta_2)
    rest_1, rest_2 = 1.0 - beta_1, 1.0 - beta_2

    def move(weight: Tensor, gradient: Tensor, m: Tensor) -> None:
        # Operation by operation Keras': what is near zero has a sign too.
        old = own.read(m)
        step = own.rate * tf.sign(old * beta_1 + gradient * rest_1)
        _raw_ops.AssignVariableOp(resource=m, value=old * beta_2 + gradient * rest_2)
        _raw_ops.AssignSubVariableOp(resource=weight, value=step)

    return move


def _rmsprop(rule: Any, own: _Scalars) -> Move:
    rho, epsilon = own.of(rule.rho), own.of(rule.epsilon)
    if rule.momentum > 0:
        return _rmsprop_with_momentum(rule, own, rho, epsilon)
    rest = own.of(1.0 - rule.rho)

    def moved(slot: Tensor, value: Tensor) -> Tensor:
        new = own.read(slot) * rho + value * rest
        _raw_ops.AssignVariableOp(resource=slot, value=new)
        return new

    def move(weight: Tensor, gradient: Tensor, v: Tensor, mean: Tensor | None = None) -> None:
        second = moved(v, tf.square(gradient))
        if mean is not None:
            second -= tf.square(moved(mean, gradient))
        step = gradient * own.rate / tf.sqrt(second + epsilon)
        _raw_ops.AssignSubVariableOp(resource=weight, value=step)

    return move


def _rmsprop_with_momentum(rule: Any, own: _Scalars, rho: Tensor, epsilon: Tensor) -> Move:
    same = {"lr": own.rate, "rho": rho, "momentum": own.of(rule.momentum), "epsilon": epsilon}

    def move(weight: Tensor, gradient: Tensor, v: Tensor, momentum: Tensor) -> None:
        _raw_ops.ResourceApplyRMSProp(var=weight, ms=v, mom=momentum, grad=gradient, **same)

    def centered(
        weight: Tensor, gradient: Tensor, v: Tensor, momentum: Tensor, mean: Tensor
    ) -> None:
        _raw_ops.ResourceApplyCenteredRMSProp(
            var=weight, mg=mean, ms=v, mom=momentum, grad=gradient, **same
        )

    return centered if rule.centered else move


def _adagrad(rule: Any, own: _Scalars) -> Move:
    epsilon = own.of(rule.epsilon)

    def move(weight: Tensor, gradient: Tensor, total: Tensor) -> None:
        _raw_ops.AssignAddVariableOp(resource=total, value=tf.square(gradient))
        step = gradient * own.rate / tf.sqrt(own.read(total) + epsilon)
        _raw_ops.AssignSubVariableOp(resource=weight, value=step)

    return move


_PREPARE: dict[str, Callable[[Any, _Scalars], Move]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "adan": _adan,
    "ademamix": _ademamix,
    "lion": _lion,
    "radam": _radam,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
}
