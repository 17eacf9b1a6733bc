"""A model that changes while it is trained, and an optimizer that follows it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from chosen_gradients import fit, groups_of, mean_output, towers, train, weights
from models import arrays, assert_equal, dense, number, numpy_of, sgd
from saving_models import fill, nested, refused
from saving_models import fit as fit_mse

import keras_groupopt as kgo

HALVED = kgo.schedules.Linear(1.0, 10, 0.0)


def grouped(model: keras.Model | None, groups: Any = (), **options: Any) -> kgo.GroupedOptimizer:
    return sgd(model, groups, **{"rule": kgo.rule("sgd", momentum=0.5), **options})


def moved_by(model: keras.Model, step: Callable[[], Any]) -> dict[str, Any]:
    """How far each weight of a model of towers went in a step."""
    before = weights(model)
    step()
    return {path: before[path] - value for path, value in weights(model).items()}


def state_of(optimizer: kgo.GroupedOptimizer) -> dict[str, np.ndarray]:
    """Moments and anchors by the path of the state variable."""
    return {variable.path: numpy_of(variable) for variable in optimizer.variables}


def slots_of(optimizer: kgo.GroupedOptimizer, path: str) -> list[np.ndarray]:
    return [value for key, value in state_of(optimizer).items() if f"/{path}/" in f"{key}/"]


def trained(model: keras.Model, **options: Any) -> keras.Model:
    """Fits three steps on the mean squared error at a rate of 1/8."""
    model.compile(optimizer=grouped(model, **{"learning_rate": 0.125, **options}), loss="mse")
    return fit_mse(model)


def frozen_backbone() -> keras.Model:
    model = fill(nested())
    model.get_layer("body").trainable = False
    return model


# Unfreezing ------------------------------------------------------------------------------------


def test_unfrozen_groups_move_at_their_ratios_of_the_schedule_now():
    model = towers("backbone", "neck", "head")
    for name in ("backbone", "neck"):
        model.get_layer(name).trainable = False
    optimizer = sgd(model, learning_rate=HALVED)
    train(model, optimizer, steps=5)
    model.get_layer("neck").trainable = model.get_layer("backbone").trainable = True
    groups = [
        kgo.Group("backbone", "backbone", learning_rate_ratio=0.1),
        kgo.Group("neck", "neck", learning_rate_ratio=0.2),
    ]
    optimizer.rebuild(model, groups)
    assert moved_by(model, lambda: fit(model)) == pytest.approx(
        {"backbone/kernel": 0.1 * 0.5, "neck/kernel": 0.2 * 0.5, "head/kernel": 0.5}
    )
    assert int(optimizer.iterations) == 6


@pytest.mark.parametrize("rule", ["adam", "nadam"])
def test_the_head_goes_on_as_if_nothing_had_been_unfrozen(rule):
    heads = []
    for unfreeze in (False, True):
        model = trained(frozen_backbone(), rule=rule)
        before = weights(model)
        if unfreeze:
            model.get_layer("body").trainable = True
            report = model.optimizer.rebuild(model, {"body": "body"})
            assert not [key for key in report.kept if key.startswith("body/")]
            assert not [key for key in report.fresh if key.startswith("default/")]
            assert report.dropped == []
        # The gradient of the head is that of the weights before the step.
        fit_mse(model, 1)
        heads.append(model.get_layer("head").get_weights())
        moved = [np.any(w != before[path]) for path, w in weights(model).items() if "body" in path]
        assert all(moved) == any(moved) == unfreeze
    assert_equal(*heads, rtol=1e-6, atol=1e-7)


class Rebuilding(keras.callbacks.Callback):
    """Unfreezes a tower and rebuilds in a hook, with its own model or one held from outside."""

    def __init__(self, hook: str, place: int | None, held: keras.Model | None) -> None:
        super().__init__()
        self.place, self.held = place, held
        setattr(self, hook, self.rebuild)

    def rebuild(self, place: int, logs: Any = None) -> None:
        if self.place in (None, place):
            model = self.held or self.model
            model.get_layer("a").trainable = True
            model.optimizer.rebuild(model)


@pytest.mark.parametrize(
    ("hook", "place", "held", "steps_of_a"),
    [
        ("on_epoch_begin", 2, False, 2),
        ("on_epoch_end", 1, False, 2),
        ("on_train_batch_end", None, False, 4),
        ("on_train_batch_end", None, True, 4),
    ],
)
def test_a_callback_rebuilds_within_one_fit_with_its_own_model(
    hook, place, held, steps_of_a, backend
):
    model = towers("a", "b")
    # Four batches of one sample, or four epochs of one batch.
    size, epochs = (1, 1) if place is None else (4, 4)
    model.get_layer("a").trainable = place is None
    model.compile(optimizer=sgd(model), loss=mean_output)
    data = [np.ones((4, 1), "float32")] * 2, np.zeros((4, 1))
    callback = Rebuilding(hook, place, model if held else None)
    refusal = pytest.raises(ValueError, match="must have its values when it is changed")
    with refusal if held and backend == "jax" else contextlib.nullcontext():
        options = {"callbacks": [callback], "validation_data": data, "verbose": 0}
        model.fit(*data, batch_size=size, epochs=epochs, **options)
        assert weights(model) == {"a/kernel": -1.0 * steps_of_a, "b/kernel": -4.0}


def test_a_tower_frozen_for_another_leaves_no_compiled_function_behind():
    """Of equal shapes, so that what was compiled for one would take the other's values."""
    model = towers("a", "b", start={"a": 1.0, "b": 3.0})
    model.get_layer("a").trainable = False
    model.compile(optimizer=grouped(model), loss=mean_output)
    x = [np.full((1, 1), value, "float32") for value in (1.0, 10.0)]
    y = np.zeros((1, 1), "float32")
    model.fit(x, y, verbose=0)
    values = [model.evaluate(x, y, verbose=0), model.predict(x, verbose=0).item()]
    assert values == [1.0 + 10 * (3.0 - 10.0)] * 2
    model.get_layer("a").trainable, model.get_layer("b").trainable = True, False
    report = model.optimizer.rebuild(model)
    # No variable of the group stays, so its rule starts anew.
    assert report.dropped == ["default/@rule/@iterations", "default/b/kernel/momentums"]
    assert groups_of(model.optimizer) == {"default": ["a/kernel"]}
    assert [model.evaluate(x, y, verbose=0), model.predict(x, verbose=0).item()] == values
    model.fit(x, y, verbose=0)
    assert weights(model) == {"a/kernel": 0.0, "b/kernel": -7.0}


# LoRA, new layers, new heads -------------------------------------------------------------------


def change_to_lora(model: keras.Model) -> list[str]:
    model.get_layer("head").enable_lora(2)
    return ["head/lora_kernel_a", "head/lora_kernel_b"]


def change_to_unfrozen(model: keras.Model) -> list[str]:
    model.get_layer("first").trainable = True
    return ["first/kernel", "first/bias"]


def change_to_longer(model: keras.Model) -> list[str]:
    model.add(keras.layers.Dense(2, name="last"))
    return ["last/kernel", "last/bias"]


def plain() -> keras.Sequential:
    layers = [
        keras.layers.Dense(3, activation="tanh", name="first", trainable=False),
        keras.layers.Dense(3, activation="tanh", name="second"),
        keras.layers.Dense(2, name="head"),
    ]
    return fill(keras.Sequential([keras.Input((4,)), *layers]))


@pytest.mark.parametrize(
    ("change", "way"),
    [
        (change_to_lora, "compiled"),
        (change_to_lora, "bound later"),
        (change_to_lora, "not compiled"),
        (change_to_unfrozen, "compiled"),
        (change_to_unfrozen, "in a loss scale"),
        (change_to_longer, "compiled"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_changed_model_is_refused_in_the_same_words_and_goes_on_after_a_rebuild(change, way):
    model, lora = plain(), change is change_to_lora
    optimizer = grouped(None if way == "bound later" else model, learning_rate=0.125)
    outer = kgo.LossScaleOptimizer(optimizer) if way == "in a loss scale" else optimizer
    model.compile(optimizer=outer, loss="mse")
    fit_mse(model)
    new = change(model)
    if way == "bound later":
        optimizer.bind(model)
    if way != "not compiled":
        model.compile(optimizer=outer, loss="mse")
        assert outer is optimizer or not outer.built
        message = (
            "Every variable must be one the optimizer was built with. Received: unknown "
            f"{', '.join(new)}. They became trainable, or were added, after the optimizer was "
            "built, or belong to another model. Call `optimizer.rebuild(model)`, which keeps the "
            "state of every variable that stays."
        )
        with refused(model, ValueError, re.escape(message)):
            fit_mse(model, 1)
    kept = slots_of(optimizer, "second/kernel")
    report = optimizer.rebuild(model)
    assert_equal(slots_of(optimizer, "second/kernel"), kept)
    fresh = [key for key in report.fresh if key.endswith("/momentums")]
    assert fresh == [f"default/{path}/momentums" for path in new]
    # The kernel beside LoRA rests.
    assert [key.endswith("head/kernel/momentums") for key in report.dropped] == [True] * lora
    before = weights(model)
    fit_mse(model, 2)
    moved = {path for path, value in weights(model).items() if np.any(value != before[path])}
    assert moved == {v.path for v in optimizer.plan.variables} >= set(new)
    assert ("head/kernel" in moved) != lora


def chain(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *layers])


def clone(*layers: keras.layers.Layer) -> keras.Model:
    return chain(*(type(layer).from_config(layer.get_config()) for layer in layers))


# A model made of two layers of another, of which the first has an automatic name; the old and the
# new path of what goes on, and what starts fresh.
REMADE: dict[str, tuple[Callable[..., keras.Model], str, str, list[str]]] = {
    "a new head of equal path and shape": (
        lambda first, head: chain(first, keras.layers.Dense(2, name="head")),
        *("dense/kernel", "dense/kernel"),
        ["default/head/kernel/momentums", "default/head/bias/momentums"],
    ),
    "another layer takes the automatic name": (
        lambda first, head: chain(keras.layers.Dense(4), first, head),
        *("dense/kernel", "dense_1/kernel"),
        ["default/dense/kernel/momentums", "default/dense/bias/momentums"],
    ),
    "a clone": (clone, "head/kernel", "head/kernel", []),
}


@pytest.mark.parametrize("case", REMADE)
def test_a_layer_keeps_its_state_and_a_new_one_starts_fresh_whatever_their_names(case):
    remake, old, new, fresh = REMADE[case]
    layers = keras.layers.Dense(4), keras.layers.Dense(2, name="head")
    model = trained(fill(chain(*layers)), weight_decay=0.5, anchor="initial")
    optimizer = model.optimizer
    kept = slots_of(optimizer, old)
    other = remake(*layers)
    report = optimizer.rebuild(other)
    assert_equal(slots_of(optimizer, new), kept)
    assert np.any(kept[0])
    assert [key for key in report.fresh if "momentums" in key] == fresh
    assert report.dropped == (report.fresh if "head" in str(fresh) else [])
    for key in fresh:
        assert not np.any(slots_of(optimizer, key.removeprefix("default/")))
    other.compile(optimizer=optimizer, loss="mse")
    fit_mse(other, 1)
    assert int(optimizer.iterations) == 4


# What is kept ----------------------------------------------------------------------------------


def test_anchors_stay_and_new_variables_are_anchored_where_they_are_now():
    model = towers("a", "b", start=1.0)
    model.get_layer("a").trainable = False
    optimizer = sgd(model, weight_decay=0.5, anchor="initial", exclude_from_decay=())
    train(model, optimizer)
    assert weights(model) == {"a/kernel": 1.0, "b/kernel": 0.0}
    model.get_layer("a").trainable = True
    model.get_layer("a").set_weights([np.full((1, 1), 5.0)])
    optimizer.rebuild(model)
    fit(model, [0.0, 0.0])
    # The anchor of b is 1: w − 0.5 (w − 1). That of a is 5.
    assert weights(model) == {"a/kernel": 5.0, "b/kernel": 0.5}


def test_averages_and_an_open_window_of_accumulation_stay():
    """Velocities of one step, then a window of gradients 1 and 3 across the rebuild."""
    states = []
    for unfreeze in (False, True):
        model = towers("a", "b", start=1.0)
        model.get_layer("a").trainable = False
        optimizer = grouped(model, gradient_accumulation_steps=2, ema=kgo.EMA(0.5))
        train(model, optimizer, steps=3)
        if unfreeze:
            model.get_layer("a").trainable = True
            optimizer.rebuild(model)
        fit(model, 3.0)
        assert int(optimizer.iterations) == 2
        states.append(state_of(optimizer))
    for name, value in states[0].items():
        if not name.endswith("/@layout"):
            np.testing.assert_array_equal(states[1][name], value, err_msg=name)
    (average,) = slots_of(optimizer, "a/kernel/@average")
    # Half of the way from 1 to where the half of the window that it saw has brought it.
    assert average == 0.5 * 1.0 + 0.5 * weights(model)["a/kernel"]
    assert weights(model)["a/kernel"] == 1.0 - 3.0 / 2


def anchored_to(anchor: Any) -> list[kgo.Group]:
    return [kgo.Group("a", "a", weight_decay=0.5, exclude_from_decay=(), anchor=anchor)]


THREE = {"a/kernel": np.full((1, 1), 3.0)}


def test_another_kind_of_anchor_counts_from_the_rebuild_on():
    model = towers("a", start=1.0)
    train(model, sgd(model, anchored_to("initial")), 0.0)
    model.optimizer.rebuild(model, anchored_to(THREE))
    fit(model, 0.0)
    assert weights(model) == {"a/kernel": 2.0}


def test_anchors_that_a_config_does_not_hold_are_not_made_up():
    model = towers("a", start=1.0)
    config = sgd(model, anchored_to(THREE)).get_config()
    loaded = kgo.GroupedOptimizer.from_config(config)
    model.compile(optimizer=loaded, loss=mean_output)
    loaded.build(model.trainable_variables)
    loaded.rebuild(model)
    with pytest.raises(ValueError, match='anchors of group "a" are not known'):
        loaded.apply([keras.ops.ones((1, 1))], model.trainable_variables)
    loaded.rebuild(model, anchored_to(THREE))
    fit(model, 0.0)
    assert weights(model) == {"a/kernel": 2.0}


def test_numbers_set_by_hand_stay_where_they_are_declared_as_before():
    model = towers("a", "b", "c")
    groups = [kgo.Group(name, name, learning_rate_ratio=0.5) for name in "ab"]
    optimizer = sgd(model, groups)
    train(model, optimizer, 0.0)
    optimizer.learning_rate = 2.0
    optimizer.set_learning_rate_ratio("a", 0.25)
    optimizer.set_learning_rate_ratio("b", 0.25)
    optimizer.rebuild(model, [groups[0], kgo.Group("b", "b", learning_rate_ratio=0.125)])
    fit(model)
    assert weights(model) == {"a/kernel": -0.5, "b/kernel": -0.25, "c/kernel": -2.0}


@pytest.mark.parametrize("same_rule", [True, False])
def test_state_of_a_variable_that_changes_its_group_is_kept_by_the_same_rule_only(same_rule):
    model = towers("a", "b")
    optimizer = grouped(model)
    train(model, optimizer, steps=2)
    rule = kgo.rule("sgd" if same_rule else "lion", **({"momentum": 0.5} if same_rule else {}))
    report = optimizer.add_group(kgo.Group("a", "a", rule=rule, learning_rate_ratio=2.0))
    assert (report.renamed.get("a/a/kernel/momentums") == "default/a/kernel/momentums") is same_rule
    assert ("a/a/kernel/momentums" in report.fresh) is not same_rule
    fit(model)
    # SGD keeps a velocity of -1.5, times the rate of old; Lion moves by the rate.
    assert weights(model) == {
        "a/kernel": -2.5 - (0.75 + 2.0 if same_rule else 2.0),
        "b/kernel": -4.25,
    }


def test_a_group_is_added_before_the_build_too():
    model = towers("a", "b")
    optimizer = sgd(model)
    assert optimizer.add_group(kgo.Group("a", "a", learning_rate_ratio=0.5)) is None
    train(model, optimizer)
    assert weights(model) == {"a/kernel": -0.5, "b/kernel": -1.0}


@pytest.mark.parametrize("made_by", ["load_model", "from_config"])
def test_a_loaded_optimizer_is_rebuilt_from_its_declaration(tmp_path, made_by):
    model = towers("a", "b", "c")
    model.get_layer("c").trainable = False
    train(model, grouped(model, [kgo.Group("a", "a", learning_rate_ratio=0.5)]), steps=2)
    model.optimizer.set_learning_rate_ratio("a", 0.25)
    if made_by == "load_model":
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        optimizer = model.optimizer
    else:
        optimizer = kgo.GroupedOptimizer.from_config(model.optimizer.get_config())
    model.get_layer("c").trainable = True
    report = optimizer.rebuild(model)
    assert groups_of(optimizer) == {"a": ["a/kernel"], "default": ["b/kernel", "c/kernel"]}
    assert float(optimizer.learning_rates["a"]) == 0.25
    assert ("default/b/kernel/momentums" in report.kept) is (made_by == "load_model")
    if made_by == "load_model":
        expected = {"a/kernel": 0.375 + 0.25, "b/kernel": 1.75, "c/kernel": 1.0}
        assert moved_by(model, lambda: fit(model)) == expected


# Mixed precision -------------------------------------------------------------------------------


def half_precision() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    return fill(dense(first=3, head=2))


@pytest.mark.parametrize("scaled", [kgo.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_a_loss_scale_around_it_follows_and_stays_as_it_is(scaled):
    model = half_precision()
    model.get_layer("first").trainable = False
    optimizer = grouped(model, learning_rate=0.125)
    outer = scaled(optimizer, initial_scale=2.0**22)
    model.compile(optimizer=outer, loss="mse")
    fit_mse(model, 12)
    scale, steps = number(outer.dynamic_scale), int(optimizer.iterations)
    assert scale < 2.0**22
    assert 0 < steps < 12
    model.get_layer("first").trainable = True
    (outer if scaled is kgo.LossScaleOptimizer else optimizer).rebuild(model)
    before = weights(model)
    fit_mse(model, 1)
    assert (number(outer.dynamic_scale), int(optimizer.iterations)) == (scale, steps + 1)
    assert all(np.any(value != before[path]) for path, value in weights(model).items())


@pytest.mark.parametrize("scaled", [kgo.LossScaleOptimizer, lambda optimizer: optimizer])
def test_state_waits_for_a_build_inside_a_loss_scale(scaled):
    model = trained(half_precision())
    new = grouped(model, {"head": "head"}, learning_rate=0.125)
    report = kgo.transfer_state(model.optimizer, new)
    assert report.status == "waits for the build"
    model.compile(optimizer=scaled(new), loss="mse")
    fit_mse(model, 1)
    assert report.status == "loaded"
    assert report.fresh == ["@learning_rate_ratio/head"]
    assert int(new.iterations) == 4


# What fails changes nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda own, model: own.rebuild(model, {"c": "heat"}), ValueError, "match at least one"),
        (
            lambda own, model: own.rebuild(model, anchored_to([np.zeros((2, 2))])),
            *(ValueError, "must have the shape of its variable"),
        ),
        (lambda own, _: own.add_group(kgo.Group("a", "b")), ValueError, 'two groups called "a"'),
        (lambda own, _: own.add_group(kgo.Group("c", "a")), ValueError, "must not overlap"),
        (lambda own, _: own.add_group("b"), TypeError, "must hold `kgo.Group` objects"),
        (lambda own, _: own.rebuild("model"), TypeError, "`model` must be a Keras model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rebuild_that_fails_leaves_the_optimizer_as_it_was(call, error, message):
    model = towers("a", "b")
    optimizer = grouped(model, anchored_to("initial"))
    train(model, optimizer, steps=2)
    variables, plan, before = optimizer.variables, optimizer.plan, arrays(optimizer.variables)
    config = optimizer.get_config()
    with pytest.raises(error, match=message):
        call(optimizer, model)
    assert [id(v) for v in optimizer.variables] == [id(v) for v in variables]
    assert optimizer.plan is plan
    assert optimizer.get_config() == config
    assert_equal(arrays(optimizer.variables), before)
    fit(model)
    assert int(optimizer.iterations) == 3


def test_variables_of_a_rebuilt_optimizer_are_those_of_one_made_so():
    model = towers("a", "b")
    groups = anchored_to("initial")
    optimizer = grouped(model)
    train(model, optimizer)
    optimizer.rebuild(model, groups)
    made = grouped(model, groups)
    made.build(model.trainable_variables)
    assert [v.path.split("/")[1:] for v in optimizer.variables] == [
        v.path.split("/")[1:] for v in made.variables
    ]
    # One of them stands for the layout, and refuses the values of another one.
    made.set_weights([np.array(value) for value in state_of(optimizer).values()])
    assert int(made.iterations) == 1


def test_a_rebuilt_optimizer_is_saved_and_loaded(tmp_path):
    model = trained(frozen_backbone(), rule="adam")
    optimizer = model.optimizer
    model.get_layer("body").trainable = True
    group = kgo.Group("body", "body", weight_decay=0.5, anchor="initial", learning_rate_ratio=0.5)
    optimizer.add_group(group)
    fit_mse(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        fit_mse(one)
    assert_equal(loaded, model)


# A model compiled again ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "loaded"),
    [(True, False), (False, False), (False, True)],
    ids=["built", "not built", "loaded"],
)
def test_a_recompiled_model_goes_on_with_a_schedule_in_place_of_a_float(built, loaded, tmp_path):
    model = towers("a", "b")
    train(model, grouped(model), steps=2)
    if loaded:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    old = model.optimizer
    new = grouped(model, [kgo.Group("a", "a")], learning_rate=kgo.constant(1.0))
    if built:
        new.build(model.trainable_variables)
    report = kgo.transfer_state(old, new)
    assert report.status == ("loaded" if built else "waits for the build")
    assert int(new.iterations) == 2
    train(model, new)
    assert weights(model) == {"a/kernel": -4.25, "b/kernel": -4.25}
    assert int(new.iterations) == 3
    assert (report.fresh, report.dropped) == (["@learning_rate_ratio/a"], ["@learning_rate"])
    assert report.renamed["a/a/kernel/momentums"] == "default/a/kernel/momentums"
    # The old one has its own state still.
    train(model, old)
    assert weights(model) == {"a/kernel": -6.0, "b/kernel": -6.0}
    assert int(old.iterations) == 3


@pytest.mark.parametrize("known_before", [True, False])
def test_state_finds_its_variable_if_only_one_optimizer_has_the_model(known_before):
    model = fill(nested())
    old, new = (
        grouped(model if known else None, rule="adam", learning_rate=0.125, ema=kgo.EMA(0.5))
        for known in (known_before, not known_before)
    )
    model.compile(optimizer=old, loss="mse")
    fit_mse(model)
    for _ in range(2):
        report = kgo.transfer_state(old, new)
    model.compile(optimizer=new, loss="mse")
    new.build(model.trainable_variables)
    assert report.fresh == report.dropped == []
    # By identity, averages among them; the layout alone names paths.
    before = [v for v in old.variables if "@layout" not in v.path]
    after = [v for v in new.variables if "@layout" not in v.path]
    assert_equal(arrays(after), arrays(before))
    fit_mse(model, 1)
    assert int(new.iterations) == 4


@pytest.mark.parametrize(
    ("pair", "error", "message"),
    [
        (lambda one: (one, one), ValueError, "one optimizer twice"),
        (lambda one: (keras.optimizers.Adam(), one), TypeError, "`old` must be .*from_optimizer"),
        (lambda one: (one, "adam"), TypeError, "`new` must be a GroupedOptimizer"),
        (lambda one: (one, kgo.GroupedOptimizer()), ValueError, "neither built nor loaded"),
    ],
    ids=["one twice", "a Keras optimizer", "a name", "no state"],
)
def test_what_has_no_state_to_transfer_is_refused(pair, error, message):
    with pytest.raises(error, match=message):
        kgo.transfer_state(*pair(kgo.GroupedOptimizer()))
