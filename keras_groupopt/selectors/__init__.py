"""Selectors choose variables of a model.

Each part that names something (a path, a layer, a type, a last name, a variable) must match at
least one variable of the model, trainable or not, in any place of an expression. `rank`, `where`
and `everything` need not match any variable.

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
from keras_groupopt.selectors.algebra import Selector as Selector
from keras_groupopt.selectors.algebra import as_selector as as_selector
from keras_groupopt.selectors.by_object import set_function_serializer as set_function_serializer
from keras_groupopt.selectors.variable_info import VariableInfo


def path(pattern: str) -> Selector:
    """Chooses the variables at or below the layer paths that a glob matches.

    A pattern claims a variable if it matches its path or the path of any layer above it, so
    `"head"` means `"head/**"`. `*` stands for any characters within one level, `?` for one
    character, `[abc]` for one of these, `[!abc]` for one of the others, and `**` for any number of
    levels, including none.

    Every place of a shared variable counts. Keras' own `variable.path` is tried only if no place
    matches, and it counts only if it names exactly one variable.

    Args:
        pattern: Levels joined by `/`, without a `/` at either end.

    Returns:
        The selector.

    Raises:
        ValueError: If the pattern is empty or malformed; when resolved, if it matches nothing, or
            matches only a `variable.path` that several variables share.

    Example:
    >>> path("mobilenetv2/**/kernel")
    path("mobilenetv2/**/kernel")
    """
    return by_property.Path(pattern)


def regex(pattern: str) -> Selector:
    """Chooses the variables at or below the layer paths that a regular expression matches.

    The whole path of the variable, or of any layer above it, must match (`re.fullmatch`). Start the
    expression with `.*` to match at any depth.

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
    """Chooses the variables of layers, and of the layers inside them.

    A layer object is found by the identity of its weights, in any place of the model, and does not
    need `model=`. Its weights are read when the selector is resolved. A config holds its path.
    A single layer must have weights. Some of several layers, such as `model.layers[5:]`, may have
    none.

    Args:
        layers: Keras layers or models, layer paths, or names that only one layer of the model has.
            A string is taken literally, without wildcards.

    Returns:
        The selector.

    Raises:
        TypeError: If one is of another type.
        ValueError: If none is given; when resolved, if a layer is not in the model or not built, or
            if several layers have a name.

    Example:
    >>> layer("encoder/block_1")
    layer("encoder/block_1")
    """
    return by_object.Layer(*layers)


def layer_type(*names: str | type) -> Selector:
    """Chooses the variables whose owner, or a layer above it, is of one of these classes.

    Args:
        names: Class names or classes. Base classes count, so `"RNN"` finds an LSTM.

    Returns:
        The selector.

    Raises:
        TypeError: If a name is not a string or class.
        ValueError: When resolved, if there is no such layer or no model.

    Example:
    >>> layer_type("BatchNormalization", "LayerNormalization")
    layer_type("BatchNormalization", "LayerNormalization")
    """
    return by_property.LayerType(n.__name__ if isinstance(n, type) else n for n in names)


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
    return by_property.VariableName(names)


def rank(
    rank: int | None = None,
    *,
    min: int | None = None,  # noqa: A002 - `rank(min=2)` reads as it means
    max: int | None = None,  # noqa: A002
) -> Selector:
    """Chooses the variables by number of dimensions. It need not match any variable.

    Args:
        rank: The exact number, >= 0, without `min` and `max`. Default: none.
        min: The least number, >= 0. Default: none.
        max: The greatest number, >= 0. Default: none.

    Returns:
        The selector.

    Raises:
        ValueError: If no number, `rank` beside another, or a negative number is given.

    Example:
    >>> rank(min=2)
    rank(min=2)
    """
    return by_property.Rank(rank, min, max)


def variables(*variables: Any) -> Selector:
    """Chooses single variables. Each must be in the model.

    Args:
        variables: Keras variables, which are found by identity, or exact layer paths. A config
            holds their paths.

    Returns:
        The selector.

    Raises:
        TypeError: If one is of another type.
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
    """Chooses the variables for which a function is true. It need not match any variable.

    Args:
        function: Takes a `VariableInfo` and returns whether to choose it. To be written to a config
            it must be registered with `keras.saving.register_keras_serializable`.

    Returns:
        The selector.

    Raises:
        TypeError: If it is not callable.

    Example:
    >>> def is_large(info):
    ...     return info.size > 1_000_000
    >>> where(is_large)
    where(is_large)
    """
    return by_object.Where(function)


def xpath(query: str) -> Selector:
    """Chooses the variables at or below the elements that an XPath 2.0 query finds.

    The document is that of `kgo.to_xml(model)`: a layer is an element named after its class, a
    variable is an element named `variable`. Needs `pip install keras-groupopt[xpath]`.

    Args:
        query: The query, such as `"//Dense[@name='head']"` or
            `"//Block[position() < 3]//variable[@rank > 1]"`. It must find elements.

    Returns:
        The selector.

    Raises:
        ImportError: If `elementpath` is not installed.
        TypeError: If the query is not a string.
        ValueError: If it is not XPath; when resolved, if it finds nothing, or anything other than
            elements, or if there is no model.

    Example:
    >>> xpath("//Dense[@name='head']") - rank(max=1)
    xpath("//Dense[@name='head']") & ~rank(max=1)
    """
    selector = by_xpath.XPath(query)
    selector.parse()
    return selector


default_exclude_from_decay: Selector = rank(max=1) | by_property.VariableName(
    ("bias", "gamma", "beta"), required=False
)
"""The variables that are not decayed by default: vectors, scalars, and all biases and norms.

It includes names because biases of attention layers have rank 2. The names need not match. Extend
it with `|` instead of replacing it.
"""
