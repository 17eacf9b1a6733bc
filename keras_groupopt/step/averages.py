"""The averages of a built optimizer, and how a step moves them.

`plan/averages.py` has the formulas.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.plan.averages import EMA, Average, KerasEMA
from keras_groupopt.step.kept import Kept, add_scalar, wide_dtype
from keras_groupopt.step.scalar import Scalar
from keras_groupopt.step.state_keys import (
    AVERAGES_MADE,
    EMA_MOMENTUM,
    STATISTICS,
    STATISTICS_MADE,
)

Tensor = Any
# An average and the variable it is of.
Pair = tuple[Any, Any]


class Averages(Kept):
    """What a built optimizer keeps for its averages, beside one variable per weight.

    Args:
        declared: What to average when.
    """

    def __init__(self, declared: Average) -> None:
        self.declared = declared
        self.made: Any = None
        self.momentum: Scalar | None = None
        if isinstance(declared, (EMA, KerasEMA)):
            self.momentum = Scalar("ema_momentum", declared.momentum, "GroupedOptimizer")
        # Whether the averages are known to belong to the weights they are beside.
        self.settled = False
        # Whether the averages are in the weights' place, where the optimizer must not be saved.
        self.in_weights = False
        # Averages of BatchNorm statistics by layer path, which a callback makes and moves.
        self.statistics: dict[str, Any] = {}
        # How many averages of the weights had been made when they last moved; made with them.
        self.statistics_made: Any = None
        # The optimizer step at which they are copies of the weights.
        self.begins = declared.start

    def make_variables(self, owner: Any) -> None:
        """Makes the count of averages and the momentum."""
        self.made = add_scalar(owner, "averages_made", "int32")
        if self.momentum is not None:
            self.momentum.build(owner, "averages")

    def update(self, pairs: Sequence[Pair], step: Tensor, variables: Sequence[Any]) -> None:
        """Moves the averages after an optimizer step.

        Args:
            pairs: Averages and their variables.
            step: The optimizer step before this one was counted, an integer scalar.
            variables: Every variable that may be read or assigned.
        """
        every, start = self.declared.every, self.declared.start
        if (every, start) == (1, 0):
            self._move(pairs, step, None)
            return
        done = ops.cast(step, "int32") + 1
        # Steps are counted anew where schedules start over; averages go on.
        begun = ops.logical_or(done > start, ops.convert_to_tensor(self.made) > 0)
        moves = ops.logical_and(begun, ops.equal((done - start) % every, 0))
        active = ops.logical_or(ops.logical_not(begun), moves)
        backend.run_if(active, lambda: self._move(pairs, step, begun), variables)

    def _move(self, pairs: Sequence[Pair], step: Tensor, begun: Tensor | None) -> None:
        share = self._share_at(step)
        if begun is None:
            self.made.assign_add(1)
        else:
            share = ops.where(begun, share, ops.ones_like(share))
            self.made.assign_add(ops.cast(begun, "int32"))
        copies = begun is not None or not isinstance(self.declared, EMA)
        backend.average([mean for mean, _ in pairs], [v for _, v in pairs], share, copies)

    def _share_at(self, step: Tensor) -> Tensor:
        """Returns `1 − β_t`, in forms that do not take a small number from 1."""
        made = ops.cast(self.made, "float32")
        if self.momentum is None:
            return 1.0 / (made + 1.0)
        share = 1.0 - self.momentum.at(step)
        if isinstance(self.declared, KerasEMA):
            return ops.where(made > 0, share, ops.ones_like(share))
        if self.declared.warmup:  # type: ignore[attr-defined]
            return ops.maximum(share, 9.0 / (10.0 + made))
        return share

    def momentum_at(self, step: Tensor) -> Tensor:
        """Returns `β_t` of the next average, a float32 scalar; 0 where it will be a copy.

        Args:
            step: The optimizer steps done, an integer scalar.
        """
        momentum = 1.0 - self._share_at(step)
        begun = ops.cast(step, "int32") >= self.declared.start
        return ops.where(begun, momentum, ops.zeros_like(momentum))

    def move_statistics(self, pairs: Sequence[Pair], step: int) -> None:
        """Moves averages of statistics as far as those of the weights moved since the last time.

        Reads a value of the device.

        Args:
            pairs: Averages of statistics and their variables.
            step: The optimizer steps done.
        """
        made = backend.on_host(self.made)
        kept = self._kept_since(backend.on_host(self.statistics_made), made, step)
        self.statistics_made.assign(made)
        if kept < 1.0:
            share = ops.convert_to_tensor(1.0 - kept, dtype="float32")
            backend.average([mean for mean, _ in pairs], [v for _, v in pairs], share, True)

    def _kept_since(self, before: int, made: int, step: int) -> float:
        """Returns the product of `β_t` for `t` from `before` up to but without `made`."""
        if made == 0:
            # Averaging has not begun: an average is what it is of.
            return 0.0
        if self.momentum is None:
            return before / made
        if isinstance(self.declared, KerasEMA) and before == 0:
            return 0.0
        momentum = backend.on_host(self.momentum.at(ops.convert_to_tensor(step, dtype="int32")))
        if isinstance(self.declared, EMA) and self.declared.warmup:
            return math.prod(min(momentum, (1 + t) / (10 + t)) for t in range(before, made))
        return momentum ** (made - before)

    def add_statistics(self, path: str, value: Any) -> Any:
        """Makes the average of a statistic, which starts as a copy of `value`."""
        if self.statistics_made is None:
            self.statistics_made = keras.Variable(0, dtype="int32", trainable=False)
        self.statistics[path] = wide_copy(value)
        return self.statistics[path]

    def expect_statistics(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Makes averages of the statistics that saved values have, to be given them.

        Args:
            values: Saved values, by key.

        Returns:
            A function that undoes it.
        """
        known = dict(self.statistics)
        for key, value in values.items():
            path = statistics_path(key)
            if path is not None and path not in known:
                self.add_statistics(path, value)

        def undo() -> None:
            self.statistics = known

        return undo

    def remember(self) -> Callable[[], None]:
        """Returns a function that puts back what is not among the optimizer's variables."""
        fields = (self.settled, self.begins, dict(self.statistics), self.statistics_made)
        own = [*self.statistics.values(), self.statistics_made]
        values = [(v, ops.copy(ops.convert_to_tensor(v))) for v in own if v is not None]

        def put_back() -> None:
            self.settled, self.begins, self.statistics, self.statistics_made = fields
            for variable, value in values:
                variable.assign(value)

        return put_back

    def after_load(self, loaded: Collection[str], iterations: int) -> None:
        """Begins anew if no averages were loaded, and drops statistics that were not.

        The averages of other weights' statistics do not fit any more.
        """
        self.statistics = {
            path: mean for path, mean in self.statistics.items() if statistics_key(path) in loaded
        }
        if AVERAGES_MADE in loaded:
            self.settled = True
        else:
            self.restart(iterations)

    def entries(self) -> dict[str, Any]:
        """Returns the state to save beside one average per weight, by key."""
        found = {AVERAGES_MADE: self.made}
        if self.momentum is not None and self.momentum.variable is not None:
            found[EMA_MOMENTUM] = self.momentum.variable
        if self.statistics:
            found[STATISTICS_MADE] = self.statistics_made
        return found | {statistics_key(path): mean for path, mean in self.statistics.items()}

    def overwrite(self, pairs: Sequence[Pair], step: Tensor, variables: Sequence[Any]) -> None:
        """Writes the averages into the weights at the steps that Keras' `use_ema` asks for."""
        frequency = getattr(self.declared, "overwrite_frequency", None)
        if frequency is not None:
            due = ops.equal((ops.cast(step, "int32") + 1) % frequency, 0)
            backend.run_if(due, lambda: copy_into_weights(pairs), variables)

    def start(self, pairs: Sequence[Pair], iterations: Any, stepping: bool) -> None:
        """Copies the weights at the step where averaging begins, if a step could not.

        Weights may be loaded or set between the build and the first step. Nothing happens in a
        stateless step, where the values are not at hand.

        Args:
            pairs: Averages and their variables.
            iterations: The optimizer's step counter.
            stepping: Whether an optimizer step follows, so that the averages are settled.
        """
        own = (self.made, iterations, *(variable for pair in pairs for variable in pair))
        with backend.outside_compiled_step():
            if not all(map(compat.is_readable, own)) or any(map(backend.is_gone, own)):
                return
            if not all(backend.is_initialized(variable) for _, variable in pairs):
                return
            begins = ops.logical_and(
                ops.equal(self.made, 0), ops.cast(iterations, "int32") <= self.begins
            )
            backend.run_if(begins, lambda: copy_from_weights(pairs), [mean for mean, _ in pairs])
            self.settled = stepping or backend.concrete(begins) is False

    def restart(self, step: int) -> None:
        """Begins anew at an optimizer step, from the weights as they are then.

        For averages that were not in the state that was loaded: other weights may be loading yet.
        """
        self.made.assign(0)
        self.begins = step
        self.settled = False
        self.statistics, self.statistics_made = {}, None


def copy_into_weights(pairs: Sequence[Pair]) -> None:
    """Writes each average into its variable. By copy: on JAX a shared buffer would be donated."""
    for mean, variable in pairs:
        variable.assign(ops.copy(ops.cast(ops.convert_to_tensor(mean), variable.dtype)))


def copy_from_weights(pairs: Sequence[Pair]) -> None:
    """Writes each variable into its average, by copy."""
    for mean, variable in pairs:
        mean.assign(ops.copy(ops.cast(ops.convert_to_tensor(variable), mean.dtype)))


def statistics_path(key: str) -> str | None:
    """Returns the layer path of the statistic that saved state is the average of, if it is one."""
    if not key.startswith(STATISTICS):
        return None
    return urllib.parse.unquote(key.removeprefix(STATISTICS))


def statistics_key(path: str) -> str:
    """Returns the key of the average of the statistic at a layer path."""
    # A slash would make the path a group's name.
    return STATISTICS + urllib.parse.quote(path, safe="")


def wide_copy(value: Any) -> Any:
    """Returns a new variable of at least float32 that starts as a copy of `value`."""
    tensor = ops.convert_to_tensor(value)
    return keras.Variable(
        ops.copy(ops.cast(tensor, wide_dtype(tensor))), dtype=wide_dtype(tensor), trainable=False
    )
