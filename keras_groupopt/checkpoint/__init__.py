"""An optimizer's state outside of the optimizer: keys, manifest, files, and matching.

State is keyed by `group/layer path/slot`, so a file tells what each array is, and each array can be
matched to a variable of the optimizer that reads the file.

    optimizer ──take──► Saved(manifest, values) ──match, give──► optimizer
                             ▲       │
                            read   write
                             │       ▼
                            a store (H5, a dict)
"""

from keras_groupopt.checkpoint.archive import opened as opened
from keras_groupopt.checkpoint.archive import read_file as read_file
from keras_groupopt.checkpoint.archive import write_file as write_file
from keras_groupopt.checkpoint.fingerprint import NOT_BUILT as NOT_BUILT
from keras_groupopt.checkpoint.fingerprint import protect as protect
from keras_groupopt.checkpoint.fingerprint import protect_early as protect_early
from keras_groupopt.checkpoint.keys import entries_of as entries_of
from keras_groupopt.checkpoint.manifest import manifest_of as manifest_of
from keras_groupopt.checkpoint.matching import Report as Report
from keras_groupopt.checkpoint.nested import from_nested as from_nested
from keras_groupopt.checkpoint.nested import to_nested as to_nested
from keras_groupopt.checkpoint.resuming import on_terms as on_terms
from keras_groupopt.checkpoint.resuming import present_terms as present_terms
from keras_groupopt.checkpoint.resuming import terms as terms
from keras_groupopt.checkpoint.saved import Saved as Saved
from keras_groupopt.checkpoint.saved import Terms as Terms
from keras_groupopt.checkpoint.saved import as_pending as as_pending
from keras_groupopt.checkpoint.saved import give as give
from keras_groupopt.checkpoint.saved import give_early as give_early
from keras_groupopt.checkpoint.saved import take as take
from keras_groupopt.checkpoint.saved import without_lora_averages as without_lora_averages
from keras_groupopt.checkpoint.sharding import beside_weights as beside_weights
from keras_groupopt.checkpoint.sharding import place as place
from keras_groupopt.checkpoint.store import read as read
from keras_groupopt.checkpoint.store import read_manifest as read_manifest
from keras_groupopt.checkpoint.store import write as write
