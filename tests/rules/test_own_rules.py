"""The rules of this package, alone in `model.compile`: learning, saving, precision, bad input."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from comparing import assert_close, assert_same, compiled_step
from own_rules import BAD, OWN_ROWS, table
from own_rules import RAdam as RAdamReference

import keras_groupopt as kgo
from keras_groupopt.rules.registry import rule_names
from keras_groupopt.rules.scalars import rectification

BACKEND = keras.backend.backend()
ops = keras.ops
every_rule = pytest.mark.parametrize("name", OWN_ROWS)


def test_every_rule_has_a_row_in_the_table() -> None:
    assert set(rule_names()) <= set(table())


def make(which: str, **options: Any) -> Any:
    row = OWN_ROWS[which]
    return row.cls(row.rate, **{**row.changed, **options})


def make_model(optimizer: Any = None, dtype: str | None = None, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = layers.Dense(8, activation="tanh", use_bias=False, dtype=dtype)
    last = layers.Dense(2, use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input((4,)), hidden, last])
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.float32(np.random.default_rng(5).normal(size=(32, 4)))
    return x, np.tanh(x[:, :2] - x[:, 1:3])


def arrays(variables: Any) -> dict[str, np.ndarray]:
    return {str(i): np.array(ops.convert_to_numpy(v)) for i, v in enumerate(variables)}


def tensors(values: Any, dtype: str = "float32") -> list[Any]:
    return [ops.convert_to_tensor(value, dtype) for value in values]


@every_rule
def test_fit_learns_and_the_next_step_after_loading_is_the_same(name: str, tmp_path: Any) -> None:
    x, y = data()
    model = make_model(make(name))
    losses = model.fit(x, y, batch_size=8, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.85 * losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is OWN_ROWS[name].cls
    assert int(loaded.optimizer.iterations) == 20
    assert_same(arrays(loaded.optimizer.variables), arrays(model.optimizer.variables))
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert_same(arrays(loaded.variables), arrays(model.variables))


@every_rule
def test_a_config_is_complete_and_plain(name: str) -> None:
    options = {"name": "mine", "weight_decay": 0.25, "global_clipnorm": 2.0}
    optimizer = make(name, **options)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    assert config["registered_name"] == f"keras_groupopt>{type(optimizer).__name__}"
    assert config["config"].items() >= options.items()
    again = keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    defaults = OWN_ROWS[name].cls().get_config()
    changed = {n for n, value in make(name).get_config().items() if defaults[n] != value}
    assert changed >= set(OWN_ROWS[name].changed)


@every_rule
def test_a_plan_tells_the_memory_before_the_state_is_made(name: str) -> None:
    model = make_model()
    optimizer = kgo.GroupedOptimizer(rule=kgo.rule(name), model=model)
    expected = [variable.state_bytes for variable in optimizer.plan.variables]
    optimizer.build(model.trainable_variables)
    assert [variable.state_bytes for variable in optimizer.plan.variables] == expected
    # The base rate, its ratio, counters and the digest are of the whole.
    state = optimizer.state_dict()["groups"]["default"]
    assert all(sum(v.nbytes for v in state[v_.path].values()) == v_.state_bytes
               for v_ in optimizer.plan.variables)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in OWN_ROWS), ("radam", {"beta_2": 0.95}), ("radam", {"beta_2": 0.6})],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_step_is_nan_in_any_precision(name: str, options: Any, dtype: str) -> None:
    sizes = (0.0, 1e-3, 100.0)
    weights = [keras.Variable([[0.5, -0.5], [1.0, 2.0]], dtype=dtype) for _ in sizes]
    optimizer = OWN_ROWS[name].cls(0.01, **options)
    gradient = np.array([[1.0, -1.0], [-1.0, 0.0]])
    gradients = tensors((gradient * size for size in sizes), dtype)
    for _ in range(12):
        optimizer.apply(gradients, weights)
    values = arrays([ops.cast(v, "float32") for v in [*weights, *optimizer.variables]])
    assert all(np.isfinite(value).all() for value in values.values())
    slots = [v for v in optimizer.variables if len(v.shape) == 2]
    assert {keras.backend.standardize_dtype(v.dtype) for v in slots} <= {dtype}


@every_rule
def test_a_variable_that_takes_its_gradient_has_no_slots(name: str) -> None:
    weight, scale = (keras.Variable([[1.0, 2.0], [3.0, 4.0]]) for _ in range(2))
    scale.overwrite_with_gradient = True
    optimizer, plain = make(name), make(name)
    optimizer.build([scale, weight])
    plain.build([weight])
    assert len(optimizer.variables) == len(plain.variables)
    optimizer.apply(tensors([np.full((2, 2), 7.0), np.eye(2)]))
    np.testing.assert_array_equal(arrays([scale])["0"], 7.0)
    assert arrays([weight])["0"][0, 0] != 1.0


@pytest.mark.parametrize("name", ["adan", "lookahead", "muon", "schedulefreeadamw"])
def test_mixed_precision_trains_float32_weights(name: str) -> None:
    x, y = data()
    optimizer = keras.optimizers.LossScaleOptimizer(make(name), initial_scale=2.0**7)
    model = make_model(optimizer, dtype="mixed_float16")
    losses = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert {keras.backend.standardize_dtype(v.dtype) for v in model.variables} == {"float32"}


@pytest.mark.parametrize("name", ["adan", "lookahead", "radam", "schedulefreeadamw"])
def test_accumulated_gradients_of_keras_are_one_batch(name: str) -> None:
    x, y = data()
    whole = make_model(make(name))
    whole.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
    parts = make_model(make(name, gradient_accumulation_steps=2))
    parts.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    assert_close(arrays(parts.variables), arrays(whole.variables), 2e-4)


def test_averages_of_keras_are_finite_after_fit() -> None:
    model = make_model(make("radam", use_ema=True))
    model.fit(*data(), batch_size=16, verbose=0)
    assert all(np.isfinite(value).all() for value in arrays(model.variables).values())


WAYS: dict[str, dict[str, Any]] = {
    "tensorflow": {"jit_compile": False, "run_eagerly": True, "steps_per_execution": 2},
    "jax": {"steps_per_execution": 2},
    "torch": {"run_eagerly": True},
}[BACKEND]


@pytest.mark.parametrize("way", WAYS)
def test_fit_learns_however_the_model_is_compiled(way: str) -> None:
    model = make_model(make("radam", clipnorm=10.0), **{way: WAYS[way]})
    losses = model.fit(*data(), batch_size=8, epochs=5, verbose=0).history["loss"]
    assert int(model.optimizer.iterations) == 20
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in OWN_ROWS), ("adabelief", {"rectify": True, "beta_2": 0.9})],
)
def test_a_hyperparameter_may_be_a_tensor(name: str, options: dict[str, Any]) -> None:
    numbers, driven = make(name, **options), make(name, **options)
    random = np.random.default_rng(2)
    start = np.float32(random.normal(size=(3, 4)))
    weights = [keras.Variable(start, name="w"), keras.Variable(start, name="w")]
    for optimizer, weight in zip((numbers, driven), weights, strict=True):
        optimizer.build([weight])
    arguments = inspect.signature(type(driven).__init__).parameters
    drive(driven, [a for a in arguments if isinstance(getattr(driven, a, None), float)])
    step, traces = compiled_step(driven, weights[1:])
    for _ in range(8):
        gradient = ops.convert_to_tensor(random.normal(size=(3, 4)), "float32")
        numbers.apply([gradient], [weights[0]])
        step([gradient])
    assert traces() == 1
    # 1 - β of a float32 β is off by 3e-5 of itself.
    assert_close(arrays(weights[1:]), arrays(weights[:1]), 2e-5)
    assert np.abs(arrays(weights)["0"] - start).max() > 0.01


def drive(optimizer: Any, names: Sequence[str]) -> None:
    """Lets attributes be scalars of the step while a step is taken, as schedules do."""
    apply, values = optimizer.apply, {name: getattr(optimizer, name) for name in names}

    def driven(*arguments: Any) -> None:
        nothing = ops.cast(optimizer.iterations, "float32") * 0.0
        for name, value in values.items():
            setattr(optimizer, name, nothing + value)
        try:
            apply(*arguments)
        finally:
            for name, value in values.items():
                setattr(optimizer, name, value)

    optimizer.apply = driven


# Bad input ------------------------------------------------------------------------------------

OF_ALL = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue")


def error_of(value: Any, default: Any) -> type[Exception]:
    """A TypeError for a value of another type than the default, which counts as a float if None."""
    wanted = type(default) if isinstance(default, int) else (int, float)
    is_right = isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool)
    return ValueError if is_right else TypeError


@every_rule
def test_a_bad_argument_is_refused_by_its_name(name: str) -> None:
    cls = OWN_ROWS[name].cls
    defaults = {k: p.default for k, p in inspect.signature(cls.__init__).parameters.items()}
    for argument in ({*defaults} - {"self", "rule", "kwargs"}) | {*OF_ALL}:
        message = rf"`{argument}` must be .*\. Received: {argument}=.* in {cls.__name__}"
        for value in BAD[argument]:
            with pytest.raises(error_of(value, defaults.get(argument)), match=message):
                cls(**{argument: value})
    with pytest.raises(ValueError, match="momentun"):
        cls(momentun=0.9)


# Rates and single steps -----------------------------------------------------------------------


def test_a_schedule_survives_the_config() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    copy = kgo.RAdam.from_config(kgo.RAdam(schedule).get_config())
    copy.iterations.assign(20)
    assert float(copy.learning_rate) == pytest.approx(0.025)


@pytest.mark.parametrize("rate", [1, np.float32(0.5), np.int64(1)])
def test_the_rate_may_be_an_integer_or_a_numpy_scalar(rate: Any) -> None:
    assert float(kgo.RAdam(rate).learning_rate) == float(rate)


def test_the_rate_may_be_a_callable_that_returns_a_tensor() -> None:
    rate = keras.Variable(0.2, trainable=False)
    weights = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    called, plain = kgo.RAdam(lambda: ops.multiply(rate, 0.5)), kgo.RAdam(0.1)
    for step in range(8):
        rate.assign(0.2 if step < 3 else 0.4)
        plain.learning_rate = 0.1 if step < 3 else 0.2
        for optimizer, weight in zip((called, plain), weights, strict=True):
            optimizer.apply(tensors([[1.0 + step, -1.0]]), [weight])
    assert_close(arrays(weights[:1]), arrays(weights[1:]))


# The two have state of the step as a whole.
@pytest.mark.parametrize("name", sorted(set(OWN_ROWS) - {"lookahead", "nadamw"}))
def test_update_step_alone_after_apply_is_the_second_step(name: str) -> None:
    """Nothing of the first step is left over, such as its bias correction."""
    weights = [keras.Variable([[1.0, 2.0]]) for _ in range(2)]
    first, second = tensors([[[0.5, -1.0]], [[2.0, 0.25]]])
    optimizers = make(name), make(name)
    for optimizer, weight in zip(optimizers, weights, strict=True):
        optimizer.apply([first], [weight])
    optimizers[0].apply([second])
    native = weights[1].value if BACKEND == "tensorflow" else weights[1]
    optimizers[1].update_step(second, native, ops.convert_to_tensor(OWN_ROWS[name].rate))
    assert_close(arrays(weights[1:]), arrays(weights[:1]))


@pytest.mark.backends("tensorflow", reason="the others have no sparse gradients")
def test_repeated_rows_of_a_sparse_gradient_are_summed_before_they_are_squared() -> None:
    import tensorflow as tf

    rows, table = [1, 3, 1], np.zeros((4, 2), "float32")
    sparse, dense = (keras.Variable(table) for _ in range(2))
    optimizers = kgo.RAdam(0.1, beta_2=0.9), kgo.RAdam(0.1, beta_2=0.9)
    for step in range(1, 9):
        values = np.float32([[1, -2], [3, 4], [5, 6]]) / step
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, 2]))
        summed = table.copy()
        np.add.at(summed, rows, values)
        optimizers[0].apply([slices], [sparse])
        optimizers[1].apply([tf.constant(summed)], [dense])
    assert_close(arrays([sparse]), arrays([dense]))
    assert (arrays([sparse])["0"].any(axis=1) == [False, True, False, True]).all()


# RAdam ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta_2", [0.999, 0.9999, 0.99999])
def test_the_switch_falls_at_the_sixth_step_however_long_the_memory(beta_2: float) -> None:
    """There ρ is 5 within 1e-3, a difference of numbers up to 200,000 in its formula."""
    weight = keras.Variable([0.0, 0.0])
    optimizer = kgo.RAdam(1.0, beta_1=0.0, beta_2=beta_2, epsilon=0.0)
    gradient = np.array([1.0, 4.0])
    rule = RAdamReference(beta_1=0.0, beta_2=beta_2, epsilon=0.0)
    for step in range(1, 9):
        weight.assign([0.0, 0.0])
        optimizer.apply(tensors([gradient]), [weight])
        moved = arrays([weight])["0"]
        np.testing.assert_allclose(moved, rule.step(np.zeros(2), gradient, 1.0), rtol=1e-5)
        is_adaptive = moved[1] == pytest.approx(moved[0], rel=1e-4)
        assert is_adaptive == (step > 5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_low_precision_costs_only_rounding(dtype: str, tolerance: float) -> None:
    weight = keras.Variable(np.random.default_rng(0).normal(size=(3, 4)), dtype=dtype)
    start = expected = arrays([ops.cast(weight, "float32")])["0"]
    optimizer, rule = kgo.RAdam(0.5, beta_2=0.99), RAdamReference(beta_2=0.99)
    random = np.random.default_rng(3)
    for _ in range(20):
        gradient = np.round(random.normal(size=(3, 4)) * 16 + 8) / 16
        optimizer.apply(tensors([gradient], dtype), [weight])
        expected = rule.step(expected, gradient, 0.5)
    found = arrays([ops.cast(weight, "float32")])["0"]
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected - start).max()


def test_the_first_step_in_bfloat16_is_not_divided_by_a_rounded_correction() -> None:
    """In bfloat16 0.999 is 1, so that 1 - β₂ᵗ would be 0."""
    weight = keras.Variable([1.0], dtype="bfloat16")
    kgo.RAdam(0.5, beta_1=0.999).apply(tensors([[0.5]], "bfloat16"), [weight])
    np.testing.assert_allclose(arrays([ops.cast(weight, "float32")])["0"], 0.75)


@pytest.mark.parametrize("beta_2", [0.999, 0.95, 0.7])
def test_the_side_that_is_not_used_is_finite(beta_2: float) -> None:
    """The root would be of a negative number at ρ between 2 and 4."""
    trusted, factor = map(
        ops.convert_to_numpy, rectification(beta_2, ops.arange(1, 6, dtype="float32"))
    )
    assert not trusted.any()
    assert np.isfinite(factor).all()


# As the rule of a group -----------------------------------------------------------------------


LAYERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "lamb": ("lamb", {}),
    "lars": ("lars", {"trust_coefficient": 0.5}),
    "muon": ("muon", {}),
    "adafactor": ("adafactor", {}),
    "adafactor, relative": ("adafactor", {"relative_limit": 0.5}),
}


@pytest.mark.parametrize("row", LAYERWISE)
def test_a_group_that_is_split_moves_as_before(row: str) -> None:
    name, arguments = LAYERWISE[row]
    random = np.random.default_rng(3)
    models = [make_model(), make_model()]
    splits: list[Any] = [(), [kgo.Group("a", "dense"), kgo.Group("b", "dense_1")]]
    optimizers = [
        kgo.GroupedOptimizer(
            groups, model=m, rule=kgo.rule(name, **arguments), weight_decay=0.1, learning_rate=0.05
        )
        for m, groups in zip(models, splits, strict=True)
    ]
    for _ in range(4):
        gradients = [random.normal(size=v.shape) for v in models[0].trainable_variables]
        for model, optimizer in zip(models, optimizers, strict=True):
            tensors = [ops.convert_to_tensor(g, "float32") for g in gradients]
            optimizer.apply(tensors, model.trainable_variables)
    assert_same(arrays(models[1].variables[:2]), arrays(models[0].variables[:2]))


@pytest.mark.parametrize("relative", [True, False])
def test_a_ratio_multiplies_every_step_of_adafactor(relative: bool) -> None:
    """Where 1/√t is the bound of the rate itself, all groups come to move alike."""
    moved = []
    rule = kgo.rule("adafactor", relative_step=relative, relative_limit=0.5, scale_parameter=False)
    for ratio in (1.0, 0.25):
        model = make_model()
        group = kgo.Group("all", "**", learning_rate_ratio=ratio)
        optimizer = kgo.GroupedOptimizer([group], model=model, rule=rule, learning_rate=0.5)
        gradients = [np.ones(v.shape) for v in model.trainable_variables]
        for _ in range(30):
            before = arrays(model.variables)["0"]
            tensors = [ops.convert_to_tensor(g, "float32") for g in gradients]
            optimizer.apply(tensors, model.trainable_variables)
        moved.append(before - arrays(model.variables)["0"])
    np.testing.assert_allclose(moved[1], moved[0] / 4, rtol=1e-4)
    # At the thirtieth step: min(0.5, 1/√30), or 0.5.
    np.testing.assert_allclose(moved[0], 30**-0.5 if relative else 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["lookahead", "schedulefreeadamw"])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
def test_weights_loaded_after_the_build_and_before_the_first_step_are_where_it_starts(
    name: str, grouped: bool
) -> None:
    arguments = {"sync_period": 2} if name == "lookahead" else {}
    variables = [[keras.Variable([[1.0, 2.0]])], [keras.Variable([[1.0, 2.0]])]]
    for late, own in zip((False, True), variables, strict=True):
        if grouped:
            optimizer: Any = kgo.GroupedOptimizer(
                rule=kgo.rule(name, **arguments), learning_rate=0.1
            )
        else:
            optimizer = OWN_ROWS[name].cls(0.1, **arguments)
        if late:
            own[0].assign([[50.0, 60.0]])
            optimizer.build(own)
            own[0].assign([[1.0, 2.0]])
        for _ in range(4):
            optimizer.apply([ops.convert_to_tensor([[1.0, -1.0]])], own)
    assert_same(arrays(variables[1]), arrays(variables[0]))


# Lookahead ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(rule_names()) - {"lookahead"}))
def test_lookahead_goes_around_any_rule(name: str) -> None:
    """Between two syncs it is that rule, and at a size of 1 all the time."""
    known, random = rule_names(), np.random.default_rng(4)
    start = np.float32(random.normal(size=(3, 4)))
    weights = [keras.Variable(start, name="w") for _ in range(3)]
    plain = [known[name](0.1), kgo.Lookahead(0.1, known[name], sync_period=2, slow_step_size=1.0)]
    half = kgo.Lookahead(0.1, name, sync_period=4, slow_step_size=0.0)
    for optimizer in (plain[0],):
        for option in ("weight_decay", "adam_weight_decay"):
            if hasattr(optimizer, option):
                setattr(optimizer, option, None)
    for step in range(4):
        gradient = ops.convert_to_tensor(random.normal(size=(3, 4)), "float32")
        for optimizer, weight in zip([*plain, half], weights, strict=True):
            optimizer.apply([gradient], [weight])
        values = arrays(weights)
        assert_close({"": values["1"]}, {"": values["0"]})
        if step < 3:
            assert_same({"": values["2"]}, {"": values["0"]})
    assert_same({"": values["2"]}, {"": start})


def test_the_state_within_lookahead_is_its_own_and_saved_once() -> None:
    weights = [keras.Variable([1.0, 2.0], name="a"), keras.Variable([[3.0]], name="b")]
    optimizer = kgo.Lookahead(0.1, "nadam")
    optimizer.build(weights)
    # Counter, rate, Nadam's product, and two moments and slow weights of each variable.
    assert len(optimizer.variables) == 2 + 1 + 3 * 2
    assert len({id(variable) for variable in optimizer.variables}) == len(optimizer.variables)
    assert not hasattr(optimizer, "inner_optimizer")
    assert not hasattr(optimizer, "optimizers")


WRONG_RULES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an unknown name": (lambda: "adamm", ValueError, "Did you mean 'adam'"),
    "an instance": (lambda: keras.optimizers.Adam(), TypeError, "rate of its own"),
    "nothing": (lambda: None, TypeError, "`rule` of Lookahead must be"),
    "a number": (lambda: 3, TypeError, "rule=3"),
    "itself": (lambda: kgo.Lookahead, ValueError, "must not itself wrap"),
    "a grouped optimizer": (lambda: kgo.GroupedOptimizer, ValueError, "must not itself wrap"),
    "an unknown argument": (lambda: kgo.rule("adam", beta1=0.9), ValueError, "mean `beta_1`"),
    "a bad argument": (lambda: kgo.rule("radam", beta_1=2.0), ValueError, "beta_1=2.0"),
    "a decay": (lambda: kgo.rule("adamw", weight_decay=0.1), ValueError, "`weight_decay` must not"),
    "a clipping": (lambda: kgo.rule("adam", clipnorm=1.0), ValueError, "`clipnorm` must not"),
    "a schedule": (
        lambda: kgo.rule("adam", beta_1=keras.optimizers.schedules.CosineDecay(0.9, 10)),
        ValueError,
        "must be a number",
    ),
}


@pytest.mark.parametrize("case", WRONG_RULES)
def test_a_rule_that_lookahead_cannot_take_is_refused(case: str) -> None:
    make_rule, error, message = WRONG_RULES[case]
    with pytest.raises(error, match=message):
        kgo.Lookahead(rule=make_rule())


@pytest.mark.parametrize("rule", ["adam", keras.optimizers.Adam, keras.optimizers.Adam()])
def test_a_rule_in_the_place_of_the_rate_is_answered_with_its_name(rule: Any) -> None:
    """Lookahead of other packages takes the optimizer first."""
    with pytest.raises(TypeError, match=r"in Lookahead\. Name the rule: `Lookahead\(rule="):
        kgo.Lookahead(rule)
    with pytest.raises(TypeError, match=r"must be a number, a schedule .* in RAdam\.$"):
        kgo.RAdam(rule)


def test_a_group_of_lookahead_survives_a_config_with_the_rule_within() -> None:
    inner = kgo.rule("lion", beta_1=0.5)
    rule = kgo.rule("lookahead", rule=inner, sync_period=2)
    model, other = make_model(), make_model()
    optimizer = kgo.GroupedOptimizer(rule=rule, model=model)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = kgo.GroupedOptimizer.from_config(config)
    assert again.get_config() == config
    for each, its in ((optimizer, model), (again, other)):
        for _ in range(3):
            tensors = [ops.ones(v.shape) for v in its.trainable_variables]
            each.apply(tensors, its.trainable_variables)
    assert_same(arrays(other.variables), arrays(model.variables))


# Muon -----------------------------------------------------------------------------------------


def make_network() -> Any:
    layers = keras.layers
    hidden = layers.Conv2D(3, 2, name="filters")
    return keras.Sequential([keras.Input((4, 4, 1)), hidden, layers.Flatten(), layers.Dense(2)])


@pytest.mark.parametrize("when", ["plan", "build"])
def test_what_is_no_matrix_is_refused_in_a_group_of_muon(when: str) -> None:
    model = make_network()
    optimizer = kgo.GroupedOptimizer([kgo.Group("all", "**", rule="muon")], model=model)
    message = (
        r"must be matrices\. Received: filters/kernel of shape \(2, 2, 1, 3\), filters/bias of "
        r"shape \(3,\), dense/bias of shape \(2,\) in group \"all\"\. .*muon_with_adamw"
    )
    with pytest.raises(ValueError, match=message):
        _ = optimizer.plan if when == "plan" else optimizer.build(model.trainable_variables)
    assert not optimizer.built


def test_what_is_no_matrix_is_refused_by_muon_alone() -> None:
    model = make_network()
    with pytest.raises(ValueError, match=r'filters/bias of .* in optimizer "muon'):
        kgo.Muon().build(model.trainable_variables)


def test_keras_own_muon_given_as_a_class_keeps_its_meaning() -> None:
    model = make_network()
    group = kgo.Group("all", "**", rule=keras.optimizers.Muon)
    optimizer = kgo.GroupedOptimizer([group], model=model)
    optimizer.build(model.trainable_variables)
    assert optimizer.plan["all"].group.rule.target is keras.optimizers.Muon


# Keras' own in bfloat16 -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_a_rule_of_keras_that_rests_in_bfloat16_is_named(name: str) -> None:
    for rule, rests in ((name, True), (kgo.rule(name, beta_2=0.99), False), ("radam", False)):
        weight = keras.Variable([1.0, 2.0], dtype="bfloat16", name="w")
        optimizer = kgo.GroupedOptimizer(rule=rule, learning_rate=0.1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.build([weight])
        assert (
            any("leaves these weights where they are: w" in str(w.message) for w in said) == rests
        )
        for _ in range(3):
            optimizer.apply([ops.ones((2,), "bfloat16")], [weight])
        assert (float(ops.convert_to_numpy(ops.cast(weight, "float32"))[0]) == 1) == rests
