"""The selectors: ways to say which variables of a model are meant.

Each part that names something (a path, a layer, a type, a last name, a variable) must match at
least one variable of the model, trainable or not, wherever it stands in an expression; `rank`,
`where` and `everything` may match none.

Example:
>>> from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo
>>> catalog = VariableCatalog(
...     (
...         VariableInfo("stem/kernel", "kernel", (3, 4)),
...         VariableInfo("stem/bias", "bias", (4,)),
...         VariableInfo("head/kernel", "kernel", (4, 2)),
...     )
... )
>>> sorted(catalog[at].path for at in (path("stem") - rank(max=1)).resolve(catalog))
['stem/kernel']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_groupopt.selectors import by_object, by_property, by_xpath
from keras_groupopt.selectors.algebra import Selector, as_selector
from keras_groupopt.selectors.by_object import set_function_serializer
from keras_groupopt.selectors.variable_info import VariableInfo

__all__ = [
    "Selector",
    "as_selector",
    "default_exclude_from_decay",
    "everything",
    "layer",
    "layer_type",
    "path",
    "rank",
    "regex",
    "set_function_serializer",
    "variable_name",
    "variables",
    "where",
    "xpath",
]


def path(pattern: str) -> Selector:
    """Chooses the variables at or below the layer paths that a glob matches.

    A pattern claims a variable if it matches its path or the path of any layer above it, so
    `"head"` is `"head/**"`. `*` stands for any characters within one level, `?` for one, `[abc]`
    for one of these, `[!abc]` for one of the others, `**` for any number of levels, none included.

    Every place of a shared variable counts. Keras' own `variable.path` is tried only if no place
    matches, and only where it names exactly one variable.

    Args:
        pattern: Levels joined by `/`, without one at either end.

    Returns:
        The selector.

    Raises:
        ValueError: If the pattern is empty or malformed; when resolved, if it matches nothing, or
            only a `variable.path` that several variables share.

    Example:
    >>> path("mobilenetv2/**/kernel")
    path("mobilenetv2/**/kernel")
    """
    return by_property.Path(pattern)


def regex(pattern: str) -> Selector:
    """Chooses the variables at or below the layer paths that a regular expression matches.

    The whole path must match (`re.fullmatch`): the variable's, or that of any layer above it. Write
    `.*` at the start to let it begin anywhere.

    Args:
        pattern: A Python regular expression. Flags go inside it, such as `(?i)`.

    Returns:
        The selector.

    Raises:
        ValueError: If it is not a regular expression; when resolved, as for `path`.

    Example:
    >>> regex(r"encoder/block_[0-5]")
    regex("encoder/block_[0-5]")
    """
    return by_property.Regex(pattern)


def layer(*layers: Any) -> Selector:
    """Chooses the variables of layers, those of the layers in them included.

    A layer object is found by the identity of its weights, at whatever place it sits, and needs no
    `model=`; it is looked at when the selector is resolved, and written to a config as its path.
    One layer must have weights; of several, such as `model.layers[5:]`, some may never have any.

    Args:
        layers: Keras layers or models; or layer paths; or names of layers that only one in the
            model has. A string is taken literally, without wildcards.

    Returns:
        The selector.

    Raises:
        TypeError: If one is neither.
        ValueError: If none is given; when resolved, if a layer is not in the model or not built, or
            if a name is that of several layers.

    Example:
    >>> layer("encoder/block_1")
    layer("encoder/block_1")
    """
    return by_object.Layer(*layers)


def layer_type(*names: str | type) -> Selector:
    """Chooses the variables whose owner, or a layer above it, is of one of these classes.

    Args:
        names: Class names, or classes. Bases count, so `"RNN"` finds an LSTM too.

    Returns:
        The selector.

    Raises:
        TypeError: If a name is not a string or class.
        ValueError: When resolved, if there is no such layer, or if there is no model to look at.

    Example:
    >>> layer_type("BatchNormalization", "LayerNormalization")
    layer_type("BatchNormalization", "LayerNormalization")
    """
    return by_property.LayerType(*names)


def variable_name(*names: str) -> Selector:
    """Chooses the variables whose last name is exactly one of these.

    Args:
        names: Last names, such as `"kernel"`, `"bias"` or `"gamma"`.

    Returns:
        The selector.

    Raises:
        TypeError: If a name is not a string.
        ValueError: When resolved, if no variable has any of them.

    Example:
    >>> variable_name("bias", "gamma")
    variable_name("bias", "gamma")
    """
    return by_property.VariableName(*names)


def rank(
    rank: int | None = None,
    *,
    min: int | None = None,  # noqa: A002 - `rank(min=2)` reads as it means
    max: int | None = None,  # noqa: A002
) -> Selector:
    """Chooses the variables by number of dimensions. It may match none.

    Args:
        rank: The exact number, >= 0; alone.
        min: The least number, >= 0.
        max: The greatest number, >= 0.

    Returns:
        The selector.

    Raises:
        ValueError: If none of them, a bad combination or a negative number is given.

    Example:
    >>> rank(min=2)
    rank(min=2)
    """
    return by_property.Rank(rank, min, max)


def variables(*variables: Any) -> Selector:
    """Chooses single variables. Each must be in the model.

    Args:
        variables: Keras variables, found by identity; or exact layer paths. Written to a config as
            their paths.

    Returns:
        The selector.

    Raises:
        TypeError: If one is neither.
        ValueError: If none is given; when resolved, if one is not in the model.

    Example:
    >>> variables("head/kernel")
    variables("head/kernel")
    """
    return by_object.Variables(*variables)


def everything() -> Selector:
    """Chooses every variable.

    Returns:
        The selector.

    Example:
    >>> everything()
    everything()
    """
    return by_property.Everything()


def where(function: Callable[[VariableInfo], bool]) -> Selector:
    """Chooses the variables for which a function is true. It may match none.

    Args:
        function: Takes a `VariableInfo`, returns whether it is chosen. To be written to a config
            the function must be registered with `keras.saving.register_keras_serializable`.

    Returns:
        The selector.

    Raises:
        TypeError: If it can't be called.

    Example:
    >>> def is_large(info):
    ...     return info.size > 1_000_000
    >>> where(is_large)
    where(is_large)
    """
    return by_object.Where(function)


def xpath(query: str) -> Selector:
    """Chooses the variables at or below the elements that an XPath 2.0 query finds.

    The document is that of `kgo.to_xml(model)`: layers are elements called as their class,
    variables are elements called `variable`. Needs `pip install keras-groupopt[xpath]`.

    Args:
        query: The query, such as `"//Dense[@name='head']"` or
            `"//Block[position() < 3]//variable[@rank > 1]"`. It must find elements.

    Returns:
        The selector.

    Raises:
        ImportError: If `elementpath` is not installed.
        TypeError: If the query is not a string.
        ValueError: If it is no XPath; when resolved, if it finds nothing, or something else than
            elements, or if there is no model to look at.

    Example:
    >>> xpath("//Dense[@name='head']") - rank(max=1)
    xpath("//Dense[@name='head']") & ~rank(max=1)
    """
    selector = by_xpath.XPath(query)
    selector.check()
    return selector


default_exclude_from_decay: Selector = rank(max=1) | by_property.VariableName(
    "bias", "gamma", "beta", required=False
)
"""What decay leaves out unless told otherwise: vectors and scalars, and all biases and norms.

Biases of attention layers have rank 2, hence the names. The names may match nothing. Extend it with
`|` rather than replace it.
"""
