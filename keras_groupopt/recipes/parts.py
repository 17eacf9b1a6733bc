"""A model's parts as sets of variables, and as selectors that read well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_groupopt.base import text
from keras_groupopt.recipes.graph import has_graph
from keras_groupopt.recipes.structure import NoOrderError, head_of, structure_of
from keras_groupopt.selectors import Selector, as_selector, layer, variables
from keras_groupopt.selectors.layer_paths import describe_model
from keras_groupopt.selectors.variable_info import VariableCatalog

__all__ = [
    "ModelParts",
    "candidates",
    "found_head",
    "no_graph",
    "parts_of",
    "resolved",
    "selector_for",
]


@dataclass(frozen=True)
class ModelParts:
    """All weights of a model, each in one part.

    Args:
        catalog: The weights.
        below: Positions of the weights of each part below the head, from the input on. None is
            empty.
        head: Positions of the head's.
    """

    catalog: VariableCatalog
    below: list[frozenset[int]]
    head: frozenset[int]


def parts_of(model: Any, head: Any = None, blocks: Any = None) -> ModelParts:
    """Divides the weights of a model into stem, blocks and head.

    A weight in several parts counts with the lowest, as does one that the graph does not show. What
    is in none of given blocks, and not the head, is a part below them.

    Args:
        model: A built Keras model.
        head: What is the head: a selector, path, layer or list of these; `()` for none; `None` to
            find it.
        blocks: The blocks in order, each a selector, path, layer or list of these; `None` to find
            them.

    Raises:
        TypeError: If `model` is no model.
        ValueError: If head or blocks have to be found and can't be.
    """
    catalog = describe_model(model)
    top = None if head is None else resolved(head, catalog, "head")
    if blocks is not None:
        below = _given_blocks(blocks, catalog)
        top = found_head(model, catalog) if top is None else top
        both = top & frozenset[int]().union(*below)
        if both:
            raise ValueError(
                "`blocks` must not have variables of the head. Received: "
                f"{_paths(catalog, both)} in both. Take them out of one; `head=` says what it is."
            )
        rest = catalog.everything - top - frozenset[int]().union(*below)
        return ModelParts(catalog, [rest, *below] if rest else below, top)
    if not has_graph(model):
        raise no_graph(
            model,
            "`model`",
            "have an order of layers",
            "Pass `blocks=`, a list of paths or layers from input to output, and `head=`.",
        )
    found = _found(model, None if top is None else (catalog, top))
    return _divided(
        catalog,
        [_positions(part, catalog) for part in found.parts],
        _positions(found.head, catalog) if top is None else top,
    )


def found_head(model: Any, catalog: VariableCatalog) -> frozenset[int]:
    """Returns the positions of the head's weights, none if the graph shows no head.

    Raises:
        ValueError: If there is no graph, or it shows no order.
    """
    if not has_graph(model):
        raise no_graph(
            model, "`head`", "be given", "Pass `head=`, or `head=()` where it may be empty."
        )
    try:
        return _positions(head_of(model), catalog)
    except NoOrderError as error:
        raise ValueError(
            "`head` must be given where the graph of layers shows no end of blocks. Received: "
            f"model named {model.name!r}, with {error}. Candidates are {candidates(catalog)}."
        ) from error


def _found(model: Any, head: tuple[VariableCatalog, frozenset[int]] | None) -> Any:
    def is_head(owner: Any) -> bool:
        assert head is not None
        return _positions([owner], head[0]) <= head[1]

    try:
        return structure_of(model, None if head is None else is_head)
    except NoOrderError as error:
        raise ValueError(
            "`model` must have an order of blocks. Received: model named "
            f"{model.name!r}, with {error}. Pass `blocks=`, a list of paths or layers from input "
            "to output."
        ) from error


def _divided(
    catalog: VariableCatalog, parts: Sequence[frozenset[int]], head: frozenset[int]
) -> ModelParts:
    taken: set[int] = set()
    below: list[frozenset[int]] = []
    for part in parts:
        below.append(part - taken)
        taken |= part
    rest = catalog.everything - taken - head
    below = [below[0] | rest, *below[1:]] if below else [rest]
    # What is below too, such as a tied embedding, moves with what is below.
    return ModelParts(catalog, [part for part in below if part], head - taken)


def _given_blocks(blocks: Any, catalog: VariableCatalog) -> list[frozenset[int]]:
    if isinstance(blocks, str) or not isinstance(blocks, Sequence) or not blocks:
        raise TypeError(
            "`blocks` must be a list of selectors, paths or layers, from input to output. "
            f"Received: blocks={blocks!r}."
        )
    found: list[frozenset[int]] = []
    for place, block in enumerate(blocks):
        claimed = resolved(block, catalog, f"blocks[{place}]")
        for other, earlier in enumerate(found):
            if claimed & earlier:
                raise ValueError(
                    "`blocks` must not overlap. Received: "
                    f"{_paths(catalog, claimed & earlier)} in blocks[{other}] and blocks[{place}]."
                )
        found.append(claimed)
    return found


def resolved(value: Any, catalog: VariableCatalog, argument: str) -> frozenset[int]:
    """Returns the positions that an argument means; none for an empty list."""
    if isinstance(value, (list, tuple)) and not value:
        return frozenset()
    try:
        return as_selector(value, argument).resolve(catalog)
    except ValueError as error:
        raise ValueError(f"In `{argument}`: {error}") from error


def selector_for(catalog: VariableCatalog, positions: Iterable[int]) -> Selector:
    """Returns a selector of exactly these variables, by the highest layers that have no others."""
    wanted = set(positions)
    left = set(wanted)
    owners: list[str] = []
    single: list[str] = []
    for at in sorted(wanted):
        if at not in left:
            continue
        levels = catalog[at].path.split("/")
        for level in range(1, len(levels)):
            path = "/".join(levels[:level])
            below = catalog.by_place[path]
            if wanted.issuperset(below):
                owners.append(path)
                left.difference_update(below)
                break
        else:
            single.append(catalog[at].path)
    selectors = [*([layer(*owners)] if owners else []), *([variables(*single)] if single else [])]
    return selectors[0] if len(selectors) == 1 else selectors[0] | selectors[1]


def candidates(catalog: VariableCatalog) -> str:
    """Returns the paths of the root's last children with weights, for errors."""
    top = dict.fromkeys(info.path.split("/")[0] for info in catalog)
    return ", ".join(map(repr, list(top)[-text.SHOWN :]))


def _positions(owners: Iterable[Any], catalog: VariableCatalog) -> frozenset[int]:
    at = (catalog.by_identity.get(id(v)) for owner in owners for v in owner.weights)
    return frozenset(position for position in at if position is not None)


def _paths(catalog: VariableCatalog, positions: Iterable[int]) -> str:
    return text.listing([catalog[at].path for at in sorted(positions)])


def no_graph(model: keras.Model, name: str, rule: str, advice: str) -> ValueError:
    """Returns an error that lists the children of a model whose order nothing tells."""
    return ValueError(
        f"{name} must {rule}. Received: model named {model.name!r} of class "
        f"{type(model).__name__}, which has no graph of layers, with "
        f"{candidates(describe_model(model))}. {advice}"
    )
