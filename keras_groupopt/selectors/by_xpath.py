"""The selector that asks the model as a document, in XPath.

`elementpath` is an extra: it is imported where a query is made or resolved.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from keras_groupopt.selectors.document import VARIABLE, element_name, to_tree
from keras_groupopt.selectors.leaf import Leaf, nearest, similar
from keras_groupopt.selectors.variable_info import VariableCatalog

__all__ = ["XPath"]

_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_WORD = re.compile(r"[^\W\d][\w.-]*")


class XPath(Leaf):
    """Variables at or below the elements that an XPath query finds."""

    kind = "xpath"

    def __init__(self, query: str) -> None:
        if not isinstance(query, str):
            raise TypeError(
                "`query` must be a string. "
                f"Received: query={query!r} (of type {type(query).__name__})."
            )
        self.query = query

    def check(self) -> None:
        """Raises if the query is no XPath, or nothing could answer it."""
        self._parse()

    def _parse(self) -> Any:
        try:
            import elementpath
        except ImportError as error:
            raise ImportError(
                f"`xpath` must have `elementpath`. Received: query={self.query!r}, and no such "
                "package. Install it with `pip install keras-groupopt[xpath]`."
            ) from error
        try:
            # XPath 3 could read files and addresses; a query may come from a saved model.
            return elementpath.Selector(self.query, parser=elementpath.XPath2Parser)
        except elementpath.ElementPathError as error:
            # A query of one line has its column; `token` is missing where nothing was read.
            line, column = getattr(error.token, "position", (1, 1))
            raise ValueError(
                f"`query` must be an XPath 2.0 query. Received: query={self.query!r}, which fails "
                f"at line {line}, column {column}: {_reason(error)}."
            ) from error

    def _claim(self, catalog: VariableCatalog) -> frozenset[int]:
        if catalog.provisional:
            raise ValueError(
                f"Selector `{self.describe()}` must know the layers above each variable. "
                "Received: variables without a model. Pass `model=`."
            )
        root, variables = to_tree(catalog)
        position_of = {id(element): position for element, position in variables}
        return frozenset(
            position_of[id(below)]
            for element in self._find(root)
            for below in element.iter(VARIABLE)
        )

    def _find(self, root: ElementTree.Element) -> list[ElementTree.Element]:
        query = self._parse()
        import elementpath

        try:
            found = query.select(root)
        except elementpath.ElementPathError as error:
            raise ValueError(
                "`query` must be an XPath 2.0 query that the model can answer. Received: "
                f"query={self.query!r}: {_reason(error)}."
            ) from error
        found = found if isinstance(found, list) else [found]
        for item in found:
            if not isinstance(item, ElementTree.Element):
                raise ValueError(
                    "`query` must find layers or variables, which are elements. Received: "
                    f"query={self.query!r}, which finds {item!r} (of type {type(item).__name__}). "
                    "A condition goes into brackets: `//variable[@rank > 1]`."
                )
        return found

    def _advice(self, catalog: VariableCatalog) -> str:
        quoted = [first or second for first, second in _QUOTED.findall(self.query)]
        classes = {element_name(layer.class_names[0]): None for layer in _layers(catalog)}
        unknown = [word for word in _WORD.findall(_QUOTED.sub("", self.query)) if word[0].isupper()]
        wrong = [word for word in unknown if word not in classes]
        if wrong:
            return similar(wrong, classes, "classes")
        advice = [nearest(text, catalog) for text in quoted if text not in catalog.by_place]
        return advice[0] if advice else " `print(kgo.to_xml(model))` shows the document."

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"query": self.query}

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> XPath:
        # A saved model loads without `elementpath` too.
        return cls(**arguments)

    def _key(self) -> tuple[Any, ...]:
        return (self.query,)


def _layers(catalog: VariableCatalog) -> list[Any]:
    return [layer for layer in catalog.layers_by_path.values() if layer.class_names]


def _reason(error: Any) -> str:
    return str(error.message).rstrip(".")
