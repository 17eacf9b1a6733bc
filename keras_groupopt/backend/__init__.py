"""Operations on lists of gradients and variables, in the fastest form each backend has.

`generic.py` states each operation in `keras.ops`; a backend's file replaces those it has a faster
or a more general form of (lists at once on torch, sparse gradients on TensorFlow), and adds the
ones that no two backends share: `known`, `conditional` and `choose`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt.backend import generic

_OPERATIONS = (
    "accumulate",
    "add_scaled",
    "apart",
    "are_fusible",
    "as_written",
    "assign_on_replicas",
    "average",
    "beside",
    "buffers",
    "choose",
    "clip_by_value",
    "combine_repeated_rows",
    "compiled",
    "conditional",
    "copies",
    "dense",
    "distance",
    "dot",
    "fused_step",
    "global_norm",
    "has_replicas",
    "is_gone",
    "known",
    "largest",
    "loss_of_all",
    "once",
    "outside_compiled_step",
    "over_replicas",
    "own",
    "pull",
    "random_states",
    "restore_random_states",
    "rmsprop_step",
    "scale",
    "select",
    "set_buffer",
    "set_copies",
    "sgd_step",
    "shares_of_replicas",
    "shrink",
    "sum_over_replicas",
    "trace",
    "without_gradients",
    "without_reduction",
)
_fast = importlib.import_module(f"keras_groupopt.backend.{keras.backend.backend()}")

(
    accumulate,
    add_scaled,
    apart,
    are_fusible,
    as_written,
    assign_on_replicas,
    average,
    beside,
    buffers,
    choose,
    clip_by_value,
    combine_repeated_rows,
    compiled,
    conditional,
    copies,
    dense,
    distance,
    dot,
    fused_step,
    global_norm,
    has_replicas,
    is_gone,
    known,
    largest,
    loss_of_all,
    once,
    outside_compiled_step,
    over_replicas,
    own,
    pull,
    random_states,
    restore_random_states,
    rmsprop_step,
    scale,
    select,
    set_buffer,
    set_copies,
    sgd_step,
    shares_of_replicas,
    shrink,
    sum_over_replicas,
    trace,
    without_gradients,
    without_reduction,
) = (
    getattr(_fast if hasattr(_fast, operation) else generic, operation) for operation in _OPERATIONS
)

# TensorFlow's variables cannot be replaced by values for the length of a call.
STATELESS = keras.backend.backend() != "tensorflow"
# `fit` passes values without their variables, which the order alone tells apart.
BY_ORDER = keras.backend.backend() == "jax"


def on_host(scalar: Any) -> Any:
    """Returns a scalar as a Python number; of copies on several devices, the first's."""
    return np.asarray(keras.ops.convert_to_numpy(scalar)).item()


def copy_of(value: Any) -> Callable[..., Any]:
    """Returns an initializer that copies: on JAX a buffer that two share could not be donated.

    Args:
        value: A variable or an array.
    """

    def initializer(shape: Any, dtype: Any = None) -> Any:
        del shape
        tensor = keras.ops.convert_to_tensor(value)
        return keras.ops.copy(keras.ops.cast(tensor, dtype or tensor.dtype))

    return initializer


def when(predicate: Any, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body` if `predicate` holds, without reading it on the host in a compiled step.

    Args:
        predicate: A boolean scalar tensor.
        body: Assigns to some of `variables` and to nothing else.
        variables: Every Keras variable that `body` reads or assigns.
    """
    taken = known(predicate)
    if taken is None:
        conditional(predicate, body, variables)
    elif taken:
        body()


def either(
    predicate: Any, then: Callable[[], list[Any]], otherwise: Callable[[], list[Any]]
) -> list[Any]:
    """Returns the tensors of one of two functions without side effects, and runs only that one.

    Args:
        predicate: A boolean scalar tensor.
        then: Returns tensors.
        otherwise: Returns as many, of the same shapes and dtypes.
    """
    taken = known(predicate)
    if taken is None:
        return list(choose(predicate, then, otherwise))
    return then() if taken else otherwise()
