"""Who goes where: a frozen, printable record. Everything downstream reads it and never a path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from keras_groupopt.base.checks import is_schedule
from keras_groupopt.plan import sampled_rates
from keras_groupopt.plan.averages import Average
from keras_groupopt.plan.averages import describe as describe_average
from keras_groupopt.plan.group import Anchor, Group
from keras_groupopt.plan.ratios import Ratio
from keras_groupopt.plan.schedule_bindings import ScheduleBinding, schedule_bindings
from keras_groupopt.plan.views.compare import PlanDifference, compare
from keras_groupopt.plan.views.html import to_html
from keras_groupopt.plan.views.plot import figure
from keras_groupopt.plan.views.table import summary
from keras_groupopt.schedules.from_base import FromBase
from keras_groupopt.selectors import Selector

FORMAT = 1
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What the optimizer says for groups that do not say it themselves."""

    learning_rate: Any
    rule: Any
    weight_decay: Any = None
    anchor: Anchor | None = None
    ratios: tuple[Ratio, ...] = ()
    exclude_from_decay: Selector | tuple[()] = ()
    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None
    gradient_accumulation_steps: int | None = None
    ema: Average | None = None
    on_nonfinite: str = "skip"
    fused: bool = True
    unclaimed: str = "default"
    overlap: str = "error"


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """One trainable variable in the plan.

    Args:
        position: Its place among the trainable variables the optimizer is built with.
        path: Its layer path.
        name: Its last name, as `"kernel"`.
        shape: Its shape.
        dtype: Its dtype.
        decayed: Whether decay acts on it.
        anchored: Whether decay pulls it toward a stored value.
        ratio_index: Which of the optimizer's `ratios` multiplies its rate; `None` for none.
        state_bytes: Bytes of optimizer state it owns; `None` before build.
    """

    position: int
    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    decayed: bool
    anchored: bool
    ratio_index: int | None = None
    state_bytes: int | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The part of it that a file keeps, and that another model is checked against."""
        return {
            "path": self.path,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "decayed": self.decayed,
            "ratio_index": self.ratio_index,
        }


@dataclasses.dataclass(frozen=True)
class PlannedGroup:
    """One group with everything filled in, and its variables.

    Args:
        group: The declaration, with what it left out taken from the optimizer.
        variables: Its variables, in the order of the model's trainable variables.
    """

    group: Group
    variables: tuple[PlannedVariable, ...]

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which variable is in which group, and how each group is trained.

    Every trainable variable is in exactly one group. `plan.summary()` prints it, `plan.plot(steps)`
    draws its rates, `plan.to_dict()` gives plain JSON, `plan.compare(other)` lists differences, and
    notebooks show it as HTML.

    Args:
        groups: The groups, in the order of declaration; the rest comes last.
        defaults: What the optimizer says for all groups.
        provisional: Whether paths come from `variable.path` because no model was given.
        gradient_rule: The scalars of the model's gradient rule (SAM), by name.

    Example:

    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.GroupedOptimizer({"head": "head"}, model=model, rule="adam")
    >>> [variable.path for variable in optimizer.plan["head"].variables]
    ['head/kernel', 'head/bias']
    """

    groups: tuple[PlannedGroup, ...]
    defaults: Defaults
    provisional: bool = False
    gradient_rule: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> PlannedGroup:
        for planned in self.groups:
            if planned.name == name:
                return planned
        names = ", ".join(planned.name for planned in self.groups)
        raise KeyError(f'No group is called "{name}". The groups are: {names}.')

    @property
    def variables(self) -> tuple[PlannedVariable, ...]:
        """All variables, in the order of the model's trainable variables."""
        every = (variable for planned in self.groups for variable in planned.variables)
        return tuple(sorted(every, key=lambda variable: variable.position))

    def bindings(self) -> tuple[ScheduleBinding, ...]:
        """Returns which schedule drives which field of which group.

        Each has `group` (`None` where it is of all groups), `field` and `schedule`, and reads as
        a sentence when printed. A schedule that drives nothing is refused when the plan is made.
        """
        return tuple(schedule_bindings(self))

    @property
    def records(self) -> list[dict[str, Any]]:
        """Per trainable variable, in order: path, name, shape, dtype, decayed and group."""
        owners = {v.position: planned.name for planned in self.groups for v in planned.variables}
        return [v.record | {"group": owners[v.position]} for v in self.variables]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain JSON: `format`, `provisional`, `options` and `groups`."""
        defaults = self.defaults
        return {
            "format": FORMAT,
            "provisional": self.provisional,
            "options": {
                "learning_rate": describe_scalar(defaults.learning_rate),
                "global_clipnorm": defaults.global_clipnorm,
                "gradient_accumulation_steps": defaults.gradient_accumulation_steps,
                "ema": describe_average(defaults.ema),
                "on_nonfinite": defaults.on_nonfinite,
                "unclaimed": defaults.unclaimed,
                "overlap": defaults.overlap,
            },
            "groups": [_group_dict(planned, defaults) for planned in self.groups],
        }

    def summary(self, at: Any = None, steps: int | None = None, **options: Any) -> None:
        """Prints the plan as a table in the look of `model.summary()`.

        Args:
            at: Points at which to print each group's rate as well: floats in [0, 1], shares of the
                run, and integers, optimizer steps.
            steps: Optimizer steps of the run. Default: the step at which the last schedule of the
                plan ends. Schedules with `total_steps="fit"` end there.
            **options: `expand` (`True` or names of groups: list their variables), `line_length`,
                `print_fn`, `console` (a `rich.console.Console`).

        Raises:
            ValueError: If a point or an option is out of range, or `steps` is needed and not given.
            TypeError: If a point is no number.
        """
        if at is None:
            if steps is not None:
                raise ValueError(
                    f"`steps` must come with `at`. Received: steps={steps!r} alone. Pass "
                    "`at=[0, 0.25, 0.5, 1.0]` to print rates over a run of that length."
                )
            rates = None
        else:
            places, shares, total = sampled_rates.points_of(at, self, steps)
            rates = sampled_rates.curves(self, places, total, shares)
        summary(self.to_dict(), rates=rates, **options)

    def plot(self, steps: int | None = None, path: Any = None, log: bool | None = None) -> Any:
        """Draws each group's rate over a run, with ratios, decays and momentums that there are.

        Needs matplotlib: `pip install keras-groupopt[plots]`. Rates are as declared: what a
        callback will set is not known before.

        Args:
            steps: Optimizer steps of the run. Default: the step at which the last schedule of the
                plan ends. Schedules with `total_steps="fit"` end there.
            path: A file to write the picture to, of the format that its ending says.
            log: Whether rates and ratios are on a logarithmic scale. Default: where the highest of
                two groups differ by more than a factor of 100.

        Returns:
            A `matplotlib.figure.Figure`, which no window shows.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If `steps` is needed and not given, or smaller than 1.
            TypeError: If it is no integer.
        """
        return figure(sampled_rates.sampled(self, sampled_rates.run_length(self, steps)), path, log)

    def compare(self, other: Plan) -> PlanDifference:
        """Returns what differs in `other`; the result is falsy when nothing does."""
        return compare(self.to_dict(), other.to_dict())

    def _repr_html_(self) -> str:
        return to_html(self.to_dict())


def describe_scalar(value: Any) -> str | float | None:
    """Returns a number as it is, and a schedule or function by its name."""
    if value is None or isinstance(value, (int, float)):
        return value
    if is_schedule(value):
        return type(value).__name__
    if isinstance(value, FromBase):
        return repr(value)
    return f"{getattr(value, '__name__', type(value).__name__)}()"


def _rate_text(planned: PlannedGroup, defaults: Defaults) -> str:
    own = planned.group.learning_rate
    own = defaults.learning_rate if own is None else own
    text = str(describe_scalar(own) if not isinstance(own, float) else f"{own:g}")
    ratio = describe_scalar(planned.group.learning_rate_ratio)
    return text + _times(ratio) + _times(*_variable_ratios(planned, defaults))


def _times(*ratios: Any) -> str:
    """Returns ` × 0.5`, or ` × 0.1…1` for several, and nothing where all are 1."""
    numbers = sorted(ratio for ratio in ratios if isinstance(ratio, float))
    named = dict.fromkeys(ratio for ratio in ratios if not isinstance(ratio, float))
    if not named and set(numbers) <= {1.0}:
        return ""
    ends = dict.fromkeys(f"{number:.4g}" for number in (*numbers[:1], *numbers[-1:]))
    return " × " + ", ".join(["…".join(ends)] * bool(numbers) + [str(name) for name in named])


def _variable_ratios(planned: PlannedGroup, defaults: Defaults) -> list[Any]:
    places = (variable.ratio_index for variable in planned.variables)
    return [1.0 if p is None else describe_scalar(defaults.ratios[p].value) for p in places]


def _group_dict(planned: PlannedGroup, defaults: Defaults) -> dict[str, Any]:
    group = planned.group
    exclusion = group.exclude_from_decay
    rule = group.rule
    return {
        "name": group.name,
        "selector": "" if group.selector is None else group.selector.describe(),
        "rule": None if rule is None else rule.label,
        "rule_arguments": {} if rule is None else {k: _plain(v) for k, v in rule.arguments.items()},
        "learning_rate": None if group.frozen else _rate_text(planned, defaults),
        "learning_rate_ratio": describe_scalar(group.learning_rate_ratio),
        "weight_decay": describe_scalar(group.weight_decay),
        "anchor": None if group.anchor is None else group.anchor.kind,
        "exclude_from_decay": exclusion.describe() if isinstance(exclusion, Selector) else None,
        "frozen": group.frozen,
        "clipnorm": group.clipnorm,
        "global_clipnorm": group.global_clipnorm,
        "clipvalue": group.clipvalue,
        "variables": [
            {
                **{key: value for key, value in v.record.items() if key != "ratio_index"},
                "ratio": ratio,
                "anchored": v.anchored,
                "state_bytes": v.state_bytes,
            }
            for v, ratio in zip(planned.variables, _variable_ratios(planned, defaults), strict=True)
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return describe_scalar(value) if is_schedule(value) else repr(value)


def with_state_bytes(plan: Plan, sizes: Mapping[int, int]) -> Plan:
    """Returns `plan` with the bytes of state per position filled in."""
    return _changed(plan, {place: {"state_bytes": size} for place, size in sizes.items()})


def without_decay(plan: Plan, positions: Iterable[int]) -> Plan:
    """Returns `plan` in which the variables at `positions` are not decayed."""
    return _changed(plan, {place: {"decayed": False, "anchored": False} for place in positions})


def _changed(plan: Plan, changes: Mapping[int, Mapping[str, Any]]) -> Plan:
    groups = [
        dataclasses.replace(
            planned,
            variables=tuple(
                dataclasses.replace(v, **changes.get(v.position, {})) for v in planned.variables
            ),
        )
        for planned in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))
