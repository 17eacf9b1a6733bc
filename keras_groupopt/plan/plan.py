"""The plan: a frozen record of the group and options of each variable.

The optimizer reads the plan and never a path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from keras_groupopt.plan import sampled_rates
from keras_groupopt.plan.averages import Average
from keras_groupopt.plan.group import Anchor, Group
from keras_groupopt.plan.plan_dict import plan_dict
from keras_groupopt.plan.ratios import Ratio
from keras_groupopt.plan.schedule_bindings import ScheduleBinding, schedule_bindings
from keras_groupopt.plan.views.compare import PlanDifference, compare
from keras_groupopt.plan.views.html import to_html
from keras_groupopt.plan.views.plot import figure
from keras_groupopt.plan.views.table import summary
from keras_groupopt.selectors import Selector
from keras_groupopt.selectors.variable_info import VariableInfo


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The options of the optimizer, for groups that leave them out."""

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
    max_skipped_steps: int | None = 100
    fused: bool = True
    count_clipped_steps: bool = False
    unclaimed: str = "default"
    overlap: str = "error"


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """One trainable variable in the plan.

    Args:
        position: Its place among the trainable variables that the optimizer is built with.
        path: Its layer path.
        name: Its last name, such as `"kernel"`.
        shape: Its shape.
        dtype: Its dtype.
        decayed: Whether it is decayed.
        anchored: Whether decay pulls it toward a stored value.
        ratio_index: The index of the optimizer's ratio that multiplies its rate. Default: none.
        state_bytes: The bytes of its optimizer state, `None` if unknown. Default: `None`.
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
        """The part that is saved, and with which another model is compared."""
        names = ("path", "name", "shape", "dtype", "decayed", "ratio_index")
        return {name: getattr(self, name) for name in names} | {"shape": list(self.shape)}


@dataclasses.dataclass(frozen=True)
class PlannedGroup:
    """One group with all options filled in, and its variables.

    Args:
        group: The declaration, with the optimizer's options for those it left out.
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
    """The group of each variable, and how each group is trained.

    Every trainable variable is in exactly one group. `plan.summary()` prints it, `plan.plot(steps)`
    draws its rates, `plan.to_dict()` returns plain JSON, `plan.compare(other)` lists differences,
    and notebooks show it as HTML.

    Args:
        groups: The groups, in the order of declaration. The group of unclaimed variables is last.
        defaults: The options of the optimizer for all groups.
        provisional: Whether paths come from `variable.path` because no model was given. Default:
            False.
        gradient_rule: The scalars of the model's gradient rule (SAM), by name. Default: none.
        waiting: The declared groups whose layers are all frozen. They take effect in
            `optimizer.rebuild(model)`, once their layers train. Default: none.

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
    waiting: tuple[Group, ...] = ()

    def __getitem__(self, name: str) -> PlannedGroup:
        for planned in self.groups:
            if planned.name == name:
                return planned
        if any(group.name == name for group in self.waiting):
            raise KeyError(
                f'The group "{name}" waits: its layers are frozen. Set `trainable = True` on them, '
                "and call `optimizer.rebuild(model)` if the optimizer is built."
            )
        names = ", ".join(planned.name for planned in self.groups)
        raise KeyError(f'No group is called "{name}". The groups are: {names}.')

    @property
    def variables(self) -> tuple[PlannedVariable, ...]:
        """All variables, in the order of the model's trainable variables."""
        every = (variable for planned in self.groups for variable in planned.variables)
        return tuple(sorted(every, key=lambda variable: variable.position))

    def bindings(self) -> tuple[ScheduleBinding, ...]:
        """Returns one binding per schedule, field and group.

        Each has `group` (`None` for all groups), `field` and `schedule`, and prints as a sentence.
        A schedule that drives nothing is an error when the plan is made.
        """
        return tuple(schedule_bindings(self))

    @property
    def records(self) -> list[dict[str, Any]]:
        """One record per trainable variable, in order: path, name, shape, dtype, decayed, group."""
        owners = {v.position: planned.name for planned in self.groups for v in planned.variables}
        return [v.record | {"group": owners[v.position]} for v in self.variables]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain JSON: `format`, `provisional`, `options` and `groups`."""
        return plan_dict(self)

    def summary(self, at: Any = None, steps: int | None = None, **options: Any) -> None:
        """Prints the plan as a table in the look of `model.summary()`.

        Args:
            at: Points at which to print each group's rate too: floats in [0, 1] are shares of the
                run, integers are optimizer steps. Default: none.
            steps: The number of optimizer steps of the run, at which schedules with
                `total_steps="fit"` end. Default: the step at which the last schedule ends.
            **options: `expand` (`True` or names of groups whose variables are listed),
                `line_length`, `print_fn` and `console` (a `rich.console.Console`).

        Raises:
            ValueError: If a point or an option is out of range, or `steps` is needed and not given.
            TypeError: If a point is not a number.
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

    def __str__(self) -> str:
        lines: list[str] = []
        self.summary(print_fn=lines.append)
        return "\n".join(lines)

    def plot(self, steps: int | None = None, path: Any = None, log: bool | None = None) -> Any:
        """Draws each group's rate over a run, and its ratios, decays and momentums if it has any.

        It needs matplotlib: `pip install keras-groupopt[plots]`. The rates are the declared ones,
        without changes that callbacks will make.

        Args:
            steps: The number of optimizer steps of the run, at which schedules with
                `total_steps="fit"` end. Default: the step at which the last schedule ends.
            path: A file for the picture. Its extension gives the format. Default: none.
            log: Whether rates and ratios are on a logarithmic scale. Default: True if the highest
                values of two groups differ by more than a factor of 100.

        Returns:
            A `matplotlib.figure.Figure`, without a window.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If `steps` is needed and not given, or smaller than 1.
            TypeError: If it is not an integer.
        """
        return figure(sampled_rates.sampled(self, sampled_rates.run_length(self, steps)), path, log)

    def compare(self, other: Plan) -> PlanDifference:
        """Returns the differences of `other`. The result is false if there are none."""
        return compare(self.to_dict(), other.to_dict())

    def _repr_html_(self) -> str:
        return to_html(self.to_dict())


def planned_variable(
    info: VariableInfo, position: int, group: Group, *, decayed: bool, ratio_index: int | None
) -> PlannedVariable:
    """Returns a variable in the plan of its group, whose options are complete."""
    anchored = decayed and group.anchor is not None and group.anchor.kind != "zero"
    shape = tuple(info.shape)
    return PlannedVariable(
        position, info.path, info.name, shape, info.dtype, decayed, anchored, ratio_index
    )


def with_state_bytes(plan: Plan, sizes: Mapping[int, int]) -> Plan:
    """Returns `plan` with the bytes of state of each position."""
    return _changed(plan, {place: {"state_bytes": size} for place, size in sizes.items()})


def without_decay(plan: Plan, positions: Iterable[int]) -> Plan:
    """Returns `plan` without decay of the variables at `positions`."""
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
