"""The notebook view of a plan: escaped, self-contained, readable in any theme."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from plan_dicts import group, plan, small_plan, variable

from keras_groupopt.plan.views.html import MOST_LISTED, to_html


class Checker(HTMLParser):
    """Reads HTML strictly: every tag is closed in order, texts and tags are kept."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile(name: str) -> dict[str, Any]:
    return plan(
        group(
            name,
            variable(name, dtype=name),
            selector=name,
            rule=name,
            rule_arguments={name: name},
            learning_rate=name,
            weight_decay=name,
            anchor=name,
            exclude_from_decay=name,
            clipnorm=name,
        ),
        learning_rate=name,
    )


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_no_text_of_a_user_becomes_markup(name: str) -> None:
    checked, harmless = Checker(to_html(hostile(name))), Checker(to_html(hostile("a")))
    assert harmless.tags == checked.tags
    assert {"class"} == checked.attributes
    assert name in checked.texts


def test_the_html_unfolds_every_group_and_needs_nothing_from_outside() -> None:
    html = to_html(small_plan())
    checked = Checker(html)
    assert checked.tags.count("details") == 3
    for path in ("resnet8/conv/kernel", "head/bias", "stem/scale"):
        assert path in checked.texts
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import", html)


def test_the_html_sets_no_text_or_background_colour_of_its_own() -> None:
    style = to_html(small_plan()).split("</style>")[0]
    assert re.findall(r"(?<![-\w])(?:background|color): (\w+)", style) == ["transparent"]


def test_a_very_large_group_is_cut_and_says_so() -> None:
    html = to_html(plan(group("a", *(variable(f"w{i}") for i in range(MOST_LISTED + 7)))))
    assert f"w{MOST_LISTED - 1}<" in html
    assert f"w{MOST_LISTED}<" not in html
    assert "and 7 more" in html
