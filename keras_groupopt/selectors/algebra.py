"""Selectors as a set algebra: the base class, and how selectors combine.

A selector is a pure predicate on the variables of a catalog. Combining selectors never looks at a
model. Resolving always looks at every part, so a misspelt name is found in any place.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from keras_groupopt.base.checks import message
from keras_groupopt.selectors.variable_info import VariableCatalog


class Selector(ABC):
    """A choice of variables. Selectors combine with `|`, `&`, `~` and `-`.

    A string next to one of these operators means `path`, and a layer means `layer`. Two selectors
    are equal if they are written the same.

    Example:
    >>> from keras_groupopt.selectors import path, rank
    >>> path("head") - rank(max=1)
    path("head") & ~rank(max=1)
    """

    kind: ClassVar[str] = ""
    _kinds: ClassVar[dict[str, type[Selector]]] = {}
    # The precedence of the operator in the text of `describe`. Higher binds tighter.
    _precedence: ClassVar[int] = 4

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.kind:
            Selector._kinds[cls.kind] = cls

    @abstractmethod
    def resolve(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the positions, in `catalog`, of the chosen variables.

        Args:
            catalog: The variables of a model.

        Raises:
            ValueError: If a part that names something does not match any variable.
        """

    @abstractmethod
    def describe(self) -> str:
        """Returns the selector as short text, such as `path("head") | rank(max=1)`."""

    @abstractmethod
    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        """Returns the config without the kind."""

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        """Builds the selector from what `_arguments` returned."""
        return cls(**arguments)

    def _key(self) -> Any:
        """Returns a value that is the same for equal selectors of one class."""
        return self.describe()

    def get_config(self, catalog: VariableCatalog | None = None) -> dict[str, Any]:
        """Returns the selector as plain JSON data.

        Args:
            catalog: The variables of the model, from which layers and variables that are held as
                objects get their paths. Default: none.

        Raises:
            ValueError: If a part cannot be written: an object and no catalog is given, or a
                function that is not registered.
        """
        return {"selector": self.kind, **self._arguments(catalog)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Selector:
        """Builds the selector that `get_config` described.

        Raises:
            ValueError: If `config` was not made by `get_config`.
        """
        kind = config.get("selector") if isinstance(config, dict) else None
        if kind not in Selector._kinds:
            raise ValueError(
                f"`config` must have a 'selector' that is one of {sorted(Selector._kinds)}. "
                f"Received: config={config!r}."
            )
        arguments = {name: value for name, value in config.items() if name != "selector"}
        try:
            return Selector._kinds[kind]._from_arguments(arguments)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(message("config", config, "what `get_config` returned")) from error

    def is_serializable(self) -> bool:
        """Returns whether `get_config` works once the catalog is known."""
        return True

    def __or__(self, other: Any) -> Selector:
        return Or(self, as_selector(other, "other"))

    def __ror__(self, other: Any) -> Selector:
        return Or(as_selector(other, "other"), self)

    def __and__(self, other: Any) -> Selector:
        return And(self, as_selector(other, "other"))

    def __rand__(self, other: Any) -> Selector:
        return And(as_selector(other, "other"), self)

    def __sub__(self, other: Any) -> Selector:
        return And(self, ~as_selector(other, "other"))

    def __rsub__(self, other: Any) -> Selector:
        return And(as_selector(other, "other"), ~self)

    def __invert__(self) -> Selector:
        return Not(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selector):
            return NotImplemented
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def __repr__(self) -> str:
        return self.describe()


class _WithParts(Selector):
    """A selector made of selectors."""

    parts: tuple[Selector, ...]

    def is_serializable(self) -> bool:
        """Returns whether all parts are serializable."""
        return all(part.is_serializable() for part in self.parts)

    def _key(self) -> tuple[Any, ...]:
        return self.parts

    def _bracketed(self, part: Selector) -> str:
        text = part.describe()
        return text if part._precedence > self._precedence else f"({text})"


class _Combination(_WithParts):
    """Selectors combined by one operator. Nested combinations of the same kind become one."""

    _sign: ClassVar[str]

    def __init__(self, *parts: Selector) -> None:
        flat: list[Selector] = []
        for part in parts:
            flat += part.parts if isinstance(part, type(self)) else [part]
        self.parts = tuple(flat)

    def describe(self) -> str:
        """Returns the parts with the operator between them."""
        return f" {self._sign} ".join(self._bracketed(part) for part in self.parts)

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"selectors": [part.get_config(catalog) for part in self.parts]}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(*(Selector.from_config(config) for config in arguments["selectors"]))


class Or(_Combination):
    """The variables that any of the parts chooses."""

    kind = "or"
    _sign = "|"
    _precedence = 1

    def resolve(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the union of the parts."""
        return frozenset().union(*[part.resolve(catalog) for part in self.parts])


class And(_Combination):
    """The variables that all of the parts choose."""

    kind = "and"
    _sign = "&"
    _precedence = 2

    def resolve(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the intersection of the parts."""
        return catalog.everything.intersection(*[part.resolve(catalog) for part in self.parts])


class Not(_WithParts):
    """The variables that the part does not choose."""

    kind = "not"
    _precedence = 3

    def __init__(self, part: Selector) -> None:
        self.parts = (part,)

    def resolve(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the complement of the part."""
        return catalog.everything - self.parts[0].resolve(catalog)

    def describe(self) -> str:
        """Returns `~` and the part."""
        return f"~{self._bracketed(self.parts[0])}"

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"of": self.parts[0].get_config(catalog)}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Selector:
        return cls(Selector.from_config(arguments["of"]))

    def __invert__(self) -> Selector:
        return self.parts[0]


def as_selector(value: Any, argument: str = "selector") -> Selector:
    """Returns `value` as a selector.

    Args:
        value: A selector; a string, which means `path`; a Keras layer or model, which means
            `layer`; a Keras variable, which means `variables`; or a list or tuple of these, which
            means any of them.
        argument: The name of the argument in errors. Default: "selector".

    Returns:
        The selector that `value` means.

    Raises:
        TypeError: If it is of another type.
        ValueError: If it is an empty list or a bad pattern.

    Example:
    >>> as_selector(["stem", "head"])
    path("stem") | path("head")
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        return Selector._kinds["path"](value)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return _any_of(value, argument)
    if _is_layer(value):
        return Selector._kinds["layer"](value)  # type: ignore[call-arg]
    if hasattr(value, "shape") and hasattr(value, "trainable"):
        return Selector._kinds["variables"](value)  # type: ignore[call-arg]
    raise TypeError(
        f"`{argument}` must be a layer path, a layer, a selector, or a list of these. "
        f"Received: {argument}={reprlib.repr(value)} (of type {type(value).__name__})."
        f"{_hint(value)}"
    )


def _any_of(values: list[Any] | tuple[Any, ...], argument: str) -> Selector:
    layers = [value for value in values if _is_layer(value)]
    # Layers go into one selector, since some in a list such as `model.layers` never have weights.
    parts = [Selector._kinds["layer"](*layers)] if layers else []
    parts += [as_selector(value, argument) for value in values if not _is_layer(value)]
    if not parts:
        raise ValueError(f"`{argument}` must not be empty. Received: {argument}={values!r}.")
    return Or(*parts) if len(parts) > 1 else parts[0]


def _is_layer(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "weights") and hasattr(value, "name")


def _hint(value: Any) -> str:
    if isinstance(value, type):
        return f' To choose all layers of a class use `layer_type("{value.__name__}")`.'
    if hasattr(value, "apply_gradients"):
        return " Pass an optimizer as the rule of a group: `Group(name, selector, rule=...)`."
    if callable(value):
        return " To choose by a function use `where(function)`."
    return ""
