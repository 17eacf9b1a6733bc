"""State that does not fit whole: what is kept, what starts fresh, and what is said of it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import keras
import numpy as np
import pytest
import saving_models
from saving_models import X, Y, assert_equal, compiled, fit, groups, state, train

import keras_groupopt as kgo

BACKBONE: dict[str, Any] = {"learning_rate_ratio": 0.25, "anchor": "initial"}


def with_head(name: str, width: int = 2) -> keras.Model:
    """The nested model with a head of its own."""
    inputs = keras.Input((4,))
    body = saving_models.nested().get_layer("body")
    model = keras.Model(inputs, keras.layers.Dense(width, name=name)(body(inputs)))
    saving_models.fill(model, seed=2)
    head = kgo.Group("head", name, rule=kgo.rule("sgd", momentum=0.5), weight_decay=0.0)
    optimizer = saving_models.optimizer(model, [named()[0], head])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def named(backbone: str = "backbone", rule: Any = None) -> list[kgo.Group]:
    return [kgo.Group(backbone, "body", rule=rule, **BACKBONE), groups()[1]]


def split() -> list[kgo.Group]:
    first = kgo.Group("first", "body/first", **BACKBONE)
    return [first, kgo.Group("backbone", "body/dense", **BACKBONE), groups()[1]]


# What has changed: the model, renames, and the prefixes of all that is fresh and all that is
# dropped.
CHANGES: dict[str, tuple[Any, dict[str, str], set[str], set[str]]] = {
    "nothing": (lambda: compiled(seed=2), {}, set(), set()),
    "a layer's name": (
        lambda: with_head("classifier"),
        {},
        {"head/classifier", "head/@rule"},
        {"head/head", "head/@rule"},
    ),
    "a layer's name, told": (
        lambda: with_head("classifier"),
        {"head": "classifier"},
        set(),
        set(),
    ),
    "a head's width": (
        lambda: with_head("head", width=5),
        {},
        {"head/head", "head/@rule"},
        {"head/head", "head/@rule"},
    ),
    "a group's name": (
        lambda: compiled(seed=2, groups_=named("trunk")),
        {},
        {"trunk/", "@learning_rate_ratio/trunk", "@weight_decay/trunk"},
        {"backbone/", "@learning_rate_ratio/backbone", "@weight_decay/backbone"},
    ),
    "a group's name, told": (
        lambda: compiled(seed=2, groups_=named("trunk")),
        {"group:backbone": "group:trunk"},
        set(),
        set(),
    ),
    "a group split": (
        lambda: compiled(seed=2, groups_=split()),
        {},
        {"first/", "@learning_rate_ratio/first", "@weight_decay/first"},
        {"backbone/body/first"},
    ),
    "a rule": (
        lambda: compiled(seed=2, groups_=named(rule="nadam")),
        {},
        {"backbone/body/first", "backbone/body/dense", "backbone/@rule"},
        {"backbone/body/first", "backbone/body/dense", "backbone/@rule"},
    ),
    "a number made a schedule": (
        lambda: compiled(seed=2, learning_rate=keras.optimizers.schedules.CosineDecay(0.125, 10)),
        {},
        set(),
        {"@learning_rate"},
    ),
}


def prefixes(keys: list[str], known: set[str]) -> set[str]:
    return {next((prefix for prefix in known if key.startswith(prefix)), key) for key in keys}


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_matches_by_path_is_kept_and_the_rest_is_listed(change, built):
    make, renames, fresh, dropped = CHANGES[change]
    source = train(compiled())
    store: dict[str, Any] = {}
    source.optimizer.save_own_variables(store)
    model = make()
    if built:
        model.optimizer.build(model.trainable_variables)
    with kgo.resuming(strict=False, renames=renames) as report:
        model.optimizer.load_own_variables(store)
        if not built:
            assert report.status == "waits for the build"
    if not built:  # the terms hold beyond the block, for the load that began in it
        model.optimizer.build(model.trainable_variables)
    assert report.status == "loaded"
    assert prefixes(report.fresh, fresh) == fresh
    assert prefixes(report.dropped, dropped) == dropped
    saved = source.optimizer.state_dict()
    now = model.optimizer.state_dict()
    assert sorted(report.kept + report.fresh) == sorted(now["manifest"]["state"])
    for key in report.kept:
        np.testing.assert_array_equal(
            value_of(now, key), value_of(saved, report.renamed.get(key, key)), err_msg=key
        )
    assert f"{len(report.kept)} kept, {len(report.fresh)} fresh" in str(report)


def value_of(nested: dict[str, Any], key: str) -> np.ndarray:
    if key.startswith("@"):
        return nested["scalars"][key]
    group, _, rest = key.partition("/")
    path, _, slot = rest.rpartition("/")
    return nested["groups"][group][path][slot]


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_renamed_layers_and_groups_go_on_bit_for_bit(ending, tmp_path):
    path = tmp_path / f"model{ending}"
    source = train(compiled())
    (source.save if ending == ".keras" else source.save_weights)(path)
    model = with_head("classifier")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"head/classifier/kernel/momentums is not saved"):
        model.load_weights(path)
    with kgo.resuming(renames={"head": "classifier"}) as report:
        model.load_weights(path)
    assert not report.fresh
    for one in (model, source):
        train(one, 2)
    for value, expected in zip(model.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_group_that_starts_over_takes_the_steps_of_a_new_optimizer():
    source = train(compiled(rule="adam", groups_=named(rule="sgd")), 50)
    store: dict[str, Any] = {}
    source.optimizer.save_own_variables(store)
    declared = [kgo.Group("backbone", "body", weight_decay=0.0), groups()[1]]
    model, new = (compiled(groups_=declared) for _ in range(2))
    with kgo.resuming(strict=False):
        model.optimizer.load_own_variables(store)
    model.optimizer.build(model.trainable_variables)
    gradients = [np.full(v.shape, 0.1, "float32") for v in model.trainable_variables]
    for one in (model, new):
        one.optimizer.apply(
            [keras.ops.convert_to_tensor(g) for g in gradients], one.trainable_variables
        )
    assert int(model.optimizer.iterations.numpy()) == 51
    for value, expected in zip(model.get_weights()[:4], new.get_weights()[:4], strict=True):
        np.testing.assert_array_equal(value, expected)
    # And so it does after another save and load.
    store = {}
    model.optimizer.save_own_variables(store)
    again = compiled(groups_=declared)
    again.optimizer.load_own_variables(store)
    again.set_weights(model.get_weights())
    assert_equal(train(again, 1), train(model, 1))


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_fresh_anchors_of_a_run_that_has_not_begun_are_the_loaded_weights(built, tmp_path):
    train(compiled()).save_weights(tmp_path / "model.weights.h5")
    model = compiled(seed=2, groups_=split())
    if built:
        model.optimizer.build(model.trainable_variables)
    with kgo.resuming(strict=False):
        model.load_weights(tmp_path / "model.weights.h5")
    model.optimizer.build(model.trainable_variables)
    drift = {name: float(value) for name, value in model.optimizer.anchor_drift().items()}
    assert drift["first"] == 0.0  # its anchor is fresh
    assert drift["backbone"] > 0.0  # its anchor is the first run's


# Terms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("renames", "error", "message"),
    [
        ({"haed": "classifier"}, ValueError, "must name saved .*'haed'.* nearest are: head"),
        ({"head": "clasifier"}, ValueError, "must name present .*'clasifier'.*: classifier"),
        ({"group:head": "classifier"}, ValueError, "groups to groups"),
        ({"head": 1}, TypeError, "must be a dict from saved names to present names"),
        ("head", TypeError, "must be a dict from saved names to present names"),
    ],
)
def test_a_mistyped_rename_is_an_error_and_nothing_is_loaded(renames, error, message):
    store: dict[str, Any] = {}
    train(compiled()).optimizer.save_own_variables(store)
    model = with_head("classifier")
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    with pytest.raises(error, match=message), kgo.resuming(strict=False, renames=renames):
        model.optimizer.load_own_variables(store)
    for value, expected in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_refusal_that_keras_swallows_is_in_the_report(tmp_path):
    path = tmp_path / "model.weights.h5"
    train(compiled()).save_weights(path)
    model = compiled(seed=2, groups_=split())
    model.optimizer.build(model.trainable_variables)
    with kgo.resuming() as report, pytest.warns(UserWarning, match="Nothing was loaded"):
        model.load_weights(path, skip_mismatch=True)
    assert (report.status, report.kept) == ("refused", [])
    assert str(report).startswith("Optimizer state: refused.")


def test_the_innermost_terms_hold_and_the_outer_ones_return():
    store: dict[str, Any] = {}
    train(compiled()).optimizer.save_own_variables(store)

    def load() -> None:
        model = compiled(seed=2, groups_=split())
        model.optimizer.build(model.trainable_variables)
        model.optimizer.load_own_variables(store)

    with kgo.resuming(strict=False) as outer:
        with pytest.raises(ValueError, match="Nothing was loaded"), kgo.resuming() as inner:
            load()
        assert (inner.status, outer.status) == ("refused", "nothing loaded")
        failures: list[BaseException] = []

        def elsewhere() -> None:
            try:
                load()
            except ValueError as error:
                failures.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(failures) == 1  # another thread has terms of its own
        load()
    assert outer.status == "loaded"
    with pytest.raises(ValueError, match="Nothing was loaded"):
        load()


# Switched on and off ------------------------------------------------------------------------------


SWITCHES: dict[str, dict[str, Any]] = {
    "averages": {"ema": kgo.EMA(0.9)},
    "accumulation": {"gradient_accumulation_steps": 2},
    "both": {"ema": kgo.EMA(0.9), "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_on_or_off_leaves_the_rest_as_it_was(switch, on, built, tmp_path):
    plain, switched = {}, SWITCHES[switch]
    before, after = (plain, switched) if on else (switched, plain)
    # Pairs of equal micro-batches make the steps of a run without accumulation.
    source = train(compiled(**before), 8)
    source.save_weights(tmp_path / "model.weights.h5")
    model = compiled(seed=2, **after)
    if built:
        model.optimizer.build(model.trainable_variables)
    with kgo.resuming() as report:
        model.load_weights(tmp_path / "model.weights.h5")
    model.optimizer.build(model.trainable_variables)
    changed = report.fresh if on else report.dropped
    own = ("@accumulator", "@average", "@micro_batches", "@accumulated_weight", "@averages_made")
    assert changed
    assert all(key.split("/")[-1] in (*own, "@ema_momentum") for key in changed)
    assert (report.dropped if on else report.fresh) == []
    saved, now = source.optimizer.state_dict(), model.optimizer.state_dict()
    for key in report.kept:
        np.testing.assert_array_equal(value_of(now, key), value_of(saved, key), err_msg=key)


@pytest.mark.parametrize("pending", [0, 1])
def test_an_open_window_that_is_dropped_is_told(pending, caplog):
    source = train(compiled(gradient_accumulation_steps=2), 4 + pending)
    model = compiled(seed=2)
    model.optimizer.build(model.trainable_variables)
    with caplog.at_level(logging.WARNING):
        model.optimizer.load_state_dict(source.optimizer.state_dict())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == pending
    assert all("its 1 micro-batches are lost" in message for message in told)


def test_averages_that_are_left_out_are_told(caplog):
    source = train(compiled(ema=kgo.EMA(0.5)), 3)
    model = compiled(seed=2)
    model.optimizer.build(model.trainable_variables)
    with caplog.at_level(logging.WARNING):
        model.optimizer.load_state_dict(source.optimizer.state_dict())
    assert "averages of the weights over 3 steps; they are left out" in caplog.text


@pytest.mark.parametrize("averages", [(kgo.EMA(0.5), kgo.SWA()), (kgo.SWA(), kgo.EMA(0.5))])
def test_averages_of_another_kind_begin_anew_at_the_present_weights(averages, caplog):
    source = train(compiled(ema=averages[0]), 3)
    model = train(compiled(ema=averages[1]), 1)
    with caplog.at_level(logging.WARNING):
        report = model.optimizer.load_state_dict(source.optimizer.state_dict())
    assert "averages of another kind" in caplog.text
    assert "@averages_made" in report.fresh
    assert "@averages_made" not in report.kept
    for mean, variable in model.optimizer._average_pairs():
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(mean), keras.ops.convert_to_numpy(variable)
        )


def test_averages_that_are_switched_on_start_at_the_loaded_weights(tmp_path):
    source = train(compiled())
    source.save_weights(tmp_path / "model.weights.h5")
    model = compiled(seed=2, ema=kgo.EMA(0.5))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "model.weights.h5")
    train(model, 1)
    average = model.optimizer.state_dict()["groups"]["head"]["head/kernel"]["@average"]
    before, after = source.get_weights()[4], model.get_weights()[4]
    np.testing.assert_allclose(average, (before + after) / 2, rtol=1e-5)


# Keras' callbacks ---------------------------------------------------------------------------------


class StoppedError(Exception):
    """Ends a run as a crash would."""


class StopAfter(keras.callbacks.Callback):
    """Crashes after some epochs."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epochs:
            raise StoppedError


def run(model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 4) -> keras.Model:
    model.fit(
        X, Y, batch_size=6, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


def test_backup_and_restore_goes_on_where_a_run_stopped(tmp_path):
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    straight = run(compiled())
    with pytest.raises(StoppedError):
        run(compiled(), backup(), StopAfter(2))
    resumed = compiled(seed=2)
    assert_equal(run(resumed, backup()), straight)


def test_backup_and_restore_follows_the_terms(tmp_path):
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    with pytest.raises(StoppedError):
        run(compiled(), backup(), StopAfter(2))
    with kgo.resuming(strict=False, renames={"head": "classifier"}) as report:
        run(with_head("classifier"), backup())
    assert (report.status, report.fresh) == ("loaded", [])


def test_the_files_of_model_checkpoint_go_on_bit_for_bit(tmp_path):
    paths = [tmp_path / "{epoch}.keras", tmp_path / "{epoch}.weights.h5"]
    savers = [
        keras.callbacks.ModelCheckpoint(str(path), save_weights_only="weights" in path.name)
        for path in paths
    ]
    straight = run(compiled(), *savers, epochs=3)
    from_model = keras.saving.load_model(tmp_path / "2.keras")
    from_weights = compiled(seed=2)
    kgo.load_weights(from_weights, tmp_path / "2.weights.h5")
    for model in (from_model, from_weights):
        assert_equal(run(model, epochs=1), straight)


def test_load_model_follows_the_terms(tmp_path):
    model = fit(compiled())
    model.save(tmp_path / "model.keras")
    with kgo.resuming() as report:
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert (report.status, report.fresh, report.dropped) == ("loaded", [], [])
    assert_equal(loaded, model)
