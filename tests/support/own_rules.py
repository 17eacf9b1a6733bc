"""The rows of this package's rules in the one table of rules; `rule_table.py` says what they mean.

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

import own_references as own
from keras_rules import KERAS_ROWS, NADAM_ON_TORCH
from references import Muon, Rule
from rule_table import RATE as R
from rule_table import Original, RuleRow, ahead, of_optax, of_package, of_torch

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


def warmed_up(first: float, last: float, share: Any) -> Any:
    """The decay whose half-life is at a share of the way from that of one decay to another's."""
    half_lives = [math.log(0.5) / math.log(decay) for decay in (first, last)]
    share = share.clip(max=1.0)
    return 0.5 ** (1.0 / ((1.0 - share) * half_lives[0] + share * half_lives[1]))


def lookahead(rule: Any = "radam", **arguments: Any) -> Rule:
    """The reference of Lookahead around that of the rule within."""
    spec = kgo.rule(rule) if isinstance(rule, str) else rule
    return own.Lookahead(table()[spec.label].reference(**spec.arguments), **arguments)


def table() -> dict[str, RuleRow]:
    """Returns all rows, Keras' first."""
    return KERAS_ROWS | OWN_ROWS


OWN_ROWS: dict[str, RuleRow] = {
    "adafactor": RuleRow(
        kgo.Adafactor,
        own.Adafactor,
        {"": {}, "_relative": {"relative_limit": 0.5, "scale_parameter": False}},
        originals={
            "_relative_scaled": Original(
                of_torch(
                    lambda p, o: o.Adafactor(p, 0.25, beta2_decay=-0.6, eps=(1e-30, 1e-3), d=1.5)
                ),
                {"relative_limit": 0.25, "beta_2_decay": -0.6, "clip_threshold": 1.5},
                rate=0.25,
            ),
            "_scaled": Original(
                of_optax(
                    lambda o: o.adafactor(R, min_dim_size_to_factor=1, clipping_threshold=0.5)
                ),
                {"relative_step": False, "clip_threshold": 0.5},
            ),
            "_relative": Original(
                of_optax(
                    lambda o: o.adafactor(
                        # Its schedules are called with the steps made.
                        lambda made: R * (1.0 / (0.25 * (made + 1.0) ** 0.5)).clip(max=1.0),
                        min_dim_size_to_factor=1,
                        multiply_by_parameter_scale=False,
                    )
                ),
                {"scale_parameter": False, "relative_limit": 0.25},
            ),
            "_plain": Original(
                of_optax(
                    lambda o: o.adafactor(
                        R, min_dim_size_to_factor=1, multiply_by_parameter_scale=False
                    )
                ),
                {"scale_parameter": False, "relative_step": False},
            ),
        },
        rate=0.1,
        changed={"scale_parameter": False, "relative_limit": 0.5, "beta_2_decay": -0.5},
    ),
    "radam": RuleRow(
        kgo.RAdam,
        own.RAdam,
        fused={"": {"epsilon": 1e-4}, "_never_adaptive": {"beta_2": 0.5}},
        originals={
            "": Original(of_torch(lambda p, o: o.RAdam(p, R))),
            "_early": Original(
                of_torch(lambda p, o: o.RAdam(p, R, (0.8, 0.95), 1e-4)),
                {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-4},
            ),
            "_late": Original(
                of_torch(lambda p, o: o.RAdam(p, R, (0.9, 0.9999), 1e-3)),
                {"beta_2": 0.9999, "epsilon": 1e-3},
            ),
            "_decayed": Original(
                of_torch(lambda p, o: o.RAdam(p, R, weight_decay=0.3, decoupled_weight_decay=True)),
                weight_decay=0.3,
            ),
            "_never_adaptive": Original(
                of_torch(lambda p, o: o.RAdam(p, R, (0.9, 0.6))), {"beta_2": 0.6}
            ),
            "_without_memory": Original(
                of_torch(lambda p, o: o.RAdam(p, R, (0.0, 0.0))), {"beta_1": 0.0, "beta_2": 0.0}
            ),
        },
        changed={"beta_2": 0.95},
    ),
    "adan": RuleRow(
        kgo.Adan,
        own.Adan,
        # Of its decay, what comes before the step is what a group has.
        switched_off={"no_prox": True},
        fused={"": {"epsilon": 1e-4}},
        originals={
            "_alone": Original(
                of_package(lambda p, o: o.Adan(p, R, weight_decay=0.3)),
                weight_decay=0.3,
                by_class=True,
            ),
            "": Original(
                of_package(
                    lambda p, o: o.Adan(
                        p, R, (0.9, 0.7, 0.95), weight_decay=0.3, weight_decouple=True, eps=1e-2
                    )
                ),
                {"beta_1": 0.9, "beta_2": 0.7, "beta_3": 0.95, "epsilon": 1e-2},
                weight_decay=0.3,
            ),
        },
        changed={"beta_1": 0.9, "beta_2": 0.8, "beta_3": 0.95, "no_prox": True},
    ),
    "ademamix": RuleRow(
        kgo.AdEMAMix,
        own.AdEMAMix,
        {"": {}, "_warm_up": {"beta_3": 0.99, "alpha_warmup_steps": 4, "beta_3_warmup_steps": 6}},
        fused={
            "": {"beta_3": 0.95, "epsilon": 1e-4},
            "_warm_up": {"alpha_warmup_steps": 4, "beta_3_warmup_steps": 30},
        },
        originals={
            "": Original(
                of_optax(lambda o: o.contrib.ademamix(R, weight_decay=0.3)), weight_decay=0.3
            ),
            "_warm_up": Original(
                of_optax(
                    lambda o: o.contrib.ademamix(
                        R,
                        b2=0.95,
                        # Its schedules are called with the steps made.
                        b3=lambda made: warmed_up(0.9, 0.999, (made + 1) / 30),
                        alpha=lambda made: 8.0 * ((made + 1) / 20).clip(max=1.0),
                        eps=1e-2,
                    )
                ),
                {
                    "beta_2": 0.95,
                    "beta_3": 0.999,
                    "alpha": 8.0,
                    "epsilon": 1e-2,
                    "alpha_warmup_steps": 20,
                    "beta_3_warmup_steps": 30,
                },
            ),
            "_one_mean": Original(
                of_package(lambda p, o: o.AdEMAMix(p, R, (0.0, 0.99, 0.98), alpha=3.0)),
                {"beta_1": 0.0, "beta_2": 0.99, "beta_3": 0.98, "alpha": 3.0},
            ),
        },
        changed={"beta_3": 0.99, "alpha": 2.0, "alpha_warmup_steps": 9, "beta_3_warmup_steps": 9},
    ),
    "lars": RuleRow(
        kgo.LARS,
        own.LARS,
        {"_nesterov": {"trust_coefficient": 0.5, "nesterov": True}},
        originals={
            "": Original(of_optax(lambda o: o.lars(2.0)), rate=2.0),
            "_nesterov": Original(
                of_optax(lambda o: o.lars(R, 0.0, True, 0.1, 0.5, True, 0.8, True)),
                {"momentum": 0.8, "trust_coefficient": 0.1, "epsilon": 0.5, "nesterov": True},
            ),
        },
        rate=1.0,
        changed={"momentum": 0.8, "trust_coefficient": 0.02, "epsilon": 1e-3, "nesterov": True},
    ),
    "adabelief": RuleRow(
        kgo.AdaBelief,
        own.AdaBelief,
        {"": {}, "_rectified": {"rectify": True, "amsgrad": True, "beta_2": 0.9}},
        originals={
            "": Original(of_optax(lambda o: o.adabelief(R))),
            "_own_epsilon": Original(
                of_optax(lambda o: o.adabelief(R, 0.8, 0.95, 1e-3, 1e-3)),
                {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3},
            ),
            "_rectified": Original(
                of_package(lambda p, o: o.AdaBelief(p, R, (0.9, 0.98), rectify=True)),
                {"rectify": True, "beta_2": 0.98},
            ),
            "_amsgrad": Original(
                of_package(lambda p, o: o.AdaBelief(p, R, (0.9, 0.9), 0.2, ams_bound=True)),
                {"amsgrad": True, "beta_2": 0.9},
                weight_decay=0.2,
            ),
        },
        changed={"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-8, "amsgrad": True},
    ),
    "nadamw": RuleRow(
        kgo.NAdamW,
        own.NAdamW,
        originals={
            "": Original(
                of_torch(lambda p, o: o.NAdam(p, R, weight_decay=0.3, decoupled_weight_decay=True)),
                weight_decay=0.3,
            ),
            "_own_pace": Original(
                of_torch(lambda p, o: o.NAdam(p, R, (0.8, 0.95), 1e-2, momentum_decay=0.1)),
                {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-2, "momentum_decay": 0.1},
            ),
            "_no_warm_up": Original(
                of_torch(lambda p, o: o.NAdam(p, R, momentum_decay=0.0)), {"momentum_decay": 0.0}
            ),
        },
        changed={"beta_2": 0.95, "momentum_decay": 0.1, "weight_decay": 0.01},
    ),
    "lookahead": RuleRow(
        kgo.Lookahead,
        lookahead,
        {
            "": {"sync_period": 3},
            "_of_nadam": {"rule": kgo.rule("nadam", beta_1=0.8), "sync_period": 2},
        },
        low_precision_faults={("_of_nadam", "torch", "bfloat16"): NADAM_ON_TORCH},
        mirrored={"rule": "nadam", "sync_period": 2},
        originals={
            "_of_sgd": Original(
                of_torch(lambda p, o: ahead(o.SGD(p, R, 0.9), k=6, alpha=0.8)),
                {"rule": kgo.rule("sgd", momentum=0.9), "slow_step_size": 0.8},
            ),
            "_of_radam": Original(
                of_torch(lambda p, o: ahead(o.RAdam(p, R), k=5, alpha=0.5)), {"sync_period": 5}
            ),
        },
        rate=0.05,
        changed={"rule": kgo.rule("adam", beta_1=0.8), "sync_period": 3},
    ),
    "muon": RuleRow(
        kgo.Muon,
        Muon,
        only_matrices=True,
        originals={
            "": Original(
                of_optax(
                    lambda o: o.chain(
                        o.trace(0.9, nesterov=True),
                        o.contrib.muon(R, beta=0.0, nesterov=False, eps=1e-7, consistent_rms=0.2),
                    )
                ),
                {"momentum": 0.9},
            ),
            "_without_nesterov": Original(
                of_optax(
                    lambda o: o.contrib.muon(R, beta=0.8, nesterov=False, eps=1e-7, ns_steps=3)
                ),
                {"momentum": 0.8, "nesterov": False, "rms_rate": None, "ns_steps": 3},
            ),
        },
        rate=0.05,
        changed={"momentum": 0.8, "ns_steps": 3, "rms_rate": None, "nesterov": False},
    ),
    "schedulefreeadamw": RuleRow(
        kgo.ScheduleFreeAdamW,
        own.ScheduleFreeAdamW,
        {"": {"warmup_steps": 4, "r": 0.5}},
        originals={
            "": Original(of_package(lambda p, o: o.ScheduleFreeAdamW(p, R, (0.9, 0.999)))),
            "_warm_up": Original(
                of_package(
                    lambda p, o: o.ScheduleFreeAdamW(
                        p, R, (0.8, 0.95), r=0.5, warmup_steps=20, eps=1e-3
                    )
                ),
                {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3, "warmup_steps": 20, "r": 0.5},
            ),
        },
        changed={"beta_1": 0.8, "warmup_steps": 4, "r": 0.5},
    ),
}
