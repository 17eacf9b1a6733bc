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


@pytest.mark.parametrize(("late", "expected"), [(False, 0.4), (True, 0.3)])
def test_what_is_set_or_loaded_last_counts_where_the_optimizer_is_not_built(
    late, expected, tmp_path
):
    model = fit(compiled(kgo.SAM(0.2)))
    model.gradient_rule.rho = 0.4
    model.save_weights(tmp_path / "run.weights.h5")
    other = compiled(kgo.SAM(0.2))
    steps = [
        lambda: setattr(other.gradient_rule, "rho", 0.3),
        lambda: other.load_weights(tmp_path / "run.weights.h5"),
    ]
    for step in reversed(steps) if late else steps:
        step()
    assert fit(other).gradient_rule.rho == expected


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


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_rule_has_its_numbers_and_belongs_to_no_model(duplicate):
    model = fit(compiled(kgo.LookSAM(0.2, every=2)))
    model.gradient_rule.rho = 0.4
    rule = duplicate(model.gradient_rule)
    assert repr(rule) == "LookSAM(rho=0.4, alpha=0.7, every=2)"
    rule.rho = 0.3
    assert model.gradient_rule.rho == 0.4
    assert fit(compiled(rule)).gradient_rule.rho == 0.3


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
    plain.compile(optimizer=optimizer, loss="mse", run_eagerly=eagerly)
    fit(plain)
    other = kgo.sharpness_aware(plain, kgo.LookSAM(0.5, every=2))
    other.compile(optimizer=optimizer, loss="mse", run_eagerly=eagerly)
    for model in (other, plain, other, plain):
        fit(model)
    return plain


def test_a_model_that_was_compiled_before_goes_on_with_the_moments_of_a_shared_optimizer():
    compiled_step, eager = shared(False), shared(True)
    assert int(compiled_step.optimizer.iterations) == 15
    for value, expected in zip(compiled_step.get_weights(), eager.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


# What is refused ----------------------------------------------------------------------------------


class Unmade(kgo.GradientRule):
    """Leaves its base class out."""

    def __init__(self) -> None:
        pass


class Does(kgo.GradientRule):
    """Does with a batch, and with a zero per variable, what it is told."""

    slots = ("kept",)

    def __init__(self, what: Callable[[kgo.Batch, list[Any]], Any]) -> None:
        super().__init__()
        self.what = what

    def gradients(self, batch: kgo.Batch) -> Any:
        return self.what(batch, [ops.zeros_like(gradient) for gradient in batch.gradients])


def does(what: Callable[[kgo.Batch, list[Any]], Any]) -> Callable[[], None]:
    return lambda: trained(Does(what))


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


def set_unbuilt(rule: Any, change: Callable[[Any], None]) -> None:
    model = kgo.sharpness_aware(weights_model(a=3.0), rule)
    model.compile(optimizer=sgd(model), loss=half_square)
    change(rule)


def set_rule(rule: Any) -> None:
    rule._attachment().model.gradient_rule = kgo.SAM(0.1)


def trained(rule: Any, optimizer: Any = None) -> None:
    model = kgo.sharpness_aware(weights_model(a=3.0, b=4.0), rule)
    model.compile(optimizer=optimizer or sgd(model), loss=half_square, run_eagerly=True)
    step_on_weights(model)


def unfrozen(rule: Any) -> None:
    plain = weights_model(a=3.0, b=4.0)
    model = kgo.sharpness_aware(plain, rule)
    model.get_layer("b").trainable = False
    model.compile(optimizer=sgd(model), loss=half_square)
    step_on_weights(model)
    model.get_layer("b").trainable = True
    model.compile(optimizer=model.optimizer, loss=half_square)
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
        does(lambda batch, zeros: batch.gradients_at(zeros)[1:]),
        ValueError,
        r"What Does returns must hold one tensor per variable.*Received: 1 for 2",
    ),
    "no gradients": (
        does(lambda batch, zeros: None),
        ValueError,
        r"What Does returns must hold one tensor per variable.*Received: None\.",
    ),
    "none among the gradients": (
        does(lambda batch, zeros: [None, *zeros[1:]]),
        ValueError,
        r"What Does returns must.*Received: None for a/kernel of shape \(1, 1\)",
    ),
    "gradients of another shape": (
        does(lambda batch, zeros: [ops.ones((1,)), *zeros[1:]]),
        ValueError,
        r"of its shape\. Received: a value of shape \(1,\) for a/kernel of shape \(1, 1\)",
    ),
    "another number of perturbations": (
        does(lambda batch, zeros: batch.gradients_at(zeros[1:])),
        ValueError,
        r"`perturbations` must hold one tensor per variable.*Received: 1 for 2",
    ),
    "perturbations of another shape": (
        does(lambda batch, zeros: batch.gradients_at([ops.ones((2, 1)), *zeros[1:]])),
        ValueError,
        r"`perturbations` must hold.*Received: a value of shape \(2, 1\) for a/kernel",
    ),
    "another number of values to keep": (
        does(lambda batch, zeros: batch.keep("kept", zeros[1:])),
        ValueError,
        r"`values` must hold one tensor per variable.*Received: 1 for 2",
    ),
    "a slot that is none": (
        does(lambda batch, zeros: batch.kept("keep")),
        ValueError,
        r'`keep` must be a slot of the rule: kept\..*Did you mean "kept"\?',
    ),
    "a hyperparameter that is none": (
        does(lambda batch, zeros: batch.scalar("rho")),
        ValueError,
        r"`rho` must be a hyperparameter of the rule: it has none",
    ),
    "a schedule set before the build": (
        lambda: set_unbuilt(kgo.SAM(0.1), with_schedule),
        TypeError,
        r"`rho` must be a number once the model is compiled.*kgo\.sharpness_aware",
    ),
    "a number in a schedule's place before the build": (
        lambda: set_unbuilt(kgo.SAM(SCHEDULE), set_rho(0.1)),
        TypeError,
        r"`rho` of SAM is a schedule and cannot be set\. Received: 0\.1",
    ),
    "a selector set in a compiled model": (
        lambda: set_unbuilt(
            kgo.SAM(0.1), lambda rule: setattr(rule, "exclude_from_perturbation", "a")
        ),
        AttributeError,
        r"`exclude_from_perturbation` must be set before the model is compiled",
    ),
    "an interval set in a compiled model": (
        lambda: set_unbuilt(kgo.LookSAM(0.1), lambda rule: setattr(rule, "every", 3)),
        AttributeError,
        r"`every` must be set before the model is compiled.*Received: every=3",
    ),
    "fit before compile": (
        lambda: step_on_weights(kgo.sharpness_aware(weights_model(a=1.0), kgo.SAM(SCHEDULE))),
        ValueError,
        r"call `compile\(\)`",
    ),
    "a variable that trains later, with slots": (
        lambda: unfrozen(kgo.LookSAM(0.1)),
        ValueError,
        r"unknown b/kernel.*`optimizer\.rebuild\(model\)`",
    ),
    "a subclassed model": (
        lambda: kgo.sharpness_aware(saving_models.subclassed(), kgo.SAM()),
        TypeError,
        r"Received: Subclassed.*Make it `class Subclassed\(kgo\.SharpnessAware, \.\.\.\)`",
    ),
    "no model": (lambda: kgo.sharpness_aware("m", kgo.SAM()), TypeError, r"Received: model='m'"),
    "swapped": (lambda: kgo.sharpness_aware(kgo.SAM(), network()), TypeError, "Swap the arguments"),
    "a rule of the base class": (
        lambda: trained(kgo.GradientRule()),
        NotImplementedError,
        r"`gradients\(self, batch\)` must be defined",
    ),
    "a rule that was not made": (
        lambda: kgo.sharpness_aware(network(), Unmade()),
        TypeError,
        r"`Unmade\.__init__` must call `super\(\)\.__init__",
    ),
    "a rule by position": (
        lambda: kgo.SharpnessAwareSequential([], kgo.SAM()),
        TypeError,
        r"must be passed by name",
    ),
    "the mixin after the model's class": (
        lambda: type("Late", (keras.Sequential, kgo.SharpnessAware), {}),
        TypeError,
        r"must come before the model's class.*Late\(Sequential, SharpnessAware\)",
    ),
    "the mixin alone": (
        lambda: type("Alone", (kgo.SharpnessAware,), {})(),
        TypeError,
        r"beside a model's class\. Received: Alone",
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


@pytest.mark.parametrize("epochs", [0, 1])
def test_where_nothing_is_trained_the_training_step_is_not_blamed(epochs):
    model = kgo.sharpness_aware(weights_model(a=3.0), kgo.SAM(0.1))
    model.trainable = epochs == 0
    model.compile(optimizer="sgd", loss=half_square)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_on_weights(model, epochs=1, initial_epoch=1 - epochs)
    assert not [w for w in caught if "had no part" in str(w.message)]


def test_a_rule_that_is_not_registered_cannot_be_loaded_and_says_so(tmp_path):
    class Unregistered(Against):
        pass

    model = compiled(Unregistered(0.1))
    with pytest.warns(UserWarning, match="Unregistered is not registered: `load_model` will need"):
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
