"""State that does not fit whole: what is kept, what starts fresh, and what the report shows."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import saving_models
from comparing import state_of
from saving_models import (
    X,
    Y,
    assert_equal,
    backbone,
    compiled,
    either_way,
    groups,
    new_head,
    refused,
    save,
    split,
    store_of,
    train,
)

import keras_groupopt as kgo

CosineDecay = keras.optimizers.schedules.CosineDecay


def with_head(name: str, width: int = 2, seed: int = 2) -> keras.Model:
    """The nested model with a head of its own."""
    model = saving_models.fill(new_head(name, width), seed)
    head = kgo.Group("head", name, rule=kgo.rule("sgd", momentum=0.5), weight_decay=0.0)
    model.compile(saving_models.optimizer(model, [backbone(), head]), loss="mse")
    return model


def regrouped(*present: kgo.Group) -> Callable[..., keras.Model]:
    """Makes the nested model with other groups."""
    return functools.partial(compiled, groups_=present)


def scalars_of(group: str) -> set[str]:
    return {f"@learning_rate_ratio/{group}", f"@weight_decay/{group}"}


BODY, HEAD = {f"backbone/body/{layer}" for layer in ("first", "dense")}, {"head/head"}
HEAD_GROUP = groups()[1]
NEW_HEAD, BODY_RULE = HEAD | {"head/@rule"}, BODY | {"backbone/@rule"}
# What has changed: the model, the first differences that a refusal shows, and the prefixes of all
# that is fresh and all that is dropped where nothing is refused.
CHANGES: dict[str, tuple[Callable[..., keras.Model], str, set[str], set[str]]] = {
    "nothing": (compiled, "", set(), set()),
    "a number made a schedule": (
        functools.partial(compiled, learning_rate=CosineDecay(0.125, 10)),
        "",
        set(),
        {"@learning_rate"},
    ),
    "a layer's name": (
        functools.partial(with_head, "classifier"),
        r"head/classifier/kernel/momentums is not saved \(nearest: head/head/kernel/momentums\)",
        {"head/classifier", "head/@rule"},
        NEW_HEAD,
    ),
    "a head's width": (
        functools.partial(with_head, "head", width=5),
        r"head/head/kernel/momentums: saved as float32\[3, 2\], now float32\[3, 5\]",
        NEW_HEAD,
        NEW_HEAD,
    ),
    "a group's name": (
        regrouped(backbone("trunk"), HEAD_GROUP),
        r'group "backbone" is saved, but not in this optimizer\n.*group "trunk" is in this',
        scalars_of("trunk"),
        scalars_of("backbone"),
    ),
    "a group split": (
        regrouped(*split()),
        r'group "first" is in this optimizer, but not saved\n'
        r".*first/body/first/kernel/momentums is not saved \(nearest: backbone/body/first/kernel/",
        scalars_of("first"),
        set(),
    ),
    "a group removed": (
        regrouped(backbone("backbone", kgo.everything())),
        r'group "head" is saved, but not in this optimizer',
        {"backbone/head"},
        HEAD | {"head/@rule", "@learning_rate_ratio/head"},
    ),
    "a rule": (
        regrouped(backbone(rule="nadam"), HEAD_GROUP),
        r'group "backbone": saved with rule adam, now nadam',
        BODY_RULE,
        BODY_RULE,
    ),
    "a slot": (
        functools.partial(compiled, groups_=groups(rule=kgo.rule("sgd", momentum=0.0))),
        r"head/head/kernel/momentums is saved, but not in this optimizer",
        set(),
        HEAD,
    ),
    "an anchor": (
        regrouped(backbone(anchor=None), HEAD_GROUP),
        r"backbone/body/first/kernel/@anchor is saved, but not in this optimizer",
        set(),
        BODY,
    ),
}
RENAMES = {
    "a layer's name": {"head": "classifier"},
    "a group's name": {"group:backbone": "group:trunk"},
}


@either_way
@pytest.mark.parametrize("change", [name for name, (_, text, *_) in CHANGES.items() if text])
def test_another_layout_is_refused_with_its_first_differences(change, build):
    make, message, *_ = CHANGES[change]
    store, model = store_of(train(compiled(), 1)), make(seed=2)
    if build:
        model.optimizer.build(model.trainable_variables)
        with refused(model, ValueError, message):
            model.optimizer.load_own_variables(store)
    else:
        model.optimizer.load_own_variables(store)
        for _ in range(2):  # the second try does not go on as if nothing had been loaded
            with pytest.raises(ValueError, match=message):
                model.optimizer.build(model.trainable_variables)
        assert not model.optimizer.built


def prefixes(keys: list[str], known: set[str]) -> set[str]:
    return {next((prefix for prefix in known if key.startswith(prefix)), key) for key in keys}


@either_way
@pytest.mark.parametrize(
    ("change", "renames"), [*((change, {}) for change in CHANGES), *RENAMES.items()]
)
def test_what_matches_by_path_is_kept_and_the_rest_is_listed(change, renames, build):
    make, _, *listed = CHANGES[change]
    fresh, dropped = (set(), set()) if renames else listed
    source, model = train(compiled()), make(seed=2)
    if build:
        model.optimizer.build(model.trainable_variables)
        state = source.optimizer.state_dict()
        report = model.optimizer.load_state_dict(state, strict=False, renames=renames)
    else:
        with kgo.resuming(strict=False, renames=renames) as report:
            model.optimizer.load_own_variables(store_of(source))
            assert report.status == "waits for the build"
        # The terms hold beyond the block, for the load that began in it.
        model.optimizer.build(model.trainable_variables)
    assert report.status == "loaded"
    assert prefixes(report.fresh, fresh) == fresh
    assert prefixes(report.dropped, dropped) == dropped
    now = model.optimizer.state_dict()["manifest"]["state"]
    assert sorted(report.kept + report.fresh) == sorted(now)
    assert_kept(report, model, source)
    assert f"{len(report.kept)} kept, {len(report.fresh)} fresh" in str(report)


def assert_kept(report: Any, target: keras.Model, source: keras.Model) -> None:
    now, saved = (state_of(model.optimizer) for model in (target, source))
    for key in report.kept:
        before = saved[report.renamed.get(key, key).replace("/", "|")]
        np.testing.assert_array_equal(now[key.replace("/", "|")], before, err_msg=key)


def test_a_variable_in_another_group_goes_on_bit_for_bit():
    source, model = train(compiled()), compiled(seed=2, groups_=split(), build=True)
    model.set_weights(source.get_weights())
    report = model.optimizer.load_state_dict(source.optimizer.state_dict(), strict=False)
    now, before = "first/body/first/kernel/momentums", "backbone/body/first/kernel/momentums"
    assert report.renamed[now] == before
    assert f"{now} (saved as {before})" in str(report)
    np.testing.assert_equal(train(model, 2).get_weights(), train(source, 2).get_weights())


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_renamed_layers_and_groups_go_on_bit_for_bit(ending, tmp_path):
    source = train(compiled())
    path = save(source, tmp_path / f"model{ending}")
    model = with_head("classifier")
    model.optimizer.build(model.trainable_variables)
    with kgo.resuming(renames=RENAMES["a layer's name"]) as report:
        model.load_weights(path)
    assert not report.fresh
    np.testing.assert_equal(train(model, 2).get_weights(), train(source, 2).get_weights())


def test_a_group_that_starts_over_takes_the_steps_of_a_new_optimizer():
    source = train(compiled(rule="adam", groups_=[backbone(rule="sgd"), HEAD_GROUP]), 50)
    declared = [kgo.Group("backbone", "body", weight_decay=0.0), groups()[1]]
    model, new = (compiled(groups_=declared) for _ in range(2))
    with kgo.resuming(strict=False):
        model.optimizer.load_own_variables(store_of(source))
    model.optimizer.build(model.trainable_variables)
    for one in (model, new):
        variables = one.trainable_variables
        one.optimizer.apply([keras.ops.full(v.shape, 0.1) for v in variables], variables)
    assert int(model.optimizer.iterations.numpy()) == 51
    np.testing.assert_equal(model.get_weights()[:4], new.get_weights()[:4])
    # And so it does after another save and load.
    again = compiled(groups_=declared)
    again.optimizer.load_own_variables(store_of(model))
    again.set_weights(model.get_weights())
    assert_equal(train(again, 1), train(model, 1))


@either_way
def test_fresh_anchors_of_a_run_that_has_not_begun_are_the_loaded_weights(build, tmp_path):
    first, *others = split()
    source = train(compiled(groups_=[backbone("first", "body/first", anchor="zero"), *others]))
    model = compiled(seed=2, groups_=[first, *others], build=build)
    with kgo.resuming(strict=False):
        model.load_weights(save(source, tmp_path / "model.weights.h5"))
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
    store = store_of(train(compiled()))
    model = with_head("classifier")
    model.optimizer.build(model.trainable_variables)
    with refused(model, error, message), kgo.resuming(strict=False, renames=renames):
        model.optimizer.load_own_variables(store)


def test_the_innermost_terms_hold_and_the_outer_ones_return():
    store = store_of(train(compiled()))
    refusal = pytest.raises(ValueError, match="No state was loaded")

    def load_it() -> None:
        model = compiled(seed=2, groups_=split(), build=True)
        model.optimizer.load_own_variables(store)

    with kgo.resuming(strict=False) as outer:
        with refusal, kgo.resuming() as inner:
            load_it()
        assert (inner.status, outer.status) == ("refused", "nothing loaded")
        with refusal, concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(load_it).result()  # another thread has terms of its own
        load_it()
    assert outer.status == "loaded"
    with refusal:
        load_it()


# Switched on and off ------------------------------------------------------------------------------


SWITCHES: dict[str, dict[str, Any]] = {
    "averages": {"ema": kgo.EMA(0.9)},
    "accumulation": {"gradient_accumulation_steps": 2},
    "both": {"ema": kgo.EMA(0.9), "gradient_accumulation_steps": 2},
}


@either_way
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_on_or_off_leaves_the_rest_as_it_was(switch, on, build, tmp_path):
    before, after = ({}, SWITCHES[switch]) if on else (SWITCHES[switch], {})
    # Pairs of equal micro-batches make the steps of a run without accumulation.
    source = train(compiled(**before), 8)
    model = compiled(seed=2, build=build, **after)
    with kgo.resuming() as report:
        model.load_weights(save(source, tmp_path / "model.weights.h5"))
    model.optimizer.build(model.trainable_variables)
    changed, none = (report.fresh, report.dropped) if on else (report.dropped, report.fresh)
    own = {"@accumulator", "@average", "@micro_batches", "@accumulated_weight", "@averages_made"}
    assert changed
    assert {key.split("/")[-1] for key in changed} <= own | {"@ema_momentum"}
    assert none == []
    assert_kept(report, model, source)


@pytest.mark.parametrize(
    ("options", "steps", "text"),
    [
        ({"gradient_accumulation_steps": 2}, 4, None),
        ({"gradient_accumulation_steps": 2}, 5, "its 1 micro-batches are lost"),
        ({"ema": kgo.EMA(0.5)}, 3, "averages of the weights over 3 steps; they are left out"),
    ],
    ids=["a closed window", "an open window", "averages"],
)
def test_state_that_is_left_out_is_logged(options, steps, text, caplog):
    source, model = train(compiled(**options), steps), compiled(seed=2, build=True)
    with caplog.at_level(logging.WARNING):
        model.optimizer.load_state_dict(source.optimizer.state_dict())
    assert len(caplog.records) == (text is not None)
    assert text is None or text in caplog.text


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
    model = compiled(seed=2, ema=kgo.EMA(0.5), build=True)
    model.load_weights(save(source, tmp_path / "model.weights.h5"))
    train(model, 1)
    average = model.optimizer.state_dict()["groups"]["head"]["head/kernel"]["@average"]
    before, after = source.get_weights()[4], model.get_weights()[4]
    np.testing.assert_allclose(average, (before + after) / 2, rtol=1e-5)


# Keras' callbacks ---------------------------------------------------------------------------------


class Stopped(keras.callbacks.Callback):
    """Ends a run after two epochs, as a crash would."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


def run(model: keras.Model, *callbacks: keras.callbacks.Callback) -> None:
    model.fit(X, Y, batch_size=6, epochs=3, verbose=0, callbacks=list(callbacks))


def test_a_backup_of_keras_follows_the_terms(tmp_path):
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    with pytest.raises(KeyboardInterrupt):
        run(compiled(), backup(), Stopped())
    with kgo.resuming(strict=False, renames={"head": "classifier"}) as report:
        run(with_head("classifier"), backup())
    assert (report.status, report.fresh) == ("loaded", [])


def test_load_model_follows_the_terms(tmp_path):
    model = train(compiled())
    path = save(model, tmp_path / "model.keras")
    with kgo.resuming() as report:
        loaded = keras.saving.load_model(path)
    assert (report.status, report.fresh, report.dropped) == ("loaded", [], [])
    assert_equal(loaded, model)
