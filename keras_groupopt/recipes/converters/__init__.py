"""Converters from other optimizers, with their state, to a `GroupedOptimizer`."""

from keras_groupopt.recipes.converters.foreign_state import load_torch_state as load_torch_state
from keras_groupopt.recipes.converters.keras_optimizers import (
    from_multi_optimizer as from_multi_optimizer,
)
from keras_groupopt.recipes.converters.keras_optimizers import from_optimizer as from_optimizer
from keras_groupopt.recipes.converters.param_groups import from_param_groups as from_param_groups
