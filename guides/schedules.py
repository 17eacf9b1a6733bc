"""
Title: Schedules
Description: Rates, ratios, decay and momentum over optimizer steps, saved and resumed.

## What you will learn

You will let numbers change while a model trains: a rate that warms up and falls, a ratio that is 0
for a while, a momentum that falls while the rate rises. You will end a schedule with the run, plot
it before training, write your own, and keep the ratios between groups throughout.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes. The plot needs
`pip install keras-groupopt[plots]`.
"""

import importlib.util
import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

schedules = kgo.schedules
generator = np.random.default_rng(0)
x_train = generator.normal(size=(80, 8)).astype("float32")
y_train = np.tanh(x_train[:, :3])


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="backbone"),
            keras.layers.Dense(3, name="head"),
        ]
    )


def compiled(groups=(), **options):
    model = make_model()
    groups = groups or [kgo.Group("backbone", "backbone", learning_rate_ratio=0.1)]
    optimizer = kgo.GroupedOptimizer(groups, model=model, **{"rule": "adam", **options})
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fit(model, epochs=2, callbacks=(), **options):
    options |= {"batch_size": 8, "epochs": epochs, "callbacks": list(callbacks), "verbose": 0}
    return model.fit(x_train, y_train, **options).history


def values(schedule, steps):
    return [round(float(schedule(step)), 6) for step in steps]


"""
## One base rate

The base rate is a number or a schedule: one of Keras, one of `kgo.schedules`, or any other
`LearningRateSchedule`. The rate of a group is the base times the ratio of the group, at each step.
`kgo.warmup` puts a warm-up in front of any schedule. After the warm-up, the schedule starts from
its own step 0.
"""

cosine = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=20)
model = compiled(learning_rate=kgo.warmup(cosine, steps=5))
history = fit(model, callbacks=[kgo.GroupLogger()])
ratio = np.divide(history["learning_rate_backbone"], history["learning_rate_default"])
print("ratio at the end of each epoch:", ratio)
assert np.allclose(ratio, 0.1)

"""
| curve | schedules |
| --- | --- |
| falls in steps | `Step`, `MultiStep` |
| falls once | `Linear`, `Polynomial`, Keras' `CosineDecay` |
| rises, stays, falls | `WarmupStableDecay` |
| rises and falls | `OneCycle`, `Cyclic` |
| falls to a constant, for averages | `SWA` |
| combines others | `Sequential`, `Chained`, `Scaled`, `Warmup` |
| is 0 until a step, for ratios | `UnfreezeAt` |
| is a function | `Lambda` |

If torch has the same schedule, the values are those of torch, step by step.

## Steps are optimizer steps

With `gradient_accumulation_steps=4` a schedule moves once per four batches, so a setting means the
same for any number of micro-batches. A skipped step does not count.

With `total_steps="fit"` a schedule ends when the run ends. `fit` knows the epochs and the steps per
epoch. If it cannot know the steps, as with a generator, pass `steps_per_epoch`.
"""

line = schedules.Linear(1e-2, total_steps="fit")
model = compiled(learning_rate=line, gradient_accumulation_steps=2)
fit(model, epochs=2)  # 2 epochs of 10 batches are 10 optimizer steps
optimizer = model.optimizer
assert int(optimizer.iterations) == int(optimizer.total_steps) == 10
assert float(optimizer.learning_rate) == 0.0

"""
The first `fit` sets `optimizer.total_steps`. From then on the value is part of the saved state, and
a second `fit` does not change it, so a run in several parts has one schedule. Here the second `fit`
trains beyond the end of the schedule, at a rate of 0. You can set `optimizer.total_steps` yourself:
before the first `fit` to plan for several, or later to go on.
"""

before = model.get_weights()
fit(model, epochs=1)
assert int(optimizer.total_steps) == 10
assert all(map(np.array_equal, before, model.get_weights()))

optimizer.total_steps = 20
fit(model, epochs=1)
assert int(optimizer.iterations) == 20
assert not np.array_equal(before[0], model.get_weights()[0])

"""
If you give a schedule a number of steps that is shorter than the run, you get one warning.

## A rate that does not follow the base

| `Group(...)` | rate of the group |
| --- | --- |
| `learning_rate_ratio=0.1` | base · 0.1 |
| `learning_rate_ratio=schedule` | base · schedule |
| `learning_rate=kgo.constant(1e-4)` | 1e-4, independent of the base |
| `learning_rate=schedule` | the schedule, independent of the base |
| `learning_rate=kgo.from_base(function)` | the function of the base |

If the base is a number, `learning_rate=1e-4` is another way to write a ratio. If the base is a
schedule, `learning_rate=1e-4` would be ambiguous, so it raises an error that shows both meanings.
"""

try:
    compiled([kgo.Group("head", "head", learning_rate=1e-4)], learning_rate=cosine)
except ValueError as error:
    print(error)
else:
    raise AssertionError


@keras.saving.register_keras_serializable(package="guide")
def at_most(base):
    return keras.ops.minimum(base, 2e-3)


"""
`from_base` is for a rate that a ratio cannot express, such as one with an upper limit. The function
is traced, so use `keras.ops` and no Python `if` on the value. Register it, or it cannot be saved.

## Other numbers than rates

A schedule can also drive a ratio, a decay, any number that a rule takes, the momentum of `kgo.EMA`
or the `rho` of SAM. One cycle lowers the momentum while the rate rises: use `OneCycle.momentum`
beside `OneCycle`. `plan.bindings()` lists which schedule drives which number. A schedule that
drives nothing is an error.
"""

groups = [
    kgo.Group("backbone", "backbone", learning_rate=kgo.from_base(at_most)),
    kgo.Group("head", "head", weight_decay=schedules.Linear(1.0, total_steps=20)),
]
momentum = schedules.OneCycle.momentum(total_steps=20)
model = compiled(
    groups,
    rule=kgo.rule("adam", beta_1=momentum),
    learning_rate=schedules.OneCycle(1e-2, total_steps=20),
    ratios=[("backbone/bias", schedules.UnfreezeAt(10))],
)
plan = model.optimizer.plan
print(*plan.bindings(), sep="\n")
assert "rule.beta_1" in {binding.field for binding in plan.bindings()}
print("rate:    ", values(schedules.OneCycle(1e-2, total_steps=20), (0, 5, 19)))
print("momentum:", values(momentum, (0, 5, 19)))

"""
## See the values before training

In `at=`, an integer is an optimizer step and a float is a share of the run. `steps=` is the length
of the run. By default the run ends with the last schedule, and so do schedules with `"fit"`.
"""

plan.summary(at=[0, 5, 0.5, 1.0])
if importlib.util.find_spec("matplotlib"):
    with tempfile.TemporaryDirectory() as folder:
        plan.plot(steps=20, path=Path(folder) / "schedules.png")
fit(model)

"""
## Write a schedule

List the arguments in `arguments`, set them in `__init__`, and compute the value in `at`, with
`keras.ops` and without a Python `if` on the step. The base class calls and saves the schedule. An
argument with the name `total_steps` can be `"fit"`, and `self.total()` returns the number.
"""


@keras.saving.register_keras_serializable(package="guide")
class Root(schedules.Schedule):
    arguments = ("peak", "total_steps")

    def __init__(self, peak, total_steps):
        self.peak = peak
        self.total_steps = total_steps

    def at(self, step):
        done = keras.ops.cast(step, "float32") / keras.ops.cast(self.total(), "float32")
        return self.peak * (1 - keras.ops.sqrt(keras.ops.minimum(done, 1.0)))


print(values(Root(1e-2, 16), (0, 4, 16, 20)))
model = compiled(learning_rate=Root(1e-2, "fit"))
fit(model)
assert float(model.optimizer.learning_rate) == 0.0

"""
For a single function use `schedules.Lambda(function)`. You have to register this function as well.
Keras also accepts a function without arguments as base rate. It is not a schedule: a compiled step
calls it only once.

## Save and resume

A `.keras` file holds the schedules, the step and the length of the run, so a run that was stopped
half way goes on as if it had not stopped. Here the first half stops after one epoch of two, and the
second half begins with `initial_epoch=1`.
"""


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


whole, half = (
    compiled(learning_rate=kgo.warmup(schedules.Linear(1e-2, "fit"), steps=4)) for _ in range(2)
)
fit(whole, epochs=2, shuffle=False)
fit(half, epochs=2, shuffle=False, callbacks=[Stop()])
assert int(half.optimizer.iterations) == 10
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "half.keras"
    half.save(path)
    resumed = keras.saving.load_model(path)
assert int(resumed.optimizer.total_steps) == 20
fit(resumed, epochs=2, initial_epoch=1, shuffle=False)
assert all(map(np.array_equal, whole.get_weights(), resumed.get_weights()))

"""
## When the metric decides

`ReduceLROnPlateau` and `LearningRateScheduler` of Keras set the base rate, so all groups follow and
their ratios hold. Put `GroupLogger` before them in the list of callbacks: then the history shows
the rates that the epoch was trained with. They cannot set a base that is a schedule.
`kgo.PlateauRatio` lowers the ratios instead, so it works beside a schedule, and for some groups
only.

| | `ReduceLROnPlateau` | `kgo.PlateauRatio` |
| --- | --- | --- |
| lowers | the base rate | the ratios of all groups or of some |
| if the base is a schedule | raises an error | works |
| lower limit | `min_lr`, a rate | `min_ratio`, a share of each declared ratio |
| a file keeps | the lowered rate | the lowered ratios |

Both start counting again in each `fit`.
"""

model = compiled(learning_rate=kgo.constant(1e-2))
plateau = kgo.PlateauRatio("loss", factor=0.5, patience=1, min_delta=1e6, groups=["backbone"])
fit(model, epochs=3, callbacks=[kgo.GroupLogger(), plateau])
ratios = {name: float(value) for name, value in model.optimizer.learning_rate_ratios.items()}
print(ratios)
assert np.isclose(ratios["backbone"], 0.025)
assert ratios["default"] == 1.0

"""
## Coming from torch

A scheduler of torch writes a rate into each of the `param_groups`. Schedulers that multiply keep
the ratio of two groups: `StepLR`, `MultiStepLR`, `ExponentialLR`, `LinearLR`, `ConstantLR`,
`PolynomialLR`, `LambdaLR` with one function, and `CosineAnnealingLR` with `eta_min=0`. Schedulers
with an absolute number change the ratio:

| torch | ratio of two groups with rates of 0.01 and 0.1 |
| --- | --- |
| `OneCycleLR(max_lr=0.1)` | 1 : 1; a list with one `max_lr` per group keeps 1 : 10 |
| `CyclicLR(base_lr=..., max_lr=...)` | 1 : 1; lists keep 1 : 10 |
| `CosineAnnealingLR(eta_min=0.005)` | from 1 : 10 to 1 : 1 at the end |
| `CosineAnnealingWarmRestarts(eta_min=0.005)` | from 1 : 10 to 1 : 1 in each period |
| `ReduceLROnPlateau(min_lr=0.005)` | 1 : 1 when both rates are at the lower limit |
| `SWALR(swa_lr=0.05)` | 1 : 1 after the annealing |

Here a schedule gives the base rate, including its lower limit, and the ratios multiply this rate.
If one group needs its own lower limit, use `kgo.from_base`. torch counts calls of
`scheduler.step()`, often one per epoch, so convert epochs into optimizer steps.
"""
