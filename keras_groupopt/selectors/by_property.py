"""The selectors that choose by a property of each variable.

Users make them with the functions of the package. These classes hold the checked arguments.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from keras_groupopt.base.checks import message, wrong_type
from keras_groupopt.selectors.leaf import Leaf, nearest, quote, similar
from keras_groupopt.selectors.patterns import Pattern, compile_glob, compile_regex
from keras_groupopt.selectors.variable_info import VariableCatalog


class Everything(Leaf):
    """Every variable."""

    kind = "everything"
    required = False

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        return catalog.everything

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {}


class _PatternLeaf(Leaf):
    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise wrong_type("pattern", pattern, "a string")
        self.pattern = self._compile(pattern)
        self.names = (pattern,)

    @staticmethod
    @abstractmethod
    def _compile(text: str) -> Pattern:
        """Checks and compiles the pattern."""

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        return self.pattern.claim(catalog)

    def _advice(self, catalog: VariableCatalog) -> str:
        unbuilt = [name for name in catalog.unbuilt_layers if self.pattern.matches(name)]
        if unbuilt:
            return f" Layer {unbuilt[0]!r} has no variables yet: build it first."
        text = self.pattern.text
        if "/" not in text and any(self.pattern.matches(name) for name in catalog.variable_names):
            return f" To match last names at any depth use `path({quote('**/' + text)})`."
        return nearest(text, catalog)

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"pattern": self.pattern.text}


class Path(_PatternLeaf):
    """Variables at or below the paths that a glob matches."""

    kind = "path"
    _compile = staticmethod(compile_glob)


class Regex(_PatternLeaf):
    """Variables at or below the paths that a regular expression matches."""

    kind = "regex"
    _compile = staticmethod(compile_regex)


class _NamesLeaf(Leaf):
    """A selector of the variables below some keys of an index of the catalog."""

    index: ClassVar[str]
    must: ClassVar[str]
    noun: ClassVar[str]

    def __init__(self, names: Iterable[Any], required: bool = True) -> None:
        self.names, self.required = tuple(names), required
        if not self.names:
            raise ValueError(f"`{self.kind}` must be given at least one name. Received: nothing.")
        for name in self.names:
            if not isinstance(name, str) or not name:
                raise TypeError(
                    f"`{self.kind}` must be given {self.must}. "
                    f"Received: {name!r} (of type {type(name).__name__})."
                )

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        index = getattr(catalog, self.index)
        return frozenset().union(*(index.get(name, ()) for name in self.names))

    def _advice(self, catalog: VariableCatalog) -> str:
        return similar(self.names, getattr(catalog, self.index), self.noun)

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        names = {"names": list(self.names)}
        return names if self.required else {**names, "required": False}

    def _key(self) -> tuple[Any, ...]:
        return (self.names, self.required)


class LayerType(_NamesLeaf):
    """Variables of layers of certain classes, and of the layers below them."""

    kind = "layer_type"
    needs_model = True
    index, must, noun = "class_names", "class names or classes", "classes"


class VariableName(_NamesLeaf):
    """Variables with certain last names."""

    kind = "variable_name"
    index, must, noun = "variable_names", "last names", "last names"

    def _advice(self, catalog: VariableCatalog) -> str:
        whole = [name for name in self.names if "/" in name]
        if whole:
            return f" Only last names count here. For a path use `path({quote(whole[0])})`."
        return super()._advice(catalog)


class Rank(Leaf):
    """Variables with a number of dimensions in a range."""

    kind = "rank"
    required = False

    def __init__(
        self,
        rank: int | None = None,
        min: int | None = None,  # noqa: A002 - as in the config
        max: int | None = None,  # noqa: A002
    ) -> None:
        bounds = {"rank": rank, "min": min, "max": max}
        self.bounds = {name: bound for name, bound in bounds.items() if bound is not None}
        for name, bound in self.bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
                raise ValueError(message(name, bound, "a whole number >= 0"))
        received = ", ".join(f"{name}={bound}" for name, bound in self.bounds.items()) or "nothing"
        if not self.bounds or (rank is not None and len(self.bounds) > 1):
            raise ValueError(
                f"`rank` must be given one number, or `min`, `max` or both. Received: {received}."
            )
        self.least, self.most = (rank, rank) if rank is not None else (min or 0, max)
        if self.most is not None and self.least > self.most:
            raise ValueError(f"`min` must be at most `max`. Received: {received}.")

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        most = math.inf if self.most is None else self.most
        return frozenset(
            at for at, info in enumerate(catalog.infos) if self.least <= info.rank <= most
        )

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return dict(self.bounds)

    def describe(self) -> str:
        """Returns the selector as the code that makes it."""
        if "rank" in self.bounds:
            return f"rank({self.least})"
        return f"rank({', '.join(f'{name}={bound}' for name, bound in self.bounds.items())})"
