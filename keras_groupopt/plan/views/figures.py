"""The figures of a plan as text, for the table and the notebook view."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_groupopt.base.dtypes import bytes_of

Plan = Mapping[str, Any]
Record = Mapping[str, Any]

NONE = "–"
# `>` marks columns of numbers.
GROUP_COLUMNS = (
    "Group (rule)",
    "Variables>",
    "Params>",
    "Learning rate",
    "Weight decay",
    "Memory>",
)
PLAN_FORMAT = 1
CLIPPING_OPTIONS = ("clipnorm", "global_clipnorm", "clipvalue")
# These are shown if they are not the default.
JOINT_OPTIONS = {
    "gradient_accumulation_steps": "Micro-batches per step",
    "ema": "Average of the weights",
    "on_nonfinite": "Gradients not finite",
    "waiting": "Waiting for frozen layers",
}
PROVISIONAL_NOTE = (
    "Provisional: paths come from variable names, so parents may be missing. "
    "Pass `model=` for layer paths."
)


class GroupFigures:
    """One group as text. `–` means that an option is not set or has no effect.

    Args:
        group: The group in `Plan.to_dict()`.
        tenths: Its share of the parameters, in tenths of a percent.
    """

    def __init__(self, group: Record, tenths: int) -> None:
        self.name: str = group["name"]
        self.selector: str = group["selector"] or NONE
        self.variables: Sequence[Record] = group["variables"]
        self.frozen = bool(group["frozen"])
        self.decays = not self.frozen and group["weight_decay"] not in (None, 0)
        self.parameters = parameter_count(self.variables)
        self.share = f"{tenths / 10:.1f} %" if tenths or not self.parameters else "< 0.1 %"
        arguments = (f"{key}={value_text(value)}" for key, value in group["rule_arguments"].items())
        self.rule = ", ".join([group["rule"] or NONE, *arguments])
        self.learning_rate = "frozen" if self.frozen else value_text(group["learning_rate"])
        self.memory = NONE if self.frozen else memory_text(self.variables)
        self.clipping = None if self.frozen else _clipping_text(group) or None
        self.weight_decay = self.anchor = self.excluded = NONE
        self.exclude_from_decay: str | None = None
        if self.decays:
            self.weight_decay = value_text(group["weight_decay"])
            self.anchor = group["anchor"] or "zero"
            self.excluded = f"{sum(not variable['decayed'] for variable in self.variables):,}"
            self.exclude_from_decay = group["exclude_from_decay"]

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the lines of each cell in the group's row, in the order of `GROUP_COLUMNS`."""
        decay = (f"→ {self.anchor}", f"{self.excluded} excluded") if self.decays else ()
        return [
            (self.name, f"({self.rule})"),
            (f"{len(self.variables):,}",),
            (f"{self.parameters:,}", self.share),
            (self.learning_rate,),
            (self.weight_decay, *decay),
            (self.memory,),
        ]

    def variable_cells(self, most: int | None = None) -> tuple[list[str], list[list[str]]]:
        """Returns the columns of the table of variables, and the cells of the first `most` rows."""
        ratios = [variable.get("ratio", 1.0) for variable in self.variables]
        has_ratios = any(ratio != 1.0 for ratio in ratios)
        columns = ["Path", "Shape", "Dtype", "Params>", *(["Ratio>"] if has_ratios else [])]
        rows = [
            [
                variable["path"],
                value_text(variable["shape"]),
                variable["dtype"],
                f"{parameter_count([variable]):,}",
                *([value_text(ratio)] if has_ratios else []),
                *("Y" if variable[key] else "N" for key in ("decayed", "anchored")),
            ]
            for variable, ratio in zip(self.variables[:most], ratios, strict=False)
        ]
        return [*columns, "Decayed", "Anchored"], rows


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """A whole plan as text: its groups in order, then the totals as (label, value) lines."""

    title: str
    groups: tuple[GroupFigures, ...]
    totals: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    note: str | None


def check_format(plan: Plan, argument: str = "plan") -> None:
    """Checks that the views can read a dictionary.

    Args:
        plan: What `Plan.to_dict()` returns.
        argument: The name of the argument in errors. Default: "plan".

    Raises:
        ValueError: If the dictionary has another format number.
    """
    if plan.get("format") != PLAN_FORMAT:
        raise ValueError(
            f"`{argument}` must be a plan of format {PLAN_FORMAT}, as `Plan.to_dict()` returns it. "
            f"Received: format={plan.get('format')!r}. Read it with the version that wrote it."
        )


def parameter_count(variables: Iterable[Record]) -> int:
    """Returns the number of values in `variables`."""
    return sum(math.prod(variable["shape"]) for variable in variables)


def shares(counts: Sequence[int]) -> list[int]:
    """Splits 100 % in proportion to `counts`, in tenths of a percent that sum to exactly 1000.

    If each share were rounded alone, a column could sum to 99.9 % or 100.1 %. So all are rounded
    down, and the remaining tenths go to the largest remainders.

    Args:
        counts: Non-negative integers.

    Returns:
        One integer per count; zeros if every count is 0.

    Example:
    >>> shares([1, 1, 1])
    [334, 333, 333]
    """
    total = sum(counts)
    if total == 0:
        return [0] * len(counts)
    tenths = [1000 * count // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda i: -(1000 * counts[i] % total))
    for i in by_remainder[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return tenths


def readable_bytes(size: float) -> str:
    """Writes bytes with a unit, in steps of 1024, as Keras' `model.summary()` writes them.

    Example:
    >>> readable_bytes(0), readable_bytes(1536), readable_bytes(3 * 1024**2)
    ('0.00 B', '1.50 KB', '3.00 MB')
    """
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} PB"


def value_text(value: Any) -> str:
    """Returns a value in `Plan.to_dict()` as short text, with `–` for None.

    Example:
    >>> value_text(1e-4), value_text(10.0), value_text(None), value_text([3, 3])
    ('0.0001', '10', '–', '(3, 3)')
    """
    if value is None:
        return NONE
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(value_text(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return str(value)


def memory_text(variables: Sequence[Record]) -> str:
    """Returns the optimizer memory: `≥` and the known part, or `–` if nothing is known."""
    known = [v["state_bytes"] for v in variables if v.get("state_bytes") is not None]
    if variables and not known:
        return NONE
    text = readable_bytes(sum(known))
    return text if len(known) == len(variables) else f"≥ {text}"


def _clipping_text(options: Record) -> str:
    given = [name for name in CLIPPING_OPTIONS if options.get(name) is not None]
    return ", ".join(f"{name}={value_text(options[name])}" for name in given)


def _exclusion_settings(groups: Sequence[GroupFigures]) -> list[tuple[str, str]]:
    """Returns one line if all groups exclude the same, otherwise one per distinct selector."""
    decaying = [group for group in groups if group.decays]
    names_of: dict[str, list[str]] = {}
    for group in decaying:
        if group.exclude_from_decay:
            names_of.setdefault(group.exclude_from_decay, []).append(group.name)
    return [
        (
            "Excluded from decay"
            + ("" if len(names) == len(decaying) else f" in {', '.join(names)}"),
            selector,
        )
        for selector, names in names_of.items()
    ]


def plan_figures(plan: Plan) -> PlanFigures:
    """Computes everything that the views show.

    Args:
        plan: What `Plan.to_dict()` returns.

    Raises:
        ValueError: If `plan` has another format number.
    """
    check_format(plan)
    records: Sequence[Record] = plan["groups"]
    tenths = shares([parameter_count(record["variables"]) for record in records])
    groups = tuple(map(GroupFigures, records, tenths))
    everything = [variable for record in records for variable in record["variables"]]
    trained = [v for record in records if not record["frozen"] for v in record["variables"]]
    frozen = [v for record in records if record["frozen"] for v in record["variables"]]

    def size(variables: Sequence[Record]) -> str:
        total = sum(bytes_of(variable["shape"], variable["dtype"]) for variable in variables)
        return f"{parameter_count(variables):,} ({readable_bytes(total)})"

    totals = [("Total params", size(everything)), ("Trained params", size(trained))]
    if any(group.frozen for group in groups):
        totals.append(("Frozen params", size(frozen)))
    # A frozen variable has no optimizer state, so its unknown size is not missing.
    totals.append(("Optimizer memory", memory_text(trained)))

    settings = []
    options = plan["options"]
    if options.get("learning_rate") is not None:
        settings.append(("Learning rate", value_text(options["learning_rate"])))
    if _clipping_text(options):
        settings.append(("Clipping over all groups", _clipping_text(options)))
    settings.extend(
        (f"Clipping in {group.name}", group.clipping) for group in groups if group.clipping
    )
    settings.extend(_exclusion_settings(groups))
    settings.extend(
        (label, str(options[name]))
        for name, label in JOINT_OPTIONS.items()
        if options.get(name) not in (None, "skip")
    )

    def counted(number: int, noun: str) -> str:
        return f"{number:,} {noun}{'' if number == 1 else 's'}"

    title = f"Plan: {counted(len(groups), 'group')}, {counted(len(everything), 'variable')}"
    note = PROVISIONAL_NOTE if plan["provisional"] else None
    return PlanFigures(title, groups, tuple(totals), tuple(settings), note)
