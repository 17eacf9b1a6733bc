"""How an optimizer's state is saved and loaded: its variables, by key, with a manifest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from keras_groupopt import state
from keras_groupopt.declaration import Declaration
from keras_groupopt.parts import Parts


class Persistence:
    """The part of `GroupedOptimizer` that Keras' saving calls."""

    _declaration: Declaration
    _parts: Parts | None
    _is_built: bool
    _iterations: Any
    _variables: list[Any]

    @property
    def variables(self) -> list[Any]:
        """All state: the optimizer's own variables, then each group's rule's."""
        parts = getattr(self, "_parts", None)
        if parts is None:
            return self._variables[:]
        parts.capture_due(self._iterations)
        return self._variables[:] + parts.rule_variables

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets `optimizer.variables`, in order.

        Raises:
            ValueError: If the optimizer is not built, or counts or shapes differ.
        """
        variables = self.variables if self._is_built else []
        shapes = [tuple(v.shape) for v in variables]
        received = [tuple(getattr(weight, "shape", ())) for weight in weights]
        if shapes != received:
            raise ValueError(
                "`weights` must have the shapes of `optimizer.variables`. Received: "
                f"{len(received)} values for {len(shapes)} variables"
                f"{'' if self._is_built else ', as the optimizer is not built'}."
            )
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)
        for group in [] if self._parts is None else self._parts.groups:
            group.anchors_unknown = False

    def save_own_variables(self, store: Any) -> None:
        """Writes all state, keyed by group, layer path and slot, with a manifest."""
        pending = self._declaration.pending
        if pending is not None:
            waiting = state.as_pending(self, pending[0])
            state.write(store, waiting.manifest, waiting.values)
        elif self._parts is not None:
            self._parts.capture_due(self._iterations)
            entries = state.entries_of(self, self._parts)
            state.write(store, state.manifest_of(entries, self._parts.plan), entries)

    def load_own_variables(self, store: Any) -> None:
        """Reads state that `save_own_variables` wrote; kept until build if not built yet.

        Raises:
            ValueError: If there is none, it is damaged, or its layout is another one. Nothing
                is assigned then.
        """
        if not len(store.keys()):
            self._note_weights_without_state()
            return
        self._accept(state.read(store), state.Terms())

    def _accept(self, saved: state.Saved, terms: state.Terms) -> None:
        """Takes state, now or when built."""
        if self._parts is None:
            declared = self._declaration.defaults.learning_rate
            self._declaration.pending = (state.give_early(self, declared, saved), terms)
        else:
            state.give(self, self._parts, saved, terms, self._declaration.resting)
            self._declaration.pending = None

    def _note_weights_without_state(self) -> None:
        if self._parts is None:
            return
        if int(self._iterations) == 0:
            self._parts.anchors_are_due = True
        else:
            warnings.warn(
                "The file holds weights but no optimizer state. The optimizer stays as it is: at "
                f"step {int(self._iterations)}, with its moments and anchors.",
                stacklevel=3,
            )
