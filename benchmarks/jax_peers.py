"""AdamW of Optax with its clipping by the global norm."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax_steps
import measuring
import optax
from prepared import (
    BETA_1,
    BETA_2,
    CLIPNORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Prepared,
    Setting,
)

EPSILON_NOTE = "epsilon is added to the corrected root"


def adamw(epsilon: float) -> Any:
    """Returns the transformation of Optax without clipping."""
    return optax.adamw(LEARNING_RATE, b1=BETA_1, b2=BETA_2, eps=epsilon, weight_decay=WEIGHT_DECAY)


def multi_transform(epsilon: float, labels: list[str]) -> Any:
    """Returns one transformation per group."""
    return optax.multi_transform({"early": adamw(epsilon), "late": adamw(epsilon)}, labels)


def prepare(make: Callable[[float, list[str]], Any], setting: Setting) -> Prepared:
    """Prepares clipping and transformation. The state is donated in the order of the results."""
    variables = setting.model.trainable_variables
    labels = ["early" if re.match(setting.pattern, v.path) else "late" for v in variables]
    optimizer = optax.chain(optax.clip_by_global_norm(CLIPNORM), make(setting.epsilon, labels))
    weights, watch = jax_steps.values(variables), measuring.Stopwatch()
    own = watch.part("build", lambda: jax.block_until_ready(optimizer.init(weights)))

    def apply(state: Any, received: Any) -> Any:
        weights, own = state
        updates, own = optimizer.update(received, own, weights)
        return optax.apply_updates(weights, updates), own

    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    return jax_steps.start(apply, (weights, own), setting, watch, state_bytes)


def _made_by(
    what: str, make: Callable[[float, list[str]], Any]
) -> tuple[str, Callable[[Setting], Prepared]]:
    return what, lambda setting: prepare(make, setting)


# Description and preparation of each peer, by name.
PEERS = {
    "optax_adamw": _made_by("optax.adamw, one group", lambda epsilon, labels: adamw(epsilon)),
    "optax_multi_transform": _made_by("optax.multi_transform, two groups", multi_transform),
    "optax_flatten": _made_by(
        "optax.flatten, all in one buffer", lambda epsilon, labels: optax.flatten(adamw(epsilon))
    ),
}
