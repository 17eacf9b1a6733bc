"""Names that are the same in every process: automatic names, and how siblings are distinguished.

Keras numbers automatic names with a counter of the process, so `dense_7` in one run is `dense_3` in
the next. These functions work on plain strings: they cut an automatic name back to its class name
and number it again among the children of one parent.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from keras_groupopt.base.text import untaken

_WORD_START = re.compile(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")
_NUMBERED = re.compile(r"(?P<base>.+?)(?:_\d+)?", re.DOTALL)
# keras.layers.Bidirectional names its two halves after the wrapped layer, including the number.
_DERIVED_PREFIXES = ("forward_", "backward_")


def automatic_bases(names: Sequence[str], bases: Iterable[Iterable[str]]) -> list[str | None]:
    """Returns for each child of a parent its name without the number if automatic, else `None`.

    A name is automatic if it is the class name in snake case, with or without `_n`. It does not
    matter who wrote the name, since a loaded model does not know. The halves of a `Bidirectional`
    count too. Keras never numbers from 0, so if children are called `block_0` and `block_1`, a user
    named all children of that class.

    Args:
        names: Keras' names of the children of one parent.
        bases: For each child the possible automatic names, without number.

    Returns:
        For each child its base, such as `"dense"` for `"dense_7"`, or `None`.

    Example:
    >>> dense = {snake_case("Dense")}
    >>> automatic_bases(["dense_7", "head"], [dense, dense])
    ['dense', None]
    >>> automatic_bases(["dense_0", "dense_1"], [dense, dense])
    [None, None]
    """
    found = [_split(name, possible) for name, possible in zip(names, bases, strict=True)]
    by_hand = {
        base
        for name, base in zip(names, found, strict=True)
        if base is not None and name.startswith("_0", len(base))
    }
    return [None if base in by_hand else base for base in found]


def number_siblings(names: Sequence[str], bases: Sequence[str | None]) -> list[str]:
    """Returns one distinct name for each child of a parent, in the given order.

    Automatic names are numbered from the start (`dense`, `dense_1`). Names that are then equal get
    `@1`, `@2` in order of appearance.

    Args:
        names: Keras' names of the children.
        bases: For each child its name without the number if automatic, else `None`.

    Returns:
        For each child a name that no other child has.

    Example:
    >>> number_siblings(["dense_4", "head", "dense_9"], ["dense", None, "dense"])
    ['dense', 'head', 'dense_1']
    >>> number_siblings(["tower", "tower"], [None, None])
    ['tower@1', 'tower@2']
    """
    seen: defaultdict[str, int] = defaultdict(int)
    numbered = []
    for name, base in zip(names, bases, strict=True):
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


def plain_names(names: Iterable[str]) -> list[str]:
    """Returns a name of ASCII letters, digits, `_`, `-` and `.` for each name, no two alike.

    Args:
        names: Names of groups, all different.

    Example:
    >>> plain_names(["block 1", "block_1", "head"])
    ['block_1', 'block_1_2', 'head']
    """
    plain: list[str] = []
    for name in names:
        plain.append(untaken(re.sub(r"[^\w.-]", "_", name, flags=re.ASCII), plain))
    return plain


@lru_cache(maxsize=4096)
def snake_case(class_name: str) -> str:
    """Returns the name that Keras gives the first layer of a class.

    Args:
        class_name: Name of the class.

    Returns:
        The class name in snake case.

    Example:
    >>> snake_case("Conv2DTranspose"), snake_case("LSTMCell")
    ('conv2d_transpose', 'lstm_cell')
    """
    return _WORD_START.sub("_", re.sub(r"\W+", "", class_name)).lower()


def _split(name: str, bases: Iterable[str]) -> str | None:
    """Returns `name` without its number if the rest is one of `bases`, else `None`."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    base = match["base"]
    for candidate in (base, *(base.removeprefix(prefix) for prefix in _DERIVED_PREFIXES)):
        if candidate in bases:
            return base
    # The class name may end in a number: layers of `Block_2` are `block_2`, then `block_2_1`.
    return name if name in bases else None
