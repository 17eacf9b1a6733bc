"""Sharpness-aware gradients in NumPy and float64, each written from its paper.

A rule here is called with a function that returns the gradients at given weights, the weights, and
the optimizer step; norms and products are over all variables that it perturbs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
from references import Array

Weights = Mapping[str, Array]
GradientsAt = Callable[[Weights], dict[str, Array]]


def product(first: Weights, second: Weights) -> float:
    return float(sum(np.sum(first[name] * second[name]) for name in first))


def norm(values: Weights) -> float:
    return float(np.sqrt(product(values, values)))


def moved(weights: Weights, perturbation: Weights) -> Weights:
    return {n: w + perturbation.get(n, 0.0) for n, w in weights.items()}


class Plain:
    """The gradient at the weights."""

    def __init__(self, rho: float = 0.0, excluded: Collection[str] = ()) -> None:
        self.rho, self.excluded = rho, excluded

    def perturbed(self, values: Weights) -> dict[str, Array]:
        """Those of variables that are perturbed."""
        return {n: v for n, v in values.items() if n not in self.excluded}

    def __call__(self, gradients_at: GradientsAt, weights: Weights, step: int) -> dict[str, Array]:
        return gradients_at(weights)


class SAM(Plain):
    """Foret et al. 2021, equation 2: ε = ρ g/‖g‖, and the gradient at w + ε."""

    def perturbation(self, weights: Weights, g: Weights) -> Weights:
        length = norm(g)
        return {n: self.rho * v / length if length > 0 else 0.0 * v for n, v in g.items()}

    def __call__(self, gradients_at: GradientsAt, weights: Weights, step: int) -> dict[str, Array]:
        g = self.perturbed(gradients_at(weights))
        return gradients_at(moved(weights, self.perturbation(weights, g)))


class ASAM(SAM):
    """Kwon et al. 2021, algorithm 1: T = |w| + η for kernels, 1 elsewhere; ε = ρ T²g/‖Tg‖."""

    def __init__(
        self,
        rho: float,
        eta: float,
        adaptive: Callable[[str], bool] = lambda name: name.endswith("kernel"),
    ) -> None:
        super().__init__(rho)
        self.eta, self.adaptive = eta, adaptive

    def perturbation(self, weights: Weights, g: Weights) -> Weights:
        t = {n: np.abs(weights[n]) + self.eta if self.adaptive(n) else 1.0 for n in g}
        length = norm({n: t[n] * g[n] for n in g})
        return {n: self.rho * t[n] ** 2 * g[n] / length for n in g}


class LookSAM(SAM):
    """Liu et al. 2022, algorithm 1.

    Each k-th step: h by SAM, v = h − ‖h‖ cos θ · g/‖g‖. Else: g + α ‖g‖/‖v‖ · v.
    """

    def __init__(self, rho: float, every: int, alpha: float) -> None:
        super().__init__(rho)
        self.every, self.alpha = every, alpha
        self.v: Weights = {}

    def __call__(self, gradients_at: GradientsAt, weights: Weights, step: int) -> dict[str, Array]:
        g = gradients_at(weights)
        if step % self.every:
            factor = self.alpha * norm(g) / norm(self.v)
            return {n: g[n] + factor * self.v[n] for n in g}
        h = gradients_at(moved(weights, self.perturbation(weights, g)))
        cosine = product(h, g) / (norm(h) * norm(g))
        self.v = {n: h[n] - norm(h) * cosine * g[n] / norm(g) for n in g}
        return h


class GSAM(SAM):
    """Zhuang et al. 2022, algorithm 1: h by SAM, less α times the part of g across h."""

    def __init__(self, rho: float, alpha: float) -> None:
        super().__init__(rho)
        self.alpha = alpha

    def __call__(self, gradients_at: GradientsAt, weights: Weights, step: int) -> dict[str, Array]:
        g = gradients_at(weights)
        h = gradients_at(moved(weights, self.perturbation(weights, g)))
        along = {n: product(g, h) / norm(h) * h[n] / norm(h) for n in g}
        return {n: h[n] - self.alpha * (g[n] - along[n]) for n in g}


class Signs(SAM):
    """The rule `Against` of `sharpness_cases`: ε = ρ sign(g)."""

    def perturbation(self, weights: Weights, g: Weights) -> Weights:
        return {n: self.rho * np.sign(v) for n, v in g.items()}
