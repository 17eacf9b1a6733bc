"""The parts of a model: stem, blocks and head, as sets of variables and as short selectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_groupopt.base import text
from keras_groupopt.base.checks import errors_in, message
from keras_groupopt.recipes.graph import has_graph
from keras_groupopt.recipes.pieces import NoOrderError
from keras_groupopt.recipes.structure import head_of, structure_of
from keras_groupopt.selectors import Selector, as_selector, layer, variables
from keras_groupopt.selectors.layer_paths import describe_model
from keras_groupopt.selectors.variable_info import VariableCatalog


@dataclass(frozen=True)
class ModelParts:
    """All weights of a model, each in one part.

    Args:
        catalog: The weights.
        below: The positions of the weights of each part below the head, from the input on. No part
            is empty.
        head: The positions of the head's weights.
    """

    catalog: VariableCatalog
    below: list[frozenset[int]]
    head: frozenset[int]

    def selectors(self) -> list[Selector]:
        """Returns one selector per part, from the input to the head."""
        return [selector_for(self.catalog, part) for part in (*self.below, self.head) if part]


def parts_of(model: Any, head: Any = None, blocks: Any = None) -> ModelParts:
    """Divides the weights of a model into stem, blocks and head.

    A weight in several parts belongs to the lowest one, as does a weight that is not in the graph.
    If blocks are given, the weights that are neither in a block nor in the head are a part below
    them.

    Args:
        model: A built Keras model.
        head: The head: a selector, path, layer or list of these, or `()` for none. Default: the one
            that is found.
        blocks: The blocks in order, each a selector, path, layer or list of these. Default: those
            that are found.

    Raises:
        TypeError: If `model` is not a model.
        ValueError: If head or blocks are not given and cannot be found.
    """
    catalog = describe_model(model)
    top = None if head is None else resolved(head, catalog, "head")
    if blocks is not None:
        given = _given_blocks(blocks, catalog)
        top = found_head(model, catalog) if top is None else top
        in_blocks = frozenset[int]().union(*given)
        if top & in_blocks:
            raise ValueError(
                "`blocks` must not have variables of the head. Received: "
                f"{_paths(catalog, top & in_blocks)} in both. Remove them from one. `head=` sets "
                "the head."
            )
        rest = catalog.everything - top - in_blocks
        return ModelParts(catalog, [rest, *given] if rest else given, top)
    check_graph(
        model,
        "`model` must have an order of layers",
        "Pass `blocks=`, a list of paths or layers from input to output, and `head=`.",
    )
    try:
        parts, last = structure_of(
            model, None if top is None else lambda owner: positions_of([owner], catalog) <= top
        )
    except NoOrderError as error:
        raise ValueError(
            "`model` must have an order of blocks. Received: model named "
            f"{model.name!r}, with {error}. Pass `blocks=`, a list of paths or layers from input "
            "to output."
        ) from error
    head = positions_of(last, catalog) if top is None else top
    taken: set[int] = set()
    below: list[frozenset[int]] = []
    for part in (positions_of(owners, catalog) for owners in parts):
        below.append(part - taken)
        taken |= part
    rest = catalog.everything - taken - head
    below = [below[0] | rest, *below[1:]] if below else [rest]
    # A weight of the head that is in a lower part too, such as a tied embedding, belongs there.
    return ModelParts(catalog, [part for part in below if part], head - taken)


def found_head(model: Any, catalog: VariableCatalog) -> frozenset[int]:
    """Returns the positions of the head's weights, or none if the graph shows no head.

    Raises:
        ValueError: If there is no graph, or it shows no order.
    """
    check_graph(model, "`head` must be given", "Pass `head=`, or `head=()` for none.")
    try:
        return positions_of(head_of(model), catalog)
    except NoOrderError as error:
        raise ValueError(
            "`head` must be given if the graph of layers shows no end of blocks. Received: "
            f"model named {model.name!r}, with {error}. Candidates are {candidates(catalog)}."
        ) from error


def _given_blocks(blocks: Any, catalog: VariableCatalog) -> list[frozenset[int]]:
    if isinstance(blocks, str) or not isinstance(blocks, Sequence) or not blocks:
        must = "a list of selectors, paths or layers, from input to output"
        raise TypeError(message("blocks", blocks, must))
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
    """Returns the positions that an argument selects, or none for an empty list."""
    if isinstance(value, (list, tuple)) and not value:
        return frozenset()
    selector = as_selector(value, argument)
    with errors_in(f"`{argument}`"):
        return selector.resolve(catalog)


def listed_parts(parts: Any, **of_model: Any) -> Sequence[Any]:
    """Returns parts that a user gives as a list.

    Args:
        parts: The list.
        of_model: The arguments that are only for models, by name.

    Raises:
        TypeError: If it is not a list, or empty.
        ValueError: If an argument that is only for models is given.
    """
    if isinstance(parts, (str, Selector)) or not isinstance(parts, Sequence) or not parts:
        must = "a Keras model, or a list of parts from input to output"
        raise TypeError(message("parts", parts, must))
    for name, value in of_model.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be given with a model only. Received: {name}={value!r} with a list "
                "of parts, which needs nothing else."
            )
    return parts


def selector_for(catalog: VariableCatalog, positions: Iterable[int]) -> Selector:
    """Returns a selector of exactly these variables, by the highest layers without others."""
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


def positions_of(owners: Iterable[Any], catalog: VariableCatalog) -> frozenset[int]:
    """Returns the positions of the weights that some layers or calls have."""
    at = (catalog.by_identity.get(id(v)) for owner in owners for v in owner.weights)
    return frozenset(position for position in at if position is not None)


def _paths(catalog: VariableCatalog, positions: Iterable[int]) -> str:
    return text.listing([catalog[at].path for at in sorted(positions)])


def check_graph(model: keras.Model, must: str, advice: str) -> None:
    """Refuses a model without a graph, by an error that lists the model's children.

    Raises:
        ValueError: If the model has no graph.
    """
    if not has_graph(model):
        raise ValueError(
            f"{must}. Received: model named {model.name!r} of class {type(model).__name__}, which "
            f"has no graph of layers, with {candidates(describe_model(model))}. {advice}"
        )
