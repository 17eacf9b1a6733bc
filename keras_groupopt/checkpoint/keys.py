"""Keys of state: `group/layer path/slot`.

Names that start with `@` belong to the optimizer: `@iterations`, `@learning_rate`,
`@learning_rate_ratio/<group>`, `@weight_decay/<group>`, `<group>/@rule/<name>`,
`<group>/@rule/@iterations`, `<group>/<layer path>/@anchor`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras_groupopt.base import compat
from keras_groupopt.step import state_keys
from keras_groupopt.step.built import BuiltOptimizer

# Optional slots: missing in the file → start fresh; extra in the file → ignored.
_SWITCHED = (state_keys.ACCUMULATOR, state_keys.AVERAGE, state_keys.ITERATIONS)


class Key(NamedTuple):
    """A key in parts.

    Attributes:
        group: The group's name, or `None`.
        owner: The layer path, `RULE` for what the rule keeps as a whole, or `None` for a scalar.
        slot: The last part; those of the optimizer begin with `@`.
    """

    group: str | None
    owner: str | None
    slot: str

    @property
    def is_own(self) -> bool:
        """Whether it belongs to the optimizer and not to the rule."""
        return self.slot.startswith("@")

    @property
    def is_optional(self) -> bool:
        """Whether state with and without it have one layout."""
        return self.owner is None or self.slot in _SWITCHED or self.is_of_gradient_rule

    @property
    def is_of_gradient_rule(self) -> bool:
        """Whether it is kept for the gradient rule of the model."""
        return self.slot.startswith(state_keys.GRADIENT_RULE_STATE)

    def __str__(self) -> str:
        if self.owner is None:
            return self.slot if self.group is None else f"{self.slot}/{self.group}"
        return f"{self.group}/{self.owner}/{self.slot}"


def parse(key: str) -> Key:
    """Returns a key in parts. Names of groups have no slash, and slots neither."""
    first, slash, rest = key.partition("/")
    if first.startswith("@"):
        return Key(rest if slash else None, None, first)
    owner, _, slot = rest.rpartition("/")
    return Key(first, owner, slot)


def is_adapter(path: str) -> bool:
    """Whether a layer path is that of a LoRA adapter, which Keras merges when it saves."""
    return path.rpartition("/")[2].startswith("lora_")


def entries_of(optimizer: Any, built: BuiltOptimizer) -> dict[str, Any]:
    """Returns every variable to save, by key; each once."""
    own = {state_keys.ITERATIONS: optimizer.iterations}
    base = compat.rate_variable(optimizer)
    if base is not None:
        own[state_keys.LEARNING_RATE] = base
    return own | built.entries()


def stored_name(key: str) -> str:
    """Returns the name under which a store holds `key`: flat, as each H5 group costs a kilobyte.

    `/` becomes `|`; no two keys get one name.
    """
    return key.replace("%", "%25").replace("|", "%7C").replace("/", "|")
