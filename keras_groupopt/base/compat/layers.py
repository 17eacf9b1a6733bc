"""Layers and models: what they hold and call, and their classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras

# The class of `keras.Model(inputs, outputs)`, which has no public name.
from keras.src.models.functional import Functional as Functional


def child_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers directly below `layer`, each once, in the same order in every process.

    Functional and Sequential models give their layers in the order of the graph. Layers that are
    attributes of a model or layer, alone or in lists and dicts, follow in the order of assignment.
    """
    layers = list(layer.layers) if isinstance(layer, keras.Model) else []
    # Only models have `layers`. `Layer.weights` reads this list.
    layers += getattr(layer, "_layers", [])
    return list({id(child): child for child in layers if child is not layer}.values())


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that `layer` itself owns, each once.

    `Layer.weights` adds those of the layers below.
    """
    variables = [*layer._trainable_variables, *layer._non_trainable_variables]
    return list({id(variable): variable for variable in variables}.values())


def frozen_weights(model: keras.Model) -> set[int]:
    """Returns the identities of the weights that would train if their layers were not frozen.

    A weight's own `trainable` is also `False` for statistics, and for kernels that LoRA adapts.
    """
    return {
        id(variable)
        for layer in model._flatten_layers()
        if not layer.trainable
        for variable in layer._trainable_variables
    }


def all_layers(model: keras.Sequential) -> list[keras.Layer]:
    """Returns the layers of a Sequential model with its input layer, which `layers` leaves out."""
    return list(model._layers)


def calls(model: keras.Model) -> list[tuple[Any, list[Any], list[Any]]] | None:
    """Returns the calls in a functional or built Sequential model: operation, inputs, outputs.

    A call comes after those that make its inputs. A model without a graph gives `None`. The public
    `operations` do not say which tensors an operation is called with.
    """
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(graph, Functional):
        return None
    nodes = [node for _, at in sorted(graph._nodes_by_depth.items(), reverse=True) for node in at]
    return [(node.operation, list(node.input_tensors), list(node.output_tensors)) for node in nodes]


def structures(model: keras.Model) -> tuple[Any, Any]:
    """Returns a functional model's inputs and outputs as they were given.

    `inputs` and `outputs` are flat lists.
    """
    return model._inputs_struct, model._outputs_struct


def layer_class_names(cls: type) -> Iterator[str]:
    """Yields the names of `cls` and of its bases below `keras.Layer`.

    Bases of Keras that are not layers, such as a backend's trainer, are left out.
    """
    for base in cls.__mro__:
        if base is keras.Layer:
            return
        # Keras mixes other classes into models on each backend.
        if issubclass(base, keras.Layer) or not base.__module__.startswith("keras.src."):
            yield base.__name__


def layer_classes() -> Iterator[type[Any]]:
    """Yields every class of layers in this process."""
    pending = [keras.Layer]
    seen = set()
    while pending:
        cls = pending.pop()
        if cls not in seen:
            seen.add(cls)
            pending += cls.__subclasses__()
            yield cls


def is_backend_variant(cls: type) -> bool:
    """Returns whether Keras uses `cls` in place of a public class on a backend."""
    return cls.__module__.startswith("keras.src.backend.")


def is_keras_own(cls: type) -> bool:
    """Returns whether Keras itself defines `cls`."""
    return cls.__module__.startswith("keras.src.")


def custom_objects(objects: Any) -> AbstractContextManager[Any]:
    """Returns Keras' scope of custom objects, or none for no objects: it would hide one around."""
    return keras.saving.custom_object_scope(objects) if objects else contextlib.nullcontext()
