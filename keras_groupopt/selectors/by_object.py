"""The selectors that hold an object: a layer, variables, or a function.

A config holds layers and variables as paths, and functions as what `set_function_serializer` gives.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from keras_groupopt.base.checks import wrong_type
from keras_groupopt.selectors.algebra import Or, Selector
from keras_groupopt.selectors.by_property import Everything
from keras_groupopt.selectors.leaf import Leaf, nearest, quote
from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo

_serialize: Callable[[Callable[..., Any]], Any] | None = None
_deserialize: Callable[[Any], Callable[..., Any]] | None = None


def set_function_serializer(
    serialize: Callable[[Callable[..., Any]], Any] | None,
    deserialize: Callable[[Any], Callable[..., Any]] | None,
) -> None:
    """Sets how the functions of `where` are written to a config and read back.

    Selectors do not import Keras, so a module that does calls this.

    Args:
        serialize: Takes a function and returns plain JSON data, or raises if it cannot be written.
        deserialize: Takes that data and returns the function.
    """
    global _serialize, _deserialize
    _serialize, _deserialize = serialize, deserialize


class _ObjectLeaf(Leaf):
    """A selector that holds Keras objects, or strings that name them.

    Args:
        noun: What it holds, for errors.
        must: What its arguments must be, for errors.
        attributes: The attributes of the objects. The first one is an object's name in errors.
        config_key: The key of the names in a config.
    """

    noun: ClassVar[str]
    must: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]]
    config_key: ClassVar[str]

    def __init__(self, *targets: Any) -> None:
        if not targets:
            raise ValueError(
                f"`{self.kind}` must be given at least one {self.noun}. Received: nothing."
            )
        for target in targets:
            if isinstance(target, str) and not target:
                raise ValueError(f"`{self.kind}` must not be empty. Received: {self.kind}=''.")
            is_object = all(hasattr(target, name) for name in self.attributes)
            if not isinstance(target, str) and (isinstance(target, type) or not is_object):
                raise wrong_type(self.kind, target, self.must)
        self.targets = targets
        self.names = tuple(map(self._name_of, targets))

    def _name_of(self, target: Any) -> str:
        return target if isinstance(target, str) else str(getattr(target, self.attributes[0]))

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        if all(isinstance(target, str) for target in self.targets):
            return {self.config_key: list(self.targets)}
        if catalog is None:
            raise ValueError(
                f"`{self.describe()}` holds a {self.noun}. A config needs its path, which is not "
                "known without a catalog. Pass the catalog of the model: `get_config(catalog)`."
            )
        return self._paths(catalog)

    @abstractmethod
    def _paths(self, catalog: VariableCatalog) -> dict[str, Any]:
        """Returns the config, with the paths of objects."""

    def _key(self) -> tuple[Any, ...]:
        return tuple(t if isinstance(t, str) else id(t) for t in self.targets)


class Layer(_ObjectLeaf):
    """Variables of layers, which are given as objects, names or paths."""

    kind = "layer"
    noun = "layer"
    must = "a Keras layer, or the name or path of one"
    attributes = ("name", "weights")
    config_key = "layers"

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        return frozenset().union(*(self._match_one(target, catalog) for target in self.targets))

    def _match_one(self, target: Any, catalog: VariableCatalog) -> frozenset[int]:
        if isinstance(target, str):
            return frozenset(catalog.by_place[self._find(target, catalog)])
        found = (catalog.by_identity.get(id(weight)) for weight in target.weights)
        positions = frozenset(position for position in found if position is not None)
        if target.weights and not positions:
            raise self._missing(target, catalog, "Was it copied, or rebuilt?")
        # One of several layers may never have weights, such as Flatten.
        if not positions and (len(self.targets) == 1 or not getattr(target, "built", True)):
            raise self._missing(target, catalog, "It has no weights: build it first.")
        return positions

    def _find(self, name: str, catalog: VariableCatalog) -> str:
        """Returns the path of the layer with this path or name."""
        if name in catalog.layers_by_path:
            return name
        named = catalog.layers_by_name.get(name, ())
        if len(named) > 1:
            paths = ", ".join(repr(path) for path in named[:6])
            raise ValueError(
                "`layer` must name one layer. "
                f"Received: layer={name!r}, the name of {len(named)} layers. "
                f"Give the path of the one you mean: {paths}; for all of them use "
                f'`path("**/{name}")`.'
            )
        if not named and name in catalog.unbuilt_layers:
            raise self._missing(name, catalog, "It has no weights: build it first.")
        if not named:
            raise self._missing(name, catalog, nearest(name, catalog))
        return named[0]

    def _missing(self, target: Any, catalog: VariableCatalog, advice: str) -> ValueError:
        return ValueError(
            "`layer` must be a layer of the model, with weights. Received: "
            f"layer={self._name_of(target)!r}, which has none of its {len(catalog)} variables. "
            f"{advice.lstrip()}"
        )

    def _paths(self, catalog: VariableCatalog) -> dict[str, Any]:
        self.resolve(catalog)
        names = [target for target in self.targets if isinstance(target, str)]
        paths: list[str] = []
        for target in self.targets:
            if isinstance(target, str):
                continue
            found = self._match_one(target, catalog)
            if id(target) in catalog.by_layer_identity:
                names.append(catalog.by_layer_identity[id(target)])
            # The model itself, or a model that shares layers with it, is not one of its layers.
            elif found == catalog.everything:
                return {"layers": [], "everything": True}
            else:
                paths += [catalog[at].path for at in sorted(found)]
        return {"layers": names, **({"variables": paths} if paths else {})}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        if arguments.get("everything"):
            return Everything()
        parts: list[Selector] = [cls(*arguments["layers"])] if arguments["layers"] else []
        if arguments.get("variables"):
            parts.append(Variables(*arguments["variables"]))
        return Or(*parts) if len(parts) > 1 else parts[0]


class Variables(_ObjectLeaf):
    """Single variables, which are given as objects or exact paths."""

    kind = "variables"
    noun = "variable"
    must = "Keras variables or their exact layer paths"
    attributes = ("path", "shape")
    config_key = "paths"

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        found = set()
        for target, name in zip(self.targets, self.names, strict=True):
            is_path = isinstance(target, str)
            at = catalog.by_path.get(name) if is_path else catalog.by_identity.get(id(target))
            if at is None:
                raise ValueError(
                    "`variables` must be given variables of the model. Received: "
                    f"{name!r}, which is none of its {len(catalog)}."
                    f"{nearest(name, catalog) if is_path else ''}"
                )
            found.add(at)
        return frozenset(found)

    def _paths(self, catalog: VariableCatalog) -> dict[str, Any]:
        return {"paths": [catalog[at].path for at in sorted(self.resolve(catalog))]}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["paths"])

    def describe(self) -> str:
        """Returns the selector as the code that makes it, with at most four variables."""
        names = [*map(quote, self.names[:4]), *(["..."] if len(self.names) > 4 else [])]
        return f"variables({', '.join(names)})"


class Where(Leaf):
    """Variables for which a function is true."""

    kind = "where"
    required = False

    def __init__(self, function: Callable[[VariableInfo], bool]) -> None:
        if not callable(function) or isinstance(function, Selector):
            raise wrong_type(
                "function", function, "a function that takes a VariableInfo and returns a bool"
            )
        self.function = function

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        return frozenset(at for at, info in enumerate(catalog.infos) if self.function(info))

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        if _serialize is None:
            raise ValueError(
                f"`{self.describe()}` holds a Python function, which cannot be written to a "
                "config. Use another selector, such as `path` or `variable_name`."
            )
        return {"function": _serialize(self.function)}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        if _deserialize is None:
            raise ValueError(
                "`config` must not hold a Python function, since no function serializer is set. "
                f"Received: function={arguments['function']!r}."
            )
        return cls(_deserialize(arguments["function"]))

    def is_serializable(self) -> bool:
        """Returns whether the function can be written to a config."""
        try:
            self._arguments(None)
        except (TypeError, ValueError):
            return False
        return True

    def describe(self) -> str:
        """Returns the selector with the name of its function."""
        return f"where({getattr(self.function, '__name__', type(self.function).__name__)})"

    def _key(self) -> Any:
        return self.function
