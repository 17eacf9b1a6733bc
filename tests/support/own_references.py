"""The float64 references of this package's rules; `references.py` says what they leave out."""

from __future__ import annotations

import math

import numpy as np
from references import Adafactor as KerasAdafactor
from references import Array, Nadam, Rule, TwoMoments, norm


class ScheduleFreeAdamW(Rule):
    """Defazio et al. 2024, arXiv:2405.15682, with Adam's v only.

    η ← η min(1, t/warmup);  v ← β₂ v + (1 - β₂) g²;  z' = z - η g / (√(v/(1 - β₂ᵗ)) + ε)
    a = tʳ (largest η)ᵖ;  c = a / Σ a;  x = (w - (1 - β₁) z)/β₁, w at first
    x ← (1 - c) x + c z';  w ← (1 - β₁) z' + β₁ x
    """

    def __init__(
        self,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        super().__init__()
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.warmup_steps, self.r, self.power = warmup_steps, r, weight_lr_power
        self.total = self.largest = 0.0

    def start(self, w: Array) -> None:
        self.z = np.array(w)
        self.v = np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        if self.warmup_steps:
            learning_rate *= min(1.0, self.t / self.warmup_steps)
        self.largest = max(self.largest, learning_rate)
        added = self.t**self.r * self.largest**self.power
        self.total += added
        c = added / self.total if self.total else 0.0
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * g**2
        x = (w - (1 - self.beta_1) * self.z) / self.beta_1
        scale = np.sqrt(self.v / (1 - self.beta_2**self.t)) + self.epsilon
        self.z = self.z - learning_rate * g / scale
        x = (1 - c) * x + c * self.z
        return (1 - self.beta_1) * self.z + self.beta_1 * x


class Adan(Rule):
    """Xie et al. 2022, arXiv:2208.06677, algorithm 1, with the betas of its code (1 - β there).

    m ← β₁ m + (1 - β₁) g;  d ← β₂ d + (1 - β₂)(g - g₋);  n ← β₃ n + (1 - β₃)(g + β₂ (g - g₋))²
    w ← w - η (m̂ + β₂ d̂) / (√n̂ + ε), each with its bias corrected; g₋ = g at first
    """

    def __init__(
        self,
        beta_1: float = 0.98,
        beta_2: float = 0.92,
        beta_3: float = 0.99,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__()
        self.betas, self.epsilon = (beta_1, beta_2, beta_3), epsilon
        self.last: Array | None = None

    def start(self, w: Array) -> None:
        self.m, self.d, self.n = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        first, second, third = self.betas
        change = np.zeros_like(g) if self.last is None else g - self.last
        self.last = g
        self.m = first * self.m + (1 - first) * g
        self.d = second * self.d + (1 - second) * change
        self.n = third * self.n + (1 - third) * (g + second * change) ** 2
        m, d, n = (
            x / (1 - beta**self.t)
            for x, beta in zip((self.m, self.d, self.n), self.betas, strict=True)
        )
        return w - learning_rate * (m + second * d) / (np.sqrt(n) + self.epsilon)


class AdEMAMix(TwoMoments):
    """Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1 and its schedules, without decay.

    m ← β₁ m + (1 - β₁) g;  s ← β₃(t) s + (1 - β₃(t)) g;  v ← β₂ v + (1 - β₂) g²
    w ← w - η (m̂ + α(t) s) / (√v̂ + ε);  α(t) = min(α, t α / T)
    β₃(t) = min(β₃, exp(log β₁ log β₃ / ((1 - t/T) log β₃ + t/T log β₁)))
    """

    def __init__(
        self,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        beta_3: float = 0.9999,
        alpha: float = 5.0,
        epsilon: float = 1e-8,
        alpha_warmup_steps: int | None = None,
        beta_3_warmup_steps: int | None = None,
    ) -> None:
        super().__init__(beta_1, beta_2, epsilon)
        self.beta_3, self.alpha = beta_3, alpha
        self.alpha_steps, self.beta_3_steps = alpha_warmup_steps, beta_3_warmup_steps

    def start(self, w: Array) -> None:
        super().start(w)
        self.s = np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        alpha, beta_3 = self.alpha, self.beta_3
        if self.alpha_steps:
            alpha = min(alpha, self.t * alpha / self.alpha_steps)
        if self.beta_3_steps:
            first, last, a = math.log(self.beta_1), math.log(beta_3), self.t / self.beta_3_steps
            beta_3 = min(beta_3, math.exp(first * last / ((1 - a) * last + a * first)))
        self.accumulate(g)
        self.s = beta_3 * self.s + (1 - beta_3) * g
        m_hat, v_hat = self.m / (1 - self.beta_1**self.t), self.v / (1 - self.beta_2**self.t)
        return w - learning_rate * (m_hat + alpha * self.s) / (np.sqrt(v_hat) + self.epsilon)


class LARS(Rule):
    """You et al. 2017, arXiv:1708.03888, without decay, which is decoupled here.

    r = τ ‖w‖/(‖g‖ + ε), 1 where either is 0;  v ← μ v + η r g
    w ← w - v, or with Nesterov's look-ahead w ← w - (μ v + η r g)
    """

    def __init__(
        self,
        momentum: float = 0.9,
        trust_coefficient: float = 1e-3,
        epsilon: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__()
        self.momentum, self.trust, self.epsilon = momentum, trust_coefficient, epsilon
        self.nesterov = nesterov

    def start(self, w: Array) -> None:
        self.v = np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        long, slope = norm(w), norm(g)
        ratio = self.trust * long / (slope + self.epsilon) if long > 0 and slope > 0 else 1.0
        pull = learning_rate * ratio * g
        self.v = self.momentum * self.v + pull
        return w - (self.momentum * self.v + pull if self.nesterov else self.v)


class RAdam(TwoMoments):
    """Liu et al. 2019, arXiv:1908.03265, algorithm 2, with ε as torch places it.

    ρ∞ = 2/(1 - β₂) - 1;  ρ = ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ)
    w ← w - η r m̂ √(1 - β₂ᵗ) / (√v + ε)  if ρ > 5, else  w ← w - η m̂
    r = √( (ρ-4)(ρ-2) ρ∞ / ((ρ∞-4)(ρ∞-2) ρ) );  m̂ = m / (1 - β₁ᵗ)
    """

    def __init__(self, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8) -> None:
        super().__init__(beta_1, beta_2, epsilon)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.accumulate(g)
        m_hat = self.m / (1 - self.beta_1**self.t)
        correction = 1 - self.beta_2**self.t
        limit = 2 / (1 - self.beta_2) - 1
        length = limit - 2 * self.t * self.beta_2**self.t / correction
        if length <= 5:
            return w - learning_rate * m_hat
        over, under = (length - 4) * (length - 2) * limit, (limit - 4) * (limit - 2) * length
        adaptive = np.sqrt(correction) / (np.sqrt(self.v) + self.epsilon)
        return w - learning_rate * np.sqrt(over / under) * m_hat * adaptive


class AdaBelief(RAdam):
    """Zhuang et al. 2020, arXiv:2010.07468; rectified as in RAdam where asked for.

    m ← β₁ m + (1 - β₁) g;  s ← β₂ s + (1 - β₂)(g - m)² + ε;  ŝ = max(ŝ, s) with `amsgrad`
    w ← w - η m̂ / (√(s/(1 - β₂ᵗ)) + ε)
    """

    def __init__(
        self,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-16,
        rectify: bool = False,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(beta_1, beta_2, epsilon)
        self.rectify, self.amsgrad = rectify, amsgrad

    def start(self, w: Array) -> None:
        super().start(w)
        self.s = np.zeros_like(w)

    def accumulate(self, g: Array) -> None:
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
        self.s = self.beta_2 * self.s + (1 - self.beta_2) * (g - self.m) ** 2 + self.epsilon
        self.v = np.maximum(self.v, self.s) if self.amsgrad else self.s

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        if self.rectify:
            return super().move(w, g, learning_rate)
        self.accumulate(g)
        m_hat = self.m / (1 - self.beta_1**self.t)
        root = np.sqrt(self.v / (1 - self.beta_2**self.t))
        return w - learning_rate * m_hat / (root + self.epsilon)


class NAdamW(Nadam):
    """Dozat 2016 with torch's pace of the momentum: μₜ = β₁ (1 - ½ 0.96^(t ψ))."""

    def __init__(
        self,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        momentum_decay: float = 4e-3,
    ) -> None:
        super().__init__(beta_1, beta_2, epsilon)
        self.momentum_decay = momentum_decay

    def mu(self, t: int) -> float:
        return self.beta_1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay))


class Adafactor(KerasAdafactor):
    """Adafactor with the rate as a factor: α = η min(1, 1/(κ √t)), or η; times max(ε₂, RMS(w))."""

    def __init__(
        self,
        relative_step: bool = True,
        scale_parameter: bool = True,
        relative_limit: float = 0.01,
        **options: float,
    ) -> None:
        super().__init__(**options)
        self.relative_step, self.scale_parameter = relative_step, scale_parameter
        self.relative_limit = relative_limit

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        u = g / np.sqrt(self.second_moment(g**2 + self.epsilon_1))
        if self.relative_step:
            learning_rate *= min(1.0, 1 / (self.relative_limit * np.sqrt(self.t)))
        if self.scale_parameter:
            learning_rate *= max(self.epsilon_2, float(np.sqrt(np.mean(w**2))))
        return w - learning_rate * u / max(1.0, float(np.sqrt(np.mean(u**2))) / self.clip_threshold)


class Lookahead(Rule):
    """Zhang et al. 2019, arXiv:1907.08610: every k steps s ← s + α (w - s), w ← s."""

    def __init__(self, rule: Rule, sync_period: int = 6, slow_step_size: float = 0.5) -> None:
        super().__init__()
        self.rule, self.period, self.size = rule, sync_period, slow_step_size

    def step(self, w: Array, g: Array | None, learning_rate: float) -> Array:
        if g is None:
            self.rule.step(w, None, learning_rate)
        return super().step(w, g, learning_rate)

    def start(self, w: Array) -> None:
        self.slow = np.array(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        w = self.rule.step(w, g, learning_rate)
        if self.t % self.period == 0:
            self.slow = self.slow + self.size * (w - self.slow)
            w = np.array(self.slow)
        return w
