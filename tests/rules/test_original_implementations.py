"""Rules against the packages they come from: forty steps, to float32 rounding.

Every rule runs in a group of a `GroupedOptimizer`, on the backend of the test run. The original
runs in float64, on the same gradients, whatever that backend is, and so does the rule's reference.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import numpy_of
from own_rules import table
from references import decayed
from rule_table import Arrays, Original, RuleRow

import keras_groupopt as kgo

STEPS = 40
SHAPES = {"kernel": (4, 3), "bias": (4,)}
MATRICES = {"wide": (3, 5), "tall": (5, 3)}
ROWS = {
    name + ending: (name, row, original)
    for name, row in table().items()
    for ending, original in row.originals.items()
}


def start(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    random = np.random.default_rng(0)
    return {name: np.float32(random.normal(size=shape)) for name, shape in shapes.items()}


def history(shapes: dict[str, tuple[int, ...]]) -> list[Arrays]:
    """Gradients with a direction, whose size changes from step to step."""
    random = np.random.default_rng(1)
    pull = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return [
        {
            n: np.float32((pull[n] + random.normal(size=s)) * (1 + step % 3))
            for n, s in shapes.items()
        }
        for step in range(STEPS)
    ]


def optimizer_of(name: str, row: RuleRow, original: Original) -> Any:
    if original.by_class:
        return row.cls(original.rate, weight_decay=original.weight_decay)
    return kgo.GroupedOptimizer(
        rule=row.rule(name, **original.arguments),
        learning_rate=original.rate,
        weight_decay=original.weight_decay,
        exclude_from_decay=(),
    )


@pytest.mark.parametrize(("name", "row", "original"), ROWS.values(), ids=list(ROWS))
def test_forty_steps_are_those_of_the_original(name: str, row: RuleRow, original: Original) -> None:
    shapes = MATRICES if row.only_matrices else SHAPES
    weights, gradients = start(shapes), history(shapes)
    expected = original.run(weights, gradients)
    variables = {n: keras.Variable(w, name=n) for n, w in weights.items()}
    optimizer = optimizer_of(name, row, original)
    optimizer.build(list(variables.values()))
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(step[n]) for n in variables])
    for n, variable in variables.items():
        move = np.max(np.abs(expected[n] - weights[n]))
        assert move > 0.01, f"{n} hardly moved: nothing would be compared"
        error = np.max(np.abs(numpy_of(variable).astype("float64") - expected[n]))
        # Beside it, what a float32 weight cannot hold: each step rounds it.
        rounding = 1e-6 * np.max(np.abs(weights[n]))
        assert error <= 1e-5 * move + rounding, f"{n}: off by {error / move:.1e} of the way"


@pytest.mark.once
@pytest.mark.parametrize(
    ("row", "original"),
    [(row, original) for _, row, original in ROWS.values() if not original.by_class],
    ids=[name for name, (_, _, original) in ROWS.items() if not original.by_class],
)
def test_a_reference_makes_the_steps_of_the_original(row: RuleRow, original: Original) -> None:
    shapes = MATRICES if row.only_matrices else SHAPES
    weights, gradients = start(shapes), history(shapes)
    expected = original.run(weights, gradients)
    for name, value in weights.items():
        rule, found = row.reference(**original.arguments), value
        for step in gradients:
            found = decayed(found, original.rate, original.weight_decay or 0.0)
            found = rule.step(found, step[name], original.rate)
        # torch keeps a product of NAdam in float32 whatever the parameter.
        move = np.max(np.abs(expected[name] - value))
        assert np.max(np.abs(found - expected[name])) <= 1e-6 * move
