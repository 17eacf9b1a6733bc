"""What every row of `cases.py` must keep, seen in weights and state and never in reported rates."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from cases import (
    CASES,
    DECAY,
    OPTIONS,
    PARTS,
    PATHS,
    RATE,
    RATIOS,
    RULES,
    Case,
    by_path,
    initial_weights,
    make_model,
    numpy_of,
    take_step,
    tensors_of,
    weights_of,
)
from comparing import assert_close, assert_same, compiled_step, counters_of, state_of

import keras_groupopt as kgo

Arrays = Mapping[str, np.ndarray]


def rows(cases: Sequence[Case]) -> Any:
    """A parameter `case` for each row."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


every_case = rows(CASES)
# One case of each rule, for what does not depend on a rule's options; and all options of the whole.
ONE_OF_EACH = [*{case.keras_class: case for case in reversed(RULES)}.values()]
one_of_each_rule = rows(ONE_OF_EACH)
one_of_each = rows([*ONE_OF_EACH, *OPTIONS])


def either_way(cases: Sequence[Case]) -> Any:
    """Parameters `case` and `fused`: rules that have a fused step are tried with and without it."""
    pairs = [(case, fused) for case in cases for fused in (True, False) if fused or case.fusible]
    names = [case.name if fused else f"{case.name}-not_fused" for case, fused in pairs]
    return pytest.mark.parametrize(("case", "fused"), pairs, ids=names)


# What is compared -----------------------------------------------------------------------------


def assert_all_moved(weights: Arrays) -> None:
    """No equality of this run is one of weights that never moved."""
    still = [p for p, w in initial_weights().items() if p in weights and np.all(w == weights[p])]
    assert not still


def halve_what_can_be_set(optimizer: Any) -> None:
    """Halves the base rate, ratios and decays that are numbers."""
    if isinstance(optimizer.plan.defaults.learning_rate, float):
        optimizer.learning_rate = float(numpy_of(optimizer.learning_rate)) / 2
    for planned in optimizer.plan.groups:
        group = planned.group
        if isinstance(group.learning_rate_ratio, float):
            optimizer.set_learning_rate_ratio(group.name, group.learning_rate_ratio / 2)
        if isinstance(group.weight_decay, float):
            optimizer.set_weight_decay(group.name, group.weight_decay / 2)


def without(values: Arrays, *paths: str) -> dict[str, np.ndarray | None]:
    """Gradients of which some are missing."""
    return {path: None if path in paths else value for path, value in values.items()}


@pytest.fixture
def missing_is_expected() -> Iterator[None]:
    """Lets both libraries warn about missing gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(No gradient for|Gradients do not exist)")
        yield


def equality(case: Case, fused: bool) -> Callable[..., None]:
    """To the bit where the same operations run; a fused step rounds otherwise."""
    return assert_same if case.exact and not (fused and case.fusible) else assert_close


@functools.cache
def ten_steps(case: Case, fused: bool = True) -> list[dict[str, np.ndarray]]:
    """The row's weights after each of ten eager steps, which several tests compare with."""
    model = make_model()
    optimizer = case.optimizer(model, fused=fused)
    weights = []
    for step in range(10):
        take_step(optimizer, model, case.gradients(step))
        weights.append(weights_of(model))
    assert_all_moved(weights[-1])
    return weights


# Numbers --------------------------------------------------------------------------------------


@either_way(CASES)
def test_ten_steps_match_the_float64_reference(case: Case, fused: bool) -> None:
    expected = case.expected_weights([case.gradients(step) for step in range(10)])
    assert_close(ten_steps(case, fused)[-1], expected, case.tolerance)


@either_way([case for case in CASES if case.keras_class])
def test_one_group_at_ratio_one_is_plain_keras(case: Case, fused: bool) -> None:
    ours, theirs = make_model(), make_model()
    groups = [kgo.Group("default", **case.group_options("backbone", 1.0))]
    optimizer, plain = case.grouped(groups, model=ours, fused=fused), case.plain(1.0)
    for step in range(3):
        take_step(optimizer, ours, case.gradients(step))
        take_step(plain, theirs, case.gradients(step))
    assert_all_moved(weights_of(ours))
    equality(case, fused)(weights_of(ours), weights_of(theirs))


@either_way(RULES)
def test_decay_and_clipping_mean_what_plain_keras_means(case: Case, fused: bool) -> None:
    ours, theirs = make_model(), make_model()
    optimizer = case.grouped(
        (), model=ours, weight_decay=DECAY, exclude_from_decay=(), clipvalue=0.5, fused=fused
    )
    decays = dict.fromkeys(case.decay_arguments, DECAY)
    plain = case.plain(1.0, clipvalue=0.5, **decays)
    for step in range(2):
        take_step(optimizer, ours, case.gradients(step))
        take_step(plain, theirs, case.gradients(step))
    equality(case, fused)(weights_of(ours), weights_of(theirs))


@either_way([case for case in CASES if case.separable])
def test_a_group_at_a_ratio_is_that_optimizer_alone_at_that_rate(case: Case, fused: bool) -> None:
    for part, ratio in RATIOS.items():
        model = make_model()
        alone = case.alone(model, part, ratio, fused)
        for step in range(3):
            take_step(alone, model, case.gradients(step), parts=[part])
        mine = {p: w for p, w in ten_steps(case, fused)[2].items() if p.startswith(part)}
        equality(case, fused)(mine, {p: weights_of(model)[p] for p in mine})


def _ways(case: Case) -> list[Any]:
    """All ways to give the row's rule; a name or a class alone where it has no arguments."""
    ways: list[Any] = [case.rule_name, case.keras_class] if case.named else [case.keras_class]
    if case.arguments:
        ways = [kgo.rule(way, **case.arguments) for way in ways]
    return [*ways, case.plain(1.0)]


@either_way(RULES)
def test_a_rule_is_the_same_by_name_by_class_and_by_instance(case: Case, fused: bool) -> None:
    theirs = make_model()
    take_step(case.plain(1.0), theirs, case.gradients(0))
    for rule in _ways(case):
        ours = make_model()
        group = kgo.Group("default", rule=rule)
        optimizer = kgo.GroupedOptimizer(
            [group], model=ours, rule="sgd", learning_rate=RATE, fused=fused
        )
        take_step(optimizer, ours, case.gradients(0))
        equality(case, fused)(weights_of(ours), weights_of(theirs))


@either_way(RULES)
def test_the_joint_norm_is_that_of_all_gradients_laid_end_to_end(case: Case, fused: bool) -> None:
    limit = 2.0
    model = make_model()
    optimizer = case.optimizer(model, global_clipnorm=limit, fused=fused)
    steps = []
    for step in range(3):
        given = case.gradients(step)
        take_step(optimizer, model, given)
        length = np.linalg.norm(np.concatenate([g.ravel() for g in given.values()]))
        steps.append({path: g * min(1.0, limit / length) for path, g in given.items()})
    assert_close(weights_of(model), case.expected_weights(steps), case.tolerance)


# Velocities and slow weights carry the rate of earlier steps on.
COASTS = ("lars", "rmsprop_momentum", "sgd_momentum", "sgd_nesterov", "lookahead")


@either_way(RULES)
def test_nothing_moves_at_rate_0_and_steps_at_other_rates_go_on(case: Case, fused: bool) -> None:
    model = make_model()
    optimizer = case.grouped((), model=model, fused=fused)
    for step, rate in enumerate([0.0, 0.0, RATE, 0.0, RATE]):
        before = weights_of(model)
        optimizer.learning_rate = rate
        take_step(optimizer, model, case.gradients(step))
        if rate:
            assert all(np.isfinite(w).all() for w in weights_of(model).values())
            assert any(np.any(w != before[path]) for path, w in weights_of(model).items())
        elif step < 2 or not case.name.startswith(COASTS):
            assert_same(weights_of(model), before)


# Config and state -----------------------------------------------------------------------------


@every_case
def test_a_config_survives_json_and_makes_the_same_optimizer(case: Case) -> None:
    model, other = make_model(), make_model()
    optimizer = case.optimizer(model)
    for change in (lambda: None, lambda: _build_and_halve(optimizer, model)):
        change()
        config = json.loads(json.dumps(optimizer.get_config()))
        assert config == optimizer.get_config()
        assert kgo.GroupedOptimizer.from_config(config).get_config() == config
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(serialized)
    assert keras.optimizers.serialize(again) == serialized
    if not case.config_is_whole:
        with pytest.raises(ValueError, match=r"anchors of group .* are not known"):
            take_step(again, other, case.gradients(0))
        assert_same(weights_of(other), initial_weights())
        return
    take_step(optimizer, model, case.gradients(0))
    take_step(again, other, case.gradients(0))
    assert_all_moved(weights_of(model))
    assert_same(weights_of(other), weights_of(model))


def _build_and_halve(optimizer: Any, model: Any) -> None:
    optimizer.build(model.trainable_variables)
    halve_what_can_be_set(optimizer)


@dataclasses.dataclass(frozen=True)
class Saved:
    """What three steps of a row left, with rates halved after two, and what the fourth made."""

    folder: pathlib.Path
    weights: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    next_weights: dict[str, np.ndarray]
    next_state: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Callable[[Case], Saved]:
    """Trains and saves a row's model, once for all tests that load it."""

    @functools.cache
    def save(case: Case) -> Saved:
        folder = tmp_path_factory.mktemp(case.name)
        model = make_model()
        optimizer = case.optimizer(model)
        model.compile(optimizer=optimizer, loss="mse")
        for step in range(3):
            if step == 2:
                halve_what_can_be_set(optimizer)
            take_step(optimizer, model, case.gradients(step))
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        weights, state = weights_of(model), state_of(optimizer)
        take_step(optimizer, model, case.gradients(3))
        return Saved(folder, weights, state, weights_of(model), state_of(optimizer))

    return save


def _load_model(case: Case, folder: pathlib.Path) -> Any:
    return keras.saving.load_model(folder / "model.keras")


def _load_weights_then_build_in_reverse(case: Case, folder: pathlib.Path) -> Any:
    model = make_model()
    model.compile(optimizer=case.optimizer(model), loss="mse")
    model.load_weights(folder / "model.weights.h5")
    model.optimizer.build(model.trainable_variables[::-1])
    return model


LOADS = {
    "a model": (_load_model, assert_same),
    # A norm sums its squares in the order of the variables.
    "weights before a build in another order": (_load_weights_then_build_in_reverse, assert_close),
}


@every_case
@pytest.mark.parametrize("load", LOADS)
def test_after_save_and_load_the_next_step_is_the_same(
    case: Case, load: str, saved: Callable[[Case], Saved]
) -> None:
    before = saved(case)
    load_from, compare = LOADS[load]
    model = load_from(case, before.folder)
    assert_same(weights_of(model), before.weights)
    assert_same(state_of(model.optimizer), before.state)
    assert counters_of(model.optimizer) == {3}
    take_step(model.optimizer, model, case.gradients(3))
    compare(weights_of(model), before.next_weights)
    compare(state_of(model.optimizer), before.next_state)


def _equal_towers() -> Any:
    layers = [keras.layers.Dense(3, name=part) for part in PARTS]
    return keras.Sequential([keras.Input((3,)), *layers])


def _step_of_towers(model: Any, order: Sequence[str]) -> None:
    variables = [v for part in order for v in model.get_layer(part).trainable_variables]
    sizes = {"backbone": -2.0, "head": 1.0}
    values = [sizes[v.path.split("/")[-2]] + np.zeros(v.shape, "float32") for v in variables]
    tensors = [keras.ops.convert_to_tensor(value) for value in values]
    model.optimizer.apply(tensors, variables)


def test_a_saved_model_keeps_apart_what_only_names_tell_apart(tmp_path: Any) -> None:
    model = _equal_towers()
    groups = [kgo.Group("backbone", "backbone", learning_rate_ratio=0.5)]
    model.compile(optimizer=kgo.GroupedOptimizer(groups, model=model), loss="mse")
    _step_of_towers(model, ["head", "backbone"])
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert_same(state_of(restored.optimizer), state_of(model.optimizer))
    for each in (model, restored):
        _step_of_towers(each, ["backbone", "head"])
    for mine, theirs in zip(model.trainable_variables, restored.trainable_variables, strict=True):
        assert numpy_of(mine).tobytes() == numpy_of(theirs).tobytes()


def test_a_saved_model_whose_variables_came_in_another_order_is_refused_without_paths(
    tmp_path: Any,
) -> None:
    model = _equal_towers()
    groups = [kgo.Group("backbone", "**/backbone", learning_rate_ratio=0.5)]
    model.compile(optimizer=kgo.GroupedOptimizer(groups), loss="mse")
    _step_of_towers(model, ["head", "backbone"])
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"in the order .* head/kernel"):
        keras.saving.load_model(tmp_path / "model.keras")


# Compiled, stateless, eager -------------------------------------------------------------------


@every_case
def test_a_compiled_step_gives_the_eager_numbers_and_is_traced_once(
    case: Case, saved: Callable[[Case], Saved]
) -> None:
    model = make_model()
    optimizer = case.optimizer(model)
    variables = by_path(model)
    optimizer.build(model.trainable_variables)
    step, traces = compiled_step(optimizer, list(variables.values()))
    for number in range(4):
        if number == 2:
            halve_what_can_be_set(optimizer)
        step(tensors_of(case.gradients(number), variables))
        assert counters_of(optimizer) == {number + 1}
    assert traces() == 1
    assert_close(weights_of(model), saved(case).next_weights, 5e-6)
    assert_close(state_of(optimizer), saved(case).next_state, 5e-6)


def test_a_compiled_step_follows_a_changed_rate_ratio_and_decay() -> None:
    model = make_model()
    groups = [kgo.Group("backbone", "backbone", learning_rate_ratio=0.5, weight_decay=0.5)]
    optimizer = kgo.GroupedOptimizer(
        groups, model=model, rule="sgd", learning_rate=1.0, exclude_from_decay=()
    )
    variables = by_path(model)
    optimizer.build(model.trainable_variables)
    step, traces = compiled_step(optimizer, list(variables.values()))
    # What is changed, then: the backbone's rate, its decay per step, and the head's rate.
    changes: list[tuple[Callable[[], None], float, float, float]] = [
        (lambda: None, 0.5, 0.25, 1.0),
        (lambda: setattr(optimizer, "learning_rate", 0.5), 0.25, 0.125, 0.5),
        (lambda: optimizer.set_learning_rate_ratio("backbone", 0.25), 0.125, 0.0625, 0.5),
        (lambda: optimizer.set_weight_decay("backbone", 2.0), 0.125, 0.25, 0.5),
        (lambda: optimizer.set_learning_rate_ratio("default", 0.0), 0.125, 0.25, 0.0),
    ]
    ones = {path: np.ones_like(w) for path, w in initial_weights().items()}
    for change, backbone, decay, head in changes:
        change()
        before = weights_of(model)
        step(tensors_of(ones, variables))
        expected = {
            path: w - (backbone + decay * w if path.startswith("backbone") else head)
            for path, w in before.items()
        }
        assert_close(weights_of(model), expected)
    assert traces() == 1


@pytest.mark.backends("jax", "tensorflow", reason="Keras compiles no step on torch")
def test_the_count_of_traces_shows_a_rate_that_is_a_python_number() -> None:
    model = make_model()
    optimizer = kgo.GroupedOptimizer(model=model, rule="sgd", learning_rate=1.0)
    variables = by_path(model)
    optimizer.build(model.trainable_variables)
    step, traces = compiled_step(optimizer, list(variables.values()))
    ones = {path: np.ones_like(w) for path, w in initial_weights().items()}
    for count, rate in enumerate((0.5, 0.25, 0.125), start=1):
        before = weights_of(model)
        step(tensors_of(ones, variables), rate=rate)
        assert_close(weights_of(model), {path: w - rate for path, w in before.items()})
        assert traces() == count


@pytest.mark.backends("jax", "torch", reason="TensorFlow has no stateless_apply")
@one_of_each
def test_a_stateless_step_is_the_eager_one_and_writes_into_nothing(case: Case) -> None:
    model = make_model()
    optimizer = case.optimizer(model)
    optimizer.build(model.trainable_variables)
    variables, own = by_path(model), optimizer.variables
    # Keras takes variables as well as their values.
    state, weights = list(own), list(variables.values())
    for step in range(3):
        values = tensors_of(case.gradients(step), variables)
        untouched = [*state, *values, *weights, *(v.value for v in [*variables.values(), *own])]
        before = [numpy_of(value) for value in untouched]
        new_weights, new_state = optimizer.stateless_apply(state, values, weights)
        for value, old in zip(untouched, before, strict=True):
            assert numpy_of(value).tobytes() == old.tobytes()
        weights, state = new_weights, new_state
        assert_same(
            dict(zip(variables, map(numpy_of, weights), strict=True)), ten_steps(case)[step]
        )


# Dtypes ---------------------------------------------------------------------------------------

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "bfloat16") for case in CASES), *((case, "float16") for case in ONE_OF_EACH)],
    ids=lambda value: getattr(value, "name", value),
)
def test_weights_slots_and_anchors_keep_their_dtype(
    case: Case, dtype: str, backend: str, request: Any
) -> None:
    fault = case.low_precision_faults.get((backend, dtype))
    if fault:
        request.applymarker(pytest.mark.xfail(reason=fault, strict=True))
    model = make_model(dtype)
    groups = [kgo.Group("default", **case.group_options("backbone", 1.0))]
    optimizer = case.grouped(groups, model=model) if case.keras_class else case.optimizer(model)
    with pytest.warns(UserWarning, match="Weights in float16/bfloat16 lose"):
        optimizer.build(model.trainable_variables)
    of_weights = {tuple(v.shape) for v in model.trainable_variables} - {()}
    slots = [v for v in optimizer.variables if tuple(v.shape) in of_weights]
    dtypes = [keras.backend.standardize_dtype(v.dtype) for v in optimizer.variables]
    take_step(optimizer, model, case.gradients(0))
    assert {keras.backend.standardize_dtype(v.dtype) for v in model.trainable_variables} == {dtype}
    assert {keras.backend.standardize_dtype(v.dtype) for v in slots} <= {dtype}
    assert [keras.backend.standardize_dtype(v.dtype) for v in optimizer.variables] == dtypes
    if case.keras_class:
        theirs = make_model(dtype)
        take_step(case.plain(1.0), theirs, case.gradients(0))
        mine, expected = (
            {path: w.astype("float32") for path, w in weights_of(each).items()}
            for each in (model, theirs)
        )
        assert_close(mine, expected, 0.0 if case.exact else 16 * ROUNDING[dtype])


@one_of_each
def test_float32_weights_have_float32_slots_and_anchors(
    case: Case, saved: Callable[[Case], Saved]
) -> None:
    state = saved(case).next_state
    assert {w.dtype.name for w in ten_steps(case)[-1].values()} == {"float32"}
    floats = [value for value in state.values() if np.issubdtype(value.dtype, np.floating)]
    assert {value.dtype.name for value in floats} <= {"float32"}
    assert all(np.all(np.isfinite(value)) for value in state.values())


# Missing, frozen, constrained, sparse, overwritten --------------------------------------------


@every_case
def test_what_has_no_gradient_rests_while_the_others_go_on_and_one_counter_counts(
    case: Case,
) -> None:
    model = make_model()
    optimizer = case.optimizer(model)
    steps: list[Any] = [case.gradients(step) for step in range(4)]
    steps[1] = without(steps[1], "head/bias")
    steps[2] = without(steps[2], *(path for path in PATHS if path.startswith("backbone")))
    optimizer.build(model.trainable_variables)
    assert counters_of(optimizer) == {0}
    for number, given in enumerate(steps):
        before = weights_of(model)
        missing = [path for path, value in given.items() if value is None]
        with warnings.catch_warnings(record=True) as said:
            warnings.filterwarnings("always", message="No gradient for")
            take_step(optimizer, model, given)
        assert [", ".join(missing) in str(each.message) for each in said] == [True] * bool(missing)
        after = weights_of(model)
        assert_same({p: after[p] for p in missing}, {p: before[p] for p in missing})
        assert counters_of(optimizer) == {number + 1}
    assert_close(weights_of(model), case.expected_weights(steps), case.tolerance)


@either_way(RULES)
@pytest.mark.usefixtures("missing_is_expected")
def test_a_resting_group_is_to_plain_keras_a_few_missing_gradients(case: Case, fused: bool) -> None:
    ours, theirs = make_model(), make_model()
    optimizer = case.optimizer(ours, ratios=dict.fromkeys(PARTS, 1.0), fused=fused)
    plain = case.plain(1.0)
    for step in range(2):
        given: Any = case.gradients(step)
        if step == 0:
            given = without(given, *(p for p in PATHS if p.startswith("backbone")))
        take_step(optimizer, ours, given)
        take_step(plain, theirs, given)
    equality(case, fused)(weights_of(ours), weights_of(theirs))


@one_of_each_rule
def test_variables_left_out_of_a_step_rest_and_the_counter_is_still_one(case: Case) -> None:
    model = make_model()
    optimizer = case.optimizer(model)
    optimizer.build(model.trainable_variables)
    for number, part in enumerate(PARTS):
        before = weights_of(model)
        take_step(optimizer, model, case.gradients(number), parts=[part])
        after = weights_of(model)
        assert [p for p in PATHS if after[p].tobytes() != before[p].tobytes()] == [
            p for p in PATHS if p.startswith(part)
        ]
        assert counters_of(optimizer) == {number + 1}


@rows([case for case in RULES if case.name in ("adam", "nadam", "lookahead")])
def test_a_step_without_any_gradient_is_refused_and_counts_for_nothing(case: Case) -> None:
    model = make_model()
    optimizer = case.optimizer(model)
    optimizer.build(model.trainable_variables)
    before = state_of(optimizer)
    with pytest.raises(ValueError, match="At least one gradient must be given"):
        take_step(optimizer, model, dict.fromkeys(PATHS))
    assert_same(weights_of(model), initial_weights())
    assert_same(state_of(optimizer), before)
    assert counters_of(optimizer) == {0}


@one_of_each
def test_a_frozen_group_is_untouched_and_owns_nothing(case: Case) -> None:
    model = make_model()
    optimizer = case.optimizer(model, frozen=["backbone"])
    steps = [case.gradients(step) for step in range(2)]
    for number, given in enumerate(steps):
        take_step(optimizer, model, given)
        assert counters_of(optimizer) == {number + 1}
    frozen = {p: w for p, w in weights_of(model).items() if p.startswith("backbone")}
    assert_same(frozen, {p: initial_weights()[p] for p in frozen})
    assert not [key for key in state_of(optimizer) if "backbone" in key]
    assert not [v.path for v in optimizer.variables if "backbone" in v.path]
    assert {v.state_bytes for v in optimizer.plan["backbone"].variables} == {0}
    # Out of the norm, too.
    expected = case.expected_weights(steps, frozen=["backbone"])
    assert_close(weights_of(model), expected, case.tolerance)


@one_of_each
def test_constraints_act_after_the_step(case: Case) -> None:
    model = make_model()
    constrained = [path for path in PATHS if not path.endswith("bias")]
    for path in constrained:
        by_path(model)[path].constraint = keras.constraints.NonNeg()
    optimizer = case.optimizer(model)
    steps = [case.gradients(step) for step in range(2)]
    for given in steps:
        take_step(optimizer, model, given)
        weights = weights_of(model)
        assert all(np.all(weights[path] >= 0) for path in constrained)
    nonnegative = dict.fromkeys(constrained, lambda w: np.maximum(w, 0.0))
    expected = case.expected_weights(steps, constraints=nonnegative)
    assert_close(weights_of(model), expected, case.tolerance)


def sparse(values: np.ndarray, rows: np.ndarray, shape: tuple[int, ...]) -> Any:
    """A sparse gradient as the backend knows it."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(values, rows, tf.constant(shape))
    from jax.experimental.sparse import BCOO

    return BCOO((values, rows[:, None]), shape=shape)


@pytest.mark.backends("tensorflow", "jax", reason="Keras has no sparse tensors of torch")
@one_of_each
def test_sparse_gradients_with_repeated_rows_count_as_their_sum(case: Case) -> None:
    model = make_model()
    optimizer = case.optimizer(model)
    variables, rows = by_path(model), np.array([2, 0, 2])
    steps = []
    for step in range(2):
        dense, given = case.gradients(step), case.gradients(step)
        for path in ("backbone/kernel", "head/kernel"):
            dense[path] = np.zeros_like(given[path])
            np.add.at(dense[path], rows, given[path][:3])
        values = dict(zip(variables, tensors_of(given, variables), strict=True))
        values |= {
            path: sparse(given[path][:3], rows, given[path].shape)
            for path in ("backbone/kernel", "head/kernel")
        }
        optimizer.apply(list(values.values()), list(variables.values()))
        steps.append(dense)
    assert_close(weights_of(model), case.expected_weights(steps), case.tolerance)


@one_of_each
def test_a_variable_that_its_gradient_overwrites_takes_it_as_it_is(case: Case) -> None:
    model = make_model()
    by_path(model)["head/bias"].overwrite_with_gradient = True
    optimizer = case.optimizer(model)
    steps: list[Any] = []
    for step in range(2):
        given = {**case.gradients(step), "head/bias": np.full(3, 100.0 + step, "float32")}
        take_step(optimizer, model, given)
        steps.append(without(given, "head/bias"))
        assert_same({"": weights_of(model)["head/bias"]}, {"": given["head/bias"]})
        assert counters_of(optimizer) == {step + 1}
    assert not [key for key in state_of(optimizer) if "head/bias" in key]
    # To clipping and decay it is as if it had no gradient.
    expected = case.expected_weights(steps) | {"head/bias": given["head/bias"]}
    assert_close(weights_of(model), expected, case.tolerance)


@either_way(ONE_OF_EACH)
def test_a_group_may_hold_a_scalar_alone(case: Case, fused: bool) -> None:
    model, alone = make_model(), make_model()
    groups = [kgo.Group("scalar", kgo.variable_name("gain"))]
    optimizer = case.grouped(groups, model=model, fused=fused)
    plain = case.plain(1.0)
    for step in range(2):
        given = case.gradients(step)
        take_step(optimizer, model, given)
        gradient = keras.ops.convert_to_tensor(given["head/gain"])
        plain.apply([gradient], [by_path(alone)["head/gain"]])
    mine, theirs = weights_of(model)["head/gain"], weights_of(alone)["head/gain"]
    equality(case, fused)({"head/gain": mine}, {"head/gain": theirs})
