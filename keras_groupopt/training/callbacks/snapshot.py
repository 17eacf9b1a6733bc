"""All that `fit` may change, copied to the host and restored bit for bit."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np

from keras_groupopt import backend
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer import saving
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.training.averaged_weights import synchronize

# What `fit` sets on a model.
_SET_BY_FIT = ("history", "stop_training")


class Snapshot:
    """Weights, statistics, seeds, metrics, optimizer state and random generators of one moment.

    The generator that TensorFlow shuffles with is left out, as it has no public state.

    Args:
        model: A compiled model whose optimizer is built.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        optimizer = unwrap(model.optimizer)
        built = optimizer._built if isinstance(optimizer, GroupedOptimizer) else None
        # This comes first, because reading `variables` takes the anchors and averages that are due.
        self._put_back_state = None if built is None else saving.remember(optimizer)
        variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        self._values = [
            (variable, backend.copies(variable))
            for variable in {id(v): v for v in variables}.values()
        ]
        self._buffers = [
            (buffer, np.array(keras.ops.convert_to_numpy(buffer)))
            for buffer in backend.buffers(model)
        ]
        self._generators = (random.getstate(), np.random.get_state(), backend.random_states())
        self._attributes = {n: getattr(model, n) for n in _SET_BY_FIT if hasattr(model, n)}

    def restore(self) -> None:
        """Restores everything."""
        # On JAX the state of an interrupted epoch would overwrite it later.
        with contextlib.suppress(RuntimeError, ValueError):
            synchronize(self._model)
        # This also resets metrics that the first `fit` made.
        self._model.reset_metrics()
        for variable, values in self._values:
            backend.set_copies(variable, values)
        for buffer, value in self._buffers:
            backend.set_buffer(buffer, value)
        if self._put_back_state is not None:
            self._put_back_state()
        python, numpy, own = self._generators
        random.setstate(python)
        np.random.set_state(numpy)
        backend.restore_random_states([np.array(state) for state in own])
        for name in _SET_BY_FIT:
            if name in self._attributes:
                setattr(self._model, name, self._attributes[name])
            elif hasattr(self._model, name):
                delattr(self._model, name)
