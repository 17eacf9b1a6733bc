"""Gradients that are not finite: the step is skipped as a whole, counted, and told of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
from cases import (
    DECAY,
    RATE,
    by_path,
    gradients,
    initial_weights,
    make_model,
    numpy_of,
    stairs,
    tensors_of,
    weights_of,
)
from chosen_gradients import fit, fit_rows, mean_output, towers, weights
from comparing import assert_same, counters_of, state_of, stepper
from models import sgd

import keras_groupopt as kgo

BACKEND = keras.backend.backend()
# The one gradient that is not finite, by path, and the group that is named.
AT_FAULT: dict[str, tuple[Mapping[str, float], str]] = {
    "inf in the first group": ({"backbone/bias": np.inf}, "backbone"),
    "NaN in the last group": ({"head/kernel": np.nan}, "head"),
    "-inf and NaN in both": ({"head/gain": -np.inf, "backbone/kernel": np.nan}, "backbone"),
    "a norm beyond float32": ({"head/kernel": 1e30}, "head"),
    "norms beyond float32 together": ({"backbone/bias": 1.5e19, "head/bias": 1.6e19}, "head"),
}
# All that a step may move, with each kind of clipping.
CLIPPINGS: dict[str, dict[str, Any]] = {
    "global_clipnorm": {"global_clipnorm": 1.0},
    "clipnorm": {"clipnorm": 1.0},
    "clipvalue": {"clipvalue": 0.5},
    "none": {},
}


def optimizer_of(model: Any, **options: Any) -> kgo.GroupedOptimizer:
    groups = [
        kgo.Group("backbone", "backbone", rule="nadam", learning_rate_ratio=0.5),
        kgo.Group("head", "head", rule=kgo.rule("sgd", momentum=0.5)),
    ]
    everything = {
        "learning_rate": stairs(RATE),
        "weight_decay": DECAY,
        "anchor": "initial",
        "ema": kgo.EMA(0.5, warmup=True),
    }
    optimizer = kgo.GroupedOptimizer(groups, model=model, **everything | options)
    optimizer.build(model.trainable_variables)
    return optimizer


def with_fault(given: Mapping[str, np.ndarray], fault: Mapping[str, float]) -> dict[str, Any]:
    """Gradients whose first element is another, at some paths."""
    changed = {path: np.array(value) for path, value in given.items()}
    for path, value in fault.items():
        changed[path].flat[0] = value
    return changed


def state_without_guard(optimizer: Any) -> dict[str, np.ndarray]:
    own = ("@skipped_steps", "@first_nonfinite_group")
    return {key: value for key, value in state_of(optimizer).items() if key not in own}


@pytest.mark.filterwarnings("ignore:Steps skipped")
@pytest.mark.parametrize(
    ("name", "way", "clipping"),
    [
        *zip(AT_FAULT, ["eager"] * 5, [*CLIPPINGS, "none"], strict=True),
        ("-inf and NaN in both", "compiled", "global_clipnorm"),
        ("norms beyond float32 together", "compiled", "clipnorm"),
    ],
)
def test_a_step_that_is_not_finite_leaves_all_state_to_the_bit(name, way, clipping):
    fault, group = AT_FAULT[name]
    model, other = make_model(), make_model()
    optimizer, plain = (optimizer_of(each, **CLIPPINGS[clipping]) for each in (model, other))
    step = stepper(optimizer, model, way, traced_once=True)
    plain_step = stepper(plain, other, way)
    step(gradients(0))
    assert optimizer.first_nonfinite_group is None
    before, state = weights_of(model), state_without_guard(optimizer)
    for number in range(2):
        step(with_fault(gradients(1), fault))
        assert int(optimizer.skipped_steps) == number + 1
    assert optimizer.first_nonfinite_group == group
    assert_same(weights_of(model), before)
    assert_same(state_without_guard(optimizer), state)
    assert counters_of(optimizer) == {1}
    # It goes on as if they had not been.
    step(gradients(2))
    for number in (0, 2):
        plain_step(gradients(number))
    assert_same(weights_of(model), weights_of(other))


def apart(policy: str = "float32", **options: Any) -> tuple[keras.Model, kgo.GroupedOptimizer]:
    """Two towers in two groups, of SGD at rate 1."""
    model = towers("a", "b", dtype=policy)
    return model, sgd(model, {"a": "a", "b": "b"}, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_norm_that_only_its_own_precision_could_not_hold_is_clipped(dtype):
    """K17: the norm of gradients of 400 is beyond float16, that of 1e18 is not beyond float32."""
    model, optimizer = apart(dtype, global_clipnorm=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Weights in float16/bfloat16")
        optimizer.build(model.trainable_variables)
    size = 400.0 if dtype == "float16" else 1e18
    given = [keras.ops.full((1, 1), size * part, dtype=dtype) for part in (0.6, 0.8)]
    optimizer.apply(given, model.trainable_variables)
    assert weights(model) == {
        "a/kernel": pytest.approx(-0.6, rel=2e-3),
        "b/kernel": pytest.approx(-0.8, rel=2e-3),
    }
    assert int(optimizer.skipped_steps) == 0


def test_what_is_frozen_or_propagates_is_not_looked_at():
    model = make_model()
    groups = [kgo.Group("backbone", "backbone", frozen=True)]
    optimizer = sgd(model, groups)
    given = with_fault(gradients(0), {"backbone/bias": np.inf})
    optimizer.apply(tensors_of(given, by_path(model)), model.trainable_variables)
    assert int(optimizer.skipped_steps) == 0
    assert int(optimizer.iterations) == 1
    for clipping in CLIPPINGS:
        model = make_model()
        optimizer = optimizer_of(model, on_nonfinite="propagate", **CLIPPINGS[clipping])
        optimizer.apply(tensors_of(given, by_path(model)), model.trainable_variables)
        assert optimizer.skipped_steps == 0
        assert optimizer.first_nonfinite_group is None
        after = weights_of(model)
        assert not np.isfinite(after["backbone/bias"][0]) or clipping == "clipvalue"
        # A norm over all shows in every weight.
        if clipping == "global_clipnorm":
            assert all(np.isnan(value).any() for value in after.values())
        else:
            assert np.isfinite(after["head/kernel"]).all()
        assert not [key for key in state_of(optimizer) if "nonfinite" in key or "skipped" in key]


@pytest.mark.filterwarnings("ignore:Steps skipped")
@pytest.mark.backends("tensorflow", reason="sparse gradients")
@pytest.mark.parametrize("values", [[[np.inf], [1.0]], [[1e19], [1e19]]], ids=["inf", "sum"])
def test_a_sparse_gradient_is_looked_at_with_repeated_rows_summed(values):
    import tensorflow as tf

    table = keras.Variable(np.ones((3, 1), "float32"), name="table")
    optimizer = sgd()
    optimizer.build([table])
    slices = tf.IndexedSlices(
        tf.constant(values, tf.float32), tf.constant([2, 2]), tf.constant([3, 1])
    )
    for step in (optimizer.apply, tf.function(lambda given: optimizer.apply(given, [table]))):
        step([slices])
    assert int(optimizer.skipped_steps) == 2
    np.testing.assert_array_equal(numpy_of(table), np.ones((3, 1)))


@pytest.mark.filterwarnings("ignore:Steps skipped")
def test_under_loss_scaling_a_norm_that_overflows_once_unscaled_is_skipped_too():
    model, inner = apart(global_clipnorm=1.0)
    outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    model.compile(outer, loss=mean_output)
    # Each element is finite, so Keras lets it pass; what is not, Keras drops before we see it.
    for given in ([1e25, 1.0], [np.inf, 1.0]):
        fit(model, given)
        assert weights(model) == {"a/kernel": 0.0, "b/kernel": 0.0}
        assert int(inner.skipped_steps) == 1
    fit(model, [3.0, 4.0])
    assert weights(model) == {"a/kernel": pytest.approx(-0.6), "b/kernel": pytest.approx(-0.8)}
    assert int(inner.iterations) == 1
    assert inner.first_nonfinite_group == "a"


# Raised and told of ---------------------------------------------------------------------------


def test_an_eager_step_raises_at_once_and_names_the_first_group():
    model = make_model()
    optimizer = optimizer_of(model, on_nonfinite="raise")
    state = state_without_guard(optimizer)
    for name, (fault, group) in AT_FAULT.items():
        given = tensors_of(with_fault(gradients(0), fault), by_path(model))
        with pytest.raises(FloatingPointError, match=f'first in group "{group}". The step was'):
            optimizer.apply(given, model.trainable_variables)
        assert_same(weights_of(model), initial_weights())
        assert_same(state_without_guard(optimizer), state), name
    assert int(optimizer.skipped_steps) == len(AT_FAULT)
    optimizer._check_finite()


@pytest.mark.parametrize("logged", [False, True], ids=["alone", "GroupLogger"])
def test_fit_raises_for_the_group_and_leaves_a_model_that_trains_on(logged, backend):
    model, optimizer = apart(on_nonfinite="raise")
    model.compile(optimizer, loss=mean_output)
    ended = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(1))
    callbacks = [count, *([kgo.GroupLogger()] if logged else [])]
    rows = (1.0, 2.0), (1.0, np.nan), (1.0, 2.0), (1.0, 2.0)
    with pytest.raises(FloatingPointError, match='first in group "b"'):
        fit_rows(model, *rows, callbacks=callbacks)
    # On torch a step is not compiled, and raises itself.
    done, seen = (1, 1) if backend == "torch" else (1, 2) if logged else (3, 4)
    assert len(ended) == seen
    assert weights(model) == {"a/kernel": -1.0 * done, "b/kernel": -2.0 * done}
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_allclose(model.predict([np.ones((1, 1))] * 2, verbose=0), [[-3.0 * done]])
    fit_rows(model, (1.0, 2.0), callbacks=callbacks)
    assert weights(model) == {"a/kernel": -1.0 * (done + 1), "b/kernel": -2.0 * (done + 1)}


def test_group_logger_warns_of_skipped_steps_and_logs_them_on_request():
    model, optimizer = apart()
    model.compile(optimizer, loss=mean_output)
    finite, broken = ((1.0, 2.0), (1.0, 2.0)), ((1.0, np.inf), (np.inf, 2.0))
    for given, skipped, total in ((finite, 0, 0), (broken, 2, 2), (finite, 0, 2), (broken, 2, 4)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            history = fit_rows(model, *given, callbacks=[kgo.GroupLogger(skipped=True)])
        told = [str(each.message) for each in said if "not finite" in str(each.message)]
        # A step that is not compiled tells of the first as well.
        assert len(told) == (0 if not skipped else 2 if BACKEND == "torch" else 1)
        if told:
            assert "not finite: 2. The first group at fault" in told[-1]
            assert 'in the last of them was "a"' in told[-1]
        assert history.history["skipped_steps"] == [total]


def all_broken(model: Any, steps: int, **options: Any) -> Any:
    return fit_rows(model, *[(1.0, np.nan)] * steps, **options)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_fit_tells_what_it_skipped_and_raises_after_too_many_in_a_row(eager):
    model, optimizer = apart(max_skipped_steps=3)
    model.compile(optimizer, loss=mean_output, run_eagerly=eager)
    for rows, count in ([(1.0, np.nan)] * 2, 2), ([(1.0, 1.0), (1.0, np.inf)], 1):
        with pytest.warns(UserWarning, match="Steps skipped") as told:
            fit_rows(model, *rows)
        skips = [str(each.message) for each in told if "Steps skipped" in str(each.message)]
        assert re.search(rf'finite: {count}\. .* was "b"\. Nothing moved in them\.', skips[-1])
    warnings.simplefilter("ignore")
    error = r'[34] steps in a row were skipped.*first in group "b".*`max_skipped_steps=3`'
    with pytest.raises(FloatingPointError, match=error):
        all_broken(model, 3)
    fit_rows(model, (1.0, 1.0))
    with pytest.raises(FloatingPointError, match=error):
        all_broken(model, 2, epochs=2, callbacks=[kgo.GroupLogger()])
    assert float(numpy_of(optimizer.iterations)) == 2.0


@pytest.mark.filterwarnings("ignore:Steps skipped")
@pytest.mark.parametrize("bring", ["state", "weights"])
def test_steps_skipped_before_a_load_are_not_those_of_this_run(bring):
    (model, optimizer), (first, other) = (apart(max_skipped_steps=3) for _ in range(2))
    for each, own in ((model, optimizer), (first, other)):
        each.compile(own, loss=mean_output)
    all_broken(first, 2)
    if bring == "state":
        optimizer.build(model.trainable_variables)
        optimizer.load_state_dict(other.state_dict())
    else:
        optimizer.build(model.trainable_variables)
        optimizer.set_weights([numpy_of(value) for value in other.variables])
    with pytest.warns(UserWarning, match="not finite: 2"):
        all_broken(model, 2)
    assert int(numpy_of(optimizer.skipped_steps)) == 4


@pytest.mark.filterwarnings("ignore:Steps skipped")
def test_micro_batches_taken_in_between_end_a_row():
    model, optimizer = apart(max_skipped_steps=2, gradient_accumulation_steps=8)
    model.compile(optimizer, loss=mean_output, run_eagerly=True)
    fit_rows(model, *[(1.0, np.nan), (1.0, 1.0)] * 3)
    assert int(numpy_of(optimizer.micro_batches)) == 3


# Compiled as one ------------------------------------------------------------------------------


@pytest.mark.backends("torch", reason="torch.compile")
def test_torch_compiles_a_step_without_a_break_and_gets_the_eager_numbers():
    import torch

    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model, optimizer = apart(
            global_clipnorm=4.0,
            gradient_accumulation_steps=2,
            ema=kgo.EMA(0.5, every=2, start=1),
            on_nonfinite="raise",
        )
        optimizer.build(model.trainable_variables)
        # Weights that are set after the build are what averages begin at.
        model.set_weights([np.full((1, 1), 8.0), np.full((1, 1), -8.0)])

        def step(values: Any, own: Any = optimizer, model: Any = model) -> None:
            own.apply(values, model.trainable_variables)

        if compiled:
            step = torch.compile(step, backend="eager", fullgraph=True)
        for given in ((3.0, 4.0), (np.inf, 1.0), (3.0, 4.0), *[(1.0, 2.0)] * 4):
            try:
                step([keras.ops.full((1, 1), value) for value in given])
            except FloatingPointError:
                assert not compiled
        if compiled:
            with pytest.raises(FloatingPointError, match='first in group "a"'):
                optimizer._check_finite()
        results.append((weights(model), state_of(optimizer)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    for key, value in results[0][1].items():
        np.testing.assert_allclose(results[1][1][key], value, rtol=1e-6, err_msg=key)
    assert int(results[1][1]["@iterations"]) == 3
    assert int(results[1][1]["@skipped_steps"]) == 1
