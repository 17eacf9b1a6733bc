"""What each optimizer step measures of the groups on request: gradients, updates, clipping.

For each group that moves, with its gradients `g` as a step takes them (unscaled, the mean over the
window of accumulation, before any clipping), its weights `w` before and `w'` after the step:

    gradient_norm   ‖g‖; also over all groups
    update_ratio    ‖w' − w‖ / ‖w‖; decay and constraints are part of it, a step with w = 0 is not
    clip_share      1 where the limit shortened a gradient, else 0; over all groups, and per group
                    that clips by itself

Norms are in float32. A group without a gradient counts with 0. Sums over steps are variables, so
that a compiled step never waits for the host. They are no part of a run's state, and not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_groupopt import backend
from keras_groupopt.step import clipping, nonfinite
from keras_groupopt.step.built_group import BuiltGroup
from keras_groupopt.step.built_variable import BuiltVariable, Pair

Tensor = Any
# Per group the norm of its weights before a step, and copies of those that may move.
Before = dict[BuiltGroup, tuple[Tensor, list[Tensor]]]
# By measurement, then by group; `None` stands for all groups together.
Means = dict[str, dict[str | None, float]]

GRADIENT_NORM, UPDATE_RATIO, CLIP_SHARE = NAMES = ("gradient_norm", "update_ratio", "clip_share")


class Measurements:
    """The sums of what was asked for, over the optimizer steps since they were last reset.

    Args:
        names: What to measure, some of `NAMES`.
        groups: The built groups.
    """

    def __init__(self, names: Iterable[str], groups: Sequence[BuiltGroup]) -> None:
        self.names = tuple(name for name in NAMES if name in set(names))
        self.groups = groups
        self.steps = _zeros((), "steps")
        # The last place is of all groups together.
        count = len(groups) + 1
        self.sums = {name: _zeros((count,), name) for name in self.names}
        # Steps in which a group's weights were not all zero.
        self.counts = _zeros((count,), "counts") if UPDATE_RATIO in self.names else None

    @property
    def variables(self) -> list[Any]:
        """Every variable."""
        own = [self.steps, *self.sums.values()]
        return own if self.counts is None else [*own, self.counts]

    # Within a step ------------------------------------------------------------------------------

    def note_gradients(
        self, came: Mapping[BuiltGroup, Sequence[Pair]], norms: Tensor | None
    ) -> Tensor | None:
        """Measures gradients before they are clipped.

        Args:
            came: Per group that has some, its variables and their gradients.
            norms: The norm of each of these groups, or `None` if it is not known.

        Returns:
            These norms, or `None` if they are not known now either.
        """
        limited = [group for group in came if CLIP_SHARE in self.names and any(group.clipping)]
        by_norm = [group for group in limited if group.clipping[1] is not None]
        if norms is None and came and (GRADIENT_NORM in self.names or by_norm):
            norms = nonfinite.group_norms(came.values())
        known = {} if norms is None else {group: norms[i] for i, group in enumerate(came)}
        if GRADIENT_NORM in self.names and norms is not None:
            found = {group.number: norm for group, norm in known.items()}
            found[len(self.groups)] = ops.sqrt(ops.sum(ops.square(norms)))
            self._add(GRADIENT_NORM, found)
        clipped = {
            group.number: clipping.is_clipped(
                [gradient for _, gradient in came[group]], group.clipping, known.get(group)
            )
            for group in limited
        }
        self._add(CLIP_SHARE, clipped)
        return norms

    def note_joint_clip(self, norm: Tensor, limit: float) -> None:
        """Measures the clip over all groups, by the norm that it takes."""
        if CLIP_SHARE in self.names:
            self._add(CLIP_SHARE, {len(self.groups): norm > limit})

    def weights_before(
        self,
        came: Mapping[BuiltGroup, Sequence[Pair]],
        absent: Mapping[BuiltGroup, Sequence[BuiltVariable]],
    ) -> Before | None:
        """Returns what `note_step` needs of the weights before the step; `None` for nothing.

        Args:
            came: Per group that has some, the variables that may move, and their gradients.
            absent: Per group that has some, the trainable variables without a gradient.
        """
        if UPDATE_RATIO not in self.names:
            return None
        before: Before = {}
        for group, pairs in came.items():
            # By copy: torch moves weights in place, and TensorFlow's tensor is the variable.
            old = [ops.copy(ops.convert_to_tensor(own.variable)) for own, _ in pairs]
            rest = [ops.convert_to_tensor(own.variable) for own in absent.get(group, ())]
            before[group] = backend.global_norm([*old, *rest]), old
        return before

    def note_step(self, came: Mapping[BuiltGroup, Sequence[Pair]], before: Before | None) -> None:
        """Counts a step, and measures how far it moved the weights.

        Args:
            came: As in `weights_before`.
            before: What that returned.
        """
        self.steps.assign_add(1.0)
        if before is None or self.counts is None:
            return
        # Without a gradient a group moved by 0.
        counted: dict[int, Any] = {g.number: 1.0 for g in self.groups if not g.frozen}
        ratios: dict[int, Tensor] = {}
        for group, (norm, old) in before.items():
            moved = backend.distance(old, [own.variable for own, _ in came[group]])
            is_zero = ops.equal(norm, 0)
            ratio = moved / ops.where(is_zero, ops.ones_like(norm), norm)
            ratios[group.number] = ops.where(is_zero, ops.zeros_like(ratio), ratio)
            counted[group.number] = ops.logical_not(is_zero)
        self._add(UPDATE_RATIO, ratios)
        self.counts.assign_add(self._vector(counted))

    def _add(self, name: str, found: dict[int, Tensor]) -> None:
        if found:
            self.sums[name].assign_add(self._vector(found))

    def _vector(self, found: dict[int, Tensor]) -> Tensor:
        zero = ops.zeros((), "float32")
        places = range(len(self.groups) + 1)
        return ops.stack([ops.cast(found.get(place, zero), "float32") for place in places])

    # On the host --------------------------------------------------------------------------------

    def means(self, is_clipped_jointly: bool) -> Means:
        """Returns the means over the steps since the last reset; NaN where there was none.

        Args:
            is_clipped_jointly: Whether there is a clip over all groups.
        """
        steps = _on_host(self.steps)
        counts = {name: np.full(len(self.groups) + 1, steps) for name in self.names}
        if self.counts is not None:
            counts[UPDATE_RATIO] = _on_host(self.counts)
        shown = {
            GRADIENT_NORM: lambda group: True,
            UPDATE_RATIO: lambda group: True,
            CLIP_SHARE: lambda group: any(group.clipping),
        }
        means: Means = {}
        for name, total in self.sums.items():
            sums = _on_host(total)
            with np.errstate(invalid="ignore", divide="ignore"):
                values = sums / counts[name]
            own: dict[str | None, float] = {
                group.name: float(value)
                for group, value in zip(self.groups, values[:-1], strict=True)
                if not group.frozen and shown[name](group)
            }
            if name == GRADIENT_NORM or (name == CLIP_SHARE and is_clipped_jointly):
                own[None] = float(values[-1])
            means[name] = own
        return means

    def reset(self) -> None:
        """Starts the means over."""
        for variable in self.variables:
            # A value each: a buffer that two variables share cannot be donated on JAX.
            variable.assign(ops.zeros(variable.shape, "float32"))


def check_names(names: Sequence[str]) -> None:
    """Refuses names of measurements that do not exist.

    Raises:
        ValueError: If there is one.
    """
    for name in names:
        if name not in NAMES:
            listed = ", ".join(f'"{known}"' for known in NAMES)
            raise ValueError(f"A measurement must be one of {listed}. Received: {name!r}.")


def _zeros(shape: tuple[int, ...], name: str) -> Any:
    return keras.Variable(
        "zeros",
        shape=shape,
        dtype="float32",
        trainable=False,
        aggregation="only_first_replica",
        name=f"measured_{name}",
    )


def _on_host(variable: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(variable), "float64")
