"""Gradient accumulation: the mean gradient of several micro-batches as that of one batch.

With micro-batches `i = 1 … N` of gradients `g_i` and weights `n_i` (sample counts, else 1):

    a ← a + n_i · g_i,   m ← m + n_i          after each micro-batch
    g = a / m                                 after the N-th; then a ← 0, m ← 0

in float32. Everything else (clipping, decay, rules, schedules, averages) sees only `g`, once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from keras import ops

from keras_groupopt.base.checks import check_count, check_number
from keras_groupopt.step.built_variable import BuiltVariable
from keras_groupopt.step.kept import Kept, add_scalar
from keras_groupopt.step.state_keys import ACCUMULATED_WEIGHT, MICRO_BATCHES

Tensor = Any


class Window(Kept):
    """The open window of accumulation: how many micro-batches it has, and their weight.

    Args:
        steps: Micro-batches per optimizer step, at least 2.
        members: The variables, which have the accumulators.
    """

    def __init__(self, steps: int, members: Sequence[BuiltVariable]) -> None:
        self.steps = steps
        self._members = members
        self.count: Any = None
        self.weight: Any = None
        # Whether sample counts come with the gradients; `None` until the first of a window.
        self.weighted: bool | None = None

    def make_variables(self, owner: Any) -> None:
        """Makes the count and the weight."""
        self.count = add_scalar(owner, "micro_batches", "int32")
        self.weight = add_scalar(owner, "accumulated_weight", "float32")

    def entries(self) -> dict[str, Any]:
        """Returns the count and the weight, by key."""
        return {MICRO_BATCHES: self.count, ACCUMULATED_WEIGHT: self.weight}

    def after_load(self, loaded: Collection[str], iterations: int) -> None:
        """Empties the window if no window was loaded."""
        self.weighted = None
        if MICRO_BATCHES not in loaded:
            self.reset()

    def remember(self) -> Callable[[], None]:
        """Returns a function that puts back whether sample counts come."""
        weighted = self.weighted

        def put_back() -> None:
            self.weighted = weighted

        return put_back

    def expect(self, samples: Tensor | None) -> None:
        """Notes whether sample counts come, and refuses a window of both kinds.

        Raises:
            ValueError: If a micro-batch of the window came the other way.
        """
        weighted = samples is not None
        if self.weighted is not None and self.weighted != weighted:
            raise ValueError(
                "`sample_count` must come with every micro-batch of a window or with none. "
                f"Received: one {'with' if weighted else 'without'} it after micro-batches "
                f"{'without' if weighted else 'with'} it. Call `optimizer.flush()` in between."
            )
        self.weighted = weighted

    def count_in(self, weight: Tensor | None, keep: Tensor | None) -> None:
        """Counts one micro-batch.

        Args:
            weight: Its sample count; `None` where micro-batches count alike.
            keep: Whether it was added, a boolean scalar; `None` for yes.
        """
        one = 1 if keep is None else ops.cast(keep, "int32")
        self.count.assign_add(one)
        added = 1.0 if weight is None else weight
        if keep is not None:
            added = ops.where(keep, added, 0.0)
        self.weight.assign_add(ops.cast(added, "float32"))

    def mean(self, accumulator: Any) -> Tensor:
        """Returns the mean gradient of a variable over the window."""
        # A window of no samples has no gradient, rather than 0 / 0.
        weight = ops.maximum(ops.convert_to_tensor(self.weight), 1e-30)
        return ops.convert_to_tensor(accumulator) / ops.cast(weight, accumulator.dtype)

    def reset(self) -> None:
        """Empties the window."""
        accumulators = [own.accumulator for own in self._members if own.accumulator is not None]
        for variable in (self.count, self.weight, *accumulators):
            variable.assign(ops.zeros_like(ops.convert_to_tensor(variable)))


def check_steps(value: Any, where: str) -> int | None:
    """Returns `gradient_accumulation_steps` as an int of at least 2; `None` for 1 as well."""
    if value is None:
        return None
    steps = check_count("gradient_accumulation_steps", value, 1, where=where)
    return None if steps == 1 else steps


def check_samples(value: Any) -> Tensor | None:
    """Returns `sample_count` as a tensor, or `None`."""
    if value is None:
        return None
    if ops.is_tensor(value):
        if tuple(value.shape) != ():
            raise ValueError(
                "`sample_count` must be a scalar. Received: sample_count of shape "
                f"{tuple(value.shape)} in `apply`. Pass the number of samples of the whole "
                "micro-batch."
            )
        return value
    return ops.convert_to_tensor(check_number("sample_count", value, where="`apply`"), "float32")
