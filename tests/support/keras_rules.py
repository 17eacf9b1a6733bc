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
from rule_table import RuleRow, of_optax, of_torch

K = keras.optimizers
_RATE_NOT_CAST = "Keras multiplies by the rate as it is, which on TensorFlow must be a variable"
NADAM_ON_TORCH = "Keras passes a bfloat16 of NumPy, which torch does not know"

SGD_CASES = {
    "": {},
    "_momentum": {"momentum": 0.9},
    "_nesterov": {"momentum": 0.9, "nesterov": True},
}

KERAS_ROWS: dict[str, RuleRow] = {
    "sgd": RuleRow(
        K.SGD,
        references.SGD,
        SGD_CASES,
        fused=SGD_CASES,
        mirrored={"momentum": 0.9, "nesterov": True},
        originals={
            "": of_torch("SGD"),
            "_momentum": of_torch("SGD", {"momentum": 0.9}),
            "_nesterov": of_optax("sgd", {"momentum": 0.8, "nesterov": True}),
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
            "": of_torch("Adam", {"epsilon": 0.0}),
            "_own_betas": of_optax("adam", {"epsilon": 0.0, "beta_1": 0.7, "beta_2": 0.95}),
            "_amsgrad": of_torch("Adam", {"epsilon": 0.0, "amsgrad": True, "beta_2": 0.9}),
        },
    ),
    "adamw": RuleRow(
        K.AdamW,
        references.Adam,
        switched_off={"weight_decay": 0.0},
        fused={"": {}},
        originals={"": of_torch("AdamW", {"epsilon": 0.0, "beta_2": 0.95}, weight_decay=0.3)},
    ),
    "nadam": RuleRow(
        K.Nadam,
        references.Nadam,
        low_precision_faults={("", "torch", "bfloat16"): NADAM_ON_TORCH},
        originals={
            # Keras fixes what torch calls the decay of the momentum.
            "": of_torch("NAdam", {"epsilon": 1e-3, "beta_2": 0.95}, {"momentum_decay": 1.0}),
        },
    ),
    "adamax": RuleRow(
        K.Adamax,
        references.Adamax,
        originals={"": of_torch("Adamax", {"epsilon": 0.0, "beta_2": 0.9})},
    ),
    "adagrad": RuleRow(
        K.Adagrad,
        references.Adagrad,
        fused={"": {"epsilon": 1e-5, "initial_accumulator_value": 0.3}},
        originals={
            "": of_torch("Adagrad", {"initial_accumulator_value": 0.5, "epsilon": 0.0}),
            "_own_epsilon": of_optax("adagrad", {"epsilon": 1e-2}),
        },
    ),
    "adadelta": RuleRow(
        K.Adadelta,
        references.Adadelta,
        originals={"": of_torch("Adadelta", {"rho": 0.9, "epsilon": 1e-2})},
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
            "": of_torch(lambda p, o: o.RMSprop(p, R, 0.8, 0.0), {"rho": 0.8, "epsilon": 0.0}),
            "_centered_momentum": of_optax(
                "rmsprop", {"epsilon": 1e-2, "momentum": 0.5, "centered": True}
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
        originals={"": of_optax("lion", {"beta_1": 0.8}, {"weight_decay": 0.0})},
    ),
    "lamb": RuleRow(
        K.Lamb,
        references.LAMB,
        originals={"": of_optax("lamb", {"epsilon": 1e-3, "beta_2": 0.95})},
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
