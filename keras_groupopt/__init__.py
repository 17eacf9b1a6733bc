"""Train different parts of a Keras 3 model differently, with one optimizer.

`GroupedOptimizer` goes into `model.compile(optimizer=...)`; each `Group` has its own rule,
learning-rate ratio, decay and anchor.
"""

from types import ModuleType as _Module

from keras_groupopt import recipes as recipes
from keras_groupopt import schedules as schedules
from keras_groupopt.checkpoint.matching import Report as Report
from keras_groupopt.checkpoint.resuming import resuming as resuming
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer as GroupedOptimizer
from keras_groupopt.optimizer.loss_scale import LossScaleOptimizer as LossScaleOptimizer
from keras_groupopt.optimizer.model_files import load_weights as load_weights
from keras_groupopt.optimizer.model_files import read_manifest as read_manifest
from keras_groupopt.optimizer.model_files import save_weights as save_weights
from keras_groupopt.optimizer.transfer_state import transfer_state as transfer_state
from keras_groupopt.plan.averages import EMA as EMA
from keras_groupopt.plan.averages import SWA as SWA
from keras_groupopt.plan.group import Group as Group
from keras_groupopt.plan.plan import Plan as Plan
from keras_groupopt.plan.rule_spec import rule as rule
from keras_groupopt.plan.views.finder_result import RateCurves as RateCurves
from keras_groupopt.recipes.converters.foreign_state import load_torch_state as load_torch_state
from keras_groupopt.recipes.converters.keras_optimizers import (
    from_multi_optimizer as from_multi_optimizer,
)
from keras_groupopt.recipes.converters.keras_optimizers import from_optimizer as from_optimizer
from keras_groupopt.recipes.converters.param_groups import from_param_groups as from_param_groups
from keras_groupopt.rules.adabelief import AdaBelief as AdaBelief
from keras_groupopt.rules.adafactor import Adafactor as Adafactor
from keras_groupopt.rules.adan import Adan as Adan
from keras_groupopt.rules.ademamix import AdEMAMix as AdEMAMix
from keras_groupopt.rules.lars import LARS as LARS
from keras_groupopt.rules.lookahead import Lookahead as Lookahead
from keras_groupopt.rules.muon import Muon as Muon
from keras_groupopt.rules.nadamw import NAdamW as NAdamW
from keras_groupopt.rules.radam import RAdam as RAdam
from keras_groupopt.rules.schedule_free_adamw import ScheduleFreeAdamW as ScheduleFreeAdamW
from keras_groupopt.schedules.constant import ConstantRate as ConstantRate
from keras_groupopt.schedules.constant import constant as constant
from keras_groupopt.schedules.from_base import from_base as from_base
from keras_groupopt.schedules.transitions import warmup as warmup
from keras_groupopt.selectors import Selector as Selector
from keras_groupopt.selectors import default_exclude_from_decay as default_exclude_from_decay
from keras_groupopt.selectors import everything as everything
from keras_groupopt.selectors import layer as layer
from keras_groupopt.selectors import layer_type as layer_type
from keras_groupopt.selectors import path as path
from keras_groupopt.selectors import rank as rank
from keras_groupopt.selectors import regex as regex
from keras_groupopt.selectors import variable_name as variable_name
from keras_groupopt.selectors import variables as variables
from keras_groupopt.selectors import where as where
from keras_groupopt.selectors import xpath as xpath
from keras_groupopt.selectors.model_xml import to_xml as to_xml
from keras_groupopt.training.averaged_weights import averaged_weights as averaged_weights
from keras_groupopt.training.averaged_weights import load_averages as load_averages
from keras_groupopt.training.averaged_weights import save_averaged as save_averaged
from keras_groupopt.training.batch import Batch as Batch
from keras_groupopt.training.batch_norm import update_batch_norm as update_batch_norm
from keras_groupopt.training.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_groupopt.training.callbacks.flush_accumulation import (
    FlushAccumulation as FlushAccumulation,
)
from keras_groupopt.training.callbacks.group_logger import GroupLogger as GroupLogger
from keras_groupopt.training.callbacks.learning_rate_finder import (
    LearningRateFinder as LearningRateFinder,
)
from keras_groupopt.training.callbacks.plateau_ratio import PlateauRatio as PlateauRatio
from keras_groupopt.training.callbacks.use_averaged_weights import (
    UseAveragedWeights as UseAveragedWeights,
)
from keras_groupopt.training.gradient_rule import GradientRule as GradientRule
from keras_groupopt.training.gradient_rule import Hyperparameter as Hyperparameter
from keras_groupopt.training.gradient_rule import SingleGradient as SingleGradient
from keras_groupopt.training.model import SharpnessAwareModel as SharpnessAwareModel
from keras_groupopt.training.model import SharpnessAwareSequential as SharpnessAwareSequential
from keras_groupopt.training.model import sharpness_aware as sharpness_aware
from keras_groupopt.training.sharpness_aware import SharpnessAware as SharpnessAware
from keras_groupopt.training.sharpness_rules import ASAM as ASAM
from keras_groupopt.training.sharpness_rules import GSAM as GSAM
from keras_groupopt.training.sharpness_rules import SAM as SAM
from keras_groupopt.training.sharpness_rules import LookSAM as LookSAM

__version__ = "0.1.0"
# The names above, without the folders that importing them leaves here.
__all__ = [
    name
    for name, value in globals().items()
    if name[0] != "_" and (not isinstance(value, _Module) or name in ("recipes", "schedules"))
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
