"""Update rules that Keras lacks, or has in a form that does not do in a group."""

from keras_groupopt.rules.adabelief import AdaBelief as AdaBelief
from keras_groupopt.rules.adafactor import Adafactor as Adafactor
from keras_groupopt.rules.adan import Adan as Adan
from keras_groupopt.rules.lars import LARS as LARS
from keras_groupopt.rules.lookahead import Lookahead as Lookahead
from keras_groupopt.rules.muon import Muon as Muon
from keras_groupopt.rules.nadamw import NAdamW as NAdamW
from keras_groupopt.rules.radam import RAdam as RAdam
from keras_groupopt.rules.schedule_free_adamw import ScheduleFreeAdamW as ScheduleFreeAdamW
