"""A plan as a table, in a terminal and in a notebook: figures add up, text fits and is escaped."""

from __future__ import annotations

import doctest
import importlib
import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import dense
from plan_dicts import EXCLUDED, group, plan, printed, small_plan, variable
from rich.console import Console

import keras_groupopt as kgo
from keras_groupopt.plan.views.compare import compare
from keras_groupopt.plan.views.figures import GroupFigures, memory_text, plan_figures, shares
from keras_groupopt.plan.views.finder_result import RateCurve, RateCurves
from keras_groupopt.plan.views.html import MOST_LISTED, to_html
from keras_groupopt.plan.views.table import summary

GOLDEN = """\
Plan: 3 groups, 5 variables
┏━━━━━━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━┓
┃ Group (rule)   ┃ Variables ┃ Params ┃ Learning rate ┃ Weight decay ┃  Memory ┃
┡━━━━━━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━┩
│ backbone       │         2 │    448 │ 0.001 × 0.1   │ 0.0001       │ 3.50 KB │
│ (radam)        │           │ 40.8 % │               │ → initial    │         │
│                │           │        │               │ 1 excluded   │         │
├────────────────┼───────────┼────────┼───────────────┼──────────────┼─────────┤
│ head           │         2 │    650 │ 0.001         │ 0.0001       │ 2.54 KB │
│ (lion,         │           │ 59.1 % │               │ → zero       │         │
│ beta_1=0.95)   │           │        │               │ 1 excluded   │         │
├────────────────┼───────────┼────────┼───────────────┼──────────────┼─────────┤
│ stem           │         1 │      1 │ frozen        │ –            │       – │
│ (radam)        │           │  0.1 % │               │              │         │
└────────────────┴───────────┴────────┴───────────────┴──────────────┴─────────┘
 Total params: 1,099 (4.29 KB)
 Trained params: 1,098 (4.29 KB)
 Frozen params: 1 (4.00 B)
 Optimizer memory: 6.04 KB
 Learning rate: 0.001
 Clipping over all groups: global_clipnorm=1
 Clipping in head: clipnorm=0.5
 Excluded from decay: rank(max=1) | variable_name("bias", "gamma", "beta")

Group: "head" claims path("head")
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━┓
┃ Path                      ┃ Shape    ┃ Dtype   ┃ Params ┃ Decayed ┃ Anchored ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━┩
│ head/kernel               │ (64, 10) │ float32 │    640 │ Y       │ N        │
│ head/bias                 │ (10,)    │ float32 │     10 │ N       │ N        │
└───────────────────────────┴──────────┴─────────┴────────┴─────────┴──────────┘
"""


@pytest.mark.parametrize("module", ["compare", "figures", "html", "table"])
def test_the_examples_in_the_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"keras_groupopt.plan.views.{module}"))
    assert results.attempted > 0
    assert results.failed == 0


# Figures


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_shares_sum_to_the_whole_and_are_off_by_less_than_a_tenth(counts):
    tenths, total = shares(counts), sum(counts)
    assert sum(tenths) == (1000 if total else 0)
    for tenth, count in zip(tenths, counts, strict=True):
        assert abs(tenth * total - 1000 * count) < max(total, 1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100, 24], "124.00 B"),
        ([1024, None], "≥ 1.00 KB"),
        ([None, None], "–"),
        ([0], "0.00 B"),
        ([], "0.00 B"),
    ],
)
def test_unknown_memory_is_never_shown_as_known(sizes, expected):
    assert expected == memory_text([variable("w", state_bytes=size) for size in sizes])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "64.00 B"),
        ("bfloat16", "32.00 B"),
        ("float8_e4m3fn", "16.00 B"),
        ("int4", "8.00 B"),
        ("bool", "16.00 B"),
    ],
)
def test_parameter_memory_follows_the_dtype(dtype, expected):
    figures = plan_figures(plan(group("a", variable("w", (4, 4), dtype=dtype))))
    assert dict(figures.totals)["Total params"] == f"16 ({expected})"


def test_a_tiny_share_does_not_read_as_zero():
    large, small = variable("v", (10**4, 10**3)), variable("w", (1, 1))
    figures = plan_figures(plan(group("a", large), group("b", small)))
    assert [g.share for g in figures.groups] == ["100.0 %", "< 0.1 %"]


def shown_of(**options: Any) -> GroupFigures:
    """The figures of a group with one variable without state."""
    return plan_figures(plan(group("a", variable("w", state_bytes=0), **options))).groups[0]


def test_what_cannot_act_reads_as_not_set():
    frozen = shown_of(frozen=True, clipnorm=1.0)
    assert frozen.learning_rate == "frozen"
    shown = (frozen.weight_decay, frozen.anchor, frozen.excluded, frozen.memory, frozen.clipping)
    assert shown == ("–", "–", "–", "–", None)
    for no_decay in (None, 0, 0.0):
        bare = shown_of(weight_decay=no_decay)
        assert (bare.weight_decay, bare.anchor, bare.excluded) == ("–", "–", "–")


def test_a_decay_that_is_a_schedule_is_shown_as_its_text():
    figures = shown_of(weight_decay="CosineDecay(0.1, 100)")
    assert (figures.weight_decay, figures.excluded) == ("CosineDecay(0.1, 100)", "0")


def test_exclusions_are_named_once_where_all_groups_agree():
    alike = plan(group("a", variable("v")), group("b", variable("w")))
    assert ("Excluded from decay", EXCLUDED) in plan_figures(alike).settings
    alike["groups"][1]["exclude_from_decay"] = "rank(max=1)"
    settings = plan_figures(alike).settings
    assert ("Excluded from decay in a", EXCLUDED) in settings
    assert ("Excluded from decay in b", "rank(max=1)") in settings


# Table


def test_the_table_at_80_columns_is_this_text():
    assert printed(small_plan(), line_length=80, expand="head") == GOLDEN.rstrip("\n")


@pytest.mark.parametrize("width", [72, 80, 100, 110, 120, 160])
def test_every_line_fits_the_width_and_no_number_is_broken(width):
    wide = plan(
        group("backbone", variable("b/w", (23_512, 1000), state_bytes=188_096_000)),
        group("a" * 40, variable("x/" * 60 + "kernel", (3, 3, 512, 512))),
        learning_rate="CosineDecay(initial_learning_rate=0.001, decay_steps=1000, alpha=0.01)",
    )
    text = printed(wide, line_length=width, expand=True)
    assert max(map(len, text.splitlines())) <= width
    for number in ("23,512,000", "90.9 %", "179.38 MB", "2,359,296"):
        assert number in text
    in_the_table = "".join(re.findall(r"a+", text.split("Total params")[0]))
    assert in_the_table.count("a") >= 40


def test_clipping_is_mentioned_only_where_it_is_set():
    bare = plan(group("a", variable("w")), global_clipnorm=None)
    assert "lipping" not in printed(bare)


def test_provisional_paths_are_pointed_out_with_the_remedy():
    assert "Pass `model=`" in printed(plan(provisional=True), line_length=120)
    assert "Pass `model=`" in to_html(plan(provisional=True))


@pytest.mark.parametrize(
    ("expand", "listed"),
    [
        (False, []),
        (True, ["backbone", "head", "stem"]),
        ((), []),
        ("head", ["head"]),
        (("stem", "backbone"), ["backbone", "stem"]),
    ],
)
def test_expand_lists_the_variables_of_these_groups(expand, listed):
    text = printed(small_plan(), expand=expand)
    assert listed == re.findall(r'Group: "(\w+)"', text)
    assert ("head/kernel" in text) == ("head" in listed)


def test_print_fn_gets_single_plain_lines_even_if_colours_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines: list[str] = []
    summary(small_plan(), print_fn=lines.append, expand=True)
    assert len(lines) > 20
    assert not [line for line in lines if "\x1b" in line or "\n" in line or line != line.rstrip()]


def test_a_terminal_gets_colours_and_dimmed_frozen_rows_and_a_pipe_gets_none():
    terminal = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system="256", highlight=False
    )
    pipe = Console(file=io.StringIO(), width=80, force_terminal=False, highlight=False)
    for console in (terminal, pipe):
        summary(small_plan(), console=console)
    coloured, plain = terminal.file.getvalue(), pipe.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[38;5;34m" in coloured
    assert re.search(r"\x1b\[2mstem", coloured)
    assert "\x1b" not in plain
    without_codes = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert plain == without_codes


def test_without_arguments_the_summary_goes_to_standard_output(capsys):
    summary(small_plan())
    assert capsys.readouterr().out.startswith("Plan: 3 groups, 5 variables\n")


def test_a_console_that_writes_ascii_only_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    summary(plan(group("größe", variable("w"))), console=Console(file=stream, width=80))
    stream.flush()
    assert b"gr\\xf6\\xdfe" in raw.getvalue()


@pytest.mark.parametrize("name", ["[bold]x[/]", "[/]", ":smile:", "a\x1b[31mb", "a\nb", "<b>&"])
def test_names_are_shown_as_they_are_and_never_obeyed(name):
    text = printed(plan(group(name, variable(name + "/kernel"))), expand=True, line_length=120)
    shown = name.replace("\x1b", "\\x1b").replace("\n", "\\n")
    assert f'Group: "{shown}"' in text
    assert f"{shown}/kernel" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": ("haed",)}, r"`expand` must be .*Received: .*'haed'.*Did you mean 'head'\?"),
        ({"expand": "zzz"}, r"`expand` must be .* The groups are: 'backbone', 'head', 'stem'"),
        ({"line_length": 40}, r"`line_length` must be at least 72\. Received: line_length=40"),
        ({"console": Console()}, r"`print_fn` and `console` must not be given together"),
    ],
)
def test_wrong_arguments_are_refused_with_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        printed(small_plan(), **options)


@pytest.mark.parametrize("view", [printed, to_html, lambda p: compare(p, p)])
def test_a_plan_of_another_format_is_refused(view):
    with pytest.raises(ValueError, match=r"must be a plan of format 1.*Received: format=2"):
        view(small_plan() | {"format": 2})


def test_an_empty_plan_can_be_shown():
    for view in (printed, to_html):
        assert "0 groups, 0 variables" in view(plan())
        assert "1 group, 0 variables" in view(plan(group("a")))


# Notebooks


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
    texts = ("selector", "rule", "learning_rate", "weight_decay", "anchor", "exclude_from_decay")
    options = dict.fromkeys([*texts, "clipnorm"], name) | {"rule_arguments": {name: name}}
    return plan(group(name, variable(name, dtype=name), **options), learning_rate=name)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_no_text_of_a_user_becomes_markup(name):
    checked, harmless = Checker(to_html(hostile(name))), Checker(to_html(hostile("a")))
    assert harmless.tags == checked.tags
    assert {"class"} == checked.attributes
    assert name in checked.texts


def test_the_html_unfolds_every_group_and_suits_any_theme_without_anything_from_outside():
    html = to_html(small_plan())
    checked = Checker(html)
    assert checked.tags.count("details") == 3
    assert {"resnet8/conv/kernel", "head/bias", "stem/scale"} <= set(checked.texts)
    # Nor has it a colour of text or background of its own.
    style = html.split("</style>")[0]
    assert re.findall(r"(?<![-\w])(?:background|color): (\w+)", style) == ["transparent"]
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import", html)


def test_a_very_large_group_is_cut_and_says_so():
    html = to_html(plan(group("a", *(variable(f"w{i}") for i in range(MOST_LISTED + 7)))))
    assert f"w{MOST_LISTED - 1}<" in html
    assert f"w{MOST_LISTED}<" not in html
    assert "and 7 more" in html


def test_plans_optimizers_and_curves_print_as_what_they_are(capsys):
    groups = [kgo.Group("head", "head", rule="sgd"), kgo.Group("enc", "enc", frozen=True)]
    model = dense()
    optimizer = kgo.GroupedOptimizer(groups, model=model, name="own")
    declared = "<GroupedOptimizer \"own\": groups {'head': 'sgd', 'enc': 'frozen'}, "
    assert repr(optimizer) == f"{declared}not built>"
    optimizer.build(model.trainable_variables)
    assert repr(optimizer) == f"{declared}4 variables>"
    assert repr(kgo.LossScaleOptimizer(optimizer)) == f"<LossScaleOptimizer around {optimizer!r}>"
    assert "{'default': 'radam'}" in repr(kgo.GroupedOptimizer())
    optimizer.plan.summary()
    assert str(optimizer.plan).split() == capsys.readouterr().out.split()
    curve = RateCurve((0.1, 1.0, 2.0), (1.0, 0.5, 2.0), (1.0, 0.5, 2.0), 1.0, True)
    assert repr(RateCurves({None: curve, "head": curve})).endswith("{'all': 0.1, 'head': 0.1})")
