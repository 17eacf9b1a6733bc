"""The selectors that choose by a property of each variable.

Users make them with the functions of the package; these classes hold the checked arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from keras_groupopt.selectors.algebra import Selector
from keras_groupopt.selectors.leaf import Leaf, checked_names, nearest, quote, similar
from keras_groupopt.selectors.patterns import Pattern, compile_glob, compile_regex
from keras_groupopt.selectors.variable_info import VariableCatalog

__all__ = ["Everything", "LayerType", "Path", "Rank", "Regex", "VariableName"]


class Everything(Leaf):
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


class _PatternLeaf(Leaf):
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
        text = self.pattern.text
        if "/" not in text and any(self.pattern.matches(name) for name in catalog.variable_names):
            return f" Last names at any depth: `path({quote('**/' + text)})`."
        return nearest(text, catalog)

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


class LayerType(Leaf):
    """Variables of, or below, layers of certain classes."""

    kind = "layer_type"

    def __init__(self, *names: Any) -> None:
        names = tuple(name.__name__ if isinstance(name, type) else name for name in names)
        self.names = checked_names(names, "layer_type", "class names or classes")

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        if catalog.provisional:
            raise ValueError(
                f"Selector `{self.describe()}` must know the layers above each variable. "
                "Received: variables without a model. Pass `model=`."
            )
        nothing: frozenset[int] = frozenset()
        return nothing.union(*(catalog.class_names.get(name, nothing) for name in self.names))

    def _advice(self, catalog: VariableCatalog) -> str:
        return similar(self.names, catalog.class_names, "classes")

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"names": list(self.names)}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["names"])

    def _key(self) -> tuple[Any, ...]:
        return self.names


class VariableName(Leaf):
    """Variables with certain last names."""

    kind = "variable_name"

    def __init__(self, *names: str, required: bool = True) -> None:
        self.names = checked_names(names, "variable_name", "last names")
        self.required = required

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        nothing: frozenset[int] = frozenset()
        return nothing.union(*(catalog.variable_names.get(name, nothing) for name in self.names))

    def _advice(self, catalog: VariableCatalog) -> str:
        whole = [name for name in self.names if "/" in name]
        if whole:
            return f" Only last names count here: for a path use `path({quote(whole[0])})`."
        return similar(self.names, catalog.variable_names, "last names")

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        names = {"names": list(self.names)}
        return names if self.required else {**names, "required": False}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*arguments["names"], required=arguments.get("required", True))

    def _text(self) -> str:
        return f"variable_name({', '.join(quote(name) for name in self.names)})"

    def _key(self) -> tuple[Any, ...]:
        return (*self.names, self.required)


class Rank(Leaf):
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

    def _text(self) -> str:
        if self.exact is not None:
            return f"rank({self.exact})"
        bounds = {"min": self.minimum, "max": self.maximum}
        given = [f"{name}={value}" for name, value in bounds.items() if value is not None]
        return f"rank({', '.join(given)})"

    def _key(self) -> tuple[Any, ...]:
        return (self.exact, self.minimum, self.maximum)
