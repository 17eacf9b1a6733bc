"""This package's rules: the float64 reference of each, and below it its row in the table of rules.

`references.py` says what a reference leaves out, `rule_table.py` what a row means.

Where an original cannot be met, the row that is missing is named here:

* Adan of Optax takes 1 - β₂ for the look-ahead, where paper and authors take β₂ (in its spelling).
* AdEMAMix of pytorch_optimizer corrects the bias of both means by that of the fast one. Optax has
  the paper's, which corrects that of the fast one alone. All agree without a fast mean.
* LARS of pytorch_optimizer starts its momentum from the first gradient as it is, unscaled, and
  scales no vectors; Optax has the paper's.
* Muon of torch and pytorch_optimizer iterates in bfloat16; Optax does in the dtype of the weights.
  Its look-ahead corrects biases as Nadam does; `optax.trace` before it has that of the authors.
* Adafactor of pytorch_optimizer scales by the size of the weights where it is told not to.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import references
from keras_rules import KERAS_ROWS, NADAM_ON_TORCH
from references import Array, Nadam, Rule, TwoMoments, norm, rms
from rule_table import RATE as R
from rule_table import RuleRow, of_optax, of_package, of_torch

import keras_groupopt as kgo

NAN, INF = math.nan, math.inf
FRACTION, AMOUNT, POSITIVE = [-0.1, 1.0, NAN, "0.9", None], [-0.1, INF, NAN, "0"], [0.0, -1.0, INF]
SWITCH, NUMBER, STEPS = [1, "yes", None], [NAN, INF, "3"], [0, -1, True, "3"]
# Values that an argument of a rule refuses; an argument means the same in each rule.
BAD: dict[str, list[Any]] = {
    **dict.fromkeys(("beta_1", "beta_2", "beta_3", "momentum"), FRACTION),
    **dict.fromkeys(("alpha", "epsilon", "epsilon_1", "epsilon_2", "r"), AMOUNT),
    **dict.fromkeys(("weight_lr_power", "momentum_decay", "weight_decay"), AMOUNT),
    **dict.fromkeys(("clip_threshold", "relative_limit", "trust_coefficient"), POSITIVE),
    **dict.fromkeys(("rms_rate", "clipnorm", "global_clipnorm", "clipvalue"), POSITIVE),
    **dict.fromkeys(("rectify", "amsgrad", "nesterov", "no_prox"), SWITCH),
    **dict.fromkeys(("relative_step", "scale_parameter"), SWITCH),
    **dict.fromkeys(("muon_a", "muon_b", "muon_c"), NUMBER),
    **dict.fromkeys(("alpha_warmup_steps", "beta_3_warmup_steps"), STEPS),
    "beta_2_decay": [0.0, 0.8, -INF, NAN, None],
    "learning_rate": [-0.1, NAN, INF],
    "ns_steps": [0, 1.5, None],
    "slow_step_size": [-0.1, 1.5, NAN],
    "sync_period": [0, -1, 2.5, True, None],
    "warmup_steps": [-1, 0.5],
}


OWN_ROWS: dict[str, RuleRow] = {}


def table() -> dict[str, RuleRow]:
    """Returns all rows, Keras' first."""
    return KERAS_ROWS | OWN_ROWS


class Adafactor(references.Adafactor):
    """Adafactor with the rate as a factor: α = η min(1, 1/(κ √t)), or η; times max(ε₂, RMS(w))."""

    relative_step, scale_parameter, relative_limit = True, True, 0.01

    def length(self, w: Array, learning_rate: float) -> float:
        if self.relative_step:
            learning_rate *= min(1.0, 1 / (self.relative_limit * np.sqrt(self.t)))
        return learning_rate * (max(self.epsilon_2, rms(w)) if self.scale_parameter else 1.0)


OWN_ROWS["adafactor"] = RuleRow(
    kgo.Adafactor,
    Adafactor,
    {"": {}, "_relative": {"relative_limit": 0.5, "scale_parameter": False}},
    originals={
        "_relative_scaled": of_torch(
            lambda p, o: o.Adafactor(p, 0.25, beta2_decay=-0.6, eps=(1e-30, 1e-3), d=1.5),
            {"relative_limit": 0.25, "beta_2_decay": -0.6, "clip_threshold": 1.5},
            rate=0.25,
        ),
        "_scaled": of_optax(
            lambda o: o.adafactor(R, min_dim_size_to_factor=1, clipping_threshold=0.5),
            {"relative_step": False, "clip_threshold": 0.5},
        ),
        "_relative": of_optax(
            lambda o: o.adafactor(
                # Its schedules are called with the steps made.
                lambda made: R * (1.0 / (0.25 * (made + 1.0) ** 0.5)).clip(max=1.0),
                min_dim_size_to_factor=1,
                multiply_by_parameter_scale=False,
            ),
            {"scale_parameter": False, "relative_limit": 0.25},
        ),
        "_plain": of_optax(
            lambda o: o.adafactor(R, min_dim_size_to_factor=1, multiply_by_parameter_scale=False),
            {"scale_parameter": False, "relative_step": False},
        ),
    },
    rate=0.1,
    changed={"scale_parameter": False, "relative_limit": 0.5, "beta_2_decay": -0.5},
)


class RAdam(TwoMoments):
    """Liu et al. 2019, arXiv:1908.03265, algorithm 2, with ε as torch places it.

    ρ∞ = 2/(1 - β₂) - 1;  ρ = ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ)
    w ← w - η r m̂ √(1 - β₂ᵗ) / (√v + ε)  if ρ > 5, else  w ← w - η m̂
    r = √( (ρ-4)(ρ-2) ρ∞ / ((ρ∞-4)(ρ∞-2) ρ) )
    """

    epsilon = 1e-8

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        self.accumulate(g)
        correction = 1 - self.beta_2**self.t
        limit = 2 / (1 - self.beta_2) - 1
        length = limit - 2 * self.t * self.beta_2**self.t / correction
        if length <= 5:
            return w - learning_rate * self.m_hat
        over, under = (length - 4) * (length - 2) * limit, (limit - 4) * (limit - 2) * length
        adaptive = np.sqrt(correction) / (np.sqrt(self.v) + self.epsilon)
        return w - learning_rate * np.sqrt(over / under) * self.m_hat * adaptive


OWN_ROWS["radam"] = RuleRow(
    kgo.RAdam,
    RAdam,
    fused={"": {"epsilon": 1e-4}, "_never_adaptive": {"beta_2": 0.5}},
    originals={
        "": of_torch("RAdam"),
        "_early": of_torch("RAdam", {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-4}),
        "_late": of_torch("RAdam", {"beta_2": 0.9999, "epsilon": 1e-3}),
        "_decayed": of_torch("RAdam", theirs={"decoupled_weight_decay": True}, weight_decay=0.3),
        "_never_adaptive": of_torch("RAdam", {"beta_2": 0.6}),
        "_without_memory": of_torch("RAdam", {"beta_1": 0.0, "beta_2": 0.0}),
    },
    changed={"beta_2": 0.95},
)


class Adan(Rule):
    """Xie et al. 2022, arXiv:2208.06677, algorithm 1, with the betas of its code (1 - β there).

    m ← β₁ m + (1 - β₁) g;  d ← β₂ d + (1 - β₂)(g - g₋);  n ← β₃ n + (1 - β₃)(g + β₂ (g - g₋))²
    w ← w - η (m̂ + β₂ d̂) / (√n̂ + ε), each with its bias corrected; g₋ = g at first
    """

    beta_1, beta_2, beta_3, epsilon = 0.98, 0.92, 0.99, 1e-8
    slots = ("m", "d", "n")
    last: Array | None = None

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        change = np.zeros_like(g) if self.last is None else g - self.last
        self.last = g
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
        self.d = self.beta_2 * self.d + (1 - self.beta_2) * change
        self.n = self.beta_3 * self.n + (1 - self.beta_3) * (g + self.beta_2 * change) ** 2
        m_hat, d_hat = self.m / (1 - self.beta_1**self.t), self.d / (1 - self.beta_2**self.t)
        root = np.sqrt(self.n / (1 - self.beta_3**self.t))
        return w - learning_rate * (m_hat + self.beta_2 * d_hat) / (root + self.epsilon)


OWN_ROWS["adan"] = RuleRow(
    kgo.Adan,
    Adan,
    # Of its decay, what comes before the step is what a group has.
    switched_off={"no_prox": True},
    fused={"": {"epsilon": 1e-4}},
    originals={
        "_alone": of_package("Adan", weight_decay=0.3, by_class=True),
        "": of_package(
            "Adan",
            {"beta_1": 0.9, "beta_2": 0.7, "beta_3": 0.95, "epsilon": 1e-2},
            {"weight_decouple": True},
            weight_decay=0.3,
        ),
    },
    changed={"beta_1": 0.9, "beta_2": 0.8, "beta_3": 0.95, "no_prox": True},
)


class AdEMAMix(TwoMoments):
    """Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1 and its schedules, without decay.

    m ← β₁ m + (1 - β₁) g;  s ← β₃(t) s + (1 - β₃(t)) g;  v ← β₂ v + (1 - β₂) g²
    w ← w - η (m̂ + α(t) s) / (√v̂ + ε);  α(t) = min(α, t α / T)
    β₃(t) = min(β₃, exp(log β₁ log β₃ / ((1 - t/T) log β₃ + t/T log β₁)))
    """

    beta_3, alpha, epsilon = 0.9999, 5.0, 1e-8
    alpha_warmup_steps = beta_3_warmup_steps = 0
    slots = ("m", "v", "s")

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        alpha, beta_3 = self.alpha, self.beta_3
        if self.alpha_warmup_steps:
            alpha = min(alpha, self.t * alpha / self.alpha_warmup_steps)
        if self.beta_3_warmup_steps:
            a = self.t / self.beta_3_warmup_steps
            first, last = math.log(self.beta_1), math.log(beta_3)
            beta_3 = min(beta_3, math.exp(first * last / ((1 - a) * last + a * first)))
        self.accumulate(g)
        self.s = beta_3 * self.s + (1 - beta_3) * g
        up = self.m_hat + alpha * self.s
        return w - learning_rate * up / (np.sqrt(self.v_hat) + self.epsilon)


def warmed_up(first: float, last: float, share: Any) -> Any:
    """The decay whose half-life is at a share of the way from that of one decay to another's."""
    half_lives = [math.log(0.5) / math.log(decay) for decay in (first, last)]
    share = share.clip(max=1.0)
    return 0.5 ** (1.0 / ((1.0 - share) * half_lives[0] + share * half_lives[1]))


OWN_ROWS["ademamix"] = RuleRow(
    kgo.AdEMAMix,
    AdEMAMix,
    {"": {}, "_warm_up": {"beta_3": 0.99, "alpha_warmup_steps": 4, "beta_3_warmup_steps": 6}},
    fused={
        "": {"beta_3": 0.95, "epsilon": 1e-4},
        "_warm_up": {"alpha_warmup_steps": 4, "beta_3_warmup_steps": 30},
    },
    originals={
        "": of_optax("contrib.ademamix", weight_decay=0.3),
        "_warm_up": of_optax(
            lambda o: o.contrib.ademamix(
                R,
                b2=0.95,
                # Its schedules are called with the steps made.
                b3=lambda made: warmed_up(0.9, 0.999, (made + 1) / 30),
                alpha=lambda made: 8.0 * ((made + 1) / 20).clip(max=1.0),
                eps=1e-2,
            ),
            {"beta_2": 0.95, "beta_3": 0.999, "alpha": 8.0, "epsilon": 1e-2}
            | {"alpha_warmup_steps": 20, "beta_3_warmup_steps": 30},
        ),
        "_one_mean": of_package(
            "AdEMAMix", {"beta_1": 0.0, "beta_2": 0.99, "beta_3": 0.98, "alpha": 3.0}
        ),
    },
    changed={"beta_3": 0.99, "alpha": 2.0, "alpha_warmup_steps": 9, "beta_3_warmup_steps": 9},
)


class LARS(Rule):
    """You et al. 2017, arXiv:1708.03888, without decay, which is decoupled here.

    r = τ ‖w‖/(‖g‖ + ε), 1 where either is 0;  v ← μ v + η r g
    w ← w - v, or with Nesterov's look-ahead w ← w - (μ v + η r g)
    """

    momentum, trust_coefficient, epsilon, nesterov = 0.9, 1e-3, 0.0, False
    slots = ("v",)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        long, slope = norm(w), norm(g)
        trust = self.trust_coefficient * long / (slope + self.epsilon) if long * slope else 1.0
        pull = learning_rate * trust * g
        self.v = self.momentum * self.v + pull
        return w - (self.momentum * self.v + pull if self.nesterov else self.v)


OWN_ROWS["lars"] = RuleRow(
    kgo.LARS,
    LARS,
    {"_nesterov": {"trust_coefficient": 0.5, "nesterov": True}},
    originals={
        "": of_optax("lars", rate=2.0),
        "_nesterov": of_optax(
            "lars", {"momentum": 0.8, "trust_coefficient": 0.1, "epsilon": 0.5, "nesterov": True}
        ),
    },
    rate=1.0,
    changed={"momentum": 0.8, "trust_coefficient": 0.02, "epsilon": 1e-3, "nesterov": True},
)


class AdaBelief(RAdam):
    """Zhuang et al. 2020, arXiv:2010.07468; rectified as in RAdam where asked for.

    m ← β₁ m + (1 - β₁) g;  s ← β₂ s + (1 - β₂)(g - m)² + ε;  v = s, or max(v, s) with `amsgrad`
    w ← w - η m̂ / (√v̂ + ε)
    """

    epsilon, rectify, amsgrad = 1e-16, False, False
    slots = ("m", "v", "s")

    def accumulate(self, g: Array) -> None:
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
        self.s = self.beta_2 * self.s + (1 - self.beta_2) * (g - self.m) ** 2 + self.epsilon
        self.v = np.maximum(self.v, self.s) if self.amsgrad else self.s

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        if self.rectify:
            return super().move(w, g, learning_rate)
        self.accumulate(g)
        return w - learning_rate * self.m_hat / (np.sqrt(self.v_hat) + self.epsilon)


OWN_ROWS["adabelief"] = RuleRow(
    kgo.AdaBelief,
    AdaBelief,
    {"": {}, "_rectified": {"rectify": True, "amsgrad": True, "beta_2": 0.9}},
    originals={
        "": of_optax("adabelief"),
        "_own_epsilon": of_optax(
            "adabelief", {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3}, {"eps_root": 1e-3}
        ),
        "_rectified": of_package("AdaBelief", {"rectify": True, "beta_2": 0.98}),
        "_amsgrad": of_package("AdaBelief", {"amsgrad": True, "beta_2": 0.9}, weight_decay=0.2),
    },
    changed={"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-8, "amsgrad": True},
)


class NAdamW(Nadam):
    """Dozat 2016 with torch's pace of the momentum: μₜ = β₁ (1 - ½ 0.96^(t ψ))."""

    epsilon, momentum_decay = 1e-8, 4e-3

    def mu(self, t: int) -> float:
        return self.beta_1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay))


OWN_ROWS["nadamw"] = RuleRow(
    kgo.NAdamW,
    NAdamW,
    originals={
        "": of_torch("NAdam", theirs={"decoupled_weight_decay": True}, weight_decay=0.3),
        "_own_pace": of_torch(
            "NAdam", {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-2, "momentum_decay": 0.1}
        ),
        "_no_warm_up": of_torch("NAdam", {"momentum_decay": 0.0}),
    },
    changed={"beta_2": 0.95, "momentum_decay": 0.1, "weight_decay": 0.01},
)


class Lookahead(Rule):
    """Zhang et al. 2019, arXiv:1907.08610: every k steps s ← s + α (w - s), w ← s."""

    rule, sync_period, slow_step_size = "radam", 6, 0.5

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        within = kgo.rule(self.rule) if isinstance(self.rule, str) else self.rule
        self.within = table()[within.label].reference(**within.arguments)

    def step(self, w: Array, g: Array | None, learning_rate: float) -> Array:
        if g is None:
            self.within.step(w, None, learning_rate)
        return super().step(w, g, learning_rate)

    def start(self, w: Array) -> None:
        self.slow = np.array(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        w = self.within.step(w, g, learning_rate)
        if self.t % self.sync_period == 0:
            self.slow = self.slow + self.slow_step_size * (w - self.slow)
            w = np.array(self.slow)
        return w


def ahead(optimizer: Any, **arguments: Any) -> Any:
    """Lookahead of pytorch_optimizer around an optimizer of torch."""
    return pytest.importorskip("pytorch_optimizer").Lookahead(optimizer, **arguments)


OWN_ROWS["lookahead"] = RuleRow(
    kgo.Lookahead,
    Lookahead,
    {
        "": {"sync_period": 3},
        "_of_nadam": {"rule": kgo.rule("nadam", beta_1=0.8), "sync_period": 2},
    },
    low_precision_faults={("_of_nadam", "torch", "bfloat16"): NADAM_ON_TORCH},
    mirrored={"rule": "nadam", "sync_period": 2},
    originals={
        "_of_sgd": of_torch(
            lambda p, o: ahead(o.SGD(p, R, 0.9), k=6, alpha=0.8),
            {"rule": kgo.rule("sgd", momentum=0.9), "slow_step_size": 0.8},
        ),
        "_of_radam": of_torch(
            lambda p, o: ahead(o.RAdam(p, R), k=5, alpha=0.5), {"sync_period": 5}
        ),
    },
    rate=0.05,
    changed={"rule": kgo.rule("adam", beta_1=0.8), "sync_period": 3},
)

OWN_ROWS["muon"] = RuleRow(
    kgo.Muon,
    references.Muon,
    only_matrices=True,
    originals={
        "": of_optax(
            lambda o: o.chain(
                o.trace(0.9, nesterov=True),
                o.contrib.muon(R, beta=0.0, nesterov=False, eps=1e-7, consistent_rms=0.2),
            ),
            {"momentum": 0.9},
        ),
        "_without_nesterov": of_optax(
            lambda o: o.contrib.muon(R, beta=0.8, nesterov=False, eps=1e-7, ns_steps=3),
            {"momentum": 0.8, "nesterov": False, "rms_rate": None, "ns_steps": 3},
        ),
    },
    rate=0.05,
    changed={"momentum": 0.8, "ns_steps": 3, "rms_rate": None, "nesterov": False},
)


class ScheduleFreeAdamW(Rule):
    """Defazio et al. 2024, arXiv:2405.15682, with Adam's v only.

    η ← η min(1, t/warmup);  v ← β₂ v + (1 - β₂) g²;  z' = z - η g / (√(v/(1 - β₂ᵗ)) + ε)
    a = tʳ (largest η)ᵖ;  c = a / Σ a;  x = (w - (1 - β₁) z)/β₁, w at first
    x ← (1 - c) x + c z';  w ← (1 - β₁) z' + β₁ x
    """

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-8
    warmup_steps, r, weight_lr_power = 0, 0.0, 2.0
    total = largest = 0.0

    def start(self, w: Array) -> None:
        self.z, self.v = np.array(w), np.zeros_like(w)

    def move(self, w: Array, g: Array, learning_rate: float) -> Array:
        if self.warmup_steps:
            learning_rate *= min(1.0, self.t / self.warmup_steps)
        self.largest = max(self.largest, learning_rate)
        added = self.t**self.r * self.largest**self.weight_lr_power
        self.total += added
        c = added / self.total if self.total else 0.0
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * g**2
        x = (w - (1 - self.beta_1) * self.z) / self.beta_1
        scale = np.sqrt(self.v / (1 - self.beta_2**self.t)) + self.epsilon
        self.z = self.z - learning_rate * g / scale
        x = (1 - c) * x + c * self.z
        return (1 - self.beta_1) * self.z + self.beta_1 * x


OWN_ROWS["schedulefreeadamw"] = RuleRow(
    kgo.ScheduleFreeAdamW,
    ScheduleFreeAdamW,
    {"": {"warmup_steps": 4, "r": 0.5}},
    originals={
        "": of_package("ScheduleFreeAdamW"),
        "_warm_up": of_package(
            "ScheduleFreeAdamW",
            {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3, "warmup_steps": 20, "r": 0.5},
        ),
    },
    changed={"beta_1": 0.8, "warmup_steps": 4, "r": 0.5},
)
