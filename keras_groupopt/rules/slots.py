"""The variable that each piece of a rule's state belongs to."""

from __future__ import annotations

from typing import Any

import keras

_BOOKKEEPING = ("_variables", "_trainable_variables")


def slot_names(rule: Any, count: int) -> dict[int, tuple[int | None, str]]:
    """Returns the place of the variable and the slot's name, per identity of a state variable.

    A rule keeps each slot in a list parallel to the variables it was built with. The name of the
    attribute is the slot's name. State that is in no such list belongs to the rule as a whole, with
    `None` as its place.

    Args:
        rule: A built optimizer.
        count: How many variables it was built with.
    """
    names: dict[int, tuple[int | None, str]] = {}
    for attribute, value in vars(rule).items():
        if attribute in _BOOKKEEPING:
            continue
        if isinstance(value, (list, tuple)) and len(value) == count:
            for index, item in enumerate(value):
                if isinstance(item, keras.Variable):
                    names.setdefault(id(item), (index, attribute.strip("_")))
        elif isinstance(value, keras.Variable):
            names.setdefault(id(value), (None, attribute.strip("_")))
    unnamed = [v for v in rule.variables if id(v) not in names]
    names.update({id(v): (None, f"state_{index}") for index, v in enumerate(unnamed)})
    return names
