"""Layer paths of a model's variables. No other module reads Keras' layer tree.

`variable.path` tells where a variable was made, not where it is: in a model with a nested backbone
it is still `Conv1/kernel`. This module finds the path by walking down from the model and numbers
automatic names per parent, so the same code gives the same paths in every process. It only reads
the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import keras

from keras_groupopt.base import compat
from keras_groupopt.base.checks import wrong_type
from keras_groupopt.base.text import untaken
from keras_groupopt.selectors.layer_names import automatic_bases, number_siblings, snake_case
from keras_groupopt.selectors.variable_info import LayerInfo, VariableCatalog, VariableInfo

# A layer may be in many places. A chain of layers that each hold the next one twice would have
# exponentially many paths, so no more than this many places of one layer are collected.
_MOST_PLACES = 256

_Names = tuple[str, ...]


def layers(model: keras.Layer) -> Iterator[keras.Layer]:
    """Yields a model and all layers below it, each once, from the top down."""
    seen: set[int] = set()
    pending = [model]
    while pending:
        layer = pending.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer
            pending += reversed(compat.child_layers(layer))


def describe_model(model: keras.Layer) -> VariableCatalog:
    """Describes every weight of a model, trainable or not, by its layer path.

    The order is that of `model.weights`, so the trainable weights are in the order of
    `model.trainable_variables`. States of random generators are left out. A shared variable has one
    canonical path, the first on the way down. Its other places are aliases, as is `variable.path`.

    Args:
        model: A Keras model (or layer) that is built. Layers in it that were never built have no
            variables; their paths are in `unbuilt_layers`.

    Returns:
        The catalog of its variables.

    Raises:
        TypeError: If `model` is not a Keras model or layer.
        ValueError: If neither `model` nor its layers are built.

    Example:
    >>> import keras
    >>> backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="backbone")
    >>> model = keras.Sequential([backbone, keras.layers.Dense(2, name="head")])
    >>> describe_model(model).paths
    ('backbone/dense/kernel', 'backbone/dense/bias', 'head/kernel', 'head/bias')
    """
    if not isinstance(model, keras.Layer):
        raise wrong_type("model", model, "a Keras model or layer")
    walk = _Walk()
    walk.enter(model, "", ())
    # A model whose layers are called one by one may not be marked as built.
    if not model.built and (walk.unbuilt or not walk.places):
        missing = ", ".join(map(repr, walk.unbuilt[:5])) or "any layer"
        raise ValueError(
            "`model` must be built before its variables can be named. "
            f"Received: model named {model.name!r}, without variables for {missing}. "
            "Call `model.build(input_shape)`, call it once on a batch, or start it with "
            "`keras.Input`."
        )
    weights = {id(variable): variable for variable in model.weights}
    trainable = {id(variable): variable for variable in model.trainable_variables}
    variables = {**weights, **trainable}
    strays = [variable for key, variable in variables.items() if key not in walk.places]
    # A class may list weights that no layer in it holds. They get Keras' own path.
    taken = {place.path for places in walk.places.values() for place in places}
    for variable, info in zip(strays, describe_variables(strays), strict=True):
        path = _untaken(info.path, taken)
        walk.places[id(variable)] = [_Place(path, path.split("/")[-1], ())]
    frozen = compat.frozen_weights(model)
    infos = [
        _variable_info(variable, walk.places[key], key in trainable, key in frozen)
        for key, variable in variables.items()
    ]
    return VariableCatalog(tuple(infos), unbuilt_layers=tuple(walk.unbuilt))


def describe_variables(variables: Iterable[keras.Variable]) -> VariableCatalog:
    """Describes variables without a model, by `variable.path` with automatic names renumbered.

    The catalog is provisional: such paths lack the parents of nested models and change when a
    Sequential model is loaded. If several variables have the same Keras path, the owner's name gets
    `@1`, `@2`.

    Args:
        variables: Keras variables, in the order of the optimizer.

    Returns:
        A provisional catalog, in the same order.

    Raises:
        TypeError: If one is not a variable.

    Example:
    >>> import keras
    >>> layer = keras.layers.Dense(2, name="head")
    >>> layer.build((None, 3))
    >>> describe_variables(layer.weights).paths
    ('head/kernel', 'head/bias')
    """
    variables = list(variables)
    raw_paths = [tuple(_keras_path(variable).split("/")) for variable in variables]
    levels = _levels_below(raw_paths)
    infos = []
    taken: set[str] = set()
    for variable, raw, path in zip(variables, raw_paths, _distinct(raw_paths, levels), strict=True):
        layers = tuple(
            LayerInfo(
                name,
                "/".join(path[: level + 1]),
                raw_name=raw[level],
                automatic=levels[raw[:level]][raw[level]][1],
            )
            for level, name in enumerate(path[:-1])
        )
        full = _untaken("/".join(path), taken)
        place = _Place(full, full.split("/")[-1], layers)
        infos.append(_variable_info(variable, [place], bool(variable.trainable)))
    return VariableCatalog(tuple(infos), provisional=True)


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    name: str
    layers: tuple[LayerInfo, ...]


@dataclass
class _Walk:
    """Collects the places of every variable, from the top down."""

    places: dict[int, list[_Place]] = field(default_factory=dict)
    unbuilt: list[str] = field(default_factory=list)
    _entered: dict[int, int] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _children: dict[int, list[tuple[keras.Layer, str, bool]]] = field(default_factory=dict)

    def enter(self, layer: keras.Layer, prefix: str, layers: tuple[LayerInfo, ...]) -> None:
        key = id(layer)
        entered = self._entered.get(key, 0)
        # A layer may hold a layer above it. Entering that again would never end.
        if key in self._open or entered >= _MOST_PLACES:
            return
        self._entered[key] = entered + 1
        self._open.add(key)
        own = compat.own_variables(layer)
        if not layer.built and not own and not entered and prefix:
            self.unbuilt.append(prefix[:-1])
        names = _variable_names(tuple(variable.name for variable in own))
        for variable, name in zip(own, names, strict=True):
            self.places.setdefault(id(variable), []).append(_Place(prefix + name, name, layers))
        for child, name, automatic in self._named_children(layer):
            path = prefix + name
            classes = tuple(compat.layer_class_names(type(child)))
            info = LayerInfo(name, path, classes, id(child), child.name, automatic)
            self.enter(child, path + "/", (*layers, info))
        self._open.discard(key)

    def _named_children(self, layer: keras.Layer) -> list[tuple[keras.Layer, str, bool]]:
        """Returns the children of a layer, their names in the path, and which are automatic."""
        if id(layer) not in self._children:
            children = compat.child_layers(layer)
            named = _numbered(
                [child.name for child in children],
                [{snake_case(type(child).__name__)} for child in children],
            )
            self._children[id(layer)] = [
                (child, *name) for child, name in zip(children, named, strict=True)
            ]
        return self._children[id(layer)]


def _variable_info(
    variable: Any, places: list[_Place], trainable: bool, waits: bool = False
) -> VariableInfo:
    first, *others = places
    paths = [place.path for place in places]
    keras_path = _keras_path(variable)
    keras_path = "" if keras_path in paths else keras_path
    above = {layer.path: layer for place in others for layer in place.layers}
    for layer in first.layers:
        above.pop(layer.path, None)
    return VariableInfo(
        path=first.path,
        name=first.name,
        shape=tuple(variable.shape),
        dtype=keras.backend.standardize_dtype(variable.dtype),
        trainable=trainable,
        aliases=(*paths[1:], keras_path) if keras_path else tuple(paths[1:]),
        layers=first.layers,
        identity=id(variable),
        keras_path=keras_path,
        alias_layers=tuple(above.values()),
        waits=waits,
    )


def _keras_path(variable: Any) -> str:
    """Returns `variable.path`, or the name of a `tf.Variable`, which has no path."""
    path = getattr(variable, "path", None)
    if path is None and hasattr(variable, "assign") and isinstance(variable.name, str):
        path = variable.name.partition(":")[0].strip("/")
    if not isinstance(path, str):
        raise TypeError(
            "Variables must be Keras variables. Received: an object of type "
            f"{type(variable).__module__}.{type(variable).__name__}. Use "
            "`model.trainable_variables`, or make variables with `keras.Variable`."
        )
    return path


def _numbered(names: Sequence[str], bases: Iterable[Iterable[str]]) -> list[tuple[str, bool]]:
    """Returns the names of siblings in the path, and whether they are automatic."""
    found = automatic_bases(names, bases)
    automatic = (base is not None for base in found)
    return list(zip(number_siblings(names, found), automatic, strict=True))


@lru_cache(maxsize=1024)
def _variable_names(names: _Names) -> _Names:
    """Names of the variables of one owner. Keras calls variables without a name `variable_n`."""
    return tuple(name for name, _ in _numbered(names, [{"variable"}] * len(names)))


def _untaken(path: str, taken: set[str]) -> str:
    """Returns `path`, with `@n` if it is taken, and takes it."""
    unique = untaken(path, taken, "@")
    taken.add(unique)
    return unique


def _levels_below(paths: list[_Names]) -> dict[_Names, dict[str, tuple[str, bool]]]:
    """Returns the children of each parent: their numbered names, and which are automatic."""
    # A path does not show the class of a layer, so the names of all layer classes are possible.
    known = {snake_case(cls.__name__) for cls in compat.layer_classes()} | {"variable"}
    children: dict[_Names, dict[str, None]] = {}
    for path in paths:
        for level, name in enumerate(path):
            children.setdefault(path[:level], {})[name] = None
    return {
        parent: dict(zip(below, _numbered(list(below), [known] * len(below)), strict=True))
        for parent, below in children.items()
    }


def _distinct(
    raw_paths: list[_Names], levels: dict[_Names, dict[str, tuple[str, bool]]]
) -> list[_Names]:
    """Renumbers automatic names, and adds `@n` to the owners of paths that are then equal.

    A path without an owner gets `@n` itself.
    """
    paths = [
        tuple(levels[raw[:level]][name][0] for level, name in enumerate(raw)) for raw in raw_paths
    ]
    repeated = {path[:-1] or path for path, count in Counter(paths).items() if count > 1}
    seen: Counter[_Names] = Counter()
    result = []
    for path in paths:
        seen[path] += 1
        owner = path[:-1] if path[:-1] in repeated else path
        if owner in repeated:
            path = (*owner[:-1], f"{owner[-1]}@{seen[path]}", *path[len(owner) :])
        result.append(path)
    return result
