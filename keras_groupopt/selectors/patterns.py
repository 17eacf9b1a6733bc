"""Patterns for layer paths, and what they claim in a catalog.

A pattern claims a variable if it matches the variable's path or the path of any layer above it.
Places in the model come first: the canonical path and, for shared variables, the further ones. Only
a pattern that matches no place is tried on Keras' own `variable.path`.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from keras_groupopt.selectors.variable_info import VariableCatalog

__all__ = ["Pattern", "compile_glob", "compile_regex"]

_WILDCARDS = "*?["


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern.

    Args:
        text: As written.
        regex: What a whole path must match.
        start: Literal text that every matching path begins with.
        literal: Whether the pattern matches `start` and nothing else.
    """

    text: str
    regex: re.Pattern[str]
    start: str = ""
    literal: bool = False

    def matches(self, path: str) -> bool:
        """Returns whether the whole of `path` matches."""
        return self.regex.fullmatch(path) is not None

    def claim(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the positions of the variables that the pattern claims, possibly none.

        Raises:
            ValueError: If it reaches variables only through a `variable.path` they share.
        """
        by_place = catalog.by_place
        if self.literal:
            found = frozenset(by_place.get(self.start, ()))
        else:
            found = frozenset().union(
                *(by_place[path] for path in self._candidates(catalog) if self.matches(path))
            )
        return found or self._claim_keras_paths(catalog)

    def _candidates(self, catalog: VariableCatalog) -> Iterator[str]:
        paths = catalog.sorted_places
        for path in islice(paths, bisect_left(paths, self.start), None):
            if not path.startswith(self.start):
                return
            yield path

    def _claim_keras_paths(self, catalog: VariableCatalog) -> frozenset[int]:
        found: set[int] = set()
        shared: list[int] = []
        for path, positions in catalog.keras_paths.items():
            if not path.startswith(self.start):
                continue
            levels = path.split("/")
            if any(self.matches("/".join(levels[:end])) for end in range(1, len(levels) + 1)):
                found.update(positions)
                shared += positions if len(positions) > 1 else ()
        if shared:
            names = ", ".join(repr(catalog[at].path) for at in sorted(shared)[:6])
            raise ValueError(
                f"Pattern {self.text!r} must name one place in the model. Received: a pattern that "
                "matches only Keras' own `variable.path`, which several variables share. "
                f"Their layer paths are {names}."
            )
        unstable = [at for at in sorted(found) if not catalog[at].keras_path_is_stable]
        if unstable:
            at = unstable[0]
            warnings.warn(
                f"Pattern {self.text!r} matches only Keras' own path {catalog[at].keras_path!r}, "
                "whose automatic name depends on what else the process has made. "
                f"Use the layer path {catalog[at].path!r}.",
                stacklevel=2,
            )
        return frozenset(found)


def compile_glob(text: str) -> Pattern:
    """Compiles a glob over layer paths.

    `*` stands for any characters within one level, `?` for one of them, `[abc]` and `[a-c]` for one
    of these, `[!abc]` for one of the others, and `**` as a level of its own for any number of
    levels, none included. To match a wildcard itself, put it in brackets: `[*]`.

    Raises:
        ValueError: If the pattern is empty, has an empty level, `**` inside a level, or brackets
            that are not closed or hold no valid characters.

    Example:
    >>> compile_glob("mobilenetv2/**/kernel").matches("mobilenetv2/Conv1/kernel")
    True
    >>> compile_glob("block_?/kernel").matches("block_12/kernel")
    False
    """
    if not text:
        raise _bad(text, "not be empty", 'For all variables use `everything()` or "**".')
    levels = text.split("/")
    if "" in levels:
        fix = "/".join(level for level in levels if level)
        raise _bad(text, "have a name between slashes", f"Use {fix!r}." if fix else "")
    parts: list[str] = []
    # `**/**` says no more than `**`.
    levels = [name for at, name in enumerate(levels) if levels[at - 1 : at + 1] != ["**", "**"]]
    for number, level in enumerate(levels):
        last = number == len(levels) - 1
        if level == "**":
            # Both take the slash with them, so that no level at all matches too.
            parts.append("(?:.+)" if levels == ["**"] else "(?:/.+)?" if last else "(?:[^/]+/)*")
        elif "**" in level:
            raise _bad(text, "have `**` only as a level of its own", "Use `*` within a level.")
        else:
            # `**` at the end brings its own slash.
            slash = "" if last or levels[number + 1 :] == ["**"] else "/"
            parts.append(_compile_level(text, level) + slash)
    literal = not any(character in text for character in _WILDCARDS)
    start = text if literal else text[: min(text.find(c) for c in _WILDCARDS if c in text)]
    if not literal and text.startswith("**", len(start)):
        start = start.removesuffix("/")
    try:
        # `[z-a]` is refused here.
        regex = re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise _bad(text, "be a valid glob", f"It fails with: {error}.") from error
    return Pattern(text, regex, start, literal)


def compile_regex(text: str) -> Pattern:
    """Compiles a regular expression that a whole path, of a variable or a layer, must match.

    Raises:
        ValueError: If it is empty or not a regular expression.
    """
    if not text:
        raise _bad(text, "not be empty", "For all variables use `everything()`.")
    try:
        return Pattern(text, re.compile(text))
    except re.error as error:
        raise _bad(text, "be a regular expression", f"It fails with: {error}.") from error


def _compile_level(text: str, level: str) -> str:
    parts = []
    at = 0
    while at < len(level):
        character = level[at]
        at += 1
        if character == "*":
            parts.append("[^/]*")
        elif character == "?":
            parts.append("[^/]")
        elif character == "[":
            # A bracket that comes first is one of the characters.
            start = at + (level[at : at + 1] == "!")
            end = level.find("]", start + 1)
            if end < 0:
                raise _bad(
                    text, "close every `[` with a `]`", "For the character itself use `[[]`."
                )
            inside = re.sub(r"([^\w-])", r"\\\1", level[start:end])
            parts.append(f"(?!/)[{'^' if start > at else ''}{inside}]")
            at = end + 1
        else:
            parts.append(re.escape(character))
    return "".join(parts)


def _bad(text: str, rule: str, advice: str) -> ValueError:
    return ValueError(f"`pattern` must {rule}. Received: pattern={text!r}. {advice}".rstrip())
