"""The update rules once more, in NumPy and float64, each written from its formula.

A rule here moves one array: `rule.step(w, g, learning_rate)` returns the new weights; `g=None` is
a step in which the variable has no gradient. The whole optimizer is in `grouped_reference.py`.

The references share no code with the package and none with Keras. What they do not re-derive:

* the gradient: it is dense, with the repeated rows of an embedding summed;
* low precision: everything is float64, and results agree to the rounding of what is compared;
* averages, accumulation, loss scale: options of an optimizer, not of a rule;
* papers that Keras does not follow: where its documentation differs, so do the references, and
  the docstring says in what.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray


class Rule:
    """One rule on one array; `t` counts steps from 1 and also those without a gradient.

    Hyperparameters are attributes of its class, with their defaults. Each slot starts at zero.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, **arguments: Any) -> None:
        unknown = [name for name in arguments if not hasattr(type(self), name)]
        assert not unknown, unknown
        self.t = 0
        self.started = False
        vars(self).update(arguments)

    def step(self, w: Array, g: Array | None, learning_rate: float) -> Array:
        self.t += 1
        w = np.array(w, "float64")
        if g is None:
            return w
        if not self.started:
            self.start(w)
            self.started = True
        return self.move(w, np.array(g, "float64"), float(learning_rate))

    def start(self, w: Array) -> None:
        """Make the state."""
        for name in self.slots:
            setattr(self, name, np.zeros_like(w))

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        raise NotImplementedError


class SGD(Rule):
    """Gradient descent; Keras keeps the rate inside the velocity.

    v ← μ v - η g; w ← w + v, or with Nesterov's look-ahead w ← w + μ v - η g.
    """

    momentum, nesterov = 0.0, False
    slots = ("velocity",)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        pull = -learning_rate * g
        self.velocity = self.momentum * self.velocity + pull
        if self.nesterov:
            return w + self.momentum * self.velocity + pull
        return w + self.velocity


class TwoMoments(Rule):
    """m ← β₁ m + (1 - β₁) g;  v ← β₂ v + (1 - β₂) g²;  m̂ = m / (1 - β₁ᵗ);  v̂ = v / (1 - β₂ᵗ)."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7
    slots = ("m", "v")

    def accumulate(self, g: Array) -> None:
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * g**2

    @property
    def m_hat(self) -> Array:
        return self.m / (1 - self.beta_1**self.t)

    @property
    def v_hat(self) -> Array:
        return self.v / (1 - self.beta_2**self.t)


class Adam(TwoMoments):
    """Kingma and Ba 2014, arXiv:1412.6980, in the order before section 2.1 (ε is "epsilon hat").

    w ← w - η √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)
    With `amsgrad`, the largest v so far is in the place of v: Reddi et al. 2018, arXiv:1904.09237.
    """

    amsgrad = False
    slots = ("m", "v", "largest")

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.accumulate(g)
        self.largest = np.maximum(self.largest, self.v) if self.amsgrad else self.v
        rate = learning_rate * np.sqrt(1 - self.beta_2**self.t)
        return w - rate * self.m_hat / (np.sqrt(self.largest) + self.epsilon)


class Nadam(TwoMoments):
    """Dozat 2016, with the momentum schedule μₜ = β₁ (1 - ½ 0.96ᵗ) that Keras fixes.

    m̂ = μₜ₊₁ m / (1 - Π μᵢ, i ≤ t+1) + (1 - μₜ) g / (1 - Π μᵢ, i ≤ t)
    w ← w - η m̂ / (√v̂ + ε)
    """

    def mu(self, t: int) -> float:
        return self.beta_1 * (1 - 0.5 * 0.96**t)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.accumulate(g)
        now, following = self.mu(self.t), self.mu(self.t + 1)
        product = np.prod([self.mu(i) for i in range(1, self.t + 1)])
        m_hat = following * self.m / (1 - product * following) + (1 - now) * g / (1 - product)
        return w - learning_rate * m_hat / (np.sqrt(self.v_hat) + self.epsilon)


class LAMB(TwoMoments):
    """You et al. 2019, arXiv:1904.00962: Adam's direction at the length of the weights.

    u = m̂ / (√v̂ + ε);  w ← w - η (‖w‖ / ‖u‖) u, the ratio 1 where either norm is 0.
    The decay of the paper's u is left out: here it is decoupled, and `w` is already decayed.
    """

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.accumulate(g)
        u = self.m_hat / (np.sqrt(self.v_hat) + self.epsilon)
        long, short = norm(w), norm(u)
        ratio = long / short if long > 0 and short > 0 else 1.0
        return w - learning_rate * ratio * u


class Adamax(Rule):
    """Kingma and Ba 2014, algorithm 2, with Keras' ε in the denominator.

    m ← β₁ m + (1 - β₁) g;  u ← max(β₂ u, |g|);  w ← w - η m / ((1 - β₁ᵗ)(u + ε))
    """

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7
    slots = ("m", "u")

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
        self.u = np.maximum(self.beta_2 * self.u, np.abs(g))
        return w - learning_rate * self.m / ((1 - self.beta_1**self.t) * (self.u + self.epsilon))


class RMSprop(Rule):
    """Hinton 2012, with Keras' ε under the root and its momentum on the increment.

    v ← ρ v + (1 - ρ) g²;  a ← ρ a + (1 - ρ) g
    d = η g / √(v + ε), or centered η g / √(v - a² + ε);  b ← μ b + d;  w ← w - b
    """

    rho, momentum, epsilon, centered = 0.9, 0.0, 1e-7, False
    slots = ("v", "a", "b")

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.v = self.rho * self.v + (1 - self.rho) * g**2
        self.a = self.rho * self.a + (1 - self.rho) * g
        spread = self.v - self.a**2 if self.centered else self.v
        self.b = self.momentum * self.b + learning_rate * g / np.sqrt(spread + self.epsilon)
        return w - self.b


class Adagrad(Rule):
    """Duchi et al. 2011, with Keras' ε under the root.

    s ← s + g², from s₀;  w ← w - η g / √(s + ε)
    """

    initial_accumulator_value, epsilon = 0.1, 1e-7

    def start(self, w: Array) -> None:
        self.s = np.full_like(w, self.initial_accumulator_value)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.s = self.s + g**2
        return w - learning_rate * g / np.sqrt(self.s + self.epsilon)


class Adadelta(Rule):
    """Zeiler 2012, arXiv:1212.5701, times a rate.

    s ← ρ s + (1 - ρ) g²;  d = √(a + ε) / √(s + ε) · g;  a ← ρ a + (1 - ρ) d²;  w ← w - η d
    """

    rho, epsilon = 0.95, 1e-7
    slots = ("s", "a")

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.s = self.rho * self.s + (1 - self.rho) * g**2
        d = np.sqrt(self.a + self.epsilon) / np.sqrt(self.s + self.epsilon) * g
        self.a = self.rho * self.a + (1 - self.rho) * d**2
        return w - learning_rate * d


class Lion(Rule):
    """Chen et al. 2023, arXiv:2302.06675.

    w ← w - η sign(β₁ m + (1 - β₁) g);  m ← β₂ m + (1 - β₂) g
    """

    beta_1, beta_2 = 0.9, 0.99
    slots = ("m",)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        direction = np.sign(self.beta_1 * self.m + (1 - self.beta_1) * g)
        self.m = self.beta_2 * self.m + (1 - self.beta_2) * g
        return w - learning_rate * direction


class Adafactor(Rule):
    """Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 (matrices) and 5 (vectors).

    α = max(ε₂, RMS(w)) · min(η, 1/√t);  β̂ = 1 - tᶜ, c = `beta_2_decay`
    v̂ ← β̂ v̂ + (1 - β̂)(g² + ε₁), of a matrix only the means of rows r and columns c:
    v̂ = r cᵀ / mean(r);  u = g / √v̂;  w ← w - α u / max(1, RMS(u) / d)
    """

    beta_2_decay, epsilon_1, epsilon_2, clip_threshold = -0.8, 1e-30, 1e-3, 1.0
    rows = columns = v = 0.0

    def second_moment(self, squares: Array) -> Array:
        beta = 1 - float(self.t) ** self.beta_2_decay
        if squares.ndim < 2:
            self.v = beta * self.v + (1 - beta) * squares
            return self.v
        self.rows = beta * self.rows + (1 - beta) * squares.mean(-1)
        self.columns = beta * self.columns + (1 - beta) * squares.mean(-2)
        mean = self.rows.mean(-1, keepdims=True)
        return (self.rows / mean)[..., :, None] * self.columns[..., None, :]

    def length(self, w: Array, learning_rate: float) -> float:
        """α."""
        return max(self.epsilon_2, rms(w)) * min(learning_rate, 1 / np.sqrt(self.t))

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        u = g / np.sqrt(self.second_moment(g**2 + self.epsilon_1))
        return w - self.length(w, learning_rate) * u / max(1.0, rms(u) / self.clip_threshold)


class Ftrl(Rule):
    """McMahan et al. 2013, with p = -`learning_rate_power` in place of the paper's ½.

    n' = n + g²;  z ← z + g - (n'ᵖ - nᵖ)/η · w;  n ← n'
    w ← 0 if |z| ≤ λ₁, else (sign(z) λ₁ - z) / (n'ᵖ/η + 2 λ₂)
    """

    learning_rate_power, initial_accumulator_value = -0.5, 0.1
    l1_regularization_strength = l2_regularization_strength = 0.0

    def start(self, w: Array) -> None:
        self.n = np.full_like(w, self.initial_accumulator_value)
        self.z = np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        before, n = self.n**-self.learning_rate_power, self.n + g**2
        after = n**-self.learning_rate_power
        self.z = self.z + g - (after - before) / learning_rate * w
        self.n = n
        l1, l2 = self.l1_regularization_strength, self.l2_regularization_strength
        moved = (np.sign(self.z) * l1 - self.z) / (after / learning_rate + 2 * l2)
        return np.where(np.abs(self.z) <= l1, 0.0, moved)


class Muon(Adam):
    """Jordan 2024, at the length of Liu et al. 2025, arXiv:2502.16982; Adam where not rank 2.

    m ← μ m + g;  u = orthogonal(g + μ m), of m without `nesterov`
    w ← w - η · ρ √max(rows, columns) · u, without ρ = `rms_rate` η · √max(1, columns / rows) · u
    orthogonal: x ← x/‖x‖, five times x ← a x + (b x xᵀ + c (x xᵀ)²) x, on the wide side
    """

    momentum, nesterov, rms_rate, ns_steps = 0.95, True, 0.2, 5

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        if w.ndim != 2:
            return super().move(w, g, learning_rate)
        self.m = self.momentum * self.m + g
        u = orthogonal(g + self.momentum * self.m if self.nesterov else self.m, self.ns_steps)
        if self.rms_rate is None:
            return w - learning_rate * np.sqrt(max(1.0, w.shape[1] / w.shape[0])) * u
        return w - learning_rate * self.rms_rate * np.sqrt(max(w.shape)) * u


def orthogonal(x: Array, steps: int) -> Array:
    """x with its singular values brought near 1 by Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.775, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def norm(*arrays: Array) -> float:
    """The length of all values together."""
    return float(np.sqrt(sum(np.sum(np.square(a, dtype="float64")) for a in arrays)))


def rms(x: Array) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(x**2)))


def decayed(
    w: Array,
    learning_rate: float,
    weight_decay: float,
    anchor: Array | float = 0.0,
    mask: Array | float = 1.0,
) -> Array:
    """w - η λ mask (w - anchor)."""
    w = np.asarray(w, "float64")
    return w - learning_rate * weight_decay * mask * (w - anchor)
