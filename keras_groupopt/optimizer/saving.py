"""How an optimizer's state is saved and loaded: its variables, by key, with a manifest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import text
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.step.built import BuiltOptimizer


class Persistence:
    """The part of `GroupedOptimizer` that Keras' saving calls."""

    _declaration: Declaration
    _built: BuiltOptimizer | None
    _is_built: bool
    _iterations: Any
    _variables: list[Any]
    _layout: Any
    _require_built: Any

    @property
    def variables(self) -> list[Any]:
        """All state: the optimizer's own, then each group's rule's; last what is not saved."""
        built = getattr(self, "_built", None)
        if built is None:
            return self._variables[:]
        built.capture_due(self._iterations)
        return self._variables[:] + built.rule_variables + built.passing_variables

    @property
    def changing_variables(self) -> list[Any]:
        """What a step may change of `variables`: all but the one that stands for the layout."""
        return [variable for variable in self.variables if variable is not self._layout]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets `optimizer.variables`, in order.

        Raises:
            ValueError: If the optimizer is not built, or counts, shapes or layouts differ.
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
            if isinstance(variable, checkpoint.LayoutVariable):
                variable.check(weight)
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)
        for group in [] if self._built is None else self._built.groups:
            group.anchors_unknown = False

    def save_own_variables(self, store: Any) -> None:
        """Writes all state, keyed by group, layer path and slot, with a manifest.

        Nothing while the averages are in the weights' place (`kgo.averaged_weights`): beside them
        this state would resume a run from weights it was never at.
        """
        pending = self._declaration.pending
        if pending is not None:
            waiting = checkpoint.as_pending(self, pending[0])
            checkpoint.write(store, waiting.manifest, waiting.values)
        elif self._built is not None and not self._built.averages_in_weights:
            self._built.capture_due(self._iterations)
            entries = checkpoint.entries_of(self, self._built)
            layout = checkpoint.manifest_of(entries, self._built)
            model = self._declaration.live_model(required=False)
            checkpoint.write(store, layout, entries, model)

    def load_own_variables(self, store: Any) -> None:
        """Reads state that `save_own_variables` wrote; kept until build if not built yet.

        Raises:
            ValueError: If there is none, it is damaged, or its layout is another one. Nothing
                is assigned then.
        """
        if not len(store.keys()):
            self._note_weights_without_state()
            return
        saved, factors = checkpoint.without_lora_averages(checkpoint.read(store))
        if factors:
            warnings.warn(
                "Keras saves a layer with LoRA merged into its kernel, and its factors as zeros: "
                f"{text.listing(factors)}. The run goes on from equal outputs, but not bit for "
                "bit, and averages of the factors start anew. To resume exactly, keep "
                "`model.get_weights()` and `optimizer.save_state(path)`.",
                stacklevel=3,
            )
        self._accept(saved, checkpoint.present_terms())

    def state_dict(self) -> dict[str, Any]:
        """Returns all state as a nested dict of NumPy arrays, which later steps leave alone.

        `state["groups"][group][layer path][slot]` is an array, bfloat16 ones as
        `ml_dtypes.bfloat16`; `"@rule"` in place of a layer path holds what a rule keeps as a
        whole, and slots that begin with `@` are the optimizer's own, such as `"@anchor"`.
        `state["scalars"]` holds `"@iterations"`, `"@learning_rate"` if it is a number, and
        numbers of groups, such as `"@weight_decay/head"`. `state["manifest"]` is plain JSON.

        Raises:
            ValueError: If the optimizer is not built and has no loaded state.
        """
        return checkpoint.to_nested(self._taken("state_dict"))

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, renames: Any = None
    ) -> checkpoint.Report:
        """Restores what `state_dict` returned; kept until build if not built yet.

        Args:
            state_dict: The nested dict.
            strict: Whether another layout is refused; as in `kgo.resuming`.
            renames: Saved names and present ones; as in `kgo.resuming`.

        Returns:
            A report of what was kept, starts fresh and was dropped.

        Raises:
            TypeError: If it is no such dict.
            ValueError: If it is not as it was returned, or its layout is another one. Nothing is
                assigned then.
        """
        return self._accept(checkpoint.from_nested(state_dict), checkpoint.terms(strict, renames))

    def save_state(self, path: Any) -> None:
        """Writes all state to a file, without the model: whole, or not at all.

        Args:
            path: Where to; ends in `.npz`.

        Raises:
            ValueError: If the path has another ending, or the optimizer is not built.
            OSError: If it cannot be written. A file that was there stays as it was.
        """
        checkpoint.write_file(path, self._taken("save_state"))

    def load_state(self, path: Any, strict: bool = True, renames: Any = None) -> checkpoint.Report:
        """Restores what `save_state` wrote; kept until build if not built yet.

        Args:
            path: The file.
            strict: Whether another layout is refused; as in `kgo.resuming`.
            renames: Saved names and present ones; as in `kgo.resuming`.

        Returns:
            A report of what was kept, starts fresh and was dropped.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, or its layout is another one. Nothing is assigned then.
        """
        return self._accept(checkpoint.read_file(path), checkpoint.terms(strict, renames))

    def _taken(self, asked: str) -> checkpoint.Saved:
        pending = self._declaration.pending
        if pending is not None:
            return checkpoint.as_pending(self, pending[0])
        return checkpoint.take(self, self._require_built(asked))

    def _accept(self, saved: checkpoint.Saved, terms: checkpoint.Terms) -> checkpoint.Report:
        """Takes state, now or when built."""
        if self._built is not None and self._built.averages_in_weights:
            raise ValueError(
                "The optimizer state must not be loaded within `kgo.averaged_weights`, which "
                "puts back the weights of before. Received: averages in the weights' place. Load "
                "outside of the block."
            )
        if self._built is None:
            declared = self._declaration.defaults.learning_rate
            self._declaration.pending = (checkpoint.give_early(self, declared, saved), terms)
            if self._declaration.gradient_rule is not None:
                self._declaration.gradient_rule.late.clear()
            terms.report.fill(checkpoint.Report(status="waits for the build"))
        else:
            checkpoint.give(self, self._built, saved, terms, self._declaration.resting)
            self._declaration.pending = None
        return terms.report

    def _note_weights_without_state(self) -> None:
        note_new_weights(self)
        if self._built is not None and backend.on_host(self._iterations) != 0:
            warnings.warn(
                "The file holds weights but no optimizer state. The optimizer stays as it is: at "
                f"step {backend.on_host(self._iterations)}, with its moments and anchors.",
                stacklevel=3,
            )


def note_new_weights(optimizer: Any) -> None:
    """Notes that weights came without state: before the first step they are the anchors.

    So they are the averages before these begin.
    """
    built = optimizer._built
    if built is None:
        return
    if built.averages is not None:
        built.averages.settled = False
        if backend.on_host(built.averages.made) == 0:
            built.averages.statistics.clear()
    if backend.on_host(optimizer.iterations) == 0:
        built.anchors_are_due = True


def remember(optimizer: Any) -> Callable[[], None]:
    """Returns a function that puts back what loading changes beside the variables."""
    declaration, built = optimizer._declaration, optimizer._built
    pending = declaration.pending
    due = None if built is None else built.due
    averages = None if built is None or built.averages is None else built.averages.remember()
    unknown = [] if built is None else [group.anchors_unknown for group in built.groups]

    def put_back() -> None:
        declaration.pending = pending
        if averages is not None:
            averages()
        if built is not None and due is not None:
            built.due = due
            for group, value in zip(built.groups, unknown, strict=True):
                group.anchors_unknown = value

    return put_back
