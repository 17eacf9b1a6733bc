"""Small runs, to be done on one device and on two replicas that see different data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from own_rules import table

import keras_groupopt as kgo

Model = Callable[[], keras.Model]
layers = keras.layers


def dense(**of_d: Any) -> keras.Model:
    """Four layers, for four groups."""
    hidden = [layers.Dense(n, "tanh", name=name) for n, name in ((6, "a"), (5, "b"), (4, "c"))]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="d", **of_d)])


def embedded() -> keras.Model:
    """An embedding whose rows repeat within a replica and over replicas."""
    inputs = keras.Input((4,))
    rows = keras.ops.cast(keras.ops.abs(inputs) * 2, "int32") % 5
    table = layers.Embedding(5, 3, name="a")(rows)
    return keras.Model(inputs, layers.Dense(2, name="d")(layers.Flatten()(table)))


@keras.saving.register_keras_serializable(package="tests")
class Halves(layers.Layer):
    """A layer with a variable that the loss does not reach."""

    def build(self, shape: Any) -> None:
        self.unused = self.add_weight(shape=(2,), name="unused")

    def call(self, inputs: Any) -> Any:
        return inputs / 2


def constrained() -> keras.Model:
    """A constraint on a kernel, a constraint that moves weights, and a missing gradient."""
    limit = keras.constraints.MaxNorm(0.5)
    hidden = layers.Dense(5, "tanh", kernel_constraint=limit, bias_constraint="non_neg", name="b")
    return keras.Sequential([keras.Input((4,)), hidden, Halves(), layers.Dense(2, name="d")])


def synchronized() -> keras.Model:
    """Statistics of the whole batch, for which replicas merge within a pass."""
    norm = layers.BatchNormalization(synchronized=True, name="c")
    hidden = layers.Dense(5, use_bias=False, name="b")
    return keras.Sequential([keras.Input((4,)), hidden, norm, layers.Dense(2, name="d")])


def mixed() -> keras.Model:
    """Float16 layers, for which `compile` scales the loss by itself."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(5, "tanh", name="b"), layers.Dense(2, name="d")]
        )
    finally:
        keras.config.set_dtype_policy("float32")


NAMED = {name: row for name, row in table().items() if row.named}


def branches() -> keras.Model:
    """A layer for each rule that has a name, side by side."""
    inputs = keras.Input((4,))
    layers_ = [layers.Dense(2, "tanh", name=name) for name in NAMED]
    return keras.Model(inputs, layers.Add()([layer(inputs) for layer in layers_]))


def groups_of_rules() -> list[kgo.Group]:
    return [
        kgo.Group(name, f"{name}/kernel" if row.only_matrices else name, rule=rule)
        for name, row in NAMED.items()
        for rule in [row.rule(name, **row.mirrored)]
    ]


def each(**rules: Any) -> list[kgo.Group]:
    return [kgo.Group(name, name, rule=rule) for name, rule in rules.items()]


def sgd(**options: Any) -> Any:
    return kgo.rule("sgd", momentum=0.9, nesterov=True, **options)


CURVE = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
WHOLE = {
    "groups": [
        kgo.Group("a", "a", learning_rate_ratio=0.5, weight_decay=0.1, anchor="initial"),
        kgo.Group("b", "b", rule="nadam", learning_rate=CURVE, weight_decay=CURVE),
        kgo.Group("c", "c", frozen=True),
    ],
    "global_clipnorm": 0.3,
    "weight_decay": 0.2,
    "gradient_accumulation_steps": 2,
    "ema": kgo.EMA(0.5, warmup=True, every=2, start=1),
}


def scaled(optimizer: Any) -> Any:
    return kgo.LossScaleOptimizer(optimizer, 2.0**7, dynamic_growth_steps=3)


def scaled_by_keras(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, 2.0**7, dynamic_growth_steps=3)


# Options of the optimizer; beside them `model`, `wrap`, `eager`, `jit_compile`,
# `rule_of_gradients`, and `broken`: a micro-batch with a NaN that only the second replica sees.
ROWS: dict[str, dict[str, Any]] = {
    "the whole": WHOLE | {"jit_compile": "auto", "broken": 2},
    "the whole, eager": WHOLE | {"eager": True, "broken": 2},
    "each rule": {"model": branches, "groups": groups_of_rules()},
    "ratios, and a schedule in a rule": {
        "rule": kgo.rule("sgd", momentum=kgo.schedules.Linear(0.5, 9, 0.9)),
        "ratios": [("a", 0.25), ("b", CURVE)],
        "weight_decay": 0.1,
        "global_clipnorm": 0.3,
    },
    "clipping in groups, and averages of Keras": {
        "groups": [
            kgo.Group("a", "a", clipnorm=0.1),
            kgo.Group("b", "b", global_clipnorm=0.2),
            kgo.Group("c", "c", clipvalue=0.01),
        ],
        "global_clipnorm": 0.25,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
    },
    "a skipped step, and equal averages": {
        "broken": 2,
        "global_clipnorm": 0.5,
        "ema": kgo.SWA(start=2, every=2),
        "learning_rate": CURVE,
    },
    "an embedding": {
        "model": embedded,
        "groups": [kgo.Group("a", "a", clipnorm=0.1, weight_decay=0.1)],
        "global_clipnorm": 0.15,
    },
    "an embedding, accumulated": {"model": embedded, "gradient_accumulation_steps": 2},
    "constraints and a missing gradient": {"model": constrained, "weight_decay": 0.1},
    "missing gradients, accumulated": {"model": constrained, "gradient_accumulation_steps": 2},
    "loss scale": {"wrap": scaled, "broken": 2, **WHOLE},
    "loss scale of Keras": {"wrap": scaled_by_keras, **WHOLE},
    "SAM": WHOLE | {"rule_of_gradients": lambda: kgo.SAM(0.1), "broken": 2},
    "ASAM": {"rule_of_gradients": lambda: kgo.ASAM(0.5), "global_clipnorm": 0.3},
    "LookSAM": {"rule_of_gradients": lambda: kgo.LookSAM(0.5, every=3), "wrap": scaled},
    "LookSAM, merging in a pass": {
        "rule_of_gradients": lambda: kgo.LookSAM(0.5, every=2),
        "model": synchronized,
        "groups": each(b=sgd(), c=sgd(), d=sgd()),
    },
    "GSAM, an embedding": {"rule_of_gradients": lambda: kgo.GSAM(0.1), "model": embedded},
    "SAM, loss scale of Keras": {
        "rule_of_gradients": lambda: kgo.SAM(0.1),
        "wrap": scaled_by_keras,
        **WHOLE,
    },
    "SAM, a missing gradient": {"rule_of_gradients": lambda: kgo.SAM(0.1), "model": constrained},
    "mixed_float16": {"model": mixed, "global_clipnorm": 0.3},
    "mixed_float16, ours": {"model": mixed, "wrap": scaled},
}
# Sums in float16 round differently where they are cut in two.
HALF = ("mixed_float16", "mixed_float16, ours")


MICRO_BATCHES, SIZE = 9, 8


def make(row: dict[str, Any]) -> keras.Model:
    """Makes the model of a row, compiled, under the present scope."""
    options = {"rule": "adam", "learning_rate": 0.02, **row}
    build, wrap = options.pop("model", dense), options.pop("wrap", None)
    how = {"run_eagerly": options.pop("eager", False)}
    how["jit_compile"] = options.pop("jit_compile", False)
    options.pop("broken", None)
    make_rule = options.pop("rule_of_gradients", None)
    keras.utils.set_random_seed(1)
    model = build() if make_rule is None else kgo.sharpness_aware(build(), make_rule())
    optimizer = kgo.GroupedOptimizer(model=model, **options)
    optimizer = optimizer if wrap is None else wrap(optimizer)
    model.compile(optimizer=optimizer, loss="mse", **how)
    return model


def data(start: int = 0, stop: int = MICRO_BATCHES, broken: int | None = None) -> tuple[Any, Any]:
    """Returns micro-batches; the last sample of `broken` is NaN, which one replica sees."""
    x = np.random.default_rng(0).normal(size=(MICRO_BATCHES, SIZE, 4)).astype("float32")
    y = np.sin(3 * x[..., :2])
    if broken is not None:
        x[broken, -1] = np.nan
    return x[start:stop].reshape(-1, 4), y[start:stop].reshape(-1, 2)


def fit(model: keras.Model, *which: Any, **options: Any) -> Any:
    """Trains on `data(*which)`; returns what `fit` returns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No gradient for")
        x, y = data(*which)
        return model.fit(x, y, batch_size=SIZE, shuffle=False, verbose=0, **options)


def variables_of(model: keras.Model) -> list[Any]:
    """Returns all that training moves, of the model and of its optimizer."""
    return [*model.variables, *model.optimizer.variables]


def values(model: keras.Model) -> list[np.ndarray]:
    """Returns the values of all variables, as float64."""
    return [np.asarray(keras.ops.convert_to_numpy(v), "float64") for v in variables_of(model)]


def farthest(ours: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Returns the largest difference, relative to values beyond 1."""
    return max(
        float(np.max(np.abs(one - other) / np.maximum(1, np.abs(other)), initial=0))
        for one, other in zip(ours, right, strict=True)
    )


def apart(model: keras.Model) -> list[str]:
    """Returns the paths of variables whose copies on the devices differ."""
    found = []
    for variable in variables_of(model):
        first, *others = (np.asarray(copy) for copy in variable.value.values)
        if not others or not all(np.array_equal(first, other) for other in others):
            found.append(variable.path)
    return found
