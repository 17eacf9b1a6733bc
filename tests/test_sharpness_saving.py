"""Models with a gradient rule in files, beside other models, and wrong ways to use them."""

from __future__ import annotations

import copy
import pathlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import saving_models
from comparing import state_of
from keras import ops
from saving_models import X, Y, assert_equal
from sharpness_cases import (
    RULES,
    Against,
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


def compiled(rule: Any, optimizer: Any = None, model: Any = None) -> Any:
    """The network with a rule, and with the optimizer that has one of everything."""
    model = kgo.sharpness_aware(model or network(), rule)
    model.compile(optimizer=optimizer or saving_models.optimizer(model), loss="mse")
    return model


def fit(model: Any) -> Any:
    """Three steps: an odd number, so that LookSAM is between two of its own."""
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model


def again(path: pathlib.Path, make: Callable[[], Any]) -> Any:
    if path.suffix == ".keras":
        return keras.saving.load_model(path)
    model = make()
    model.load_weights(path)
    return model


# A run that goes on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *((name, "run.keras") for name in RULES),
        ("SAM", "run.weights.h5"),
        ("LookSAM", "run.weights.h5"),
    ],
)
def test_a_run_from_a_file_goes_on_as_if_it_had_not_stopped(name, file, tmp_path):
    """With a rho that was set on the way, excluded variables, and LookSAM's direction."""

    def make() -> Any:
        model = network()
        excluded = model.get_layer("head")
        return compiled(rule_of(name, 0.2, exclude_from_perturbation=excluded), model=model)

    model = fit(make())
    model.gradient_rule.rho = 0.4
    path = tmp_path / file
    model.save(path) if path.suffix == ".keras" else model.save_weights(path)
    resumed = again(path, make)
    assert type(resumed) is type(model)
    assert_equal(fit(resumed), fit(model))
    assert repr(resumed.gradient_rule) == repr(model.gradient_rule)
    assert resumed.gradient_rule.rho == 0.4


def test_a_file_of_a_model_with_a_plain_optimizer_has_the_rule_and_its_present_rho(tmp_path):
    model = fit(compiled(kgo.ASAM(0.2), "adam"))
    model.gradient_rule.rho = 0.4
    model.save(tmp_path / "run.keras")
    resumed = keras.saving.load_model(tmp_path / "run.keras")
    assert repr(resumed.gradient_rule) == repr(model.gradient_rule)
    assert_equal(fit(resumed), fit(model))


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


def test_a_rule_in_a_file_tells_what_the_code_does_not_declare_alike(tmp_path):
    model = fit(compiled(kgo.SAM(0.2)))
    model.gradient_rule.rho = 0.4
    model.save_weights(tmp_path / "run.weights.h5")
    other = compiled(kgo.SAM(0.3))
    other.load_weights(tmp_path / "run.weights.h5")
    other.optimizer.build(other.trainable_variables)
    assert other.gradient_rule.rho == 0.3


@pytest.mark.parametrize("way", ["optimizer", "file"])
def test_the_numbers_of_another_rule_are_not_taken_for_those_of_this_one(way, tmp_path, caplog):
    model = fit(compiled(kgo.SAM(0.2)))
    model.gradient_rule.rho = 0.4
    if way == "optimizer":
        other = kgo.sharpness_aware(model, kgo.ASAM(0.2))
        other.compile(optimizer=model.optimizer, loss="mse")
    else:
        model.save_weights(tmp_path / "run.weights.h5")
        other = again(tmp_path / "run.weights.h5", lambda: compiled(kgo.ASAM(0.2)))
        other.optimizer.build(other.trainable_variables)
    assert other.gradient_rule.rho == 0.2
    assert "gradient_rule" not in caplog.text


PLAIN: dict[str, Callable[[], Any]] = {
    "plain": lambda: saving_models.compiled(),
    "SAM": lambda: compiled(kgo.SAM(0.2)),
    "LookSAM": lambda: compiled(kgo.LookSAM(0.2, every=2)),
}


@pytest.mark.parametrize(
    ("written", "read"),
    [("plain", "LookSAM"), ("SAM", "plain"), ("SAM", "LookSAM"), ("LookSAM", "plain")],
)
def test_weights_files_fit_models_with_other_rules_and_with_none(written, read, tmp_path):
    model = saving_models.train(PLAIN[written]())
    model.save_weights(tmp_path / "run.weights.h5")
    other = PLAIN[read]()
    other.load_weights(tmp_path / "run.weights.h5")
    other.optimizer.build(other.trainable_variables)
    for value, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    found = state_of(other.optimizer)
    for key, value in state_of(model.optimizer).items():
        if "@gradient_rule" not in key:
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert int(fit(other).optimizer.iterations) == 6


@each_rule
def test_the_optimizer_of_one_model_goes_on_in_another_with_its_moments(name):
    model = saving_models.train(compiled(kgo.SAM(0.2)))
    before = state_of(model.optimizer)
    other = kgo.sharpness_aware(model, rule_of(name, 0.3))
    other.compile(optimizer=model.optimizer, loss="mse")
    after = state_of(other.optimizer)
    kept = {key for key in before if "@gradient_rule" not in key}
    assert kept < set(after)
    for key in kept:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    assert after["@gradient_rule:rho"] == pytest.approx(0.3)
    if name == "LookSAM":
        assert int(fit(other).optimizer.iterations) == 6
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
    fit(compiled(kgo.LookSAM(0.2, every=2))).save_weights(tmp_path / "run.weights.h5")
    other = compiled(kgo.LookSAM(0.2, every=2, exclude_from_perturbation="head"))
    with kgo.resuming(strict=False) as report:
        other.load_weights(tmp_path / "run.weights.h5")
        other.optimizer.build(other.trainable_variables)
    assert "backbone/body/first/kernel/@gradient_rule:direction" in report.kept
    assert not report.fresh


# Copies -------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("kind", ["nested", "sequential"])
def test_a_config_has_the_rule(kind, name):
    rule = rule_of(name, keras.optimizers.schedules.CosineDecay(0.2, 9))
    model = kgo.sharpness_aware(network(kind), rule)
    other = type(model).from_config(model.get_config())
    assert type(other.gradient_rule) is type(rule)
    assert other.gradient_rule.get_config() == rule.get_config()
    assert other.gradient_rule is not rule


@pytest.mark.parametrize("kind", ["nested", "sequential"])
def test_a_clone_gets_a_rule_of_its_own(kind):
    model = kgo.sharpness_aware(network(kind), kgo.SAM(0.2))
    clone = kgo.sharpness_aware(keras.models.clone_model(model), kgo.SAM(0.2))
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
        each.compile(optimizer=sgd(each, 0.1), loss="mse")
        fit(each)
    for value, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


# What is refused ----------------------------------------------------------------------------------


class Two(kgo.GradientRule):
    """Returns another number of gradients, or takes another number of perturbations."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def gradients(self, batch: kgo.Batch) -> Any:
        zeros = [ops.zeros_like(gradient) for gradient in batch.gradients]
        return batch.gradients_at(zeros)[1:] if self.late else batch.gradients_at(zeros[1:])


def in_use() -> Any:
    rule = kgo.SAM(0.1)
    rule.kept = kgo.sharpness_aware(weights_model(a=1.0), rule)
    return rule


def with_schedule(rule: Any) -> None:
    rule.rho = keras.optimizers.schedules.CosineDecay(0.1, 9)


def set_in(rule: Any, change: Callable[[Any], None]) -> None:
    model = kgo.sharpness_aware(weights_model(a=3.0), rule)
    model.compile(optimizer=sgd(model), loss=half_square)
    step_on_weights(model)
    change(rule)


def set_rho(value: Any) -> Callable[[Any], None]:
    return lambda rule: setattr(rule, "rho", value)


def set_rule(rule: Any) -> None:
    rule._attachment().model.gradient_rule = kgo.SAM(0.1)


def trained(rule: Any, optimizer: Any = None) -> None:
    model = kgo.sharpness_aware(weights_model(a=3.0, b=4.0), rule)
    model.compile(optimizer=optimizer or sgd(model), loss=half_square, run_eagerly=True)
    step_on_weights(model)


MODEL = {"a": 1.0}
SCHEDULE = keras.optimizers.schedules.CosineDecay(0.1, 9)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a rule of two models": (
        lambda: kgo.sharpness_aware(weights_model(**MODEL), in_use()),
        ValueError,
        r"must belong to one model\. Received: SAM\(rho=0\.1\) of the model",
    ),
    "a class as rule": (
        lambda: kgo.sharpness_aware(weights_model(**MODEL), kgo.SAM),
        TypeError,
        r"must be a `kgo\.GradientRule`\. Received: .*Pass an instance, such as `SAM\(\.\.\.\)`",
    ),
    "a number as rule": (
        lambda: kgo.SharpnessAwareSequential([keras.Input((1,))], gradient_rule=0.05),
        TypeError,
        r"must be a `kgo\.GradientRule`\. Received: gradient_rule=0\.05 of type float",
    ),
    "a negative rho": (lambda: kgo.SAM(-0.1), ValueError, r"`rho` must be .*Received: rho=-0\.1"),
    "a rho that is not finite": (lambda: kgo.GSAM(float("nan")), ValueError, r"`rho` must be"),
    "a text as rho": (lambda: kgo.SAM("0.1"), TypeError, r"`rho` must be .*Received: rho='0\.1'"),
    "no rho": (lambda: kgo.ASAM(None), TypeError, r"`rho` must be a number.*rho=None in ASAM"),
    "a negative alpha": (lambda: kgo.GSAM(alpha=-1), ValueError, r"`alpha` must be"),
    "a negative eta": (lambda: kgo.ASAM(eta=-1), ValueError, r"`eta` must be"),
    "an interval of none": (lambda: kgo.LookSAM(every=0), ValueError, r"`every` must be"),
    "an interval that is no integer": (lambda: kgo.LookSAM(every=1.5), TypeError, r"`every` must"),
    "a number as selector": (
        lambda: kgo.SAM(exclude_from_perturbation=3),
        TypeError,
        r"In SAM: `exclude_from_perturbation` must be",
    ),
    "a selector that chooses nothing": (
        lambda: trained(kgo.SAM(exclude_from_perturbation="hed")),
        ValueError,
        r"In `exclude_from_perturbation` of SAM: .*hed",
    ),
    "a selector that chooses everything": (
        lambda: trained(kgo.LookSAM(exclude_from_perturbation=kgo.everything())),
        ValueError,
        r"must have a variable to perturb\. Received: exclude_from_perturbation=everything\(\)",
    ),
    "a schedule set while training": (
        lambda: set_in(kgo.SAM(0.1), with_schedule),
        TypeError,
        r"`rho` must be a number once the model is compiled.*kgo\.sharpness_aware",
    ),
    "a number in a schedule's place": (
        lambda: set_in(kgo.SAM(SCHEDULE), set_rho(0.1)),
        TypeError,
        r"`rho` of SAM is a schedule and cannot be set\. Received: 0\.1",
    ),
    "a negative rho set while training": (
        lambda: set_in(kgo.SAM(0.1), set_rho(-1.0)),
        ValueError,
        r"`rho` must be",
    ),
    "a rule set in a compiled model": (
        lambda: set_in(kgo.SAM(0.1), set_rule),
        AttributeError,
        r"must be set before the model is compiled\. Received: gradient_rule=SAM\(rho=0\.1\)",
    ),
    "slots with a plain optimizer": (
        lambda: trained(kgo.LookSAM(0.1), "adam"),
        TypeError,
        r"LookSAM keeps state beside each weight.*Received: Adam\. Compile with",
    ),
    "another number of gradients": (
        lambda: trained(Two(late=True)),
        ValueError,
        r"one gradient per gradient of the batch\. Received: 1 of 2 from Two",
    ),
    "another number of perturbations": (
        lambda: trained(Two(late=False)),
        ValueError,
        r"`perturbations` must hold one tensor per variable.*Received: 1 for 2",
    ),
    "a subclassed model": (
        lambda: kgo.sharpness_aware(saving_models.subclassed(), kgo.SAM()),
        TypeError,
        r"Received: Subclassed.*Make it `class Subclassed\(kgo\.SharpnessAware, \.\.\.\)`",
    ),
    "no model": (lambda: kgo.sharpness_aware("model", kgo.SAM()), TypeError, r"Received: str"),
    "a rule of the base class": (
        lambda: trained(kgo.GradientRule()),
        NotImplementedError,
        "",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case):
    build, error, message = REFUSED[case]
    with pytest.raises(error, match=f"(?s){message}"):
        build()


class OwnStep(kgo.SharpnessAware, keras.Sequential):
    """A training step that does not ask the rule."""

    def train_step(self, *args: Any) -> Any:
        return keras.Sequential.train_step(self, *args)


def test_a_training_step_that_leaves_the_rule_out_is_told_of():
    """SAM-13."""
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(2)], gradient_rule=kgo.SAM(0.1))
    model.compile(optimizer=sgd(model, 0.1), loss="mse")
    with pytest.warns(UserWarning, match=r"SAM\(rho=0\.1\) had no part in this training: OwnStep"):
        fit(model)


def test_a_rule_that_is_not_registered_cannot_be_loaded_and_says_so(tmp_path):
    class Unregistered(Against):
        pass

    model = compiled(Unregistered(0.1))
    model.save(tmp_path / "run.keras")
    with pytest.raises(TypeError, match="Unregistered"):
        keras.saving.load_model(tmp_path / "run.keras")
    loaded = keras.saving.load_model(
        tmp_path / "run.keras", custom_objects={"Unregistered": Unregistered}
    )
    assert isinstance(loaded.gradient_rule, Unregistered)


def test_a_failed_compile_leaves_a_model_that_can_be_compiled():
    model = kgo.sharpness_aware(weights_model(a=3.0, b=4.0), kgo.LookSAM(0.5))
    with pytest.raises(TypeError, match="must be a GroupedOptimizer"):
        model.compile(optimizer="adam", loss=half_square)
    model.compile(optimizer=sgd(model), loss=half_square)
    step_on_weights(model)
    np.testing.assert_allclose(values_of(model), [-0.3, -0.4], rtol=1e-5)
