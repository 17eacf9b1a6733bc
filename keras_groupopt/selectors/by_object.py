"""The selectors that hold an object: a layer, variables, or a function.

A config holds layers and variables as paths, and functions as what `set_function_serializer` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_groupopt.selectors.algebra import Or, Selector
from keras_groupopt.selectors.by_property import Everything
from keras_groupopt.selectors.leaf import Leaf, nearest, quote
from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo

__all__ = ["Layer", "Variables", "Where", "set_function_serializer"]

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


class Layer(Leaf):
    """Variables of layers, which are given as objects, names or paths."""

    kind = "layer"

    def __init__(self, *targets: Any) -> None:
        if not targets:
            raise ValueError("`layer` must be given at least one layer. Received: nothing.")
        for target in targets:
            if isinstance(target, type) or not (
                isinstance(target, str) or hasattr(target, "weights")
            ):
                raise TypeError(
                    "`layer` must be a Keras layer, or the name or path of one. "
                    f"Received: layer={target!r} (of type {type(target).__name__})."
                )
            if isinstance(target, str) and not target:
                raise ValueError("`layer` must not be empty. Received: layer=''.")
        self.targets = targets
        self.names = tuple(_name_of(target) for target in targets)

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
            "`layer` must be a layer of the model, with weights. "
            f"Received: layer={_name_of(target)!r}, which has none of its {len(catalog)} variables."
            f" {advice.lstrip()}"
        )

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        names = [target for target in self.targets if isinstance(target, str)]
        if len(names) == len(self.targets):
            return {"layers": names}
        if catalog is None:
            raise _no_catalog(self, "layers")
        self.resolve(catalog)
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

    def _key(self) -> tuple[Any, ...]:
        return tuple(t if isinstance(t, str) else id(t) for t in self.targets)


class Variables(Leaf):
    """Single variables, which are given as objects or exact paths."""

    kind = "variables"

    def __init__(self, *values: Any) -> None:
        if not values:
            raise ValueError("`variables` must be given at least one variable. Received: nothing.")
        for value in values:
            if not isinstance(value, str) and not (
                hasattr(value, "shape") and hasattr(value, "path")
            ):
                raise TypeError(
                    "`variables` must be given Keras variables or their exact layer paths. "
                    f"Received: {value!r} (of type {type(value).__name__})."
                )
        self.values = values

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        found = set()
        for value in self.values:
            if isinstance(value, str):
                position = catalog.by_path.get(value)
            else:
                position = catalog.by_identity.get(id(value))
            if position is None:
                near = nearest(value, catalog) if isinstance(value, str) else ""
                raise ValueError(
                    "`variables` must be given variables of the model. "
                    f"Received: {_path_of(value)!r}, which is none of its {len(catalog)}.{near}"
                )
            found.add(position)
        return frozenset(found)

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        if all(isinstance(value, str) for value in self.values):
            return {"paths": list(self.values)}
        if catalog is None:
            raise _no_catalog(self, "variables")
        return {"paths": [catalog[at].path for at in sorted(self.resolve(catalog))]}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["paths"])

    def describe(self) -> str:
        """Returns the selector as the code that makes it, with at most four variables."""
        names = [quote(_path_of(value)) for value in self.values[:4]]
        names += ["..."] if len(self.values) > 4 else []
        return f"variables({', '.join(names)})"

    def _key(self) -> tuple[Any, ...]:
        return tuple(value if isinstance(value, str) else id(value) for value in self.values)


class Where(Leaf):
    """Variables for which a function is true."""

    kind = "where"
    required = False

    def __init__(self, function: Callable[[VariableInfo], bool]) -> None:
        if not callable(function) or isinstance(function, Selector):
            raise TypeError(
                "`function` must take a VariableInfo and return whether it is chosen. "
                f"Received: function={function!r} (of type {type(function).__name__})."
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


def _no_catalog(selector: Selector, what: str) -> ValueError:
    return ValueError(
        f"`{selector.describe()}` holds {what}. A config needs their paths, which are not known "
        "without a catalog. Pass the catalog of the model: `get_config(catalog)`."
    )


def _path_of(value: Any) -> str:
    return value if isinstance(value, str) else str(value.path)


def _name_of(layer: Any) -> str:
    return layer if isinstance(layer, str) else str(getattr(layer, "name", "?"))
