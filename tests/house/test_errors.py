"""Bad input, before anything is trained: what is wrong, where, what was received, what to do."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
from bad_calls import ALL_CALLS
from bad_declarations import GROUPS, NUMBERS, RATES, SELECTORS
from bad_input import SGD, World, backbone_and_head, head, pattern
from bad_plans import ANCHORS, PLANS
from bad_rules import RULES
from models import numpy_of

from keras_groupopt import Group, GroupedOptimizer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [*RULES, *NUMBERS, *RATES, *GROUPS, *SELECTORS, *ANCHORS, *PLANS, *ALL_CALLS],
)
def test_bad_input_is_refused_with_a_reason_and_changes_nothing(world, call, error, text):
    before = world.state()
    with pytest.raises(error) as caught:
        call(world)
    assert type(caught.value) is error
    assert pattern(text).search(str(caught.value)), str(caught.value)
    for old, new in zip(before, world.state(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_after_all_that_the_optimizers_still_train(world):
    for optimizer in (world.built, world.scheduled):
        before = [numpy_of(v) for v in world.variables]
        optimizer.apply(world.gradients, world.variables)
        moved = [
            not np.array_equal(a, numpy_of(v)) for a, v in zip(before, world.variables, strict=True)
        ]
        # The bias of the head is frozen in the first.
        assert moved == [True] * 5 + [optimizer is world.scheduled]


# Repairs ---------------------------------------------------------------------------------------


def test_a_build_that_failed_can_be_done_again_when_the_reason_is_gone(world, tmp_path):
    path = tmp_path / "late.keras"
    optimizer, new = (
        GroupedOptimizer([head(weight_decay=0.5, anchor=anchor)], model=world.model, rule="sgd")
        for anchor in (path, "initial")
    )
    with pytest.raises(FileNotFoundError, match=r"late\.keras"):
        optimizer.build(world.variables)
    world.model.save(path)
    for each in (optimizer, new):
        each.build(world.variables)
    assert len(optimizer.variables) == len(new.variables)
    assert float(optimizer.anchor_drift()["head"]) == 0.0


def test_an_instance_refused_in_one_optimizer_serves_another():
    model = backbone_and_head()
    instance = SGD(0.1)
    variables = model.trainable_variables
    failing = head(rule=instance, weight_decay=0.1, anchor=[])
    with pytest.raises(ValueError, match="one array per variable"):
        GroupedOptimizer([failing], model=model).build(variables)
    GroupedOptimizer([head(rule=instance)], model=model).build(variables)


def test_an_optimizer_whose_model_was_deleted_can_be_bound_to_the_one_that_is_trained():
    optimizer = GroupedOptimizer({"head": "head"}, model=backbone_and_head())
    gc.collect()
    model = backbone_and_head()
    optimizer.bind(model)
    optimizer.build(model.trainable_variables)
    assert [group.name for group in optimizer.plan.groups] == ["head", "default"]


def test_a_built_optimizer_outlives_its_model():
    model = backbone_and_head()
    optimizer = GroupedOptimizer({"head": "head"}, model=model, rule="sgd", learning_rate=1.0)
    variables = model.trainable_variables
    optimizer.build(variables)
    del model
    gc.collect()
    before = numpy_of(variables[-1])
    optimizer.apply([keras.ops.ones(v.shape) for v in variables], variables)
    np.testing.assert_allclose(numpy_of(variables[-1]), before - 1.0)
    assert optimizer.get_config()["plan"][-1]["path"] == "head/bias"
    assert [group.name for group in optimizer.plan.groups] == ["head", "default"]


# Anchors that a config does not hold -----------------------------------------------------------


def test_given_anchors_are_unknown_after_from_config_until_they_are_given_or_loaded():
    model = backbone_and_head()
    group = Group("head", "head", weight_decay=0.5, anchor={"head/kernel": np.ones((3, 2))})
    optimizer = GroupedOptimizer([group], model=model, rule="sgd", learning_rate=1.0)
    copy = GroupedOptimizer.from_config(optimizer.get_config())
    variables = model.trainable_variables
    for each in (optimizer, copy):
        each.build(variables)
    zeros = [keras.ops.zeros(v.shape) for v in variables]
    before = [numpy_of(v) for v in variables]
    message = r'anchors of group "head" are not known.*load the saved state, or pass `anchor=`'
    with pytest.raises(ValueError, match=message):
        copy.apply(zeros, variables)
    for old, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(numpy_of(variable), old)
    assert int(copy.iterations) == 0
    copy.set_weights([numpy_of(v) for v in optimizer.variables])
    copy.apply(zeros, variables)
    kernel = model.get_layer("head").kernel
    np.testing.assert_allclose(numpy_of(kernel), (before[4] + 1.0) / 2, rtol=1e-6)


# Through fit -----------------------------------------------------------------------------------


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("groups", "options", "text"),
    [
        ({"a": "haed"}, {}, "Nearest paths: 'head'"),
        ({"a": "**", "b": "head"}, {}, "must not overlap"),
        ({"a": "head"}, {"unclaimed": "error"}, "no group for backbone/dense/kernel"),
        ([Group("a", "head", weight_decay=0.1, anchor=[])], {}, "0 arrays"),
    ],
    ids=["no match", "overlap", "unclaimed", "anchor"],
)
def test_fit_fails_before_its_first_step_and_the_model_can_be_compiled_again(groups, options, text):
    model = backbone_and_head()
    before = model.get_weights()
    x, y = np.eye(4, 3, dtype="float32"), np.ones((4, 2), "float32")
    model.compile(optimizer=GroupedOptimizer(groups, model=model, **options), loss="mse")
    with pytest.raises(ValueError, match=text):
        model.fit(x, y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    model.compile(optimizer=GroupedOptimizer({"head": "head"}, model=model), loss="mse")
    model.fit(x, y, verbose=0)
    assert not np.array_equal(model.get_weights()[-1], before[-1])


# What is accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [1, np.int32(1), np.float32(1), np.float64(1), np.array(1.0), np.array(1)], ids=repr
)
def test_whole_numbers_and_numpy_scalars_are_numbers(number):
    group = Group("head", "head", learning_rate_ratio=number, weight_decay=number, clipnorm=number)
    optimizer = GroupedOptimizer(
        [group], learning_rate=number, weight_decay=number, global_clipnorm=number
    )
    assert float(optimizer.learning_rate) == 1.0
    optimizer.learning_rate = 2 * number
    assert float(optimizer.learning_rate) == 2.0
    for value in (group.learning_rate_ratio, group.weight_decay, group.clipnorm):
        assert type(value) is float
        assert value == 1.0


def test_groups_may_be_missing_empty_or_a_single_one():
    for groups in (None, (), [], {}, head(), [head()], {"head": head()}, {"head": "head"}):
        GroupedOptimizer(groups)
