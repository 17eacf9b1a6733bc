"""How an optimizer's state is saved and loaded: its variables, by key, with a manifest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from keras_groupopt import backend, checkpoint
from keras_groupopt.base import text
from keras_groupopt.optimizer import values
from keras_groupopt.optimizer.run import require_built

# What Keras calls -------------------------------------------------------------------------------


# What a load by Keras adds to a refusal.
WEIGHTS_CAME_FIRST = (
    "\nKeras loads the weights before the optimizer state: they may be those of the file now. "
    "`kgo.load_weights(model, path)` loads both or nothing."
)


def set_weights(optimizer: Any, weights: Sequence[Any]) -> None:
    """Sets `optimizer.variables`, in order.

    Args:
        weights: One value per variable.

    Raises:
        ValueError: If the optimizer is not built, or counts, shapes or layouts differ.
    """
    built = optimizer._built
    variables = [] if built is None else optimizer.variables
    shapes = [tuple(v.shape) for v in variables]
    received = [tuple(getattr(weight, "shape", ())) for weight in weights]
    if shapes != received:
        raise ValueError(
            "`weights` must have the shapes of `optimizer.variables`. Received: "
            f"{len(received)} values for {len(shapes)} variables"
            f"{', as the optimizer is not built' if built is None else ''}."
        )
    for variable, weight in zip(variables, weights, strict=True):
        if variable is optimizer._fingerprint:
            variable.check(weight)
    for variable, weight in zip(variables, weights, strict=True):
        variable.assign(weight)
    for group in [] if built is None else built.groups:
        group.anchors_unknown = False
    if built is not None:
        built.anchors_are_due = False
    if built is not None and built.guard is not None:
        built.guard.begin(built.taken())


def save_own_variables(optimizer: Any, store: Any) -> None:
    """Writes all state, keyed by group, layer path and slot, with a manifest.

    It writes nothing while the averages are in the weights' place (`kgo.averaged_weights`):
    beside them this state would resume a run from weights it never had.

    Args:
        store: Where to write: a mapping from names to arrays.
    """
    built, pending = optimizer._built, optimizer._run.pending
    if pending is not None:
        waiting = checkpoint.as_pending(optimizer, pending[0])
        checkpoint.write(store, waiting.manifest, waiting.values)
    elif built is not None and not built.averages_in_weights:
        built.capture_due()
        entries = checkpoint.entries_of(optimizer, built)
        manifest = checkpoint.manifest_of(entries, built)
        checkpoint.write(store, manifest, entries, optimizer._link.model)


def load_own_variables(optimizer: Any, store: Any) -> None:
    """Reads state that `save_own_variables` wrote; kept until build if not built yet.

    Args:
        store: Where to read: a mapping from names to arrays.

    Raises:
        ValueError: If there is none, it is damaged, or its layout is another one. Nothing
            is assigned then.
    """
    if not len(store.keys()):
        note_new_weights(optimizer)
        step = backend.on_host(optimizer.iterations)
        if optimizer._built is not None and step != 0:
            warnings.warn(
                "The file holds weights but no optimizer state. The optimizer stays as it is: at "
                f"step {step}, with its moments and anchors.",
                stacklevel=2,
            )
        return
    try:
        _load(optimizer, store)
    except ValueError as error:
        note_new_weights(optimizer)
        raise ValueError(f"{error}{WEIGHTS_CAME_FIRST}") from error


def _load(optimizer: Any, store: Any) -> None:
    saved, factors = checkpoint.without_lora_averages(checkpoint.read(store))
    if factors:
        warnings.warn(
            "Keras saves a layer with LoRA merged into its kernel, and its factors as zeros: "
            f"{text.listing(factors)}. The run goes on from equal outputs, but not bit for "
            "bit, and averages of the factors start anew. To resume exactly, keep "
            "`model.get_weights()` and `optimizer.save_state(path)`.",
            stacklevel=4,
        )
    accept(optimizer, saved, checkpoint.present_terms())


# What users call ---------------------------------------------------------------------------------


def state_dict(optimizer: Any) -> dict[str, Any]:
    """Returns all state as a nested dict of NumPy arrays, which later steps leave alone.

    `state["groups"][group][layer path][slot]` is an array, bfloat16 ones as
    `ml_dtypes.bfloat16`; `"@rule"` in place of a layer path holds what a rule keeps as a
    whole, and slots that begin with `@` are the optimizer's, such as `"@anchor"`.
    `state["scalars"]` holds `"@iterations"`, `"@learning_rate"` if it is a number, and
    numbers of groups, such as `"@weight_decay/head"`. `state["manifest"]` is plain JSON.

    Raises:
        ValueError: If the optimizer is not built and has no loaded state.
    """
    return checkpoint.to_nested(take(optimizer, "state_dict"))


def load_state_dict(
    optimizer: Any, state_dict: dict[str, Any], strict: bool = True, renames: Any = None
) -> checkpoint.Report:
    """Restores what `state_dict` returned; kept until build if not built yet.

    Args:
        state_dict: The nested dict.
        strict: Whether another layout is refused; as in `kgo.resuming`. Default: `True`.
        renames: Saved names and present ones; as in `kgo.resuming`. Default: `None`.

    Returns:
        A report of what was kept, starts fresh and was dropped.

    Raises:
        TypeError: If it is not such a dict.
        ValueError: If it is not as it was returned, or its layout is another one. Nothing is
            assigned then.
    """
    terms = checkpoint.terms(strict, renames)
    return accept(optimizer, checkpoint.from_nested(state_dict), terms)


def save_state(optimizer: Any, path: Any) -> None:
    """Writes all state to a file, without the model: whole, or not at all.

    Args:
        path: Where to write; ends in `.npz`.

    Raises:
        ValueError: If the path has another ending, or the optimizer is not built.
        OSError: If it cannot be written. A file that was there stays as it was.
    """
    checkpoint.write_file(path, take(optimizer, "save_state"))


def load_state(
    optimizer: Any, path: Any, strict: bool = True, renames: Any = None
) -> checkpoint.Report:
    """Restores what `save_state` wrote; kept until build if not built yet.

    Args:
        path: The file.
        strict: Whether another layout is refused; as in `kgo.resuming`. Default: `True`.
        renames: Saved names and present ones; as in `kgo.resuming`. Default: `None`.

    Returns:
        A report of what was kept, starts fresh and was dropped.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or its layout is another one. Nothing is assigned then.
    """
    return accept(optimizer, checkpoint.read_file(path), checkpoint.terms(strict, renames))


# Within the package ------------------------------------------------------------------------------


def take(optimizer: Any, asked: str) -> checkpoint.Saved:
    """Returns copies of an optimizer's state, also of state that waits for the build.

    Args:
        optimizer: The optimizer.
        asked: What needs the state, for the error.

    Raises:
        ValueError: If the optimizer is not built and has no loaded state.
    """
    pending = optimizer._run.pending
    if pending is not None:
        return checkpoint.as_pending(optimizer, pending[0])
    return checkpoint.take(optimizer, require_built(optimizer, asked))


def accept(optimizer: Any, saved: checkpoint.Saved, terms: checkpoint.Terms) -> checkpoint.Report:
    """Gives an optimizer state, now or when it is built."""
    built, link, run = optimizer._built, optimizer._link, optimizer._run
    if built is None:
        declared = optimizer._declared.defaults.learning_rate
        run.pending = checkpoint.give_early(optimizer, declared, saved), terms
        if link.gradient_rule is not None:
            link.gradient_rule.late.clear()
        terms.report.fill(checkpoint.Report(status="waits for the build"))
        return terms.report
    if built.averages_in_weights:
        raise ValueError(
            "The optimizer state must not be loaded within `kgo.averaged_weights`, which "
            "puts back the weights of before. Received: averages in the weights' place. Load "
            "outside of the block."
        )
    checkpoint.give(optimizer, built, saved, terms, link.resting)
    run.pending = None
    values.note_progress(optimizer)
    return terms.report


def note_new_weights(optimizer: Any) -> None:
    """Notes that weights came without state: they are the averages, before these begin."""
    built = optimizer._built
    if built is None:
        return
    if built.averages is not None:
        built.averages.settled = False
        if backend.on_host(built.averages.made) == 0:
            built.averages.statistics.clear()


def remember(optimizer: Any) -> Callable[[], None]:
    """Returns a function that puts back what loading changes beside the variables."""
    run, built = optimizer._run, optimizer._built
    pending = run.pending
    restore = None if built is None else built.remember()

    def put_back() -> None:
        run.pending = pending
        if restore is not None:
            restore()

    return put_back
