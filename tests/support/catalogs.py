"""Catalogs written by hand: selectors need no model to be tested."""

from __future__ import annotations

from keras_groupopt.selectors import Selector, as_selector
from keras_groupopt.selectors.variable_info import LayerInfo, VariableCatalog, VariableInfo

SHAPES = {"kernel": (3, 4), "embeddings": (10, 4)}


def variable(
    path: str,
    *,
    shape: tuple[int, ...] | None = None,
    trainable: bool = True,
    classes: dict[str, tuple[str, ...]] | None = None,
    aliases: tuple[str, ...] = (),
    keras_path: str = "",
    raw_names: dict[str, str] | None = None,
) -> VariableInfo:
    """A variable whose layers follow from its path; `classes` and `raw_names` are by layer path."""
    *above, name = path.split("/")
    classes, raw = classes or {}, raw_names or {}
    layers = [
        LayerInfo(layer, at, classes.get(at, ()), raw_name=raw.get(at, layer), automatic=at in raw)
        for layer, at in (
            (above[end - 1], "/".join(above[:end])) for end in range(1, 1 + len(above))
        )
    ]
    return VariableInfo(
        path,
        name,
        SHAPES.get(name, (4,)) if shape is None else shape,
        trainable=trainable,
        aliases=(*aliases, keras_path) if keras_path else aliases,
        layers=tuple(layers),
        keras_path=keras_path,
    )


def catalog(*variables: str | VariableInfo, provisional: bool = False) -> VariableCatalog:
    infos = [variable(info) if isinstance(info, str) else info for info in variables]
    return VariableCatalog(tuple(infos), provisional=provisional)


def chosen(selector: Selector | str, among: VariableCatalog) -> list[str]:
    """The paths that a selector chooses, in the order of the catalog."""
    return [among[at].path for at in sorted(as_selector(selector).resolve(among))]
