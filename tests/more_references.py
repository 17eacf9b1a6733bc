"""Float64 references of rules that only Keras brings; `references.py` says what they leave out."""

from __future__ import annotations

import numpy as np
from references import Adam, Array, Rule


class AdamMaximum(Adam):
    """Reddi et al. 2018, arXiv:1904.09237: Adam with the largest second moment so far.

    v̂ ← max(v̂, v), in place of v in the step.
    """

    def start(self, w: Array) -> None:
        super().start(w)
        self.v_largest = np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.accumulate(g)
        self.v_largest = np.maximum(self.v_largest, self.v)
        rate = learning_rate * np.sqrt(1 - self.beta_2**self.t) / (1 - self.beta_1**self.t)
        return w - rate * self.m / (np.sqrt(self.v_largest) + self.epsilon)


class Muon(Adam):
    """Jordan 2024, at the length of Liu et al. 2025, arXiv:2502.16982; Adam where not rank 2.

    m ← μ m + g;  u = orthogonal(g + μ m);  w ← w - η · 0.2 √max(rows, columns) · u
    orthogonal: x ← x/‖x‖, five times x ← a x + (b x xᵀ + c (x xᵀ)²) x, on the wide side
    """

    def __init__(self, momentum: float = 0.95) -> None:
        super().__init__()
        self.momentum = momentum

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        if w.ndim != 2:
            return super().move(w, g, learning_rate)
        self.m = self.momentum * self.m + g
        u = orthogonal(g + self.momentum * self.m)
        return w - learning_rate * 0.2 * np.sqrt(max(w.shape)) * u


def orthogonal(x: Array, a: float = 3.4445, b: float = -4.775, c: float = 2.0315) -> Array:
    """x with its singular values brought near 1 by five Newton-Schulz iterations."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


class ScheduleFreeAdamW(Rule):
    """Defazio et al. 2024, arXiv:2405.15682, without warm-up and with Adam's v only.

    v ← β₂ v + (1 - β₂) g²;  z' = z - η g / (√(v/(1 - β₂ᵗ)) + ε)
    x = (w - (1 - β₁) z)/β₁;  x ← (1 - 1/t) x + z'/t;  w ← (1 - β₁) z' + β₁ x
    """

    def __init__(self, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def start(self, w: Array) -> None:
        self.z = np.array(w)
        self.v = np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * g**2
        x = (w - (1 - self.beta_1) * self.z) / self.beta_1
        scale = np.sqrt(self.v / (1 - self.beta_2**self.t)) + self.epsilon
        self.z = self.z - learning_rate * g / scale
        x = (1 - 1 / self.t) * x + self.z / self.t
        return (1 - self.beta_1) * self.z + self.beta_1 * x
