"""
Title: Schedules
Description: Rates, ratios, decay and momentum over optimizer steps, saved and resumed.

## What we want

Numbers that change while a model trains: a rate that warms up and falls, a ratio that is 0 for a
while, a momentum that goes against the rate. The proportions between groups shall hold all along.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes. The picture needs
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
`LearningRateSchedule`. A group's rate is the base times its ratio, at every step. `kgo.warmup` goes
in front of any schedule, which starts after it from its own step 0.
"""

cosine = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=20)
model = compiled(learning_rate=kgo.warmup(cosine, steps=5))
history = fit(model, callbacks=[kgo.GroupLogger()])
ratio = np.divide(history["learning_rate_backbone"], history["learning_rate_default"])
print("ratio at the end of each epoch:", ratio)
assert np.allclose(ratio, 0.1)

"""
| a curve | name |
| --- | --- |
| in steps | `Step`, `MultiStep` |
| down once | `Linear`, `Polynomial`, Keras' `CosineDecay` |
| up, flat, down | `WarmupStableDecay` |
| up and down | `OneCycle`, `Cyclic` |
| down to a flat end, for averages | `SWA` |
| made of others | `Sequential`, `Chained`, `Scaled`, `Warmup` |
| a ratio that waits | `UnfreezeAt` |
| a function | `Lambda` |

What torch has too gives torch's numbers, step by step.

## Steps are optimizer steps

With `gradient_accumulation_steps=4` a schedule moves once per four batches, so a setting means the
same for any number of micro-batches. A skipped step does not count.

`total_steps="fit"` ends a schedule with the run. `fit` knows `epochs` and the steps per epoch;
where it cannot know, as with a generator, pass `steps_per_epoch`.
"""

line = schedules.Linear(1e-2, total_steps="fit")
model = compiled(learning_rate=line, gradient_accumulation_steps=2)
fit(model, epochs=2)  # 2 epochs of 10 batches are 10 optimizer steps
optimizer = model.optimizer
assert int(optimizer.iterations) == int(optimizer.total_steps) == 10
assert float(optimizer.learning_rate) == 0.0

"""
The first `fit` fills it in, and from then on it is state: saved, and not changed by a second `fit`,
so that a run in several parts has one schedule. Here a second `fit` trains at the end of the line,
at 0. Set `optimizer.total_steps`: before the first `fit` to plan for several, or later to go on.
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
A schedule with a number of its own that is shorter than the run is warned of, once.

## A rate that does not follow the base

| `Group(...)` | rate |
| --- | --- |
| `learning_rate_ratio=0.1` | base · 0.1 |
| `learning_rate_ratio=schedule` | base · schedule |
| `learning_rate=kgo.constant(1e-4)` | 1e-4, whatever the base does |
| `learning_rate=schedule` | the schedule, whatever the base does |
| `learning_rate=kgo.from_base(function)` | what the function makes of the base |

Beside a base that is a number, `learning_rate=1e-4` is a ratio in other words. Beside a schedule it
would be ambiguous, and is an error that shows the ways out.
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
`from_base` is for what no ratio says, such as a ceiling. The function is traced: `keras.ops`, no
`if` on the value, and registered, or it cannot be saved.

## Not only rates

Ratios, decay, any number that a rule takes, the momentum of `kgo.EMA` and SAM's `rho` may follow a
schedule. One cycle moves the momentum against the rate: `OneCycle.momentum` is the other half.
`bindings` says what drives what, and a schedule that would drive nothing is an error.
"""

groups = [
    kgo.Group("backbone", "backbone", learning_rate=kgo.from_base(at_most)),
    kgo.Group("head", "head", weight_decay=schedules.Linear(0.1, total_steps=20)),
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
## See it before training

Integers in `at=` are optimizer steps, floats shares of the run. `steps=` is the length of the run,
by default where the last schedule ends; `"fit"` ends there too.
"""

plan.summary(at=[0, 5, 0.5, 1.0])
if importlib.util.find_spec("matplotlib"):
    with tempfile.TemporaryDirectory() as folder:
        plan.plot(steps=20, path=Path(folder) / "schedules.png")
fit(model)

"""
## A schedule of your own

Name the arguments, set them, and compute the value in `at`, by `keras.ops` and without a Python
`if` on the step. Calling and saving are done. An argument called `total_steps` may be `"fit"`;
`self.total()` is the number.
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
For one function there is `schedules.Lambda(function)`, which wants it registered as well. A
function without arguments as base rate, which Keras allows, is no schedule: a compiled step calls
it once.

## Saved and resumed

The `.keras` file has the schedules, the step and the length of the run. A run that was stopped half
way goes on as if it had not been. Here the first half stops after one epoch of two, and the second
begins with `initial_epoch=1`.
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

Keras' `ReduceLROnPlateau` and `LearningRateScheduler` set the base rate, so all groups follow and
their ratios hold. A base that is a schedule cannot be set. `kgo.PlateauRatio` lowers the ratios
instead: beside a schedule, or of some groups only.

| | `ReduceLROnPlateau` | `kgo.PlateauRatio` |
| --- | --- | --- |
| lowers | the base rate | ratios, of all groups or some |
| beside a base that is a schedule | an error | works |
| its floor | `min_lr` of the base | `min_ratio`, a share of each declared ratio |
| is saved | the lowered rate | the lowered ratios |

Both count from 0 again in each `fit`.
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

There a scheduler writes a rate into each of `param_groups`. Those that multiply keep the proportion
of two groups: `StepLR`, `MultiStepLR`, `ExponentialLR`, `LinearLR`, `ConstantLR`, `PolynomialLR`,
`LambdaLR` with one function, and `CosineAnnealingLR` with `eta_min=0`. Those with an absolute
number do not:

| torch | with rates of 0.01 and 0.1 |
| --- | --- |
| `OneCycleLR(max_lr=0.1)` | the same rate for both; a list of one `max_lr` per group keeps it |
| `CyclicLR(base_lr=..., max_lr=...)` | likewise |
| `CosineAnnealingLR(eta_min=0.005)` | from 1 : 10 to 1 : 1 at the end |
| `CosineAnnealingWarmRestarts(eta_min=0.005)` | likewise, in each period |
| `ReduceLROnPlateau(min_lr=0.005)` | 1 : 1 when both are at the floor |
| `SWALR(swa_lr=0.05)` | 1 : 1 after the annealing |

Here a schedule has the base, a floor included, and ratios multiply the whole of it. A floor for one
group alone is `kgo.from_base`. And torch counts calls of `scheduler.step()`, often one per epoch:
turn epochs into optimizer steps.
"""
