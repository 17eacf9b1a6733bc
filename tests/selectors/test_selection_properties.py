"""Laws of selection, on models and selectors made up at random."""

from __future__ import annotations

import json

from catalogs import catalog, variable
from hypothesis import assume, given
from hypothesis import strategies as st

from keras_groupopt.selectors import (
    Selector,
    everything,
    layer,
    layer_type,
    path,
    rank,
    regex,
    variable_name,
    variables,
)
from keras_groupopt.selectors.variable_info import VariableCatalog

LAYERS = ("stem", "block_1", "block_2", "head")
NAMES = ("kernel", "bias", "gamma")
CLASSES = ("Dense", "Conv2D", "Block")

paths = st.builds(
    lambda above, name: "/".join([*above, name]),
    st.lists(st.sampled_from(LAYERS), max_size=3),
    st.sampled_from(NAMES),
)


@st.composite
def catalogs(draw: st.DrawFn) -> VariableCatalog:
    drawn = draw(st.lists(paths, min_size=1, max_size=12, unique=True))
    above = {"/".join(p.split("/")[:level]) for p in drawn for level in range(1, p.count("/") + 1)}
    classes = {p: (draw(st.sampled_from(CLASSES)),) for p in sorted(above)}
    return catalog(
        *(
            variable(
                p,
                shape=(2,) * draw(st.integers(0, 4)),
                trainable=draw(st.booleans()),
                classes=classes,
            )
            for p in drawn
        )
    )


levels = st.sampled_from([*LAYERS, *NAMES, "*", "**", "b*", "block_?", "[a-h]*", "[!s]*"])
globs = st.lists(levels, min_size=1, max_size=4).map("/".join)
leaves = st.one_of(
    st.just(everything()),
    globs.map(path),
    st.sampled_from([r".*/kernel", r"block_\d", r"(stem|head)/.*", r".*"]).map(regex),
    st.sampled_from(CLASSES).map(layer_type),
    st.sampled_from(NAMES).map(variable_name),
    st.builds(rank, st.integers(0, 4)),
    st.builds(lambda low: rank(min=low), st.integers(0, 4)),
    paths.map(variables),
)
trees = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.builds(lambda a, b: a | b, parts, parts),
        st.builds(lambda a, b: a & b, parts, parts),
        st.builds(lambda a, b: a - b, parts, parts),
        st.builds(lambda a: ~a, parts),
    ),
    max_leaves=5,
)


def outcome(selector: Selector, among: VariableCatalog) -> frozenset[str] | str:
    """The paths chosen, or the error: a selector that can't be resolved has to stay so."""
    try:
        return frozenset(among[at].path for at in selector.resolve(among))
    except ValueError as error:
        return str(error)


def resolved(selector: Selector, among: VariableCatalog) -> frozenset[int]:
    try:
        return selector.resolve(among)
    except ValueError:
        assume(False)
        raise


@given(trees, catalogs())
def test_resolving_is_total_and_repeatable(selector, among):
    first = outcome(selector, among)
    assert outcome(selector, among) == first
    assert outcome(selector, VariableCatalog(among.infos)) == first
    if isinstance(first, frozenset):
        assert first <= set(among.paths)


@given(trees, catalogs(), st.randoms(use_true_random=False))
def test_the_order_of_the_variables_makes_no_difference(selector, among, random):
    infos = list(among.infos)
    random.shuffle(infos)
    shuffled = VariableCatalog(tuple(infos))
    before, after = outcome(selector, among), outcome(selector, shuffled)
    assert after == before or (isinstance(after, str) and isinstance(before, str))


@given(trees, trees, catalogs())
def test_de_morgan(a, b, among):
    resolved(a | b, among)
    assert resolved(~(a | b), among) == resolved(~a & ~b, among)
    assert resolved(~(a & b), among) == resolved(~a | ~b, among)


@given(trees, trees, trees, catalogs())
def test_the_laws_of_sets(a, b, c, among):
    chosen = [resolved(part, among) for part in (a, b, c)]
    assert resolved(a | b, among) == chosen[0] | chosen[1] == resolved(b | a, among)
    assert resolved(a & b, among) == chosen[0] & chosen[1] == resolved(b & a, among)
    assert resolved(a - b, among) == chosen[0] - chosen[1] == resolved(a & ~b, among)
    assert resolved(a & (b | c), among) == resolved((a & b) | (a & c), among)
    assert resolved(a | (b & c), among) == resolved((a | b) & (a | c), among)
    assert resolved(a | ~a, among) == among.everything
    assert resolved(a & ~a, among) == frozenset()


@given(trees, trees)
def test_selectors_compare_by_what_is_written(a, b):
    assert ~~a == a
    assert a - b == a & ~b
    assert (a | b) | a == a | (b | a)
    assert hash(a - b) == hash(a & ~b)


@given(trees, catalogs())
def test_a_config_brings_back_the_same_selector(selector, among):
    again = Selector.from_config(json.loads(json.dumps(selector.get_config())))
    assert again == selector
    assert hash(again) == hash(selector)
    assert again.describe() == selector.describe()
    assert outcome(again, among) == outcome(selector, among)


@given(catalogs())
def test_a_layer_path_claims_what_lies_below_it_however_it_is_written(among):
    for layer_path in among.layer_paths:
        below = {i for i, p in enumerate(among.paths) if p.startswith(f"{layer_path}/")}
        for selector in (path(layer_path), path(f"{layer_path}/**"), layer(layer_path)):
            assert selector.resolve(among) == below
        assert path(f"{layer_path}/*").resolve(among) == below


@given(globs, catalogs())
def test_a_glob_claims_what_its_levels_match_one_by_one(pattern, among):
    expected = frozenset(
        at
        for at, info in enumerate(among)
        if any(
            by_levels(pattern.split("/"), info.path.split("/")[:end])
            for end in range(1, info.path.count("/") + 2)
        )
    )
    assert path(pattern).pattern.claim(among) == expected


def by_levels(pattern: list[str], names: list[str]) -> bool:
    """What a glob means, level by level and without regular expressions."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(by_levels(pattern[1:], names[skip:]) for skip in range(len(names) + 1))
    if not names:
        return False
    name, level = names[0], pattern[0]
    fits = {
        "*": True,
        "b*": name.startswith("b"),
        "block_?": name.startswith("block_") and len(name) == 7,
        "[a-h]*": "a" <= name[0] <= "h",
        "[!s]*": name[0] != "s",
    }.get(level, name == level)
    return fits and by_levels(pattern[1:], names[1:])
