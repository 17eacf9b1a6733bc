"""The rows of Keras' rules in the one table of rules; `rule_table.py` says what they mean.

Where an original cannot be met, the row that is missing is named here: Adam, AdamW, Adamax, Adagrad
and RMSprop of Keras have ε elsewhere than those of torch: under the root, beside the uncorrected
moment, or outside of the maximum. They meet at ε = 0. Adagrad and RMSprop meet Optax, which has ε
under the root too, at any ε.
"""

from __future__ import annotations

import inspect

import keras
import references
from rule_table import RATE as R
from rule_table import Original, RuleRow, of_optax, of_torch

K = keras.optimizers
_RATE_NOT_CAST = "Keras multiplies by the rate as it is, which on TensorFlow must be a variable"
NADAM_ON_TORCH = "Keras passes a bfloat16 of NumPy, which torch does not know"

KERAS_ROWS: dict[str, RuleRow] = {
    "sgd": RuleRow(
        K.SGD,
        references.SGD,
        {
            "": {},
            "_momentum": {"momentum": 0.9},
            "_nesterov": {"momentum": 0.9, "nesterov": True},
        },
        fused={
            "": {},
            "_momentum": {"momentum": 0.8},
            "_nesterov": {"momentum": 0.8, "nesterov": True},
        },
        mirrored={"momentum": 0.9, "nesterov": True},
        originals={
            "": Original(of_torch(lambda p, o: o.SGD(p, R))),
            "_momentum": Original(of_torch(lambda p, o: o.SGD(p, R, 0.9)), {"momentum": 0.9}),
            "_nesterov": Original(
                of_optax(lambda o: o.sgd(R, momentum=0.8, nesterov=True)),
                {"momentum": 0.8, "nesterov": True},
            ),
        },
    ),
    "adam": RuleRow(
        K.Adam,
        references.Adam,
        {"": {}, "_amsgrad": {"amsgrad": True, "beta_2": 0.5}},
        fused={
            "": {"beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-3},
            "_amsgrad": {"amsgrad": True, "beta_2": 0.5},
        },
        originals={
            "": Original(of_torch(lambda p, o: o.Adam(p, R, eps=0.0)), {"epsilon": 0.0}),
            "_own_betas": Original(
                of_optax(lambda o: o.adam(R, b1=0.7, b2=0.95, eps=0.0)),
                {"epsilon": 0.0, "beta_1": 0.7, "beta_2": 0.95},
            ),
            "_amsgrad": Original(
                of_torch(lambda p, o: o.Adam(p, R, (0.9, 0.9), 0.0, amsgrad=True)),
                {"epsilon": 0.0, "amsgrad": True, "beta_2": 0.9},
            ),
        },
    ),
    "adamw": RuleRow(
        K.AdamW,
        references.Adam,
        switched_off={"weight_decay": 0.0},
        fused={"": {}},
        originals={
            "": Original(
                of_torch(lambda p, o: o.AdamW(p, R, (0.9, 0.95), 0.0, weight_decay=0.3)),
                {"epsilon": 0.0, "beta_2": 0.95},
                weight_decay=0.3,
            )
        },
    ),
    "nadam": RuleRow(
        K.Nadam,
        references.Nadam,
        low_precision_faults={("", "torch", "bfloat16"): NADAM_ON_TORCH},
        originals={
            "": Original(
                # Keras fixes what torch calls the decay of the momentum.
                of_torch(lambda p, o: o.NAdam(p, R, (0.9, 0.95), 1e-3, momentum_decay=1.0)),
                {"epsilon": 1e-3, "beta_2": 0.95},
            )
        },
    ),
    "adamax": RuleRow(
        K.Adamax,
        references.Adamax,
        originals={
            "": Original(
                of_torch(lambda p, o: o.Adamax(p, R, (0.9, 0.9), eps=0.0)),
                {"epsilon": 0.0, "beta_2": 0.9},
            )
        },
    ),
    "adagrad": RuleRow(
        K.Adagrad,
        references.Adagrad,
        fused={"": {"epsilon": 1e-5, "initial_accumulator_value": 0.3}},
        originals={
            "": Original(
                of_torch(lambda p, o: o.Adagrad(p, R, initial_accumulator_value=0.5, eps=0.0)),
                {"initial_accumulator_value": 0.5, "epsilon": 0.0},
            ),
            "_own_epsilon": Original(of_optax(lambda o: o.adagrad(R, eps=1e-2)), {"epsilon": 1e-2}),
        },
    ),
    "adadelta": RuleRow(
        K.Adadelta,
        references.Adadelta,
        originals={
            "": Original(
                of_torch(lambda p, o: o.Adadelta(p, R, rho=0.9, eps=1e-2)),
                {"rho": 0.9, "epsilon": 1e-2},
            )
        },
    ),
    "rmsprop": RuleRow(
        K.RMSprop,
        references.RMSprop,
        {"": {}, "_momentum": {"momentum": 0.9, "rho": 0.5}, "_centered": {"centered": True}},
        fused={
            "": {"rho": 0.7},
            "_centered": {"rho": 0.7, "centered": True},
            "_centered_momentum": {"centered": True, "momentum": 0.4},
            "_momentum": {"momentum": 0.4},
        },
        originals={
            "": Original(
                of_torch(lambda p, o: o.RMSprop(p, R, 0.8, 0.0)), {"rho": 0.8, "epsilon": 0.0}
            ),
            "_centered_momentum": Original(
                of_optax(lambda o: o.rmsprop(R, 0.9, 1e-2, centered=True, momentum=0.5)),
                {"epsilon": 1e-2, "momentum": 0.5, "centered": True},
            ),
        },
    ),
    "ftrl": RuleRow(
        K.Ftrl,
        references.Ftrl,
        {"": {}, "_l1_l2": {"l1_regularization_strength": 0.3, "l2_regularization_strength": 0.1}},
    ),
    "lion": RuleRow(
        K.Lion,
        references.Lion,
        fused={"": {"beta_1": 0.6}},
        originals={
            "": Original(of_optax(lambda o: o.lion(R, b1=0.8, weight_decay=0.0)), {"beta_1": 0.8})
        },
    ),
    "lamb": RuleRow(
        K.Lamb,
        references.LAMB,
        originals={
            "": Original(
                of_optax(lambda o: o.lamb(R, b2=0.95, eps=1e-3)), {"epsilon": 1e-3, "beta_2": 0.95}
            )
        },
    ),
    # Rules of this package have the names of the two below, of which Keras' are classes.
    "adafactor_of_keras": RuleRow(
        K.Adafactor, references.Adafactor, {"": {"clip_threshold": 0.5}}, named=False
    ),
}
# Keras learned this after the oldest release that is supported.
if "adam_weight_decay" in inspect.signature(K.Muon).parameters:
    KERAS_ROWS["muon_of_keras"] = RuleRow(
        K.Muon,
        references.Muon,
        switched_off={"weight_decay": None, "adam_weight_decay": None},
        decays=("weight_decay", "adam_weight_decay"),
        named=False,
        low_precision_faults=dict.fromkeys(
            (("", "tensorflow", "bfloat16"), ("", "tensorflow", "float16")), _RATE_NOT_CAST
        ),
    )
