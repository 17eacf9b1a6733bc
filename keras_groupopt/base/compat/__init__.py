"""The only place that uses Keras' internals, with the reason for each use.

By subject: `layers`, `variables`, `optimizers`, `training`.
"""

from keras_groupopt.base.compat.layers import *
from keras_groupopt.base.compat.optimizers import *
from keras_groupopt.base.compat.training import *
from keras_groupopt.base.compat.variables import *
