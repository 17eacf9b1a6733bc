"""Fused steps against the rules they stand for: weights, state, options, and who gets one."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
from comparing import assert_close, assert_same, compiled_step, state_of
from keras import ops
from models import arrays, dense, fit, numpy_of
from models import compiled as compiled_model
from own_rules import table

import keras_groupopt as kgo

BACKEND = keras.backend.backend()

# Each rule with a fused step, with each option that changes its arithmetic.
RULES: dict[str, Any] = {
    name + ending: row.rule(name, **arguments)
    for name, row in table().items()
    for ending, arguments in row.fused.items()
}
OPTIONS: dict[str, Mapping[str, Any]] = {
    "alone": {},
    "all": {
        "weight_decay": 0.1,
        "anchor": "initial",
        "exclude_from_decay": kgo.rank(max=0),
        "global_clipnorm": 1.0,
        "ratios": [(kgo.rank(1), 0.5)],
    },
    "decay and a window": {
        "weight_decay": keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5),
        "exclude_from_decay": (),
        "gradient_accumulation_steps": 2,
        "ema": kgo.EMA(0.9),
    },
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))

SHAPES = {"matrix": (7, 5), "vector": (5,), "scalar": (), "again": (7, 5)}


def gradients(shapes: Mapping[str, tuple[int, ...]], step: int) -> list[Any]:
    """Gradients of very different sizes, so that an epsilon in another place shows."""
    generator = np.random.default_rng(step)
    return [
        ops.convert_to_tensor((generator.normal(size=shape) * 10.0**-place).astype("float32"))
        for place, shape in enumerate(shapes.values())
    ]


def variables(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> list[Any]:
    generator = np.random.default_rng(99)
    return [
        keras.Variable(generator.normal(size=shape), dtype=dtype, name=name)
        for name, shape in shapes.items()
    ]


def optimizer(rule: Any, fused: bool, **options: Any) -> kgo.GroupedOptimizer:
    options = {"on_nonfinite": "propagate", "learning_rate": 0.02, **options}
    return kgo.GroupedOptimizer(rule=rule, fused=fused, **options)


def after(
    rule: Any,
    fused: bool,
    options: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    steps: int = 12,
    compiled: bool = False,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """Weights and all state after some steps, one of them without a gradient for a variable."""
    own, weights = optimizer(rule, fused, **options), variables(shapes, dtype)
    own.build(weights)
    step = compiled_step(own, weights)[0] if compiled else lambda given: own.apply(given, weights)
    for number in range(steps):
        given = [ops.cast(gradient, dtype) for gradient in gradients(shapes, number)]
        if number == 1 and not compiled:
            with pytest.warns(UserWarning, match="No gradient for"):
                own.apply([None, *given[1:]], weights)
        else:
            step(given)
    return dict(zip(shapes, map(numpy_of, weights), strict=True)) | state_of(own)


@pytest.mark.backends("tensorflow", "torch", reason="JAX fuses compiled steps only")
@each_option
@each_rule
def test_twelve_steps_are_the_rules_own_to_rounding(rule: Any, options: Any) -> None:
    assert_close(after(rule, True, options), after(rule, False, options), 5e-6)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, OPTIONS["all"]) for rule in RULES.values()),
        *((RULES[name], OPTIONS["decay and a window"]) for name in ("adam", "adan", "sgd")),
    ],
)
def test_a_compiled_step_is_the_rules_own_to_rounding(rule: Any, options: Any) -> None:
    fused = after(rule, True, options, steps=8, compiled=True)
    assert_close(fused, after(rule, False, options, steps=8, compiled=True), 5e-6)


@pytest.mark.parametrize("rule", ["adam", "adan", "radam"])
def test_large_variables_beside_small_ones_are_moved_whole(rule: str) -> None:
    """Torch cuts them into blocks, of which the last is not full."""
    shapes = {
        "small": (3,),
        "large": (1100, 2001),
        "empty": (0, 3),
        "between": (2, 2),
        "full": (1024, 1024),
    }
    options = OPTIONS["all"]
    fused = after(rule, True, options, shapes, steps=3)
    assert_close(fused, after(rule, False, options, shapes, steps=3), 5e-6)


@pytest.mark.parametrize("rule", ["adamw", "radam", "sgd"])
def test_float64_is_computed_in_float64(rule: str) -> None:
    if BACKEND == "jax":
        pytest.skip("JAX has no float64 unless it is switched on for the whole process")
    fused = after(rule, True, OPTIONS["all"], steps=6, dtype="float64")
    assert_close(fused, after(rule, False, OPTIONS["all"], steps=6, dtype="float64"), 1e-7)


@pytest.mark.filterwarnings("ignore:Weights in float16/bfloat16 lose")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_weights_of_low_precision_move_by_the_rule_itself(rule: str, dtype: str) -> None:
    plain = after(rule, False, OPTIONS["all"], steps=3, dtype=dtype)
    assert_same(after(rule, True, OPTIONS["all"], steps=3, dtype=dtype), plain)


@pytest.mark.parametrize("rule", [RULES[name] for name in ("adamw", "adan", "sgd_nesterov")])
def test_a_run_that_was_saved_with_it_goes_on_without_it(rule: Any, tmp_path: pathlib.Path) -> None:
    options = {"rule": rule, "weight_decay": 0.1, "global_clipnorm": 0.5, "learning_rate": 0.02}
    runs = []
    for switch in (False, True):
        model = fit(compiled_model(dense("model", a=3, b=2), fused=True, **options), 2)
        model.save_weights(tmp_path / "run.weights.h5")
        compiled_model(model, fused=not switch, **options)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / "run.weights.h5")
        fit(model, 2)
        assert int(numpy_of(model.optimizer.iterations)) == 4
        runs.append({str(place): value for place, value in enumerate(arrays(model))})
    assert_close(*runs, 5e-6)


def test_state_is_slots_anchors_averages_and_accumulators_and_scalars() -> None:
    """No buffer of a fused step is kept beside."""
    options = {**OPTIONS["all"], "gradient_accumulation_steps": 2, "ema": kgo.EMA(0.9)}
    own, weights = optimizer("adamw", True, **options), variables(SHAPES)
    for step in range(2):
        own.apply(gradients(SHAPES, step), weights)
    shapes = [tuple(variable.shape) for variable in own.variables]
    kept = sum(int(np.prod(shape)) for shape in shapes if shape)
    arrays = sum(int(np.prod(shape)) for shape in SHAPES.values() if shape)
    # Two slots, the anchor, the average and the accumulator.
    assert kept == 5 * arrays


# Who gets one -----------------------------------------------------------------------------------


def uses_fused_step(rule: Any, **options: Any) -> bool:
    own = optimizer(rule, True, **options)
    own.build(variables(SHAPES))
    (group,) = own._built.groups
    return group.is_fused


@each_rule
def test_each_of_these_rules_has_one(rule: Any) -> None:
    assert uses_fused_step(rule)


class NamedAdam(keras.optimizers.Adam):
    """Leaves the update alone, and has state of its own beside."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.extra = self.add_variable((), name="extra")


class HalfAdam(keras.optimizers.Adam):
    """Moves by half of what Adam does, whose name it has."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate * 0.5)


HalfAdam.__name__ = "Adam"


class CountingSGD(keras.optimizers.SGD):
    """Sees every assignment."""

    assigned = 0

    def assign_add(self, variable: Any, value: Any) -> None:
        CountingSGD.assigned += 1
        super().assign_add(variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        CountingSGD.assigned += 1
        super().assign_sub(variable, value)


def test_a_subclass_that_leaves_the_update_alone_has_one_too() -> None:
    assert uses_fused_step(NamedAdam)
    assert_close(after(NamedAdam, True, {}), {**after(NamedAdam, False, {})}, 5e-6)


def test_a_subclass_with_an_update_of_its_own_is_obeyed() -> None:
    assert not uses_fused_step(HalfAdam)
    start = ops.convert_to_numpy(variables(SHAPES)[0])
    whole = after("adam", True, {}, steps=1)["matrix"] - start
    group = kgo.Group("all", "**", rule=HalfAdam(0.02))
    for rule, options in ((HalfAdam, {}), ("adam", {"groups": [group]})):
        own = after(rule, True, options, steps=1)["matrix"] - start
        np.testing.assert_allclose(own, whole / 2, rtol=1e-4)


def test_a_subclass_that_watches_assignments_sees_them() -> None:
    assert not uses_fused_step(CountingSGD)
    CountingSGD.assigned = 0
    after(CountingSGD, True, {}, steps=1)
    assert CountingSGD.assigned >= len(SHAPES)


def test_a_rule_whose_argument_is_a_schedule_moves_by_itself() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.9, 4, 0.5)
    assert not uses_fused_step(kgo.rule("adam", beta_1=schedule))


def test_a_layer_wise_and_a_matrix_rule_keep_their_own_update() -> None:
    assert not uses_fused_step("lars")
    assert not uses_fused_step(kgo.rule("lookahead", rule="adam"))


def test_it_is_switched_off_by_one_argument_that_a_config_keeps() -> None:
    own = optimizer("adam", False)
    own.build(variables(SHAPES))
    assert not own._built.groups[0].is_fused
    assert kgo.GroupedOptimizer.from_config(own.get_config()).fused is False
