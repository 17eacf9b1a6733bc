"""What a user declared, checked, and kept beside the tracked state of the optimizer."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from keras_groupopt.base.checks import check_number, is_schedule
from keras_groupopt.plan.plan import Defaults, Plan
from keras_groupopt.step.gradient_rule_state import Wanted


class Declaration:
    """What was declared, beside what is tracked: plain, so that Keras does not look inside."""

    def __init__(self, groups: tuple[Any, ...], defaults: Defaults) -> None:
        self.groups = groups
        self.defaults = defaults
        self.model: weakref.ref[Any] | None = None
        self.preview: Plan | None = None
        # The variables the plan was resolved over, which give selectors of objects their paths.
        self.catalog: Any = None
        self.records: list[dict[str, Any]] | None = None
        self.records_provisional = False
        self.current: dict[tuple[str, str], float] = {}
        self.pending: tuple[Any, Any] | None = None
        # The groups that `freeze_to` froze, and the identities of the variables it froze.
        self.frozen_groups: tuple[str, ...] = ()
        self.held: set[int] = set()
        # The length of the run, where it was set before the build.
        self.total_steps: int | None = None
        # Whether a `fit` is the run that schedules are made for, and not a search for rates.
        self.is_run = True
        # The identities of schedules that were said to be shorter than the run.
        self.said_short: set[int] = set()
        # The end of the run that they were last compared with.
        self.run_seen: int | None = None
        # What the gradient rule of the model asks to be kept.
        self.gradient_rule: Wanted | None = None
        # What steps are to measure.
        self.measured: frozenset[str] = frozenset()

    @property
    def resting(self) -> list[dict[str, Any]]:
        """The records of variables that were frozen when the config was saved."""
        return [record for record in self.records or () if not record.get("trainable", True)]

    def live_model(self, required: bool = True) -> Any:
        """Returns the model, or `None` if none was given.

        Raises:
            ValueError: If one was given and `required`, but it no longer exists.
        """
        if self.model is None:
            return None
        model = self.model()
        if model is None and required:
            raise ValueError(
                "The model given as `model=` must exist until the optimizer is built. Received: "
                "a model that was deleted. Keep a reference to it, or call "
                "`optimizer.bind(model)` with the model you train."
            )
        return model

    def train_function(self) -> weakref.ref[Any] | None:
        """Returns the training function that `fit` made for the model, held weakly, if any.

        `compile` drops it, so it tells the steps before a `compile` from those after it.
        """
        function = getattr(self.live_model(required=False), "train_function", None)
        return None if function is None else weakref.ref(function)


def check_base(learning_rate: Any, groups: Sequence[Any]) -> Any:
    """Returns the base rate: a float, a schedule or a function."""
    shape = None if is_schedule(learning_rate) else getattr(learning_rate, "shape", None)
    if isinstance(learning_rate, (list, tuple, Mapping)) or shape:
        names = ", ".join(group.name for group in groups)
        raise ValueError(
            "`learning_rate` must be one base rate. Received: "
            f"{len(learning_rate)} rates for {len(groups)} groups ({names}). Give a group its "
            "own by `Group(learning_rate_ratio=...)` or `Group(learning_rate=...)`."
        )
    if callable(learning_rate):
        _check_callable(learning_rate)
        return learning_rate
    return check_number("learning_rate", learning_rate, where="GroupedOptimizer")


def _check_callable(learning_rate: Any) -> None:
    """Refuses, before there is a step, what Keras could not call."""
    if isinstance(learning_rate, type):
        raise TypeError(
            "`learning_rate` must be a number, a schedule or a function without arguments. "
            f"Received: the class {learning_rate.__name__} in GroupedOptimizer. Make an instance "
            f"of it: `{learning_rate.__name__}(...)`."
        )
    if is_schedule(learning_rate):
        return
    try:
        inspect.signature(learning_rate).bind()
    except ValueError:  # a function in C may have no signature
        return
    except TypeError as error:
        raise TypeError(
            "`learning_rate` as a function must take no arguments. Received: "
            f"{learning_rate!r} in GroupedOptimizer: {error}. To compute the rate from the step, "
            "subclass `keras.optimizers.schedules.LearningRateSchedule`."
        ) from error


def check_default_rule(rule: Any) -> Any:
    """Returns the rule of groups that name none, without anything that belongs elsewhere."""
    if rule is None:
        raise TypeError("`rule` must be given. Received: rule=None in GroupedOptimizer.")
    if rule.is_instance:
        raise ValueError(
            "`rule` of GroupedOptimizer must not be an instance, which has a rate of its own and "
            f"belongs to one group. Received: {rule.label}. Use "
            f'`rule=kgo.rule("{rule.label}", ...)` with `learning_rate=`.'
        )
    lifted = sorted(set(rule.arguments) & {"weight_decay", "clipnorm", "clipvalue"})
    if lifted:
        raise ValueError(
            f"`{lifted[0]}` must be given to GroupedOptimizer itself. Received: {rule!r} as its "
            f"default rule. Use `GroupedOptimizer({lifted[0]}=...)`."
        )
    return rule
