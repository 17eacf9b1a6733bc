"""All that `fit` may change, kept on the host and put back bit for bit."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np

from keras_groupopt import backend
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.training.averaged_weights import synchronize

# What `fit` sets on a model.
_SET_BY_FIT = ("history", "stop_training")


class Snapshot:
    """Weights, statistics, seeds, metrics, optimizer state and random generators of one moment.

    Not the generator that TensorFlow shuffles with, which has no public state.

    Args:
        model: A compiled model whose optimizer is built.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        optimizer = unwrap(model.optimizer)
        self._built = optimizer._built if isinstance(optimizer, GroupedOptimizer) else None
        # Before `variables` is read, which takes what is due.
        self._fields: dict[str, Any] = {}
        self._put_back_averages: Any = None
        if self._built is not None:
            names = ("due", "received", "received_in", "with_gradient", "warned")
            self._fields = {name: getattr(self._built, name) for name in names}
            self._fields["warned"] = set(self._built.warned)
            if self._built.averages is not None:
                self._put_back_averages = self._built.averages.remember()
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
        """Puts all back."""
        # State of an epoch that was interrupted on JAX would overwrite it later.
        with contextlib.suppress(RuntimeError, ValueError):
            synchronize(self._model)
        # Those that the first `fit` made.
        self._model.reset_metrics()
        for variable, values in self._values:
            backend.set_copies(variable, values)
        for buffer, value in self._buffers:
            backend.set_buffer(buffer, value)
        if self._put_back_averages is not None:
            self._put_back_averages()
        for name, field in self._fields.items():
            setattr(self._built, name, set(field) if name == "warned" else field)
        python, numpy, own = self._generators
        random.setstate(python)
        np.random.set_state(numpy)
        backend.restore_random_states([np.array(state) for state in own])
        for name in _SET_BY_FIT:
            if name in self._attributes:
                setattr(self._model, name, self._attributes[name])
            elif hasattr(self._model, name):
                delattr(self._model, name)
