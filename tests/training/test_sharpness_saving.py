"""Models with a gradient rule in files and copies, and beside other models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import keras
import models
import numpy as np
import pytest
import saving_models
from comparing import state_of
from saving_models import X, Y, assert_equal, load, save
from sharpness_cases import (
    RULES,
    half_square,
    network,
    rule_of,
    sgd,
    step_on_weights,
    values_of,
    weights_model,
)

import keras_groupopt as kgo

each_rule = pytest.mark.parametrize("name", RULES)


def compiled(rule: Any, optimizer: Any = None, model: Any = None, **how: Any) -> Any:
    """The network with a rule or none, and with the optimizer that has one of everything."""
    model = model or network()
    model = model if rule is None else kgo.sharpness_aware(model, rule)
    how = {"loss": "mse", "run_eagerly": True} | how
    model.compile(optimizer=optimizer or saving_models.optimizer(model), **how)
    return model


def fit(model: Any) -> Any:
    """Three steps: an odd number, so that LookSAM is between two of its own."""
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model


# A run that goes on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "optimizer"),
    [
        ("ASAM", "run.keras", "adam"),
        ("LookSAM", "run.keras", None),
        ("LookSAM", "run.weights.h5", None),
        ("own", "run.keras", None),
    ],
)
def test_a_run_from_a_file_goes_on_as_if_it_had_not_stopped(name, file, optimizer, tmp_path):
    """With a rho that was set on the way, excluded variables, and LookSAM's direction."""

    def make() -> Any:
        model = network()
        rule = rule_of(name, 0.2, exclude_from_perturbation=model.get_layer("head"))
        return compiled(rule, optimizer, model, run_eagerly=False)

    model = fit(make())
    model.gradient_rule.rho = 0.4
    resumed = load(save(model, tmp_path / file), make)
    assert type(resumed) is type(model)
    assert_equal(fit(resumed), fit(model))
    assert repr(resumed.gradient_rule) == repr(model.gradient_rule)
    assert resumed.gradient_rule.rho == 0.4


def test_state_of_a_rule_is_state_of_the_optimizer():
    rule = kgo.LookSAM(0.2, exclude_from_perturbation="body/dense")
    state = state_of(fit(compiled(rule)).optimizer)
    own = {k.replace("|", "/"): v for k, v in state.items() if "@gradient_rule:" in k}
    assert own.pop("@gradient_rule:rho") == pytest.approx(0.2)
    assert own.pop("@gradient_rule:alpha") == pytest.approx(0.7)
    assert set(own) == {
        f"{owner}/{name}/@gradient_rule:direction"
        for owner in ("backbone/body/first", "head/head")
        for name in ("kernel", "bias")
    }
    assert all(np.any(value) for value in own.values())


@pytest.mark.parametrize(("late", "expected"), [(False, 0.4), (True, 0.3)])
def test_what_is_set_or_loaded_last_counts_where_the_optimizer_is_not_built(
    late, expected, tmp_path
):
    model = saving_models.train(compiled(kgo.SAM(0.2)))
    model.gradient_rule.rho = 0.4
    path = save(model, tmp_path / "run.weights.h5")
    other = compiled(kgo.SAM(0.2))
    steps = [
        lambda: setattr(other.gradient_rule, "rho", 0.3),
        lambda: other.load_weights(path),
    ]
    for step in reversed(steps) if late else steps:
        step()
    assert fit(other).gradient_rule.rho == expected


@pytest.mark.parametrize("way", ["optimizer", "file"])
@pytest.mark.parametrize(
    ("written", "read"),
    [(None, "LookSAM"), ("LookSAM", None), *(("SAM", name) for name in (None, *RULES))],
)
def test_another_rule_goes_on_with_all_state_but_that_of_the_rule(
    written, read, way, tmp_path, caplog
):
    model = saving_models.train(compiled(written and rule_of(written, 0.2)))
    if written:
        model.gradient_rule.rho = 0.4
    before = state_of(model.optimizer)
    kept = {key for key in before if "@gradient_rule" not in key}

    def make(*shared: Any) -> Any:
        # Declared otherwise, if it is the same rule.
        return compiled(read and rule_of(read, 0.3), *shared)

    if way == "optimizer":
        other = make(model.optimizer, keras.Model(model.input, model.output))
    else:
        other = load(save(model, tmp_path / "run.weights.h5"), make)
        other.optimizer.build(other.trainable_variables)
    after = state_of(other.optimizer)
    assert kept <= set(after)
    for key in kept:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    np.testing.assert_equal(other.get_weights(), model.get_weights())
    if read:
        assert other.gradient_rule.rho == 0.3
        assert after["@gradient_rule:rho"] == pytest.approx(0.3)
    assert read == written or "gradient_rule" not in caplog.text
    assert int(fit(other).optimizer.iterations) == 6
    if read == "LookSAM":
        direction = state_of(other.optimizer)["head|head|kernel|@gradient_rule:direction"]
        # Of the steps 3, 4 and 5 the second is one of its own.
        assert np.any(direction)


def test_a_rebuilt_optimizer_keeps_the_state_of_the_rule():
    model = network()
    model.get_layer("body").trainable = False
    rule = kgo.LookSAM(0.2, every=2)
    model = fit(compiled(rule, kgo.GroupedOptimizer(model=model, rule="adam"), model))
    model.gradient_rule.rho = 0.4
    before = state_of(model.optimizer)
    model.get_layer("body").trainable = True
    model.optimizer.rebuild(model)
    after = state_of(model.optimizer)
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    new = "default|body|first|kernel|@gradient_rule:direction"
    assert not np.any(after[new])
    # The next step of LookSAM's own gives the new slots their values.
    assert np.any(state_of(fit(model).optimizer)[new])
    assert model.gradient_rule.rho == 0.4


def test_state_is_kept_where_a_layout_matches_in_part(tmp_path):
    other = compiled(kgo.LookSAM(0.2, every=2, exclude_from_perturbation="head"))
    model = saving_models.train(compiled(kgo.LookSAM(0.2, every=2)))
    with kgo.resuming(strict=False) as report:
        other.load_weights(save(model, tmp_path / "run.weights.h5"))
        other.optimizer.build(other.trainable_variables)
    assert "backbone/body/first/kernel/@gradient_rule:direction" in report.kept
    assert not report.fresh


# Copies -------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("kind", ["nested", "sequential"])
def test_a_config_has_the_rule_and_a_clone_a_rule_of_its_own(kind, name):
    rule = rule_of(name, keras.optimizers.schedules.CosineDecay(0.2, 9))
    model = kgo.sharpness_aware(network(kind), rule)
    other = type(model).from_config(model.get_config())
    assert type(other.gradient_rule) is type(rule)
    assert other.gradient_rule.get_config() == rule.get_config()
    assert other.gradient_rule is not rule
    clone = kgo.sharpness_aware(keras.models.clone_model(model), rule_of(name, 0.2))
    assert clone.gradient_rule.rho == 0.2
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(X, verbose=0), model.predict(X, verbose=0))
    assert not {id(v) for v in clone.variables} & {id(v) for v in model.variables}


def test_selectors_of_a_rule_are_saved_as_what_they_choose():
    model = network()
    rule = kgo.ASAM(
        0.2,
        exclude_from_perturbation=model.get_layer("head"),
        adaptive_on=kgo.path("body/**/kernel") & ~kgo.variables(model.trainable_variables[0]),
    )
    model = kgo.sharpness_aware(model, rule)
    other = kgo.sharpness_aware(network(), kgo.ASAM.from_config(rule.get_config()))
    for each in (model, other):
        each.compile(optimizer=sgd(each, 0.1), loss="mse", run_eagerly=True)
        fit(each)
    np.testing.assert_equal(other.get_weights(), model.get_weights())


# A rule before and after its model is compiled ----------------------------------------------------


@pytest.mark.parametrize("make", [sgd, lambda model: keras.optimizers.SGD(1.0)])
def test_a_rho_that_is_set_before_the_optimizer_is_built_counts(make):
    model = kgo.sharpness_aware(weights_model(a=3.0, b=4.0), kgo.SAM(0.1))
    model.compile(optimizer=make(model), loss=half_square)
    model.gradient_rule.rho = 0.5
    assert model.gradient_rule.rho == 0.5
    step_on_weights(model)
    np.testing.assert_allclose(values_of(model), [-0.3, -0.4], rtol=1e-5)
    assert model.gradient_rule.rho == 0.5


def test_selectors_of_a_rule_may_be_set_until_the_model_is_compiled():
    rule = kgo.ASAM(0.2)
    rule.exclude_from_perturbation = "head"
    rule.adaptive_on = "a kernel"
    given = kgo.ASAM(0.2, exclude_from_perturbation="head", adaptive_on="a kernel")
    assert rule.get_config() == given.get_config()
    with pytest.raises(TypeError, match="In ASAM: `adaptive_on` must be"):
        rule.adaptive_on = 3
    assert rule.get_config() == given.get_config()


def test_a_copy_of_a_rule_has_its_numbers_and_belongs_to_no_model():
    model = fit(compiled(kgo.LookSAM(0.2, every=2)))
    model.gradient_rule.rho = 0.4
    for duplicate in (copy.copy, copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))):
        rule = duplicate(model.gradient_rule)
        assert repr(rule) == "LookSAM(rho=0.4, alpha=0.7, every=2)"
        rule.rho = 0.3
        assert model.gradient_rule.rho == 0.4
        assert saving_models.train(compiled(rule), 1).gradient_rule.rho == 0.3


@pytest.mark.parametrize("train", ["fit", "train_on_batch"])
def test_an_optimizer_that_went_to_another_rule_is_refused_before_anything_is_lost(train):
    plain = weights_model(a=3.0)
    first, second = (kgo.sharpness_aware(plain, kgo.SAM(rho)) for rho in (0.1, 0.2))
    optimizer = sgd(plain, 0.1)
    for model in (first, second):
        model.compile(optimizer=optimizer, loss=half_square)
        step_on_weights(model)
    before = values_of(plain)
    with pytest.raises(ValueError, match="compiled with another model since"):
        getattr(first, train)(np.ones((1, 1)), np.ones((1, 1)))
    assert values_of(plain) == before
    step_on_weights(second)
    first.compile(optimizer=optimizer, loss=half_square)
    step_on_weights(first)
    assert int(optimizer.iterations) == 4


def shared(eagerly: bool) -> keras.Model:
    """Trains a plain model, and one with a rule, in turns with one optimizer."""
    plain = network()
    optimizer = kgo.GroupedOptimizer(model=plain, rule="adam", learning_rate=0.01)
    fit(compiled(None, optimizer, plain, run_eagerly=eagerly))
    other = compiled(kgo.LookSAM(0.5, every=2), optimizer, plain, run_eagerly=eagerly)
    for model in (other, plain, other, plain):
        fit(model)
    return plain


def test_a_model_that_was_compiled_before_goes_on_with_the_moments_of_a_shared_optimizer():
    compiled_step, eager = shared(False), shared(True)
    assert int(compiled_step.optimizer.iterations) == 15
    models.assert_equal(compiled_step.get_weights(), eager.get_weights(), rtol=1e-4, atol=1e-6)
