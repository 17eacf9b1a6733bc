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
        """Writes all state, keyed by group, layer path and slot, with a manifest.

        Nothing while the averages are in the weights' place (`kgo.averaged_weights`): beside them
        this state would resume a run from weights it was never at.
        """
        if self._declaration.pending is not None:
            state.write_pending(store, self, *self._declaration.pending)
        elif self._parts is not None and not self._parts.averages_in_weights:
            self._parts.capture_due(self._iterations)
            entries = state.entries_of(self, self._parts)
            state.write(store, entries, state.manifest_of(entries, self._parts.plan))

    def load_own_variables(self, store: Any) -> None:
        """Reads state that `save_own_variables` wrote; kept until build if not built yet.

        Raises:
            ValueError: If there is none, it is damaged, or its layout is another one. Nothing
                is assigned then.
        """
        if not len(store.keys()):
            self._note_weights_without_state()
            return
        manifest = state.read_manifest(store)
        values = state.read(store, manifest)
        if self._parts is None:
            declared = self._declaration.defaults.learning_rate
            values = state.assign_early(self, declared, manifest, values)
            self._declaration.pending = (manifest, values)
        else:
            state.assign(self, self._parts, manifest, values, self._declaration.resting)
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
