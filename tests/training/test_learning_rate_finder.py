"""The search for learning rates: what it finds, and that nothing of it is left."""

from __future__ import annotations

import math
import random
from typing import Any

import keras
import models
import numpy as np
import pytest

import keras_groupopt as kgo
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.plan.views import finder_result

layers = keras.layers
_generator = np.random.default_rng(0)
X = _generator.normal(size=(96, 6)).astype("float32")
Y = np.sin(X[:, :2]) + 0.1 * _generator.normal(size=(96, 2)).astype("float32")
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
DATA = {"batch_size": 8, "shuffle": False}
# TensorFlow would trace the step of each model: only tests of compiled steps ask for that.
EAGERLY = keras.backend.backend() == "tensorflow"


def network() -> keras.Model:
    keras.utils.set_random_seed(2)
    backbone, head = layers.Dense(8, name="backbone"), layers.Dense(2, name="head")
    norm, dropped = layers.BatchNormalization(name="norm"), layers.Dropout(0.2, seed=3)
    hidden = [backbone, norm, layers.Activation("tanh"), dropped]
    return keras.Sequential([keras.Input((6,)), *hidden, head])


def compiled(
    wrap: Any = None, gradients: Any = None, eagerly: bool = EAGERLY, **options: Any
) -> keras.Model:
    model = network() if gradients is None else kgo.sharpness_aware(network(), gradients)
    settings = {"rule": "adam", "learning_rate": 0.01, **options}
    groups = settings.pop("groups", [kgo.Group("backbone", "backbone", learning_rate_ratio=0.1)])
    optimizer: Any = kgo.GroupedOptimizer(groups, model=model, **settings)
    optimizer = optimizer if wrap is None else wrap(optimizer)
    model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=eagerly)
    return model


def plain(optimizer: Any) -> keras.Model:
    model = network()
    model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=EAGERLY)
    return model


def fit(model: keras.Model, epochs: int = 1) -> keras.Model:
    model.fit(X[:40], Y[:40], **DATA, epochs=epochs, verbose=0)
    return model


def short(**options: Any) -> kgo.LearningRateFinder:
    return kgo.LearningRateFinder(**{"minimum": 1e-4, "steps": 5, **options})


def everything(model: keras.Model) -> dict[str, Any]:
    """Every bit of a model, its metrics, its optimizer and the generators."""
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    found: dict[str, Any] = {
        "state": [value.tobytes() for value in models.arrays(variables)],
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),
    }
    if keras.backend.backend() == "torch":
        import torch

        found["torch"] = torch.get_rng_state().numpy().tobytes()
    optimizer = unwrap(model.optimizer)
    if isinstance(optimizer, kgo.GroupedOptimizer):
        found["rates"] = {name: float(rate) for name, rate in optimizer.learning_rates.items()}
    found["compiled"] = id(model.train_function)
    found["history"] = id(getattr(model, "history", None))
    return found


ANCHOR = {"weight_decay": 0.1, "anchor": "initial"}
WHOLE = {
    "groups": [
        kgo.Group("backbone", "backbone", "nadam", learning_rate_ratio=SCHEDULE, **ANCHOR),
        kgo.Group("norm", "norm", learning_rate=SCHEDULE),
        kgo.Group("head", "head"),
    ],
    "learning_rate": SCHEDULE,
    "global_clipnorm": 1.0,
    "gradient_accumulation_steps": 3,
    "ema": kgo.EMA(0.9, warmup=True, start=1),
}
CASES: dict[str, Any] = {
    "the whole": lambda: compiled(eagerly=False, **WHOLE),
    "SAM and a loss scale": lambda: compiled(kgo.LossScaleOptimizer, kgo.SAM(0.05), False),
    "loss scale of Keras": lambda: compiled(keras.optimizers.LossScaleOptimizer, None, False),
    "a rule's instance and averages of Keras": lambda: compiled(
        groups=[kgo.Group("head", "head", rule=keras.optimizers.SGD(0.1, momentum=0.9))],
        use_ema=True,
        ema_momentum=0.5,
    ),
    "Adam of Keras": lambda: plain(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_begins_and_goes_on_after_a_search_as_if_there_had_been_none(name):
    model, twin = CASES[name](), CASES[name]()
    was_built, count = model.optimizer.built, len(model.optimizer.variables)
    short(steps=3).find(model, X, Y, **DATA)
    assert int(model.optimizer.iterations) == 0
    if name not in ("loss scale of Keras", "Adam of Keras"):
        assert (model.optimizer.built, len(model.optimizer.variables)) == (was_built, count)
    fit(model), fit(twin)
    before = everything(model)
    found = short(steps=4).find(model, X, Y, **DATA)
    assert everything(model) == before
    assert all(len(curve.losses) > 0 for curve in found.curves.values())
    fit(model), fit(twin)
    models.assert_equal(model, twin)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("in the data", RuntimeError("stop"), "stop"),
        ("between steps", KeyboardInterrupt("stop"), "stop"),
        ("no number in the data", None, "must be finite before a sweep. Received: loss=nan"),
    ],
)
def test_all_is_as_it_was_after_an_interrupted_search(where, error, message, monkeypatch):
    model = fit(compiled(**WHOLE))
    before = everything(model)
    x, count = X.copy(), 0
    if error is None:
        x[3] = np.nan

    def count_down() -> None:
        nonlocal count
        count += 1
        if count == 9 and error is not None:
            raise error

    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            if where == "in the data":
                count_down()
            return x[8 * index :][:8], Y[8 * index :][:8]

    if where == "between steps":
        reset = model.reset_metrics
        monkeypatch.setattr(model, "reset_metrics", lambda: (count_down(), reset())[1])
    # TensorFlow wraps what its data raises.
    with pytest.raises(BaseException, match=message):
        short().find(model, Data(), shuffle=False)
    monkeypatch.undo()
    assert everything(model) == before
    fit(model)


def test_an_unbuilt_optimizer_takes_its_anchors_from_weights_that_are_loaded_later():
    groups = [kgo.Group("backbone", "backbone", **ANCHOR)]
    wrap = keras.optimizers.LossScaleOptimizer
    model = compiled(wrap, groups=groups, rule="sgd", learning_rate=0.0)
    short(steps=3).find(model, X, Y, **DATA)
    model.set_weights([np.full(w.shape, 0.5, "float32") for w in model.get_weights()])
    fit(model)
    assert float(model.optimizer.inner_optimizer.anchor_drift()["backbone"]) == 0.0


def test_layers_can_be_unfrozen_between_a_search_and_the_first_fit():
    model = network()
    model.get_layer("backbone").trainable = False
    model.compile(kgo.GroupedOptimizer(model=model), loss="mse", run_eagerly=EAGERLY)
    short(steps=3).find(model, X, Y, **DATA)
    model.get_layer("backbone").trainable = True
    before = model.get_layer("backbone").get_weights()[0]
    fit(model)
    assert (model.get_layer("backbone").get_weights()[0] != before).any()


# What is found --------------------------------------------------------------------------------


def quadratic(groups: Any = (), eagerly: bool = EAGERLY, **options: Any) -> keras.Model:
    """`loss = mean((w − 1)²)` over two weights of each of two layers, which start at 0."""
    inputs = keras.Input((1,))
    a, b = (
        layers.Dense(2, use_bias=False, kernel_initializer="zeros", name=name)(inputs)
        for name in "ab"
    )
    model = keras.Model(inputs, layers.Concatenate()([a, b]))
    settings = {"rule": "sgd", "learning_rate": 0.5, **options}
    optimizer = kgo.GroupedOptimizer(groups, model=model, **settings)
    model.compile(optimizer, loss="mse", run_eagerly=eagerly)
    return model


# Twenty equal batches: TensorFlow makes an iterator an epoch, which costs more than a step.
ONES = (np.ones((640, 1), "float32"), np.ones((640, 4), "float32"))


@keras.saving.register_keras_serializable(package="finder")
def tenth() -> float:
    return 0.1


BOTH = [kgo.Group("a", "a", learning_rate_ratio=0.5), kgo.Group("b", "b")]
OWN_RATE = [kgo.Group("a", "a", learning_rate=kgo.constant(0.2)), kgo.Group("b", "b")]


@pytest.mark.parametrize(
    ("groups", "steps", "ratios", "own"),
    [
        (BOTH, None, {"a": 0.5, "b": 1.0}, 0.0),
        (BOTH, 2, {"a": 0.5, "b": 1.0}, 0.0),
        (OWN_RATE, None, {"a": 0.0, "b": 1.0}, 0.2),
    ],
    ids=["", "accumulated", "a group with a rate of its own keeps it"],
)
def test_losses_are_those_after_a_step_at_each_rate(groups, steps, ratios, own):
    model = quadratic(groups, eagerly=False, gradient_accumulation_steps=steps)
    finder = kgo.LearningRateFinder(0.01, 1.0, steps=7, smoothing=0.0)
    curves = finder.find(model, *ONES).curves
    assert list(curves) == ["a", "b", None]
    for name, curve in curves.items():
        assert curve.rates == pytest.approx(np.geomspace(0.01, 1.0, 7))
        assert curve.first_loss == pytest.approx(1.0)
        # A group alone moves at the rate itself, and the others not at all.
        moving = ratios if name is None else {name: 1.0}
        errors, losses = dict.fromkeys("ab", 1.0), []
        for rate in curve.rates:
            # Of the mean over four outputs the gradient is 2 · error / 4.
            for layer in "ab":
                at = rate * moving.get(layer, 0.0) + (own if name is None and layer == "a" else 0.0)
                errors[layer] *= 1 - at / 2
            losses.append(sum(error**2 for error in errors.values()) / 2)
        assert curve.losses == pytest.approx(losses, rel=1e-5)
        assert curve.losses == curve.raw_losses
        assert not curve.diverged


def test_groups_move_at_the_rates_of_a_sweep_within_its_block_and_at_their_own_after_it():
    model = quadratic(BOTH)
    optimizer, weights = model.optimizer, model.trainable_variables
    optimizer.build(weights)
    ones = [keras.ops.ones(weight.shape) for weight in weights]
    rates = {name: keras.Variable(rate) for name, rate in {"a": 3.0, "b": 2.0}.items()}
    with optimizer._built.sweep(rates):
        optimizer.apply(ones, weights)
    assert [array[0, 0] for array in models.arrays(model)] == [-3.0, -2.0]
    optimizer.apply(ones, weights)
    assert [array[0, 0] for array in models.arrays(model)] == [-3.25, -2.5]


def test_what_is_found_does_not_depend_on_the_declared_base():
    finder = kgo.LearningRateFinder(1e-2, 100.0, steps=20, groups=[None])
    found = [
        finder.find(quadratic(BOTH, learning_rate=base), *ONES).learning_rate
        for base in (0.5, 0.0, SCHEDULE, tenth)
    ]
    assert set(found) == {found[0]}
    assert 0.01 < found[0] < 4.0


def test_a_run_warns_of_a_short_schedule_and_a_sweep_does_not():
    model = compiled(learning_rate=kgo.schedules.Linear(0.01, total_steps=2))
    short().find(model, X, Y, **DATA)
    with pytest.warns(UserWarning, match="is made for 2 optimizer steps, and the run has 5"):
        fit(model)


def test_schedules_that_end_with_the_run_can_be_swept_before_there_is_one():
    rate = kgo.schedules.Linear(0.01, "fit")
    model, same = (compiled(eagerly=False, learning_rate=rate) for _ in range(2))
    found = short().find(model, X, Y, **DATA)
    assert list(found.curves) == ["backbone", "default", None]
    assert all(len(curve.losses) == 5 for curve in found.curves.values())
    assert int(model.optimizer.total_steps) == 0
    fit(model)
    assert int(model.optimizer.total_steps) == 5
    models.assert_equal(model, fit(same))


def test_a_sweep_ends_where_the_loss_diverges():
    curve = kgo.LearningRateFinder(0.1, 1000.0, steps=50).find(quadratic(), *ONES).curves[None]
    assert curve.diverged
    assert 4.0 < curve.rates[-1] < 500.0
    *others, last = curve.losses
    assert last > 4 * min(curve.losses)
    assert all(loss <= 4 * min((1.0, *others[: place + 1])) for place, loss in enumerate(others))


@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_a_loss_or_gradients_that_stop_being_finite_end_the_sweep(policy):
    finder = kgo.LearningRateFinder(1.0, 1e30, steps=40, divergence=1e30)
    curve = finder.find(quadratic(on_nonfinite=policy), *ONES).curves[None]
    assert curve.diverged
    assert all(map(math.isfinite, curve.losses))
    assert len(curve.losses) < 40


def test_a_loss_that_only_rises_has_no_suggestion():
    model = quadratic()
    finder = kgo.LearningRateFinder(10.0, 100.0, steps=5)
    found = finder.find(model, *ONES)
    assert found.suggestions == {None: None}
    assert found.learning_rate is None


def test_one_curve_of_a_plain_optimizer():
    model = quadratic()
    finder = kgo.LearningRateFinder(1e-3, 10.0, steps=12)
    expected = finder.find(model, *ONES).curves[None]
    model.compile(keras.optimizers.SGD(0.5), loss="mse")
    curves = finder.find(model, *ONES).curves
    assert list(curves) == [None]
    assert curves[None].losses == pytest.approx(expected.losses, rel=1e-5)
    assert float(model.optimizer.learning_rate) == 0.5


FROZEN = [kgo.Group("a", "a", frozen=True), kgo.Group("b", "b")]


@pytest.mark.parametrize(
    ("groups", "asked", "swept"), [(BOTH, ["b"], ["b"]), (FROZEN, None, [None])]
)
def test_what_is_swept_are_the_groups_asked_for_or_those_that_move(groups, asked, swept):
    assert list(short(groups=asked).find(quadratic(groups), *ONES).curves) == swept


def test_a_summary_and_a_plot_show_the_suggestions(tmp_path):
    found = kgo.LearningRateFinder(1e-3, 100.0, steps=20).find(quadratic(BOTH), *ONES)
    lines: list[str] = []
    found.summary(print_fn=lines.append)
    text = "\n".join(lines)
    for name, rate in found.suggestions.items():
        assert f"{rate:.2e}" in text
        assert (name or "all together") in text
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.png"
    figure = found.plot(path)
    assert path.stat().st_size > 0
    (axes,) = figure.axes
    marks = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [mark.get_xdata()[0] for mark in marks] == list(found.suggestions.values())
    assert axes.get_xscale() == "log"


def curve(*losses: float) -> Any:
    rates = tuple(10.0**place for place in range(len(losses)))
    return finder_result.RateCurve(rates, losses, losses, 1.0, False)


@pytest.mark.once
@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((1.0, 0.9, 0.2, 0.3), 10.0),
        ((0.5, 0.6, 0.7), None),
        ((), None),
        # The first of ten is left out, as are those of a curve that rises from there on.
        ((0.1, *[0.9] * 4, 0.5, *[0.8] * 4), 1e4),
        ((0.1, *[0.9] * 9), None),
    ],
    ids=str,
)
def test_a_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss(losses, expected):
    found = kgo.RateCurves({None: curve(*losses)})
    assert found.suggestions == {None: expected if expected is None else pytest.approx(expected)}


# Errors ---------------------------------------------------------------------------------------


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), layers.Dense(2)])


def unbuilt() -> keras.Model:
    model = keras.Sequential([layers.Dense(2)])
    model.compile(kgo.GroupedOptimizer(), loss="mse")
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: None, {}, TypeError, "`model` must be a Keras model"),
        (uncompiled, {}, ValueError, "needs a compiled model"),
        (unbuilt, {}, ValueError, "needs a built model"),
        (
            lambda: plain(keras.optimizers.SGD(SCHEDULE)),
            {},
            TypeError,
            "`learning_rate`, a number. Received: SGD without",
        ),
        (quadratic, {"groups": ["defualt"]}, ValueError, r"'defualt' .* nearest is \"def"),
        (quadratic, {"groups": []}, ValueError, "`groups` must hold a name"),
    ],
)
def test_models_that_cannot_be_swept_are_refused(make, options, error, message):
    with pytest.raises(error, match=message):
        short(**options).find(make(), *ONES)
