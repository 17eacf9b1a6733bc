"""Descriptions of a model's variables, as plain values.

`layer_paths` makes them from a Keras model. Selectors, groups and the plan read nothing else, so
they need neither Keras nor a backend and can be tested with strings.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

# Keras' names for variables without a given name.
_AUTOMATIC_VARIABLE = re.compile(r"variable(_\d+)?")


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer above a variable.

    Args:
        name: The name in the path: automatic names are renumbered, `@n` is added.
        path: The layer path: the names from the root's child down to this layer, joined by `/`.
        class_names: The names of its class and of the base classes below `keras.Layer`. Default:
            none.
        identity: `id()` of the Keras layer, 0 if unknown. It is not compared. Default: 0.
        raw_name: `layer.name` in Keras. It is not compared, since automatic names differ between
            processes. Default: "".
        automatic: Whether `raw_name` is an automatic name. Default: False.
    """

    name: str
    path: str
    class_names: tuple[str, ...] = ()
    identity: int = field(default=0, compare=False)
    raw_name: str = field(default="", compare=False)
    automatic: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class VariableInfo:
    """One variable of a model.

    Args:
        path: The canonical layer path, such as `"mobilenetv2/Conv1/kernel"`.
        name: The last name, such as `"kernel"`.
        shape: The shape.
        dtype: The data type. Default: `"float32"`.
        trainable: Whether Keras trains it at present. Default: True.
        waits: Whether Keras would train it if its layer were not frozen. It is not compared.
            Default: False.
        aliases: Its other paths: further places in the model if it is shared, and Keras' own
            `variable.path` if that differs. They are not compared, since they differ between
            processes. Default: none.
        layers: The layers above it, from the root's child to the owner. Default: none.
        identity: `id()` of the Keras variable, 0 if unknown. It is not compared. Default: 0.
        keras_path: Keras' own `variable.path` if it is not a place in the model, else empty. It is
            not compared. Default: "".
        alias_layers: The layers above its further places. They are not compared. Default: none.

    Example:
    >>> info = VariableInfo("head/kernel", "kernel", (8, 2), "float32", True)
    >>> info.rank, info.size
    (2, 16)
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = field(default=(), compare=False)
    layers: tuple[LayerInfo, ...] = ()
    identity: int = field(default=0, compare=False)
    keras_path: str = field(default="", compare=False)
    alias_layers: tuple[LayerInfo, ...] = field(default=(), compare=False)
    waits: bool = field(default=False, compare=False)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def every_layer(self) -> tuple[LayerInfo, ...]:
        """The layers above it, in all places."""
        return (*self.layers, *self.alias_layers)

    @property
    def places(self) -> tuple[str, ...]:
        """Its paths in the model, the canonical one first, without Keras' own path."""
        return (self.path, *(alias for alias in self.aliases if alias != self.keras_path))

    @property
    def keras_path_is_stable(self) -> bool:
        """Whether `keras_path` has no automatic names, which differ between processes."""
        automatic = {layer.raw_name for layer in self.layers if layer.automatic}
        *above, name = self.keras_path.split("/")
        return automatic.isdisjoint(above) and not _AUTOMATIC_VARIABLE.fullmatch(name)


@dataclass(frozen=True, eq=False)
class VariableCatalog:
    """All variables of a model, in order, with the indices that selectors use.

    It is immutable. Each index is computed when it is first read, and then kept.

    Args:
        infos: The variables. Their paths must differ.
        provisional: Whether the paths come from `variable.path` alone, without a model. Default:
            False.
        unbuilt_layers: Layer paths of layers without variables, for messages. Default: none.

    Raises:
        ValueError: If two variables have the same path.

    Example:
    >>> catalog = VariableCatalog((VariableInfo("head/kernel", "kernel", (8, 2)),))
    >>> catalog.layer_paths
    ('head',)
    >>> catalog.near("haed")
    ['head']
    """

    infos: tuple[VariableInfo, ...]
    provisional: bool = False
    unbuilt_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "infos", tuple(self.infos))
        if len(self.by_path) != len(self.infos):
            paths = [info.path for info in self.infos]
            repeated = sorted({path for path in paths if paths.count(path) > 1})
            raise ValueError(f"`infos` must have distinct paths. Received twice: {repeated[:5]}.")

    def __len__(self) -> int:
        return len(self.infos)

    def __iter__(self) -> Iterator[VariableInfo]:
        return iter(self.infos)

    def __getitem__(self, position: int) -> VariableInfo:
        return self.infos[position]

    @cached_property
    def everything(self) -> frozenset[int]:
        """All positions."""
        return frozenset(range(len(self.infos)))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The canonical path of each variable."""
        return tuple(info.path for info in self.infos)

    @cached_property
    def by_path(self) -> dict[str, int]:
        """Position of each canonical path."""
        return {info.path: position for position, info in enumerate(self.infos)}

    @cached_property
    def by_identity(self) -> dict[int, int]:
        """Position of each variable by `id()`, without variables of unknown identity."""
        return {info.identity: at for at, info in enumerate(self.infos) if info.identity}

    @cached_property
    def layers_by_path(self) -> dict[str, LayerInfo]:
        """Every layer above some variable by its path, once per place, in order of appearance."""
        found: dict[str, LayerInfo] = {}
        for info in self.infos:
            for layer in info.every_layer:
                found.setdefault(layer.path, layer)
            # Infos that are made by hand may have paths without layers.
            for path in (path for place in info.places for path in _layers_above(place)):
                if path not in found:
                    found[path] = LayerInfo(path.rpartition("/")[2], path)
        return found

    @property
    def layer_paths(self) -> tuple[str, ...]:
        """The path of every layer above some variable, in order of appearance."""
        return tuple(self.layers_by_path)

    @cached_property
    def layers_by_name(self) -> dict[str, tuple[str, ...]]:
        """Paths of the layers with each name, in the path or explicitly given to Keras.

        A layer in several places is listed once, with its first path.
        """
        found: dict[str, dict[object, str]] = {}
        for path, layer in self.layers_by_path.items():
            names = {layer.name} if layer.automatic else {layer.name, layer.raw_name}
            for name in names:
                found.setdefault(name, {}).setdefault(layer.identity or path, path)
        return {name: tuple(paths.values()) for name, paths in found.items()}

    @cached_property
    def by_layer_identity(self) -> dict[int, str]:
        """First layer path of each layer by `id()`."""
        found: dict[int, str] = {}
        for layer in (layer for info in self.infos for layer in info.every_layer):
            found.setdefault(layer.identity, layer.path)
        found.pop(0, None)
        return found

    @cached_property
    def by_place(self) -> dict[str, tuple[int, ...]]:
        """Positions claimed by each path in the model, of a variable or of a layer above it."""
        return _positions_by(
            (path, at)
            for at, info in enumerate(self.infos)
            for place in info.places
            for path in (place, *_layers_above(place))
        )

    @cached_property
    def keras_paths(self) -> dict[str, tuple[int, ...]]:
        """Positions of the variables with each `keras_path` that is not a place of any variable."""
        return _positions_by(
            (info.keras_path, at)
            for at, info in enumerate(self.infos)
            if info.keras_path and info.keras_path not in self.by_place
        )

    @cached_property
    def class_names(self) -> dict[str, tuple[int, ...]]:
        """Positions below a layer of each class or base class."""
        return _positions_by(
            (class_name, at)
            for at, info in enumerate(self.infos)
            for layer in info.every_layer
            for class_name in layer.class_names
        )

    @cached_property
    def variable_names(self) -> dict[str, tuple[int, ...]]:
        """Positions of the variables with each last name."""
        return _positions_by((info.name, at) for at, info in enumerate(self.infos))

    def is_automatic_name(self, text: str) -> bool:
        """Returns whether `text` is the automatic name that Keras gave some layer."""
        return any(
            layer.automatic and layer.raw_name == text for layer in self.layers_by_path.values()
        )

    def near(self, text: str, n: int = 3) -> list[str]:
        """Returns the `n` real paths most like `text`, of layers and of variables.

        A layer whose Keras name is `text` comes first, then paths that are like `text` as a whole
        or in their last names, in any case. If there are none, paths follow with a name like one
        level of `text`, the last level first.

        Args:
            text: A path or a pattern.
            n: The maximum number of paths. Default: 3.
        """
        found = [layer.path for layer in self.layers_by_path.values() if layer.raw_name == text]
        found += self._like(text, n)
        for level in reversed(text.split("/")):
            found = found or self._like(level, n)
        return list(dict.fromkeys(found))[:n]

    def _like(self, text: str, n: int) -> list[str]:
        by_end: dict[str, list[str]] = {}
        levels = text.count("/") + 1
        for path in dict.fromkeys((*self.layer_paths, *self.paths)):
            for key in {path.lower(), "/".join(path.split("/")[-levels:]).lower()}:
                by_end.setdefault(key, []).append(path)
        near = difflib.get_close_matches(text.lower(), by_end, n=n, cutoff=0.6)
        return [path for key in near for path in sorted(by_end[key], key=len)]


def _layers_above(path: str) -> Iterator[str]:
    """Yields the paths of the layers above `path`, the root's child first."""
    end = path.find("/")
    while end >= 0:
        yield path[:end]
        end = path.find("/", end + 1)


def _positions_by(pairs: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """Collects the positions of each key, each once, in order."""
    found: dict[str, dict[int, None]] = {}
    for key, position in pairs:
        found.setdefault(key, {})[position] = None
    return {key: tuple(positions) for key, positions in found.items()}
