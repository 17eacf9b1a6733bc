"""Operations on lists of gradients and variables, in the fastest form each backend has.

`generic.py` defines each operation with `keras.ops`. The file of a backend replaces those it has a
faster or more general form of (lists at once on torch, sparse gradients on TensorFlow), and adds
the three that have no generic form: `concrete`, `traced_run_if` and `traced_cond`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt.backend.generic import *

if keras.backend.backend() == "jax":
    from keras_groupopt.backend.jax import *
elif keras.backend.backend() == "tensorflow":
    from keras_groupopt.backend.tensorflow import *
else:
    from keras_groupopt.backend.torch import *

# TensorFlow's variables cannot be replaced by values for the length of a call.
STATELESS = keras.backend.backend() != "tensorflow"
# `fit` passes values without their variables, which the order alone tells apart.
BY_ORDER = keras.backend.backend() == "jax"


def on_host(scalar: Any) -> Any:
    """Returns a scalar as a Python number; of copies on several devices, the first's."""
    return np.asarray(keras.ops.convert_to_numpy(scalar)).item()


def copy_of(value: Any) -> Callable[..., Any]:
    """Returns an initializer that copies: on JAX a buffer that two share could not be donated.

    A variable that has no value yet is taken for zero.

    Args:
        value: A variable or an array.
    """

    def initializer(shape: Any, dtype: Any = None) -> Any:
        if isinstance(value, keras.Variable) and not is_initialized(value):
            return keras.ops.zeros(shape, dtype)
        with outside_compiled_step():
            tensor = keras.ops.convert_to_tensor(value)
            return keras.ops.copy(keras.ops.cast(tensor, dtype or tensor.dtype))

    return initializer


def run_if(predicate: Any, body: Callable[[], None], variables: Sequence[Any]) -> None:
    """Runs `body` if `predicate` holds, without reading it on the host in a compiled step.

    Args:
        predicate: A boolean scalar tensor.
        body: Assigns to some of `variables` and to nothing else.
        variables: Every Keras variable that `body` reads or assigns.
    """
    taken = concrete(predicate)
    if taken is None:
        traced_run_if(predicate, body, variables)
    elif taken:
        body()


def cond(
    predicate: Any, then: Callable[[], list[Any]], otherwise: Callable[[], list[Any]]
) -> list[Any]:
    """Returns the tensors of one of two functions without side effects, and runs only that one.

    Args:
        predicate: A boolean scalar tensor, or a Python boolean.
        then: Returns tensors.
        otherwise: Returns as many, of the same shapes and dtypes.
    """
    taken = predicate if isinstance(predicate, bool) else concrete(predicate)
    if taken is None:
        return list(traced_cond(predicate, then, otherwise))
    return then() if taken else otherwise()
