"""Operations on lists of gradients and variables, in the fastest form each backend has.

`generic.py` states each operation in `keras.ops`; a backend's file replaces those it has a faster
or a more general form of (lists at once on torch, sparse gradients on TensorFlow).
"""

from __future__ import annotations

import importlib

import keras

from keras_groupopt.kernels import generic

_OPERATIONS = (
    "check_replicas",
    "clip_by_value",
    "combine_repeated_rows",
    "global_norm",
    "outside_compiled_step",
    "own",
    "pull",
    "scale",
    "shrink",
)
_BACKENDS = ("tensorflow", "torch")

_fast = (
    importlib.import_module(f"keras_groupopt.kernels.{keras.backend.backend()}")
    if keras.backend.backend() in _BACKENDS
    else generic
)

(
    check_replicas,
    clip_by_value,
    combine_repeated_rows,
    global_norm,
    outside_compiled_step,
    own,
    pull,
    scale,
    shrink,
) = (getattr(_fast, operation, getattr(generic, operation)) for operation in _OPERATIONS)

# TensorFlow's variables cannot be replaced by values for the length of a call.
STATELESS = keras.backend.backend() != "tensorflow"
# `fit` passes values without their variables, which the order alone tells apart.
BY_ORDER = keras.backend.backend() == "jax"
