"""The calls of a model, in order. Nested models are opened, other layers are one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_groupopt.base import compat
from keras_groupopt.selectors.layer_paths import layers

# Layers that keep a linear map linear. All other layers count as nonlinear.
_LINEAR = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.Dropout,
    keras.layers.ZeroPadding1D,
    keras.layers.ZeroPadding2D,
    keras.layers.ZeroPadding3D,
    keras.layers.Reshape,
    keras.layers.Permute,
    keras.layers.Identity,
)
_DENSE = (keras.layers.Dense, keras.layers.EinsumDense)
_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)


@dataclass(eq=False)
class Call:
    """One call of an operation.

    Args:
        operation: The layer or operation.
        before: The indices of the calls whose outputs it takes.
        inputs: The shapes of its inputs.
        outputs: The shapes of its outputs.
        child: The child of the root that it is, or that it is in.
        is_used: Whether an output of the root depends on it.
        owners: The layers in it with a matrix that maps features; see `_owns_kernel`.
    """

    operation: Any
    before: frozenset[int]
    inputs: list[tuple[Any, ...]]
    outputs: list[tuple[Any, ...]]
    child: Any
    is_used: bool = field(init=False, default=False)
    owners: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.weights:
            self.owners = [part for part in layers(self.operation) if _owns_kernel(part, self)]

    @property
    def kernels(self) -> int:
        """The number of layers in it with a matrix that maps features."""
        return len(self.owners)

    @property
    def weights(self) -> list[Any]:
        """The variables of its operation."""
        return list(getattr(self.operation, "weights", ()))

    @property
    def drops_rank(self) -> bool:
        """Whether only features are left: pooled over positions, flattened, or one position."""
        taken, made = (max(map(len, shapes), default=0) for shapes in (self.inputs, self.outputs))
        return taken > 2 >= made

    @property
    def has_attention(self) -> bool:
        """Whether its class, or that of a layer in it, is an attention."""
        is_layer = isinstance(self.operation, keras.Layer)
        parts = layers(self.operation) if is_layer else (self.operation,)
        return any("Attention" in type(part).__name__ for part in parts)

    @property
    def is_dense(self) -> bool:
        """Whether all its kernels are of dense layers."""
        return all(isinstance(part, _DENSE) for part in self.owners)

    @property
    def is_depthwise(self) -> bool:
        """Whether it is a depthwise convolution."""
        return isinstance(self.operation, _DEPTHWISE)

    @property
    def is_linear(self) -> bool:
        """Whether it is known to have no activation."""
        if self.kernels:
            activation = getattr(self.operation, "activation", None)
            return activation in (None, keras.activations.linear)
        return isinstance(self.operation, _LINEAR)


def has_graph(model: Any) -> bool:
    """Whether a model has a graph with the order of its layers."""
    return isinstance(model, keras.Model) and compat.calls(model) is not None


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a model with a graph, each after the calls it depends on."""
    found: list[Call] = []
    producers: dict[int, frozenset[int]] = {}
    _add(model, producers, found, None)
    # An output of a nested model may be unused.
    ends = (producers.get(id(tensor), frozenset()) for tensor in model.outputs)
    for index in ancestors(found, frozenset().union(*ends)):
        found[index].is_used = True
    return found


def _add(
    model: keras.Model, producers: dict[int, frozenset[int]], found: list[Call], child: Any
) -> None:
    nothing: frozenset[int] = frozenset()
    for operation, inputs, outputs in compat.calls(model) or ():
        owner = operation if child is None else child
        given = [producers.get(id(tensor), nothing) for tensor in inputs]
        before = nothing.union(*given)
        if not inputs:
            # An input. The call of a nested model sets the producers of its inputs.
            continue
        if has_graph(operation):
            inner = operation.inputs
            if len(given) != len(inner):
                given = [before] * len(inner)
            inside = {id(tensor): by for tensor, by in zip(inner, given, strict=True)}
            _add(operation, inside, found, owner)
            for tensor, result in zip(outputs, operation.outputs, strict=True):
                producers[id(tensor)] = inside.get(id(result), nothing)
            continue
        shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (inputs, outputs)]
        found.append(Call(operation, before, shapes[0], shapes[1], owner))
        producers.update((id(tensor), frozenset({len(found) - 1})) for tensor in outputs)


def ancestors(calls: Sequence[Call], start: Iterable[int]) -> set[int]:
    """Returns `start` and all calls that one of them depends on."""
    found = set(start)
    for index in range(len(calls) - 1, -1, -1):
        if index in found:
            found |= calls[index].before
    return found


def descendants(calls: Sequence[Call], start: Iterable[int]) -> set[int]:
    """Returns `start` and all calls that depend on one of them."""
    found = set(start)
    for index, call in enumerate(calls):
        if call.before & found:
            found.add(index)
    return found


def _owns_kernel(layer: Any, call: Call) -> bool:
    """Whether a layer owns a matrix that maps features, and not a table of vectors.

    For a layer that is not of Keras, a matrix counts if its shape fits the layer's input and it is
    not an array that is added to the output, such as a position embedding.
    """
    if isinstance(layer, keras.layers.Embedding):
        return False
    shapes = [tuple(v.shape) for v in compat.own_variables(layer) if len(v.shape) >= 2]
    if compat.is_keras_own(type(layer)):
        return bool(shapes)
    features = {shape[-1] for shape in call.inputs if len(shape) > 1}
    whole = layer is call.operation
    return any(
        not _is_table(shape, call.outputs) and (not whole or bool(features & set(shape[:-1])))
        for shape in shapes
    )


def _is_table(shape: tuple[int, ...], outputs: list[tuple[Any, ...]]) -> bool:
    while shape[:1] == (1,):
        shape = shape[1:]
    return len(shape) < 2 or any(shape == output[-len(shape) :] for output in outputs)
