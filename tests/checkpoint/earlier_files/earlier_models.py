"""The runs whose files an earlier version wrote: the script that wrote them and the tests share it.

Only the wording here may change: a file goes on only beside the data, the layers
and the declaration that it was written with. Only public names are used, as the modules behind
them move.
"""

from __future__ import annotations

import pathlib

import keras
import numpy as np

import keras_groupopt as kgo

# Apart from the modules here: a folder named as a backend beside them could be imported as it.
FOLDER = pathlib.Path(__file__).resolve().parent / "written"
BACKENDS = ("jax", "tensorflow", "torch")
# Micro-batches before and after the files are written, and the one whose targets are not finite: it
# is skipped and counts in no window. So a window of three is open at both ends.
BEFORE, AFTER, BROKEN = 12, 8, 4
ROWS, FEATURES, CLASSES = 4, 6, 3
# What a `LossScaleOptimizer` holds beside the state of the optimizer in it.
SCALING = ("dynamic_scale", "step_counter", "skipped_steps")


def waves(shape: tuple[int, ...], pace: float) -> np.ndarray:
    """Numbers between -1 and 1 from a formula, and so the same with every version of NumPy.

    They are rounded to multiples of 1/256, since the last bit of a sine is not the same everywhere.
    """
    count = int(np.prod(shape))
    values = np.round(np.sin(pace * (1.0 + np.arange(count))) * 256) / 256
    return aligned(values.astype("float32").reshape(shape))


def aligned(values: np.ndarray) -> np.ndarray:
    """The same numbers at an address that 64 divides.

    Backends read the arrays of a caller in place, and the order of a sum depends on the address.
    """
    room = np.empty(values.nbytes + 64, dtype="uint8")
    start = -room.ctypes.data % 64
    copy = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def network() -> keras.Model:
    """A nested backbone with a normalization, and a head, with weights from a formula.

    It is no larger than it must be, as each variable takes a kilobyte in each file.
    """
    layers = keras.layers
    inner = keras.Input((FEATURES,))
    hidden = layers.Dense(10, activation="tanh", use_bias=False, name="stem")(inner)
    hidden = layers.BatchNormalization(scale=False, name="norm")(hidden)
    hidden = layers.Dense(8, activation="tanh", name="body")(hidden)
    backbone = keras.Model(inner, hidden, name="backbone")
    outer = keras.Input((FEATURES,))
    outputs = layers.Dense(CLASSES, name="head")(backbone(outer))
    rule = kgo.LookSAM(0.05, every=2, alpha=0.5, exclude_from_perturbation="backbone/norm")
    model = kgo.SharpnessAwareModel(outer, outputs, gradient_rule=rule, name="earlier")
    weights = []
    for place, weight in enumerate(model.get_weights()):
        values = waves(weight.shape, 0.7 + 0.1 * place)
        # Scales and variances stay near 1, and so above 0; the statistics start as Keras has them.
        weights.append(weight + values / 8 if weight.ndim == 1 else values / 2)
    model.set_weights(weights)
    return model


def compiled() -> keras.Model:
    """The network, compiled with an optimizer that has everything switched on."""
    model = network()
    norm = kgo.layer_type("BatchNormalization")
    optimizer = kgo.GroupedOptimizer(
        [
            kgo.Group("stem", "backbone/stem", frozen=True),
            kgo.Group("norm", norm, rule=kgo.rule("sgd", momentum=0.9, nesterov=True)),
            kgo.Group(
                "backbone",
                kgo.path("backbone") - norm - "backbone/stem",
                learning_rate_ratio=0.25,
                weight_decay=0.02,
                anchor="initial",
            ),
            kgo.Group(
                "head",
                "head",
                rule=kgo.rule("lookahead", rule=kgo.rule("adamw", beta_2=0.98), sync_period=2),
                weight_decay=kgo.schedules.Linear(0.1, 20),
                anchor="zero",
            ),
        ],
        model=model,
        rule="radam",
        learning_rate=kgo.warmup(keras.optimizers.schedules.CosineDecay(0.02, 40), 2),
        weight_decay=0.01,
        ratios=[(kgo.path("backbone/body/kernel"), 0.5), (kgo.path("head/bias"), 2.0)],
        global_clipnorm=1.0,
        gradient_accumulation_steps=3,
        ema=kgo.EMA(0.9, warmup=True),
        on_nonfinite="skip",
    )
    scaled = kgo.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=2)
    model.compile(optimizer=scaled, loss="mse")
    return model


def fit(model: keras.Model, start: int, count: int) -> dict[str, list[float]]:
    """Trains on micro-batches `start … start + count`; returns what was logged."""
    x = waves((BEFORE + AFTER, ROWS, FEATURES), 1.3)
    y = waves((BEFORE + AFTER, ROWS, CLASSES), 0.9)
    y[BROKEN] = np.inf
    # In one call, so that the addresses of micro-batches are the same in every process.
    rows = slice(start, start + count)
    x = aligned(x[rows]).reshape(-1, FEATURES)
    y = aligned(y[rows]).reshape(-1, CLASSES)
    history = model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return dict(history.history)


def go_on(model: keras.Model) -> dict[str, np.ndarray]:
    """The same further micro-batches for every model; returns all there is afterwards."""
    logs = fit(model, BEFORE, AFTER)
    return {**state(model), **{f"logs/{name}": np.asarray(value) for name, value in logs.items()}}


def state(model: keras.Model) -> dict[str, np.ndarray]:
    """Every weight, and every array of the optimizer: moments, averages, anchors, the window."""
    arrays = {
        f"weights/{place}": np.asarray(weight) for place, weight in enumerate(model.get_weights())
    }
    return {**arrays, **optimizer_state(model), **scaling(model)}


def optimizer_state(model: keras.Model) -> dict[str, np.ndarray]:
    """What `state_dict` of the grouped optimizer holds, by names joined with `/`."""
    held = model.optimizer.state_dict()
    arrays = {
        f"state/{group}/{path}/{slot}": np.asarray(value)
        for group, paths in held["groups"].items()
        for path, slots in paths.items()
        for slot, value in slots.items()
    }
    return {**arrays, **{f"state/{name}": np.asarray(v) for name, v in held["scalars"].items()}}


def scaling(model: keras.Model) -> dict[str, np.ndarray]:
    """What the loss scaling has counted."""
    return {
        f"scaling/{name}": np.asarray(
            keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(getattr(model.optimizer, name)))
        )
        for name in SCALING
    }


def declared() -> dict[str, kgo.GroupedOptimizer]:
    """Optimizers whose configs have every kind of selector, schedule and rule.

    They are never bound: selectors need no model to be written, and so need not match one. All have
    names, as the automatic ones count what was made before.
    """
    return {"scheduled": with_schedules(), "instances": with_instances()}


def with_instances() -> kgo.GroupedOptimizer:
    """Optimizers of Keras as rules; their rates are numbers, and so is the base rate."""
    return kgo.GroupedOptimizer(
        {
            "adagrad": kgo.Group(
                "adagrad",
                "task/**",
                rule=keras.optimizers.Adagrad(0.05, weight_decay=0.01, name="adagrad"),
            ),
            "lion": kgo.Group(
                "lion", ["a", "b"], rule=keras.optimizers.Lion(1e-4, clipnorm=2.0, name="lion")
            ),
            "class": kgo.Group("class", "c", rule=kgo.AdaBelief),
            "default": kgo.Group("default", learning_rate=0.5),
        },
        rule=keras.optimizers.RMSprop,
        learning_rate=0.25,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=5,
        clipvalue=0.5,
        exclude_from_decay=(),
        unclaimed="freeze",
        overlap="last",
        on_nonfinite="propagate",
        name="instances",
    )


def with_schedules() -> kgo.GroupedOptimizer:
    """Schedules and rules of this package, and selectors joined with each other."""
    schedules = kgo.schedules
    keras_schedules = keras.optimizers.schedules
    wide = kgo.path("backbone/**/kernel") & kgo.rank(min=2)
    return kgo.GroupedOptimizer(
        [
            kgo.Group("frozen", kgo.layer("backbone/stem"), frozen=True),
            kgo.Group(
                "muon",
                wide - kgo.regex(r".*/block_[0-3]/.*") - kgo.layer_type("Embedding"),
                rule=kgo.rule("muon", momentum=schedules.Linear(0.85, 100, 0.95), ns_steps=4),
                learning_rate_ratio=schedules.UnfreezeAt(10),
                weight_decay=schedules.Step(0.1, 30),
                anchor="initial",
                exclude_from_decay=kgo.variable_name("bias") | kgo.rank(1),
            ),
            kgo.Group(
                "adan",
                ~kgo.path("backbone") & kgo.regex(r"neck/[a-z]+") & ~kgo.rank(max=1),
                rule=kgo.rule("adan", beta_1=0.97, no_prox=True),
                learning_rate=schedules.OneCycle(0.01, 100),
                clipnorm=1.0,
            ),
            kgo.Group(
                "lookahead",
                [kgo.layer_type("LSTM", "GRU"), "decoder/*"],
                rule=kgo.rule("lookahead", rule=kgo.rule("lion", beta_1=0.95), sync_period=5),
                learning_rate_ratio=schedules.Chained([schedules.MultiStep(0.5, [3, 5]), 0.5]),
                clipvalue=0.5,
            ),
            kgo.Group(
                "schedule_free",
                kgo.variables("head/kernel", "head/bias"),
                rule=kgo.rule("schedulefreeadamw", beta_1=0.95, warmup_steps=3),
                exclude_from_decay=(),
                global_clipnorm=2.0,
            ),
            kgo.Group(
                "scheduled",
                kgo.variable_name("gamma", "beta") | kgo.path("extra"),
                rule=kgo.rule(
                    "adam",
                    beta_1=schedules.OneCycle.momentum(100),
                    beta_2=keras_schedules.PolynomialDecay(0.99, 50, 0.999),
                ),
                learning_rate_ratio=schedules.Polynomial(1.0, 100, power=2.0, warmup_steps=5),
            ),
            kgo.Group(
                "instance",
                "other",
                rule=kgo.RAdam(
                    keras_schedules.ExponentialDecay(0.05, 10, 0.9), beta_2=0.99, name="radam"
                ),
            ),
            kgo.Group("default", rule="adafactor", learning_rate_ratio=0.5),
        ],
        rule=kgo.rule("nadamw", beta_2=0.99),
        learning_rate=schedules.Sequential(
            [
                kgo.warmup(schedules.WarmupStableDecay(0.01, 100, decay_curve="root"), 5),
                schedules.Cyclic(0.001, 0.01, up_steps=10, mode="triangular2"),
                schedules.SWA(0.01, 0.005, 20),
                schedules.Scaled(kgo.constant(0.1), 0.5),
            ],
            [100, 200, 300],
        ),
        weight_decay=0.05,
        anchor="initial",
        exclude_from_decay=kgo.default_exclude_from_decay | kgo.path("**/embeddings"),
        ratios=[
            (kgo.path("backbone/block_0") & kgo.everything(), 0.25),
            (kgo.path("backbone") - "backbone/block_0", schedules.Linear(0.1, "fit", 1.0)),
        ],
        global_clipnorm=1.0,
        gradient_accumulation_steps=4,
        ema=kgo.SWA(every=10, start=100),
        on_nonfinite="raise",
        fused=False,
        unclaimed="default",
        overlap="first",
        loss_scale_factor=8.0,
        name="scheduled",
    )
