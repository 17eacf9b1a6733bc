"""The selector that searches the model, as an XML document, with XPath.

`elementpath` is an extra. It is imported when a query is made or resolved.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from keras_groupopt.base.checks import wrong_type
from keras_groupopt.selectors.document import VARIABLE, element_name, to_tree
from keras_groupopt.selectors.leaf import Leaf, nearest, similar
from keras_groupopt.selectors.variable_info import VariableCatalog

_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_WORD = re.compile(r"[^\W\d][\w.-]*")


class XPath(Leaf):
    """Variables at or below the elements that an XPath query finds.

    Making one does not parse the query, so a saved model loads without `elementpath`.
    """

    kind = "xpath"
    needs_model = True

    def __init__(self, query: str) -> None:
        if not isinstance(query, str):
            raise wrong_type("query", query, "a string")
        self.query = query
        self.names = (query,)

    def parse(self) -> Any:
        """Returns the parsed query.

        Raises:
            ImportError: If `elementpath` is not installed.
            ValueError: If the query is not XPath.
        """
        try:
            import elementpath
        except ImportError as error:
            raise ImportError(
                f"`xpath` needs `elementpath`, which is not installed, for query={self.query!r}. "
                "Install it with `pip install keras-groupopt[xpath]`."
            ) from error
        try:
            # A query may come from a saved model, and XPath 3 can read files and web addresses.
            return elementpath.Selector(self.query, parser=elementpath.XPath2Parser)
        except elementpath.ElementPathError as error:
            # `token` is missing if nothing was read.
            line, column = getattr(error.token, "position", (1, 1))
            raise ValueError(
                f"`query` must be an XPath 2.0 query. Received: query={self.query!r}, which fails "
                f"at line {line}, column {column}: {_reason(error)}."
            ) from error

    def _match(self, catalog: VariableCatalog) -> frozenset[int]:
        root, variables = to_tree(catalog)
        position_of = {id(element): position for element, position in variables}
        return frozenset(
            position_of[id(below)]
            for element in self._find(root)
            for below in element.iter(VARIABLE)
        )

    def _find(self, root: ElementTree.Element) -> list[ElementTree.Element]:
        query = self.parse()
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
                    "Write a condition in brackets: `//variable[@rank > 1]`."
                )
        return found

    def _advice(self, catalog: VariableCatalog) -> str:
        quoted = [first or second for first, second in _QUOTED.findall(self.query)]
        layers = catalog.layers_by_path.values()
        classes = dict.fromkeys(element_name(x.class_names[0]) for x in layers if x.class_names)
        words = _WORD.findall(_QUOTED.sub("", self.query))
        unknown = [word for word in words if word[0].isupper() and word not in classes]
        if unknown:
            return similar(unknown, classes, "classes")
        advice = [nearest(text, catalog) for text in quoted if text not in catalog.by_place]
        return advice[0] if advice else " `print(kgo.to_xml(model))` shows the document."

    def _arguments(self, catalog: VariableCatalog | None) -> dict[str, Any]:
        return {"query": self.query}


def _reason(error: Any) -> str:
    return str(error.message).rstrip(".")
