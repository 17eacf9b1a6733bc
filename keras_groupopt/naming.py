"""Names that stay the same: which are automatic, and how siblings are told apart.

Keras numbers automatic names by a counter of the process, so `dense_7` in one run is `dense_3` in
the next. Everything here works on plain strings: an automatic name is cut back to its class, then
counted again among the children of one parent.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

__all__ = ["automatic_base", "known_bases", "number_siblings", "split_automatic"]

_WORD_START = re.compile(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")
_NUMBERED = re.compile(r"(?P<base>.+?)(?:_\d+)?", re.DOTALL)
# keras.layers.Bidirectional names its two halves after the layer it was given, number and all.
_DERIVED_PREFIXES = ("forward_", "backward_")


def automatic_base(name: str, class_name: str) -> str | None:
    """Returns `name` without its number if it is an automatic name of `class_name`, else `None`.

    A name is automatic if it is the class name in snake case, with or without `_n`; who wrote it
    makes no difference. The halves of a `Bidirectional` count too.

    Args:
        name: Name of a layer or variable, as Keras gives it.
        class_name: Name of its class, such as `"BatchNormalization"`.

    Example:

    >>> automatic_base("batch_normalization_12", "BatchNormalization")
    'batch_normalization'
    >>> automatic_base("forward_lstm_2", "LSTM")
    'forward_lstm'
    >>> automatic_base("head", "Dense") is None
    True
    """
    return split_automatic(name, (_snake_case(class_name),))


def known_bases(class_names: Iterable[str]) -> frozenset[str]:
    """Returns the automatic names, without numbers, of layers of these classes.

    Example:

    >>> sorted(known_bases(["Dense", "LSTMCell"]))
    ['dense', 'lstm_cell']
    """
    return frozenset(_snake_case(class_name) for class_name in class_names)


def split_automatic(name: str, bases: Iterable[str]) -> str | None:
    """Returns `name` without its number if what is left is one of `bases`, else `None`.

    Args:
        name: Name of a layer or variable.
        bases: Automatic names without numbers, such as `"dense"`.

    Example:

    >>> split_automatic("dense_7", {"dense"})
    'dense'
    """
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    base = match["base"]
    for candidate in (base, *(base.removeprefix(prefix) for prefix in _DERIVED_PREFIXES)):
        if candidate in bases:
            return base
    # A class whose own name ends in a number: `Block_2` is named `block_2`, then `block_2_1`.
    return name if name in bases else None


def number_siblings(names: Sequence[tuple[str, str | None]]) -> list[str]:
    """Returns one distinct name for each child of a parent, in the order given.

    Automatic names are counted from the start (`dense`, `dense_1`); names that are equal after
    that get `@1`, `@2` in order of appearance.

    Args:
        names: For each child its name, and its automatic base or `None`.

    Example:

    >>> number_siblings([("dense_4", "dense"), ("head", None), ("dense_9", "dense")])
    ['dense', 'head', 'dense_1']
    >>> number_siblings([("tower", None), ("tower", None)])
    ['tower@1', 'tower@2']
    """
    seen: defaultdict[str, int] = defaultdict(int)
    numbered = []
    for name, base in names:
        if base is not None:
            name = base if not seen[base] else f"{base}_{seen[base]}"
            seen[base] += 1
        numbered.append(name)
    counts = Counter(numbered)
    taken = {name for name, count in counts.items() if count == 1}
    occurrence: defaultdict[str, int] = defaultdict(int)
    result = []
    for name in numbered:
        unique = name
        while counts[name] > 1 and (unique == name or unique in taken):
            occurrence[name] += 1
            unique = f"{name}@{occurrence[name]}"
        taken.add(unique)
        result.append(unique)
    return result


def _snake_case(class_name: str) -> str:
    return _WORD_START.sub("_", re.sub(r"\W+", "", class_name)).lower()
