"""What comes from another optimizer goes on as it would have gone on there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import models
import numpy as np
import pytest
from saving_models import fill, fit, nested, train

import keras_groupopt as kgo

optimizers = keras.optimizers
has_multi_optimizer = pytest.mark.skipif(
    not hasattr(optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
HALVING = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


def assert_same_steps(model: keras.Model, old: Any, new: Any) -> None:
    """Trains from the same weights with each; the new one first, so that nothing is shared."""
    start = model.get_weights()
    after = []
    for optimizer in (new, old):
        model.set_weights(start)
        model.compile(optimizer=optimizer, loss="mse")
        after.append(train(model, 2).get_weights())
    models.assert_equal(*after, rtol=1e-6, atol=1e-7)
    assert any(np.any(value != first) for value, first in zip(after[0], start, strict=True))


# MultiOptimizer --------------------------------------------------------------------------------


def multi(default: Any, **parts: Any) -> Any:
    keys = {"first": "first/.*", "head": "head/.*"}
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(default, {keys[n]: part for n, part in parts.items()})
    )


def adamw_without_biases() -> Any:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "clipped": lambda: (
        optimizers.Adam(3e-3, amsgrad=True, clipnorm=0.1),
        optimizers.SGD(0.07, momentum=0.9, nesterov=True, global_clipnorm=0.01),
    ),
    "with a state of the whole": lambda: (
        optimizers.Nadam(3e-3),
        optimizers.RMSprop(1e-3, momentum=0.5, centered=True),
    ),
    "decayed": lambda: (
        optimizers.SGD(0.1, weight_decay=0.1, clipvalue=0.02),
        adamw_without_biases(),
    ),
    "a number beside a schedule": lambda: (
        optimizers.SGD(0.1, momentum=0.5),
        optimizers.Adamax(HALVING),
    ),
    "a schedule beside a number": lambda: (optimizers.Adafactor(HALVING), optimizers.Lion(1e-3)),
}


@has_multi_optimizer
@pytest.mark.parametrize("pair", PAIRS)
def test_a_multi_optimizer_goes_on_as_groups(pair):
    model = fill(nested())
    default, head = PAIRS[pair]()
    model.compile(optimizer=multi(default, head=head), loss="mse")
    train(model)
    new = kgo.from_multi_optimizer(model.optimizer, model)
    assert [group.name for group in new.plan.groups] == ["head", "default"]
    assert int(new.iterations) == 3
    for name, inner in (("default", default), ("head", head)):
        assert float(new.learning_rates[name]) == np.float32(inner.learning_rate)
    assert_same_steps(model, model.optimizer, new)


@has_multi_optimizer
def test_one_inner_optimizer_of_two_patterns_is_one_group():
    model = fill(nested())
    shared = optimizers.SGD(0.1)
    new = kgo.from_multi_optimizer(multi(optimizers.Adam(), first=shared, head=shared), model)
    assert not new.built
    paths = {group.name: [v.path for v in group.variables] for group in new.plan.groups}
    assert paths == {
        "first": ["body/first/kernel", "body/first/bias", "head/kernel", "head/bias"],
        "default": ["body/dense/kernel", "body/dense/bias"],
    }


@has_multi_optimizer
def test_a_function_as_map_is_asked_once_per_variable():
    model = fill(nested())
    made: list[Any] = []

    def choose(variable: Any) -> Any:
        made.append(optimizers.SGD(0.1 * (len(made) + 1), momentum=0.5))
        return made[-1]

    model.compile(optimizer=optimizers.MultiOptimizer(choose), loss="mse")
    train(model)
    new = kgo.from_multi_optimizer(model.optimizer, model)
    assert len(made) == len(new.plan.groups) == len(model.trainable_variables)
    assert_same_steps(model, model.optimizer, new)


@has_multi_optimizer
def test_a_converted_optimizer_is_saved_and_loaded(tmp_path):
    model = fill(nested())
    model.compile(
        optimizer=multi(optimizers.Adam(3e-3), head=optimizers.SGD(0.07, momentum=0.9)), loss="mse"
    )
    train(model)
    model.compile(optimizer=kgo.from_multi_optimizer(model.optimizer, model), loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    models.assert_equal(fit(model, 1), fit(loaded, 1))


def out_of_step(model: keras.Model) -> Any:
    inner = optimizers.Adam()
    inner.build(model.trainable_variables[-2:])
    inner.iterations.assign(2)
    return multi(optimizers.SGD(0.1), head=inner)


def multi_with(head: Any) -> Callable[[keras.Model], Any]:
    return lambda _: multi(optimizers.SGD(0.1), head=head)


REFUSED: list[tuple[Callable[[keras.Model], Any], type[Exception], str]] = [
    (lambda _: optimizers.Adam(), TypeError, "use `kgo.from_optimizer`"),
    (
        multi_with(optimizers.Adam(use_ema=True)),
        ValueError,
        '`use_ema` must not be set .* Adam \\("head"\\)',
    ),
    (multi_with(optimizers.Adam(lambda: 0.1)), ValueError, "must be a number or a schedule"),
    (out_of_step, ValueError, "Received: 0, 2 steps"),
]


@has_multi_optimizer
@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_groups_cannot_mean_is_refused(make, error, message):
    model = nested()
    with pytest.raises(error, match=message):
        kgo.from_multi_optimizer(make(model), model)


@has_multi_optimizer
def test_a_variable_the_multi_optimizer_does_not_know_is_named():
    model = fill(nested())
    model.get_layer("head").trainable = False
    model.compile(optimizer=multi(optimizers.SGD(0.1)), loss="mse")
    train(model, 1)
    model.get_layer("head").trainable = True
    with pytest.raises(ValueError, match=r"unknown head/kernel, head/bias\..*rebuild"):
        kgo.from_multi_optimizer(model.optimizer, model)


# One Keras optimizer ---------------------------------------------------------------------------


SINGLE: dict[str, Callable[[], Any]] = {
    "adamw": adamw_without_biases,
    "sgd on a schedule": lambda: optimizers.SGD(HALVING, momentum=0.9, global_clipnorm=0.1),
    "radam": lambda: kgo.RAdam(1e-2),
}


@pytest.mark.parametrize("case", SINGLE)
def test_a_keras_optimizer_goes_on_as_one_group(case):
    model = fill(nested())
    model.compile(optimizer=SINGLE[case](), loss="mse")
    train(model)
    new = kgo.from_optimizer(model.optimizer, model)
    assert_same_steps(model, model.optimizer, new)


def test_groups_of_another_rule_start_fresh_at_the_same_step():
    model = fill(nested())
    model.compile(optimizer=optimizers.Adam(3e-3), loss="mse")
    train(model)
    groups = [
        kgo.Group("head", "head", rule=kgo.rule("sgd", momentum=0.5)),
        kgo.Group("body", "body", learning_rate_ratio=0.5),
    ]
    new = kgo.from_optimizer(model.optimizer, model, groups)
    assert int(new.iterations) == 3
    slots = {v.path: np.abs(keras.ops.convert_to_numpy(v)).sum() for v in new.variables}
    moments = {path: size for path, size in slots.items() if "momentum" in path}
    assert {path.split("/")[1]: size > 0 for path, size in moments.items()} == {
        "head": False,
        "body": True,
    }


def test_an_optimizer_inside_a_loss_scale_is_found():
    model = nested()
    inner = optimizers.Adam(0.25)
    new = kgo.from_optimizer(optimizers.LossScaleOptimizer(inner), model)
    assert float(new.learning_rate) == 0.25


@pytest.mark.parametrize("value", ["adam", object(), None])
def test_what_is_no_keras_optimizer_is_refused(value):
    with pytest.raises(TypeError, match="must be a Keras optimizer"):
        kgo.from_optimizer(value, nested())


# torch -----------------------------------------------------------------------------------------


PATHS = ["head/kernel", "head/bias"]


def dense(rule: Any = "adam", inputs: int = 3, **options: Any) -> tuple[keras.Model, Any]:
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(2, name="head")])
    optimizer = kgo.GroupedOptimizer(model=model, rule=rule, **options)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def torch_state(*shapes: tuple[int, ...], names: tuple[str, ...] = (), **states: Any) -> Any:
    """A state_dict of Adam: each value is an array that says where it is, or one per parameter."""
    kept = {"step": [np.float32(5)] * 3, "exp_avg": 1.0, "exp_avg_sq": 2.0, **states}

    def of(value: Any, number: int, shape: tuple[int, ...]) -> Any:
        if isinstance(value, list):
            return value[number]
        return value * np.arange(1.0, np.prod(shape) + 1).reshape(shape) / 8

    state = {
        number: {name: of(value, number, shape) for name, value in kept.items() if value}
        for number, shape in enumerate(shapes)
    }
    group = {"params": list(state), **({"param_names": list(names)} if names else {})}
    return {"state": state, "param_groups": [group]}


def slot(optimizer: Any, name: str, rank: int) -> np.ndarray:
    (found,) = (
        keras.ops.convert_to_numpy(v)
        for v in optimizer.variables
        if name in v.path and len(v.shape) == rank
    )
    return found


@pytest.mark.parametrize("named", [False, True], ids=["list", "dict"])
def test_moments_and_step_of_torch_go_to_their_paths(named):
    _, optimizer = dense()
    names = ("fc.weight", "fc.bias") if named else ()
    paths = dict(zip(names, PATHS, strict=True)) if named else PATHS
    kgo.load_torch_state(optimizer, torch_state((2, 3), (2,), names=names), paths)
    assert int(optimizer.iterations) == 5
    kernel = np.arange(1.0, 7.0).reshape(2, 3).T / 8
    np.testing.assert_array_equal(slot(optimizer, "momentums", 2), kernel)
    np.testing.assert_array_equal(slot(optimizer, "velocities", 2), 2 * kernel)
    np.testing.assert_array_equal(slot(optimizer, "momentums", 1), [1 / 8, 2 / 8])


@pytest.mark.parametrize("given", [{"model": {}, "optimizer": {}}, [], None])
def test_a_whole_checkpoint_of_torch_is_refused_in_place_of_its_optimizers_entry(given):
    _, optimizer = dense()
    with pytest.raises(ValueError, match="optimizer's entry of a checkpoint"):
        kgo.load_torch_state(optimizer, given, PATHS)


def test_momentum_of_torch_is_stored_times_the_rate():
    _, optimizer = dense(kgo.rule("sgd", momentum=0.5), learning_rate=0.25)
    none = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"))
    state = torch_state((2, 3), (2,), momentum_buffer=1.0, **none)
    kgo.load_torch_state(optimizer, state, PATHS)
    np.testing.assert_array_equal(slot(optimizer, "momentums", 1), [-1 / 32, -2 / 32])


@pytest.mark.parametrize("turned", [True, False])
def test_a_square_kernel_is_turned_as_the_caller_says(turned):
    state = torch_state((2, 2), (2,))
    kernel = np.arange(1.0, 5.0).reshape(2, 2) / 8
    _, optimizer = dense(inputs=2)
    with pytest.raises(ValueError, match=r"head/kernel: exp_avg .*set `transpose`"):
        kgo.load_torch_state(optimizer, state, PATHS)
    assert not slot(optimizer, "momentums", 2).any()
    kgo.load_torch_state(optimizer, state, PATHS, transpose={"head/kernel": turned})
    np.testing.assert_array_equal(slot(optimizer, "momentums", 2), kernel.T if turned else kernel)


SHAPES = ((2, 3), (2,))
NAMED = {"names": ("fc.weight", "fc.bias")}
WRONG: list[tuple[Any, Any, str]] = [
    (
        torch_state(*SHAPES),
        ["heat/kernel", "head/bias"],
        "heat/kernel: mapped to, but no variable that moves (nearest: head/kernel)\n"
        "  head/kernel: no parameter is mapped to it",
    ),
    (torch_state((2, 4), (2,)), PATHS, "head/kernel: exp_avg of shape [2, 4] does not fit [3, 2]"),
    (torch_state(*SHAPES, (2,)), [*PATHS, "head/bias"], "head/bias: two parameters are mapped to"),
    (torch_state(*SHAPES), ["head/kernel", None], "head/bias: no parameter is mapped to it"),
    (torch_state(*SHAPES, max_exp_avg_sq=1.0), PATHS, "kernel: max_exp_avg_sq has no slot in adam"),
    (torch_state(*SHAPES, exp_avg_sq=None), PATHS, "head/kernel: no state for velocities of adam"),
    (torch_state(*SHAPES), {"fc.weight": "head/kernel"}, "no `param_names`"),
    (
        torch_state(*SHAPES, **NAMED),
        {"fc.weight": "head/kernel", "fc.bia": "head/bias"},
        "fc.bias: not in `paths`\n  fc.bia: in `paths`, but no parameter",
    ),
    (torch_state(*SHAPES), ["head/kernel"], "1 paths for 2"),
    (
        torch_state(*SHAPES, step=[np.float32(5), np.float32(4)]),
        PATHS,
        "different steps: head/bias at 4, head/kernel at 5",
    ),
]


@pytest.mark.parametrize(("state", "paths", "text"), WRONG, ids=[row[2] for row in WRONG])
def test_torch_state_that_has_no_place_is_listed_and_nothing_is_loaded(state, paths, text):
    _, optimizer = dense()
    with pytest.raises(ValueError, match=re.escape(text)):
        kgo.load_torch_state(optimizer, state, paths)
    assert int(optimizer.iterations) == 0
    assert not slot(optimizer, "momentums", 1).any()


def test_other_variables_keep_their_state_if_the_load_is_not_strict():
    _, optimizer = dense()
    kgo.load_torch_state(optimizer, torch_state((2, 3), (2,)), ["head/kernel", None], strict=False)
    assert slot(optimizer, "momentums", 2).any()
    assert not slot(optimizer, "momentums", 1).any()


LAYOUTS = {
    "linear": ((2, 3), (3, 2), (1, 0)),
    "convolution": ((4, 4, 3, 3), (3, 3, 4, 4), (2, 3, 1, 0)),
    "convolution in one dimension": ((4, 2, 3), (3, 2, 4), (2, 1, 0)),
    "depthwise": ((4, 1, 3, 5), (3, 5, 4, 1), (2, 3, 0, 1)),
    "embedding": ((7, 3), (7, 3), (0, 1)),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_alone_fits_is_taken(case):
    from keras_groupopt.recipes.converters.weight_axes import to_keras

    stored, shape, order = LAYOUTS[case]
    value = np.arange(np.prod(stored)).reshape(stored)
    found = to_keras(value, shape, None)
    assert found is not None
    np.testing.assert_array_equal(found, value.transpose(order))


EPS, EPSILON = {"eps": 1e-12}, {"epsilon": 1e-12}
DECAY: dict[str, Any] = {"weight_decay": 0.5, "exclude_from_decay": ()}
# The class in torch and its options, our rule, and the optimizer's options.
TORCH_RULES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "adam": ("Adam", EPS, kgo.rule("adam", **EPSILON), {}),
    "amsgrad": ("Adam", EPS | {"amsgrad": True}, kgo.rule("adam", amsgrad=True, **EPSILON), {}),
    "adamw": ("AdamW", EPS | {"weight_decay": 0.5}, kgo.rule("adam", **EPSILON), DECAY),
    "sgd": (
        "SGD",
        {"momentum": 0.9, "nesterov": True},
        kgo.rule("sgd", momentum=0.9, nesterov=True),
        {},
    ),
    "rmsprop": (
        "RMSprop",
        EPS | {"alpha": 0.9, "momentum": 0.5},
        kgo.rule("rmsprop", rho=0.9, momentum=0.5, epsilon=1e-24),
        {},
    ),
    "adagrad": ("Adagrad", EPS, kgo.rule("adagrad", epsilon=1e-24), {}),
    "radam": ("RAdam", EPS, kgo.rule("radam", **EPSILON), {}),
}


@pytest.mark.backends("torch", reason="compares with torch.optim")
@pytest.mark.parametrize("case", TORCH_RULES)
def test_training_that_began_in_torch_goes_on_here(case):
    import torch

    name, torch_options, rule, options = TORCH_RULES[case]
    numbers = np.random.default_rng(3)
    module = torch.nn.Sequential(
        torch.nn.Conv1d(2, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )
    inner = getattr(torch.optim, name)(module.named_parameters(), lr=0.01, **torch_options)
    x = numbers.normal(size=(5, 2, 4)).astype("float32")
    y = numbers.normal(size=(5, 3)).astype("float32")

    def train_torch(steps: int) -> None:
        for _ in range(steps):
            inner.zero_grad()
            torch.nn.functional.mse_loss(module(torch.tensor(x)), torch.tensor(y)).backward()
            inner.step()

    train_torch(6)
    conv = keras.layers.Conv1D(4, 3, activation="tanh", name="conv")
    # torch flattens channels first.
    flat = [keras.layers.Permute((2, 1)), keras.layers.Flatten()]
    head = keras.layers.Dense(3, name="head")
    model = keras.Sequential([keras.Input((4, 2)), conv, *flat, head])

    def as_keras() -> list[np.ndarray]:
        conv, conv_bias, linear, bias = (p.detach().numpy() for p in module.parameters())
        return [conv.transpose(2, 1, 0).copy(), conv_bias.copy(), linear.T.copy(), bias.copy()]

    model.set_weights(as_keras())
    optimizer = kgo.GroupedOptimizer(model=model, rule=rule, learning_rate=0.01, **options)
    optimizer.build(model.trainable_variables)
    names = ("0.weight", "0.bias", "3.weight", "3.bias")
    paths = ("conv/kernel", "conv/bias", "head/kernel", "head/bias")
    kgo.load_torch_state(optimizer, inner.state_dict(), dict(zip(names, paths, strict=True)))
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x.transpose(0, 2, 1), y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    train_torch(3)
    models.assert_equal(model.get_weights(), as_keras(), rtol=2e-5, atol=2e-6)
