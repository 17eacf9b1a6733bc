"""The selectors that choose by one property of a variable each.

Users make them with the functions of `selectors.py`; these classes hold the checked arguments.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from keras_groupopt.algebra import Selector
from keras_groupopt.patterns import Pattern, compile_glob, compile_regex
from keras_groupopt.variable_info import VariableCatalog, VariableInfo

__all__ = [
    "Everything",
    "Layer",
    "LayerType",
    "Path",
    "Rank",
    "Regex",
    "VariableName",
    "Variables",
    "Where",
    "set_function_serializer",
]

_serialize: Callable[[Callable[..., Any]], Any] | None = None
_deserialize: Callable[[Any], Callable[..., Any]] | None = None


def set_function_serializer(
    serialize: Callable[[Callable[..., Any]], Any] | None,
    deserialize: Callable[[Any], Callable[..., Any]] | None,
) -> None:
    """Sets how the functions of `where` are written to a config and read back.

    Selectors know nothing of Keras; whoever does hands in the two directions here.

    Args:
        serialize: Takes a function, returns plain JSON data or raises if it can't be written.
        deserialize: Takes that data, returns the function.
    """
    global _serialize, _deserialize
    _serialize, _deserialize = serialize, deserialize


class _Leaf(Selector):
    """A selector without parts.

    Args:
        required: Whether matching no variable at all is an error.
    """

    required = True

    def resolve(self, catalog: VariableCatalog) -> frozenset[int]:
        found = self._claim(catalog)
        if not found and self.required:
            raise ValueError(
                f"Selector `{self.describe()}` must match at least one variable of the model. "
                f"Received: {self.describe()}, which matches none of {len(catalog)}."
                f"{self._advice(catalog)}"
            )
        return found

    @abstractmethod
    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the positions of the variables that match, possibly none."""

    def _advice(self, catalog: VariableCatalog) -> str:
        return ""

    def describe(self) -> str:
        names = ", ".join(_quote(name) for name in self._key())
        return f"{self.kind}({names})"


class Everything(_Leaf):
    """Every variable."""

    kind = "everything"
    required = False

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        return catalog.everything

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls()

    def _key(self) -> tuple[Any, ...]:
        return ()


class _PatternLeaf(_Leaf):
    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise TypeError(
                "`pattern` must be a string. "
                f"Received: pattern={pattern!r} (of type {type(pattern).__name__})."
            )
        self.pattern = self._compile(pattern)

    @staticmethod
    @abstractmethod
    def _compile(text: str) -> Pattern:
        """Checks and compiles the pattern."""

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        return self.pattern.claim(catalog)

    def _advice(self, catalog: VariableCatalog) -> str:
        unbuilt = [name for name in catalog.unbuilt_layers if self.pattern.matches(name)]
        if unbuilt:
            return f" Layer {unbuilt[0]!r} has no variables: build it first."
        return _nearest(self.pattern.text, catalog)

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"pattern": self.pattern.text}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(**arguments)

    def _key(self) -> tuple[Any, ...]:
        return (self.pattern.text,)


class Path(_PatternLeaf):
    """Variables at or below the paths that a glob matches."""

    kind = "path"
    _compile = staticmethod(compile_glob)


class Regex(_PatternLeaf):
    """Variables at or below the paths that a regular expression matches."""

    kind = "regex"
    _compile = staticmethod(compile_regex)


class Layer(_Leaf):
    """Variables of one layer, held as the object or named."""

    kind = "layer"

    def __init__(self, target: Any) -> None:
        if isinstance(target, type) or not (isinstance(target, str) or hasattr(target, "weights")):
            raise TypeError(
                "`layer` must be a Keras layer, or the name or path of one. "
                f"Received: layer={target!r} (of type {type(target).__name__})."
            )
        if target == "":
            raise ValueError("`layer` must not be empty. Received: layer=''.")
        self.target = target

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        if not isinstance(self.target, str):
            positions = (catalog.by_identity.get(id(weight)) for weight in self.target.weights)
            return frozenset(at for at in positions if at is not None)
        if self.target in catalog.layers_by_path:
            return frozenset(catalog.by_place[self.target])
        named = catalog.layers_by_name.get(self.target, ())
        if len(named) > 1:
            paths = ", ".join(repr(path) for path in named[:6])
            raise ValueError(
                "`layer` must name one layer. "
                f"Received: layer={self.target!r}, the name of {len(named)} layers. "
                f"Give the path of the one you mean: {paths}; for all of them use "
                f'`path("**/{self.target}")`.'
            )
        return frozenset(catalog.by_place[named[0]]) if named else frozenset()

    def _advice(self, catalog: VariableCatalog) -> str:
        if isinstance(self.target, str):
            if self.target in catalog.unbuilt_layers:
                return f" Layer {self.target!r} has no variables: build it first."
            return _nearest(self.target, catalog)
        if not self.target.weights:
            return " The layer has no weights: build it first, or choose another."
        return " The layer's weights are not in this model: was it copied or rebuilt?"

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        if isinstance(self.target, str):
            return {"layer": self.target}
        if catalog is None:
            raise ValueError(
                f"`{self.describe()}` holds a layer and is written as its path. "
                "Received: catalog=None. Pass the catalog of the model."
            )
        layer_path = catalog.by_layer_identity.get(id(self.target))
        if layer_path is not None:
            return {"layer": layer_path}
        # The model itself, or a model that shares layers with it and is no layer of it.
        return {"paths": [catalog[at].path for at in sorted(self.resolve(catalog))]}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        if "paths" in arguments:
            return Variables(*arguments["paths"])
        return cls(arguments["layer"])

    def describe(self) -> str:
        name = self.target if isinstance(self.target, str) else getattr(self.target, "name", "?")
        return f"layer({_quote(name)})"

    def _key(self) -> tuple[Any, ...]:
        return (self.target if isinstance(self.target, str) else id(self.target),)


class LayerType(_Leaf):
    """Variables of, or below, layers of certain classes."""

    kind = "layer_type"

    def __init__(self, *names: Any) -> None:
        names = tuple(name.__name__ if isinstance(name, type) else name for name in names)
        self.names = _checked_names(names, "layer_type", "class names or classes")

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        if catalog.provisional:
            raise ValueError(
                f"Selector `{self.describe()}` must know the layers above each variable. "
                "Received: variables without a model. Pass `model=`."
            )
        nothing: frozenset[int] = frozenset()
        return nothing.union(*(catalog.class_names.get(name, nothing) for name in self.names))

    def _advice(self, catalog: VariableCatalog) -> str:
        return _similar(self.names, catalog.class_names, "classes")

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"names": list(self.names)}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["names"])

    def _key(self) -> tuple[Any, ...]:
        return self.names


class VariableName(_Leaf):
    """Variables with certain last names."""

    kind = "variable_name"

    def __init__(self, *names: str, required: bool = True) -> None:
        self.names = _checked_names(names, "variable_name", "last names")
        self.required = required

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        nothing: frozenset[int] = frozenset()
        return nothing.union(*(catalog.variable_names.get(name, nothing) for name in self.names))

    def _advice(self, catalog: VariableCatalog) -> str:
        whole = [name for name in self.names if "/" in name]
        if whole:
            return f" Only last names count here: for a path use `path({_quote(whole[0])})`."
        return _similar(self.names, catalog.variable_names, "last names")

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        names = {"names": list(self.names)}
        return names if self.required else {**names, "required": False}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["names"], required=arguments.get("required", True))

    def describe(self) -> str:
        return f"variable_name({', '.join(_quote(name) for name in self.names)})"

    def _key(self) -> tuple[Any, ...]:
        return (*self.names, self.required)


class Rank(_Leaf):
    """Variables with a number of dimensions in a range."""

    kind = "rank"
    required = False

    def __init__(self, exact: int | None, minimum: int | None, maximum: int | None) -> None:
        bounds = {"rank": exact, "min": minimum, "max": maximum}
        for name, value in bounds.items():
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                raise ValueError(
                    f"`{name}` must be a whole number >= 0. Received: {name}={value!r}."
                )
        given = {name: value for name, value in bounds.items() if value is not None}
        received = ", ".join(f"{name}={value}" for name, value in given.items()) or "nothing"
        if not given or (exact is not None and len(given) > 1):
            raise ValueError(
                f"`rank` must be given one number, or `min`, `max` or both. Received: {received}."
            )
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError(f"`min` must be at most `max`. Received: {received}.")
        self.exact, self.minimum, self.maximum = exact, minimum, maximum

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        low = self.minimum or 0 if self.exact is None else self.exact
        high = self.maximum if self.exact is None else self.exact
        return frozenset(
            at
            for at, info in enumerate(catalog.infos)
            if low <= info.rank and (high is None or info.rank <= high)
        )

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        bounds = {"rank": self.exact, "min": self.minimum, "max": self.maximum}
        return {name: value for name, value in bounds.items() if value is not None}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(arguments.get("rank"), arguments.get("min"), arguments.get("max"))

    def describe(self) -> str:
        if self.exact is not None:
            return f"rank({self.exact})"
        bounds = {"min": self.minimum, "max": self.maximum}
        given = [f"{name}={value}" for name, value in bounds.items() if value is not None]
        return f"rank({', '.join(given)})"

    def _key(self) -> tuple[Any, ...]:
        return (self.exact, self.minimum, self.maximum)


class Variables(_Leaf):
    """Single variables, held as objects or named by their exact paths."""

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

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        found = set()
        for value in self.values:
            key, index = (
                (value, catalog.by_path)
                if isinstance(value, str)
                else (id(value), catalog.by_identity)
            )
            if key not in index:
                near = _nearest(value, catalog) if isinstance(value, str) else ""
                raise ValueError(
                    "`variables` must be given variables of the model. "
                    f"Received: {_path_of(value)!r}, which is none of its {len(catalog)}.{near}"
                )
            found.add(index[key])
        return frozenset(found)

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        if all(isinstance(value, str) for value in self.values):
            return {"paths": list(self.values)}
        if catalog is None:
            raise ValueError(
                f"`{self.describe()}` holds variables and is written as their paths. "
                "Received: catalog=None. Pass the catalog of the model."
            )
        return {"paths": [catalog[at].path for at in sorted(self.resolve(catalog))]}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["paths"])

    def describe(self) -> str:
        names = [_quote(_path_of(value)) for value in self.values[:4]]
        names += ["..."] if len(self.values) > 4 else []
        return f"variables({', '.join(names)})"

    def _key(self) -> tuple[Any, ...]:
        return tuple(value if isinstance(value, str) else id(value) for value in self.values)


class Where(_Leaf):
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

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        return frozenset(at for at, info in enumerate(catalog.infos) if self.function(info))

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        if _serialize is None:
            raise ValueError(
                f"`{self.describe()}` holds a Python function, which is not plain data. "
                "Use a selector that is, such as `path` or `variable_name`."
            )
        return {"function": _serialize(self.function)}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        if _deserialize is None:
            raise ValueError(
                "`config` must hold no Python function where none can be read. "
                f"Received: function={arguments['function']!r}."
            )
        return cls(_deserialize(arguments["function"]))

    def is_serializable(self) -> bool:
        try:
            self._arguments(None)
        except (TypeError, ValueError):
            return False
        return True

    def describe(self) -> str:
        return f"where({getattr(self.function, '__name__', type(self.function).__name__)})"

    def _key(self) -> tuple[Any, ...]:
        return (self.function,)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _path_of(value: Any) -> str:
    return value if isinstance(value, str) else str(value.path)


def _checked_names(names: tuple[Any, ...], argument: str, rule: str) -> tuple[str, ...]:
    if not names:
        raise ValueError(f"`{argument}` must be given at least one name. Received: nothing.")
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"`{argument}` must be given {rule}. "
                f"Received: {name!r} (of type {type(name).__name__})."
            )
    return names


def _nearest(text: str, catalog: VariableCatalog) -> str:
    near = catalog.near(text)
    advice = f" Nearest paths: {', '.join(map(repr, near))}." if near else ""
    if not near and len(catalog):
        some = dict.fromkeys(path.split("/")[0] for path in catalog.paths)
        advice = f" The model begins with {', '.join(map(repr, list(some)[:6]))}."
    if catalog.provisional:
        advice += " These are Keras' own paths, which lack nested models: pass `model=`."
    return advice


def _similar(names: Iterable[str], known: Iterable[str], what: str) -> str:
    known = list(known)
    near = [hit for name in names for hit in difflib.get_close_matches(name, known, n=2)]
    listed = list(dict.fromkeys(near)) or sorted(known)[:10]
    if not listed:
        return ""
    return f" {'Nearest' if near else 'Known'} {what}: {', '.join(map(repr, listed))}."
