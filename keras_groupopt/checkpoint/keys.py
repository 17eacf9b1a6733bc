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

# Optional slots. If a file lacks one, it starts fresh. If only the file has it, it is ignored.
_SWITCHED = (state_keys.ACCUMULATOR, state_keys.AVERAGE, state_keys.ITERATIONS)


class Key(NamedTuple):
    """A key in parts.

    Attributes:
        group: The group's name, or `None`.
        owner: The layer path, `RULE` for what the rule keeps as a whole, or `None` for a scalar.
        slot: The last part. If it is the optimizer's own, it begins with `@`.
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
        """Whether state without it has the same layout as state with it."""
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
    """Returns a key in parts. Neither names of groups nor slots have a slash."""
    first, slash, rest = key.partition("/")
    if first.startswith("@"):
        return Key(rest if slash else None, None, first)
    owner, _, slot = rest.rpartition("/")
    return Key(first, owner, slot)


def is_adapter(path: str) -> bool:
    """Whether a layer path is that of a LoRA adapter, which Keras merges when it saves."""
    return path.rpartition("/")[2].startswith("lora_")


def entries_of(optimizer: Any, built: BuiltOptimizer) -> dict[str, Any]:
    """Returns every variable to save, once, by its key."""
    return first_entries(optimizer) | built.entries()


def first_entries(optimizer: Any) -> dict[str, Any]:
    """Returns the variables that an optimizer has before it is built, by key."""
    base = compat.rate_variable(optimizer)
    rate = {} if base is None else {state_keys.LEARNING_RATE: base}
    return {state_keys.ITERATIONS: optimizer.iterations, **rate}


def stored_name(key: str) -> str:
    """Returns the name under which a store holds `key`.

    It has no `/`, since each group of an H5 file costs a kilobyte. No two keys get the same name.
    """
    return key.replace("%", "%25").replace("|", "%7C").replace("/", "|")
