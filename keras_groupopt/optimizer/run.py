"""What an optimizer remembers about its run, beside its variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_groupopt import checkpoint
from keras_groupopt.step.built import BuiltOptimizer


@dataclasses.dataclass(frozen=True)
class LastStep:
    """The last step that was eager or traced.

    Args:
        positions: The positions of the variables whose gradients came.
        train_function: The model's training function at that step, held weakly; `None` in a loop
            without `fit`.
    """

    positions: frozenset[int]
    train_function: Any

    def changed(self, now: Sequence[int]) -> frozenset[int]:
        """Returns the positions that came then and do not now, or the other way round."""
        return self.positions ^ frozenset(now)

    def is_in(self, train_function: Any) -> bool:
        """Whether the step was made in a training function."""
        return train_function is not None and self._function() is train_function

    def is_in_another(self, train_function: Any) -> bool:
        """Whether it was made in another training function than the model has now."""
        known = self.train_function is not None and train_function is not None
        return known and not self.is_in(train_function)

    def _function(self) -> Any:
        return None if self.train_function is None else self.train_function()


@dataclasses.dataclass
class Run:
    """What an optimizer remembers about its run: what waits for the build, and flags.

    Args:
        pending: State that was loaded and waits for the build, and its terms. Default: none.
        current: Numbers that a config holds for the build, by group and name. Default: none.
        total_steps: The length of the run, if it was set before the build. Default: `None`.
        frozen_groups: The groups that `freeze_to` froze. Default: none.
        held: The identities of the variables that it froze. Default: none.
        measured: What steps measure. Default: nothing.
        is_training: Whether a `fit` is the run that schedules are made for. It is `False` while
            rates are searched. Default: `True`.
        warned_short: The identities of schedules that a warning called too short. Default: none.
        compared_end: The end of the run that schedules were last compared with. Default: `None`.
        last_step: The last step that was eager or traced. Default: none yet.
        done: The optimizer steps done when the last `fit` ended, or state was loaded. Default: 0.
        kept_total: The length of the run that was kept then. Default: `None`.
        past_history: The history of the `fit` after which schedules were started over: it does not
            tell the next length. Default: none.
    """

    pending: tuple[checkpoint.Saved, checkpoint.Terms] | None = None
    current: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    total_steps: int | None = None
    frozen_groups: tuple[str, ...] = ()
    held: set[int] = dataclasses.field(default_factory=set)
    measured: frozenset[str] = frozenset()
    is_training: bool = True
    warned_short: set[int] = dataclasses.field(default_factory=set)
    compared_end: int | None = None
    last_step: LastStep | None = None
    done: int = 0
    kept_total: int | None = None
    past_history: Any = None

    def freeze(self, names: Sequence[str], built: BuiltOptimizer) -> None:
        """Freezes the variables of some groups, and lets those go on that it froze before.

        Args:
            names: The groups to freeze.
            built: The built optimizer.
        """
        self.frozen_groups = tuple(names)
        for group in built.groups:
            frozen = group.name in names
            for variable in [] if group.frozen else [own.variable for own in group.members]:
                if frozen and variable.trainable:
                    variable.trainable = False
                    self.held.add(id(variable))
                elif not frozen and id(variable) in self.held:
                    variable.trainable = True
                    self.held.discard(id(variable))


def require_built(optimizer: Any, asked: str) -> BuiltOptimizer:
    """Returns the built state of an optimizer.

    Args:
        optimizer: The optimizer.
        asked: What needs it, for the error.

    Raises:
        ValueError: If the optimizer is not built.
    """
    built: BuiltOptimizer | None = optimizer._built
    if built is None:
        raise ValueError(
            f"`{asked}` needs a built optimizer. Received: one that is not built. Call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    return built
