"""Reported faults of rates per group, seen in the weights after `fit` and not in reported rates."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from cases import Jump
from chosen_gradients import fit, mean_output, towers, train, weights

import keras_groupopt as kgo


def cosine(first: float, steps: int) -> np.ndarray:
    """The rates of a cosine decay to 0, in float64."""
    return first * 0.5 * (1 + np.cos(np.pi * np.arange(steps) / steps))


def one_and_two(model: keras.Model, learning_rate) -> kgo.GroupedOptimizer:
    return kgo.GroupedOptimizer(
        {"a": "a", "b": kgo.Group("b", "b", learning_rate_ratio=2.0)},
        model=model,
        rule="sgd",
        learning_rate=learning_rate,
    )


def test_warm_up_and_cosine_keep_the_ratio_of_two_groups_over_the_whole_run():
    """A schedule used to bring every group to the rate of the first."""
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=100, warmup_target=0.1, warmup_steps=10
    )
    model = towers("a", "b")
    moved = train(model, one_and_two(model, schedule), steps=110)
    expected = 0.01 * np.arange(10).sum() + cosine(0.1, 100).sum()
    assert moved["a/kernel"] == pytest.approx(-expected, rel=1e-4)
    assert moved["b/kernel"] == 2 * moved["a/kernel"]


def test_the_ratio_of_two_groups_holds_at_every_step_the_first_included():
    model = towers("a", "b")
    optimizer = one_and_two(model, kgo.schedules.Linear(0.0, 10, 0.1))
    variables = model.trainable_variables
    optimizer.build(variables)
    gradients = [keras.ops.ones((1, 1)), keras.ops.ones((1, 1))]
    for step in range(12):
        for variable in variables:
            variable.assign(np.zeros((1, 1)))
        expected = 0.01 * min(step, 10)  # 0 at the first step
        reported = {name: float(rate) for name, rate in optimizer.learning_rates.items()}
        assert reported == pytest.approx({"a": expected, "b": 2 * expected}, rel=1e-6, abs=0)
        optimizer.apply(gradients, variables)
        assert weights(model) == pytest.approx(
            {"a/kernel": -expected, "b/kernel": -2 * expected}, rel=1e-6, abs=0
        )


@pytest.mark.parametrize("rule", [keras.optimizers.SGD, keras.optimizers.Adam, kgo.RAdam])
def test_an_instance_brings_its_own_schedule(rule):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    moved = []
    for own in ({"rule": rule(schedule)}, {"rule": rule, "learning_rate": schedule}):
        model = towers("a", "b")
        groups = [kgo.Group("a", "a", **own)]
        moved.append(train(model, kgo.GroupedOptimizer(groups, model=model, rule="sgd"), steps=3))
    assert moved[0] == moved[1]
    if rule is keras.optimizers.SGD:
        assert moved[0]["a/kernel"] == -1.25


def test_a_group_unfrozen_while_training_starts_at_the_present_rate_of_the_schedule():
    """It got an arbitrary rate, or the schedule began again for it."""
    schedule = keras.optimizers.schedules.CosineDecay(1.0, 100)
    model = towers("backbone", "head")
    optimizer = kgo.GroupedOptimizer(
        {"backbone": kgo.Group("backbone", "backbone", learning_rate_ratio=Jump(0.0, 0.1, at=50))},
        model=model,
        rule=kgo.rule("sgd", momentum=0.9),
        learning_rate=schedule,
    )
    model.compile(optimizer=optimizer, loss=mean_output)
    fit(model, [0.0, 1.0], steps=50)
    assert weights(model)["backbone/kernel"] == 0.0
    fit(model, [1.0, 1.0], steps=1)
    after = weights(model)
    # 0.1 times the rate at step 50, which is half of the first.
    assert after["backbone/kernel"] == pytest.approx(-0.1 * 0.5, rel=1e-4)
    # The head's momentum went on: its trajectory is that of a run without the other group.
    velocity = position = 0.0
    for rate in cosine(1.0, 100)[:51]:
        velocity = 0.9 * velocity - rate
        position += velocity
    assert after["head/kernel"] == pytest.approx(position, rel=1e-4)


def test_layerwise_ratios_move_each_block_by_its_power():
    """The scale was stored in the group and never used: all blocks moved alike."""
    names = [f"block_{index}" for index in range(12)]
    model = towers(*names)
    groups = [
        kgo.Group(name, name, learning_rate_ratio=0.75 ** (12 - index))
        for index, name in enumerate(names)
    ]
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adamw", learning_rate=1e-3)
    moved = train(model, optimizer)
    # Adam's first step is the rate, whatever the gradient.
    assert [moved[f"{name}/kernel"] for name in names] == pytest.approx(
        [-1e-3 * 0.75 ** (12 - index) for index in range(12)], rel=1e-4
    )


def test_the_plan_shows_on_which_side_the_rates_are_small():
    model = towers("stem", "block_0", "block_1", "head")
    ratios = {"stem": 0.125, "block_0": 0.25, "block_1": 0.5, "head": 1.0}
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group(name, name, learning_rate_ratio=ratio) for name, ratio in ratios.items()],
        model=model,
        rule="sgd",
        learning_rate=1.0,
    )
    lines: list[str] = []
    optimizer.plan.summary(print_fn=lines.append)
    table = "\n".join(lines)
    for text in ("1 × 0.125", "1 × 0.25", "1 × 0.5"):
        assert text in table
    assert table.index("stem") < table.index("block_0") < table.index("head")
    assert train(model, optimizer) == {
        f"{name}/kernel": pytest.approx(-ratio) for name, ratio in ratios.items()
    }


def test_a_ratio_multiplies_the_rate_once_and_not_at_every_step():
    """Multiplied in at every step, the rate dies and the weight stops near −0.3."""
    model = towers("w")
    optimizer = kgo.GroupedOptimizer(
        {"w": kgo.Group("w", "w", learning_rate_ratio=0.75)},
        model=model,
        rule="sgd",
        learning_rate=0.1,
    )
    assert train(model, optimizer, steps=50) == {"w/kernel": pytest.approx(-3.75, rel=1e-5)}


def test_a_resumed_run_continues_the_schedule_where_it_stopped(tmp_path):
    """The schedule began again at step 0 after a restart."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model = towers("a", "b")
    optimizer = kgo.GroupedOptimizer(
        {"a": kgo.Group("a", "a", learning_rate_ratio=0.5)},
        model=model,
        rule="sgd",
        learning_rate=schedule,
    )
    model.compile(optimizer=optimizer, loss=mean_output)
    for _ in range(5):
        fit(model, steps=10)
    model.save(tmp_path / "run.keras")
    stopped = weights(model)

    resumed = keras.models.load_model(
        tmp_path / "run.keras", custom_objects={"mean_output": mean_output}
    )
    assert int(resumed.optimizer.iterations) == 50
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.1 * 0.5**5)
    fit(resumed, steps=10, initial_epoch=5, epochs=6)
    expected = -0.1 * (0.5 ** (np.arange(50, 60) / 10)).sum()
    assert weights(resumed)["b/kernel"] - stopped["b/kernel"] == pytest.approx(expected, rel=1e-3)
    assert weights(resumed)["a/kernel"] - stopped["a/kernel"] == pytest.approx(
        0.5 * expected, rel=1e-3
    )


@pytest.mark.parametrize("one", [1, np.float16(1), np.array(1)], ids=repr)
def test_a_whole_number_as_rate_is_a_float_that_can_be_halved(one):
    """An integer rate kept its type, and half of it was 0."""
    model = towers("w")
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group("w", "w", learning_rate_ratio=one)], model=model, rule="sgd", learning_rate=one
    )
    model.compile(optimizer=optimizer, loss=mean_output)
    # The loss falls, which `mode="max"` takes for no improvement.
    halve = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=0, mode="max", min_delta=0.0
    )
    fit(model, epochs=3, callbacks=[halve])
    # Rates 1, 1, 1/2: the callback acts from the end of the second epoch.
    assert weights(model) == {"w/kernel": pytest.approx(-2.5)}
    assert float(optimizer.learning_rate) == pytest.approx(0.25)
