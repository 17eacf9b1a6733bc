"""The base class of selectors without parts, and the advice they give if nothing matches."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Iterable

from keras_groupopt.selectors.algebra import Selector
from keras_groupopt.selectors.variable_info import VariableCatalog


class Leaf(Selector):
    """A selector without parts.

    Args:
        names: The texts that it is written with.
        required: Whether matching no variable is an error.
        needs_model: Whether it reads the layers above a variable.
    """

    names: tuple[str, ...] = ()
    required = True
    needs_model = False

    def resolve(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the positions of the variables that match.

        Raises:
            ValueError: If none matches and one is required, or the catalog is not of a model and
                the selector needs one.
        """
        if self.needs_model and catalog.provisional:
            raise ValueError(
                f"Selector `{self.describe()}` reads the layers above each variable, which are not "
                "known without a model. Pass `model=`."
            )
        found = self._match(catalog)
        if not found and self.required:
            raise ValueError(
                f"Selector `{self.describe()}` must match at least one variable of the model. "
                f"Received: {self.describe()}, which matches none of {len(catalog)}."
                f"{self._advice(catalog)}"
            )
        return found

    @abstractmethod
    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the positions of the variables that match, possibly none."""

    def _advice(self, catalog: VariableCatalog) -> str:
        return ""

    def describe(self) -> str:
        """Returns the selector as the code that makes it."""
        return f"{self.kind}({', '.join(map(quote, self.names))})"


def quote(text: str) -> str:
    """Returns `text` in double quotes, as Python code."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def nearest(text: str, catalog: VariableCatalog) -> str:
    """Returns advice for a path or pattern that is not in the model."""
    near = catalog.near(text)
    advice = f" Nearest paths: {', '.join(map(repr, near))}." if near else ""
    if not near and len(catalog):
        some = dict.fromkeys(path.split("/")[0] for path in catalog.paths)
        advice = f" The model begins with {', '.join(map(repr, list(some)[:6]))}."
    if text in near:
        literal = "".join(f"[{letter}]" if letter in "[*?" else letter for letter in text)
        advice += f" `[`, `*` and `?` are wildcards: to match the characters, write {literal!r}."
    if near and catalog.is_automatic_name(text):
        advice += f" Automatic names such as {text!r} are counted anew below each parent."
    if catalog.provisional:
        advice += " These are Keras' own paths, which lack nested models: pass `model=`."
    return advice


def similar(names: Iterable[str], known: Iterable[str], what: str) -> str:
    """Returns advice for names that are not among `known`."""
    known = list(known)
    near = [hit for name in names for hit in difflib.get_close_matches(name, known, n=2)]
    listed = list(dict.fromkeys(near)) or sorted(known)[:10]
    if not listed:
        return ""
    return f" {'Nearest' if near else 'Known'} {what}: {', '.join(map(repr, listed))}."
