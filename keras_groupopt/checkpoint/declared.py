"""The declared value of each scalar in the state, as a manifest keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from keras_groupopt.plan.averages import EMA, KerasEMA
from keras_groupopt.plan.plan import Plan
from keras_groupopt.schedules.serialization import serialize_scalar
from keras_groupopt.step import state_keys

_logger = logging.getLogger(__name__)


def declared_scalars(plan: Plan) -> dict[str, Any]:
    """Returns the declared value of each scalar in the state by key, and ratios as `@ratios`."""
    defaults = plan.defaults
    declared = {state_keys.LEARNING_RATE: declared_as(defaults.learning_rate)}
    if defaults.ratios:
        declared[state_keys.RATIOS] = [
            [ratio.selector.describe(), declared_as(ratio.value)] for ratio in defaults.ratios
        ]
    if isinstance(defaults.ema, (EMA, KerasEMA)):
        declared[state_keys.EMA_MOMENTUM] = declared_as(defaults.ema.momentum)
    for planned in plan.groups:
        group = planned.group
        if not group.frozen:
            declared[f"{state_keys.LEARNING_RATE_RATIO}/{group.name}"] = declared_as(
                group.learning_rate_ratio
            )
            if group.weight_decay is not None:
                declared[f"{state_keys.WEIGHT_DECAY}/{group.name}"] = declared_as(
                    group.weight_decay
                )
    return declared


def declared_as(value: Any) -> Any:
    """Returns how a manifest writes a declared scalar: as a number, a config or a name."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return serialize_scalar(value, "a scalar")
    except ValueError:
        return type(value).__name__


def scalars_to_keep(saved: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the keys of scalars whose declaration changed, and logs the changes.

    Such a scalar keeps the value that the code declares now.

    Args:
        saved: The declared values when the state was saved.
        now: The declared values now.
    """
    kept = set()
    for key, value in now.items():
        if key in saved and _registered(saved[key]) == _registered(value):
            continue
        kept.add(key)
        if key in saved:
            _logger.warning(
                "%s: declared as %s when it was saved, now %s; the present declaration is used.",
                key.lstrip("@"),
                saved[key],
                value,
            )
    return kept


def _registered(declared: Any) -> Any:
    """Returns a declaration without the modules of registered objects, since these may move."""
    if isinstance(declared, list):
        return [_registered(item) for item in declared]
    if not isinstance(declared, dict):
        return declared
    named = declared.get("registered_name")
    return {k: _registered(v) for k, v in declared.items() if not (named and k == "module")}
