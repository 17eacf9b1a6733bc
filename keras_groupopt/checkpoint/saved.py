"""Takes state from an optimizer, and gives it to one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt import backend
from keras_groupopt.base import text
from keras_groupopt.checkpoint import keys, renames
from keras_groupopt.checkpoint.declared import declared_as
from keras_groupopt.checkpoint.manifest import manifest_of
from keras_groupopt.checkpoint.matching import Report, match
from keras_groupopt.step import state_keys
from keras_groupopt.step.built import BuiltOptimizer

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Saved:
    """State outside an optimizer.

    Attributes:
        manifest: Its description: groups, rules, shapes, declared values. See `manifest.py`.
        values: The arrays, by key.
    """

    manifest: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms on which saved state is accepted.

    Attributes:
        strict: Whether another layout is refused. If it is not, a variable that moved to another
            group of the same rule keeps its state. Default: `True`.
        renames: The present names of prefixes of layer paths and of `group:` names, by their saved
            names. Default: none.
        report: What is filled when a built optimizer gets the state. Default: an empty report.
    """

    strict: bool = True
    renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
    report: Report = dataclasses.field(default_factory=Report)


def take(optimizer: Any, built: BuiltOptimizer) -> Saved:
    """Returns the state of a built optimizer, as copies that later steps leave alone.

    Args:
        optimizer: The optimizer.
        built: What it has built.
    """
    built.capture_due()
    entries = keys.entries_of(optimizer, built)
    values = {
        # Without a copy, the array would be a view of the variable on torch.
        key: np.array(keras.ops.convert_to_numpy(variable), copy=True)
        for key, variable in entries.items()
    }
    return Saved(manifest_of(entries, built), values)


def give(
    optimizer: Any,
    built: BuiltOptimizer,
    saved: Saved,
    terms: Terms | None = None,
    resting: Sequence[Mapping[str, Any]] = (),
) -> Report:
    """Gives a built optimizer the state that was saved, after checking that it fits.

    State that starts fresh keeps the value it has in the optimizer. If the optimizer has made no
    steps, fresh anchors at the initial weights are taken again at the next step.

    Args:
        optimizer: The optimizer.
        built: What it has built.
        saved: The saved state.
        terms: The terms on which it is accepted. Default: the same layout only.
        resting: Records of variables frozen when the optimizer was saved, whose state is left
            out if the optimizer that reads was built without them. Default: none.

    Returns:
        The report of `terms`, filled.

    Raises:
        ValueError: If the layout differs. Nothing is assigned then.
    """
    terms = Terms() if terms is None else terms
    averages = built.averages
    # A callback makes the averages of statistics. It may come later than the state.
    undo = None
    if averages is not None:
        named = {renames.new_key(key, terms.renames): v for key, v in saved.values.items()}
        undo = averages.expect_statistics(named)
    entries = keys.entries_of(optimizer, built)
    expected = manifest_of(entries, built)
    try:
        pairs, report = match(
            saved.manifest,
            expected,
            strict=terms.strict,
            renames=terms.renames,
            resting=resting,
        )
    except ValueError:
        if undo is not None:
            undo()
        terms.report.fill(Report(status="refused"))
        raise
    begun = backend.on_host(optimizer.iterations) > 0
    if _other_average(saved.manifest, expected):
        _logger.warning(
            "The file holds averages of another kind (EMA or SWA): those of this optimizer begin "
            "at the present weights."
        )
        anew = [
            key
            for key in pairs
            if key == state_keys.AVERAGES_MADE or keys.parse(key).slot == state_keys.AVERAGE
        ]
        for key in anew:
            del pairs[key]
            report.kept.remove(key)
        report.fresh += anew
    for key, saved_key in pairs.items():
        if saved_key in saved.values:
            entries[key].assign(saved.values[saved_key])
    iterations = backend.on_host(saved.values[state_keys.ITERATIONS])
    built.after_load(pairs, iterations, begun=begun)
    _tell(report, saved.values)
    terms.report.fill(report)
    return terms.report


def _other_average(saved: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Whether both manifests have averages of weights: one exponential, the other equal."""
    both = all(state_keys.AVERAGES_MADE in manifest["state"] for manifest in (saved, present))
    momenta = [state_keys.EMA_MOMENTUM in manifest["declared"] for manifest in (saved, present)]
    return both and momenta[0] != momenta[1]


def _tell(report: Report, values: Mapping[str, Any]) -> None:
    """Logs the state that every load leaves out, even one on the strictest terms."""
    switched = [key for key in report.dropped if keys.parse(key).is_optional]
    if switched:
        _logger.info("Saved, but not used: %s.", text.listing(switched))
    made = values.get(state_keys.AVERAGES_MADE, 0)
    if any(keys.parse(key).slot == state_keys.AVERAGE for key in switched) and int(made):
        _logger.warning(
            "The state holds averages of the weights over %d steps; they are left out, as this "
            "optimizer was made without `ema=`.",
            int(made),
        )
    pending = values.get(state_keys.MICRO_BATCHES, 0)
    if any(keys.parse(key).slot == state_keys.ACCUMULATOR for key in switched) and int(pending):
        _logger.warning(
            "The state was saved in the middle of an accumulation window; its %d micro-batches "
            "are lost, as this optimizer does not accumulate.",
            int(pending),
        )


def without_lora_averages(saved: Saved) -> tuple[Saved, list[str]]:
    """Returns state without the averages of LoRA's factors, and the paths of all such factors.

    When Keras saves a layer, it merges LoRA into the kernel and saves the factors as zeros. Their
    averages would be added to a kernel that contains the factors already.

    Args:
        saved: State from a file that Keras saved with the weights.
    """
    factors = [
        key for key in saved.manifest["state"] if keys.is_adapter(str(keys.parse(key).owner))
    ]
    dropped = {key for key in factors if keys.parse(key).slot == state_keys.AVERAGE}
    state = {key: v for key, v in saved.manifest["state"].items() if key not in dropped}
    values = {key: v for key, v in saved.values.items() if key not in dropped}
    paths = list(dict.fromkeys(str(keys.parse(key).owner) for key in factors))
    return Saved({**saved.manifest, "state": state}, values), paths


def give_early(optimizer: Any, declared: Any, saved: Saved) -> Saved:
    """Gives the saved step and base rate to an optimizer that is not built.

    Both are read before the build. A callback may change the rate before the first step, and the
    first step may be what builds the optimizer.

    Args:
        optimizer: The optimizer.
        declared: Its declared base rate.
        saved: The saved state.

    Returns:
        The state to give once it is built. The base rate is not in it, since it may change until
        then.
    """
    optimizer.iterations.assign(saved.values[state_keys.ITERATIONS])
    later = dict(saved.values)
    rate = later.pop(state_keys.LEARNING_RATE, None)
    saved_as = saved.manifest["declared"].get(state_keys.LEARNING_RATE)
    if rate is not None and declared_as(declared) == saved_as:
        optimizer.learning_rate = rate
    return Saved(saved.manifest, later)


def as_pending(optimizer: Any, saved: Saved) -> Saved:
    """Returns state that waits for the build, with the present step and base rate."""
    scalars = {state_keys.ITERATIONS: optimizer.iterations}
    if state_keys.LEARNING_RATE in saved.manifest["state"]:
        scalars[state_keys.LEARNING_RATE] = optimizer.learning_rate
    values = {
        key: np.array(keras.ops.convert_to_numpy(scalars.get(key, saved.values.get(key))))
        for key in saved.manifest["state"]
    }
    return Saved(saved.manifest, values)
