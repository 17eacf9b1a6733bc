"""Wrong ways to use a gradient rule raise errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import saving_models
from bad_input import pattern, rows
from keras import ops
from saving_models import X, Y
from sharpness_cases import (
    Against,
    half_square,
    network,
    sgd,
    step_on_weights,
    values_of,
    weights_model,
)

import keras_groupopt as kgo


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


def of_two_models() -> None:
    rule = kgo.SAM(0.1)
    models = [kgo.sharpness_aware(weights_model(a=1.0), rule) for _ in range(2)]
    del models


def compiled(rule: Any, optimizer: Any = None, **values: float) -> Any:
    model = kgo.sharpness_aware(weights_model(**(values or {"a": 3.0})), rule)
    model.compile(optimizer=optimizer or sgd(model), loss=half_square, run_eagerly=True)
    return model


def trained(rule: Any, optimizer: Any = None) -> Any:
    model = compiled(rule, optimizer, a=3.0, b=4.0)
    step_on_weights(model)
    return model


def set_in(make: Callable[[Any], Any], rule: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets a field of a rule whose model is made first."""

    def call() -> None:
        model = make(rule)
        setattr(model if name == "gradient_rule" else rule, name, value)

    return call


def unfrozen() -> None:
    model = kgo.sharpness_aware(weights_model(a=3.0, b=4.0), kgo.LookSAM(0.1))
    for trainable in (False, True):
        model.get_layer("b").trainable = trainable
        optimizer = getattr(model, "optimizer", None) or sgd(model)
        model.compile(optimizer=optimizer, loss=half_square)
        step_on_weights(model)


SCHEDULE = keras.optimizers.schedules.CosineDecay(0.1, 9)
SAM = kgo.SAM
REFUSED = [
    *rows(
        ValueError,
        (of_two_models, "must belong to one model. Received: SAM(rho=0.1) of the model"),
        (lambda: SAM(-0.1), "`rho` must be … Received: rho=-0.1"),
        (lambda: kgo.GSAM(float("nan")), "`rho` must be"),
        (lambda: kgo.GSAM(alpha=-1), "`alpha` must be"),
        (lambda: kgo.ASAM(eta=-1), "`eta` must be"),
        (lambda: kgo.LookSAM(every=0), "`every` must be"),
        (
            lambda: trained(SAM(exclude_from_perturbation="hed")),
            "In `exclude_from_perturbation` of SAM: … hed",
        ),
        (
            lambda: trained(kgo.LookSAM(exclude_from_perturbation=kgo.everything())),
            "a variable to perturb. Received: exclude_from_perturbation=everything()",
        ),
        (set_in(trained, SAM(0.1), "rho", -1.0), "`rho` must be"),
        (does(lambda batch, zeros: batch.gradients_at(zeros)[1:]), "What Does … Received: 1 for 2"),
        (does(lambda batch, zeros: None), "What Does returns must hold one … Received: None."),
        (
            does(lambda batch, zeros: [None, *zeros[1:]]),
            "What Does returns must … Received: None for a/kernel of shape (1, 1)",
        ),
        (
            does(lambda batch, zeros: [ops.ones((1,)), *zeros[1:]]),
            "of its shape. Received: a value of shape (1,) for a/kernel of shape (1, 1)",
        ),
        (
            does(lambda batch, zeros: batch.gradients_at(zeros[1:])),
            "`perturbations` must hold one tensor per variable … Received: 1 for 2",
        ),
        (
            does(lambda batch, zeros: batch.gradients_at([ops.ones((2, 1)), *zeros[1:]])),
            "`perturbations` must hold … Received: a value of shape (2, 1) for a/kernel",
        ),
        (
            does(lambda batch, zeros: batch.keep("kept", zeros[1:])),
            "`values` must hold one tensor per variable … Received: 1 for 2",
        ),
        (does(lambda batch, zeros: batch.kept("keep")), '`keep` must be … mean "kept"?'),
        (does(lambda batch, zeros: batch.scalar("rho")), "`rho` must be a hyperparameter of the"),
        (
            lambda: step_on_weights(kgo.sharpness_aware(weights_model(a=1.0), SAM(SCHEDULE))),
            "call `compile()`",
        ),
        (unfrozen, "unknown b/kernel … `optimizer.rebuild(model)`"),
    ),
    *rows(
        TypeError,
        (
            lambda: kgo.sharpness_aware(weights_model(a=1.0), SAM),
            "a `kgo.GradientRule`. Received: … Pass an instance, such as `SAM(...)`",
        ),
        (
            lambda: kgo.SharpnessAwareSequential([keras.Input((1,))], gradient_rule=0.05),
            "a `kgo.GradientRule`. Received: gradient_rule=0.05 of type float",
        ),
        (lambda: SAM("0.1"), "`rho` must be … Received: rho='0.1'"),
        (lambda: kgo.ASAM(None), "`rho` must be a number … rho=None in ASAM"),
        (lambda: kgo.LookSAM(every=1.5), "`every` must"),
        (lambda: SAM(exclude_from_perturbation=3), "In SAM: `exclude_from_perturbation` must be"),
        *(
            (
                set_in(make, SAM(0.1), "rho", SCHEDULE),
                "a number once the model is compiled … kgo.sharpness_aware",
            )
            for make in (trained, compiled)
        ),
        *(
            (
                set_in(make, SAM(SCHEDULE), "rho", 0.1),
                "`rho` of SAM is a schedule and cannot be set. Received: 0.1",
            )
            for make in (trained, compiled)
        ),
        (
            lambda: trained(kgo.LookSAM(0.1), "adam"),
            "LookSAM keeps state beside each weight … Received: Adam. Compile with",
        ),
        (
            lambda: kgo.sharpness_aware(saving_models.subclassed(), SAM()),
            "Received: Subclassed … Make it `class Subclassed(kgo.SharpnessAware, ...)`",
        ),
        (lambda: kgo.sharpness_aware("m", SAM()), "Received: model='m'"),
        (lambda: kgo.sharpness_aware(SAM(), network()), "Swap the arguments"),
        (lambda: kgo.sharpness_aware(network(), Unmade()), "`Unmade.__init__` must call `super()"),
        (lambda: kgo.SharpnessAwareSequential([], SAM()), "must be passed by name"),
        (
            lambda: type("Late", (keras.Sequential, kgo.SharpnessAware), {}),
            "must come before the model's class … Late(Sequential, SharpnessAware)",
        ),
        (
            lambda: type("Alone", (kgo.SharpnessAware,), {})(),
            "beside a model's class. Received: Alone",
        ),
    ),
    *rows(
        AttributeError,
        (
            set_in(trained, SAM(0.1), "gradient_rule", SAM(0.1)),
            "before the model is compiled. Received: gradient_rule=SAM(rho=0.1)",
        ),
        (
            set_in(compiled, SAM(0.1), "exclude_from_perturbation", "a"),
            "`exclude_from_perturbation` must be set before the model is compiled",
        ),
        (
            set_in(compiled, kgo.LookSAM(0.1), "every", 3),
            "`every` must be set before the model is compiled … Received: every=3",
        ),
    ),
    *rows(
        NotImplementedError,
        (
            lambda: trained(kgo.GradientRule()),
            "GradientRule has no method `gradients(self, batch)`",
        ),
    ),
]


@pytest.mark.once
@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_cannot_work_is_refused(call, error, text):
    with pytest.raises(error, match=pattern(text)):
        call()


class OwnStep(kgo.SharpnessAware, keras.Sequential):
    """A training step that does not ask the rule."""

    def train_step(self, *args: Any) -> Any:
        return keras.Sequential.train_step(self, *args)


def test_a_training_step_that_leaves_the_rule_out_gets_a_warning():
    """SAM-13."""
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(2)], gradient_rule=kgo.SAM(0.1))
    model.compile(optimizer=sgd(model, 0.1), loss="mse")
    with pytest.warns(UserWarning, match=r"SAM\(rho=0\.1\) had no part in this training: OwnStep"):
        model.fit(X, Y, batch_size=4, verbose=0)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_fit_that_trains_nothing_raises_no_such_warning(epochs):
    """Other warnings are errors here."""
    model = kgo.sharpness_aware(weights_model(a=3.0), kgo.SAM(0.1))
    model.trainable = epochs == 0
    model.compile(optimizer="sgd", loss=half_square)
    step_on_weights(model, epochs=1, initial_epoch=1 - epochs)


def test_a_rule_that_is_not_registered_cannot_be_loaded_and_says_so(tmp_path):
    class Unregistered(Against):
        pass

    model = kgo.sharpness_aware(network(), Unregistered(0.1))
    model.compile(optimizer=sgd(model), loss="mse")
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
