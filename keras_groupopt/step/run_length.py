"""How many optimizer steps a run has: told by `fit`, kept for schedules that end with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.plan.plan import Plan
from keras_groupopt.schedules.horizon import horizon, length_of, needs_horizon
from keras_groupopt.step.kept import Kept, add_scalar
from keras_groupopt.step.state_keys import TOTAL_STEPS

Tensor = Any

# More than any run has, and twice that is an int32: of epochs without end, and of a sweep.
ENDLESS = 2**30 - 1
UNKNOWN = (
    'A schedule with total_steps="fit" needs to know how many steps the run has. Received: {}. '
    "{}, or set `optimizer.total_steps` to the number of optimizer steps."
)
NO_MODEL = UNKNOWN.format("no model, whose `fit` could tell", "Pass `GroupedOptimizer(model=...)`")


def of_fit(model: Any, accumulation: int | None) -> int | None:
    """Returns the optimizer steps of the `fit` that a model is in, or was in last.

    Keras tells its callbacks, of which the model's history is one.

    Args:
        model: A Keras model, or `None`.
        accumulation: Micro-batches per optimizer step.

    Returns:
        The steps of all epochs, or `None` where the model is in no `fit` or that does not know.
    """
    params = getattr(getattr(model, "history", None), "params", None) or {}
    epochs, batches = params.get("epochs"), params.get("steps")
    if not epochs or not batches:
        return None
    return min(max(int(epochs) * int(batches) // (accumulation or 1), 1), ENDLESS)


class RunLength(Kept):
    """The length of the run that an optimizer is in, for schedules with `total_steps="fit"`.

    The first `fit` that trains fills it in, and from then on it is state.

    Args:
        model: Returns the model, or `None` if there is none.
        accumulation: Micro-batches per optimizer step.
    """

    def __init__(self, model: Callable[[], Any], accumulation: int | None) -> None:
        self.model = model
        self.accumulation = accumulation
        self.variable: Any = None
        self._seen = False
        # Steps that count in place of all that is known, as in a search for rates.
        self.pretended: int | None = None

    def make_variables(self, owner: Any) -> None:
        """Makes the number of steps, 0 while it is not known."""
        self.variable = add_scalar(owner, "total_steps", "int32")

    def entries(self) -> dict[str, Any]:
        """Returns the number of steps, by key."""
        return {TOTAL_STEPS: self.variable}

    def after_load(self, loaded: Collection[str], iterations: int) -> None:
        """Looks whether a length was loaded."""
        self.look()

    def in_run(self, iterations: Any) -> horizon:
        """Returns a block in which schedules end with the run.

        Args:
            iterations: The optimizer steps done.

        Raises:
            ValueError: If its length is not known.
        """
        return horizon(self._total(iterations))

    def keep(self, total: Any) -> None:
        """Keeps what `fit` told, in the first step after it did.

        Args:
            total: Of the block that the step is in.
        """
        if self.pretended is None:
            self.variable.assign(total)

    def forget(self) -> None:
        """Forgets the length, so that the next `fit` tells its own."""
        self.variable.assign(0)
        self._seen = False

    def set(self, total: int) -> None:
        """Sets the length."""
        self.variable.assign(total)
        self._seen = True

    def look(self) -> bool:
        """Returns whether a length is kept; if it cannot be read now, whether it was before."""
        with backend.outside_compiled_step():
            if compat.is_readable(self.variable):
                self._seen = backend.on_host(self.variable) > 0
        return self._seen

    def _total(self, iterations: Any) -> Tensor:
        if self.pretended is not None:
            return ops.convert_to_tensor(self.pretended, dtype="int32")
        kept = ops.convert_to_tensor(self.variable)
        model = self.model()
        told = of_fit(model, self.accumulation)
        if told is not None:
            done = ops.cast(ops.convert_to_tensor(iterations), "int32")
            # With `initial_epoch` the epochs count those done before; a further `fit` does not.
            end = ops.where(done < told, told, done + told)
            return ops.where(kept > 0, kept, end)
        if not self.look():
            if model is None:
                raise ValueError(NO_MODEL)
            raise ValueError(
                UNKNOWN.format(
                    "none that `fit` told, as it knows no steps per epoch or was not called",
                    "Pass `fit(..., steps_per_epoch=...)`",
                )
            )
        return kept


def warn_if_shorter(plan: Plan, end: int, said: set[int]) -> None:
    """Warns of schedules that are made for fewer optimizer steps than the run has.

    Args:
        plan: The plan.
        end: The optimizer step at which the run ends.
        said: The identities of schedules it was said of, which are added to.
    """
    for schedule, fields in _by_schedule(plan).items():
        length = length_of(schedule)
        if length is not None and length < end and id(schedule) not in said:
            said.add(id(schedule))
            warnings.warn(
                f"{type(schedule).__name__} is made for {length} optimizer steps, and the run has "
                f"{end}: {', '.join(fields)} will not move as it says after step {length}. Call "
                "`optimizer.restart_schedules()` before a further `fit`, or give it the steps of "
                "all (`optimizer.total_steps`, if it ends with the run).",
                stacklevel=3,
            )


def _by_schedule(plan: Plan) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for group, field, schedule in plan.bindings():
        found.setdefault(schedule, []).append(field if group is None else f"{field} of {group}")
    return found


def is_needed(plan: Plan) -> bool:
    """Whether a schedule in a plan ends with the run."""
    return any(needs_horizon(binding.schedule) for binding in plan.bindings())
