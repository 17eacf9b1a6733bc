"""Schedules that Keras lacks, for rates, ratios, decays and momentums.

Each one equals, step by step, the torch scheduler that its docstring names. They combine with
Keras' `ExponentialDecay`, `CosineDecay`, `CosineDecayRestarts`, `InverseTimeDecay` and
`PiecewiseConstantDecay`.
"""

from keras_groupopt.schedules.base import Schedule as Schedule
from keras_groupopt.schedules.combined import Chained as Chained
from keras_groupopt.schedules.combined import Scaled as Scaled
from keras_groupopt.schedules.combined import Sequential as Sequential
from keras_groupopt.schedules.cycles import Cyclic as Cyclic
from keras_groupopt.schedules.cycles import OneCycle as OneCycle
from keras_groupopt.schedules.decays import Linear as Linear
from keras_groupopt.schedules.decays import Polynomial as Polynomial
from keras_groupopt.schedules.decays import WarmupStableDecay as WarmupStableDecay
from keras_groupopt.schedules.functions import Lambda as Lambda
from keras_groupopt.schedules.steps import MultiStep as MultiStep
from keras_groupopt.schedules.steps import Step as Step
from keras_groupopt.schedules.steps import UnfreezeAt as UnfreezeAt
from keras_groupopt.schedules.transitions import SWA as SWA
from keras_groupopt.schedules.transitions import Warmup as Warmup
