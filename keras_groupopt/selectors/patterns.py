"""Patterns for layer paths.

A pattern claims a variable if it matches the variable's path or the path of any layer above it.
Places in the model come first: the canonical path and the further paths of shared variables. Only a
pattern that does not match any place is tried on Keras' own `variable.path`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from keras_groupopt.selectors.variable_info import VariableCatalog

_WILDCARDS = "*?["
# A wildcard, or one character. A `]` that comes first in brackets is one of the characters.
_TOKEN = re.compile(r"\[(?:!(?P<others>.[^\]]*)|(?P<these>[^!][^\]]*))\]|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern.

    Args:
        text: The pattern as written.
        regex: The expression that a whole path must match.
        literal: Whether the pattern matches only `text`. Default: False.
    """

    text: str
    regex: re.Pattern[str]
    literal: bool = False

    def matches(self, path: str) -> bool:
        """Returns whether the whole of `path` matches."""
        return self.regex.fullmatch(path) is not None

    def claim(self, catalog: VariableCatalog) -> frozenset[int]:
        """Returns the positions of the variables that the pattern claims, possibly none.

        Raises:
            ValueError: If it matches variables only through a `variable.path` that they share.
        """
        by_place = catalog.by_place
        if self.literal:
            found = frozenset(by_place.get(self.text, ()))
        else:
            found = frozenset().union(*(by_place[path] for path in by_place if self.matches(path)))
        return found or self._claim_keras_paths(catalog)

    def _claim_keras_paths(self, catalog: VariableCatalog) -> frozenset[int]:
        found: set[int] = set()
        shared: list[int] = []
        for path, positions in catalog.keras_paths.items():
            levels = path.split("/")
            if any(self.matches("/".join(levels[:end])) for end in range(1, len(levels) + 1)):
                found.update(positions)
                shared += positions if len(positions) > 1 else ()
        if shared:
            names = ", ".join(repr(catalog[at].path) for at in sorted(shared)[:6])
            raise ValueError(
                f"Pattern {self.text!r} matches no place in the model, only a Keras "
                f"`variable.path` that several variables share. Use their layer paths: {names}."
            )
        unstable = [at for at in sorted(found) if not catalog[at].keras_path_is_stable]
        if unstable:
            at = unstable[0]
            warnings.warn(
                f"Pattern {self.text!r} matches only Keras' own path {catalog[at].keras_path!r}, "
                "whose automatic name depends on the other layers that the process has made. "
                f"Use the layer path {catalog[at].path!r}.",
                stacklevel=2,
            )
        return frozenset(found)


def compile_glob(text: str) -> Pattern:
    """Compiles a glob over layer paths.

    `*` stands for any characters within one level, `?` for one character, `[abc]` and `[a-c]` for
    one of these, `[!abc]` for one of the others, and `**` as a whole level for any number of
    levels, including none. To match a wildcard character, put it in brackets: `[*]`.

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
        raise _bad(text, "not be empty", 'To choose all variables use `everything()` or "**".')
    levels = text.split("/")
    if "" in levels:
        fix = "/".join(level for level in levels if level)
        raise _bad(text, "have a name between slashes", f"Use {fix!r}." if fix else "")
    parts: list[str] = []
    # `**/**` means the same as `**`.
    levels = [name for at, name in enumerate(levels) if levels[at - 1 : at + 1] != ["**", "**"]]
    for number, level in enumerate(levels):
        last = number == len(levels) - 1
        if level == "**":
            # The slash belongs to the group, since `**` also matches no level.
            parts.append("(?:.+)" if levels == ["**"] else "(?:/.+)?" if last else "(?:[^/]+/)*")
        elif "**" in level:
            raise _bad(text, "have `**` only as a level of its own", "Use `*` within a level.")
        else:
            # A `**` at the end has its own slash.
            slash = "" if last or levels[number + 1 :] == ["**"] else "/"
            parts.append(_compile_level(text, level) + slash)
    literal = not any(character in text for character in _WILDCARDS)
    try:
        # `[z-a]` raises an error here.
        regex = re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise _bad(text, "be a valid glob", f"It fails with: {error}.") from error
    return Pattern(text, regex, literal)


def compile_regex(text: str) -> Pattern:
    """Compiles a regular expression that a whole path, of a variable or a layer, must match.

    Raises:
        ValueError: If it is empty or not a regular expression.
    """
    if not text:
        raise _bad(text, "not be empty", "To choose all variables use `everything()`.")
    try:
        return Pattern(text, re.compile(text))
    except re.error as error:
        raise _bad(text, "be a regular expression", f"It fails with: {error}.") from error


def _compile_level(text: str, level: str) -> str:
    parts = []
    for token in _TOKEN.finditer(level):
        characters = token["these"] or token["others"]
        if characters:
            inside = re.sub(r"([^\w-])", r"\\\1", characters)
            parts.append(f"(?!/)[{'^' if token['others'] else ''}{inside}]")
        elif token[0] == "[":
            raise _bad(text, "close every `[` with a `]`", "To match the character use `[[]`.")
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(token[0]) or re.escape(token[0]))
    return "".join(parts)


def _bad(text: str, rule: str, advice: str) -> ValueError:
    return ValueError(f"`pattern` must {rule}. Received: pattern={text!r}. {advice}".rstrip())
