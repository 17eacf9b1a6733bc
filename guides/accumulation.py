"""
Title: Gradient accumulation
Description: Train with batches that do not fit into memory, and get the same weights.

## What we want

A recipe asks for batches of 120 pictures, and 30 are all that fit. Four batches of 30 have the same
mean gradient as one of 120, so we add up four gradients and do one step. The optimizer does that:
`gradient_accumulation_steps=4`. What it is given at a time is a *micro-batch*; four of them are a
*window*; and an *optimizer step* is what happens to the weights when the window is full.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

assets = Path(__file__).parents[1] / "examples" / "assets"
data = np.load(assets / "fashion_mini.npz")
x_train = data["x_train"][:240].astype("float32")[..., None] / 255
y_train = data["y_train"][:240].astype("int32")

"""
## Four small batches are one large one

Two optimizers, alike but for the accumulation. The schedule, the decay, the clipping and Adam's
bias correction all count optimizer steps, so nothing has to be converted: `decay_steps=4` is four
optimizer steps, with and without accumulation.
"""


def compiled_model(**options):
    """A small network, equal each time, with two groups."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, strides=3, activation="relu", name="features"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="head"),
        ]
    )
    optimizer = kgo.GroupedOptimizer(
        groups=[
            kgo.Group("features", "features", learning_rate_ratio=0.3, weight_decay=0.1),
            kgo.Group("head", "head"),
        ],
        model=model,
        rule="adam",
        learning_rate=keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=4),
        global_clipnorm=1.0,
        **options,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


large = compiled_model()
large.fit(x_train, y_train, batch_size=120, epochs=2, shuffle=False, verbose=0)
small = compiled_model(gradient_accumulation_steps=4)
small.fit(x_train, y_train, batch_size=30, epochs=2, shuffle=False, verbose=0)

difference = max(
    float(np.abs(mine - other).max())
    for mine, other in zip(large.get_weights(), small.get_weights(), strict=True)
)
print(f"largest difference of a weight: {difference:.1e}")
print("optimizer steps:", int(large.optimizer.iterations), int(small.optimizer.iterations))
assert difference < 1e-5
assert int(large.optimizer.iterations) == int(small.optimizer.iterations) == 4

"""
Two things an optimizer cannot make equal: BatchNorm sees a micro-batch at a time, and random layers
such as Dropout draw anew for each. The sums are float32, whatever the dtype of the weights, and
cost one value per weight. The plan counts them:
"""

small.optimizer.plan.summary()

"""
## When the batches of an epoch do not come out even

240 pictures in batches of 36 are seven batches, the last of 24. With windows of four, three batches
are left over. By default the window stays open and the next epoch fills it: every step has four
micro-batches. `kgo.FlushAccumulation()` closes it with what there is instead, so that no gradient
outlives its epoch.
"""


def steps_of(epochs, callbacks=()):
    """Optimizer steps, and micro-batches in the window that is still open."""
    model = compiled_model(gradient_accumulation_steps=4)
    model.fit(x_train, y_train, batch_size=36, epochs=epochs, callbacks=list(callbacks), verbose=0)
    return int(model.optimizer.iterations), int(model.optimizer.micro_batches)


carried = steps_of(2)
flushed = steps_of(2, [kgo.FlushAccumulation()])
print("steps, and micro-batches left over: carried", carried, "flushed", flushed)
assert carried == (3, 2)
assert flushed == (4, 0)

"""
In a loop of your own, `optimizer.flush()` does the same.

## Micro-batches of different sizes

Three samples with gradient 1 and one with gradient 5 have the mean gradient 2. The mean of the two
means is 3. Where you know how many samples (or tokens) a micro-batch holds, say so, and each weighs
what it should:
"""

weight = keras.Variable(np.zeros(1, "float32"), name="weight")
optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1.0, gradient_accumulation_steps=2)
optimizer.build([weight])
for gradient, samples in ((1.0, 3), (5.0, 1)):
    optimizer.apply([keras.ops.full((1,), gradient)], [weight], sample_count=samples)
print("the weight went from 0 to", float(keras.ops.convert_to_numpy(weight)[0]))
assert float(keras.ops.convert_to_numpy(weight)[0]) == -2.0

"""
## A micro-batch that overflows

A gradient that is not finite is never added. The window takes the next micro-batch in its place,
and `skipped_steps` counts it. `on_nonfinite="raise"` raises instead.
"""

for gradient in (1.0, np.inf, 3.0):
    optimizer.apply([keras.ops.full((1,), gradient)], [weight])
print("skipped:", int(optimizer.skipped_steps), "in group", optimizer.first_nonfinite_group)
assert float(keras.ops.convert_to_numpy(weight)[0]) == -4.0
assert int(optimizer.skipped_steps) == 1

"""
## Saved in the middle of a window

The open window is state: a run that is interrupted loses no gradient. Here the first of the four
micro-batches is taken in, the model is saved, and the loaded one goes on with the other three.
"""

rest = {"batch_size": 30, "shuffle": False, "verbose": 0}
straight = compiled_model(gradient_accumulation_steps=4)
straight.fit(x_train[:120], y_train[:120], **rest)

interrupted = compiled_model(gradient_accumulation_steps=4)
interrupted.fit(x_train[:30], y_train[:30], **rest)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "accumulation.keras"
    interrupted.save(path)
    resumed = keras.saving.load_model(path)

assert int(resumed.optimizer.micro_batches) == 1
assert int(resumed.optimizer.iterations) == 0
resumed.fit(x_train[30:120], y_train[30:120], **rest)
assert int(resumed.optimizer.iterations) == 1
for mine, other in zip(straight.get_weights(), resumed.get_weights(), strict=True):
    np.testing.assert_array_equal(mine, other)

"""
## Where to go from here

* `ema=kgo.EMA(0.999)` averages the weights once per optimizer step, whatever the window.
* Under `mixed_float16` Keras wraps the optimizer in a loss scale, and an overflow is dropped from
  the window in the same way.
* A variable that gets a gradient in one micro-batch only moves by its mean over the whole window.
"""
