"""
Title: Gradient accumulation
Description: Train with batches that do not fit into memory, and get the same weights.

## What you will learn

You will train with large batches although only small ones fit into memory, decide what happens to
the batches that are left over at the end of an epoch, and resume a run that was saved between two
of the small batches.

Suppose a recipe asks for batches of 120 pictures, but only 30 fit. Four batches of 30 have the same
mean gradient as one of 120, so the optimizer can add up four gradients and take one step. You
switch this on by `gradient_accumulation_steps=4`. Each of the small batches is a *micro-batch*,
four of them are a *window*, and the update of the weights at the end of a window is an *optimizer
step*.

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

We train the same model twice, with and without accumulation. The schedule, the decay, the clipping
and Adam's bias correction all count optimizer steps, so you do not have to convert any number:
`decay_steps=4` means four optimizer steps in both runs.
"""


def compiled_model(**options):
    """Returns a small network with two groups, which starts from the same weights each time."""
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
            kgo.Group("features", "features", learning_rate_ratio=0.3, weight_decay=1.0),
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


def fit(model, batch_size, epochs=1, rows=slice(None), **options):
    options |= {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(x_train[rows], y_train[rows], **options)
    return model


large = fit(compiled_model(), batch_size=120, epochs=2)
small = fit(compiled_model(gradient_accumulation_steps=4), batch_size=30, epochs=2)

difference = max(
    float(np.abs(mine - other).max())
    for mine, other in zip(large.get_weights(), small.get_weights(), strict=True)
)
print(f"largest difference of a weight: {difference:.1e}")
print("optimizer steps:", int(large.optimizer.iterations), int(small.optimizer.iterations))
assert difference < 1e-5
assert int(large.optimizer.iterations) == int(small.optimizer.iterations) == 4

"""
An optimizer cannot make two things equal: `BatchNormalization` sees one micro-batch at a time, and
random layers such as `Dropout` draw new masks for each. The sums are kept in float32, whatever the
dtype of the weights, and cost one value per weight. The plan counts them:
"""

small.optimizer.plan.summary()

"""
## When the number of batches is not a multiple of the window

240 pictures in batches of 36 are seven batches. With windows of four, three batches are left over
at the end of the epoch. By default the window stays open, and the next epoch fills it, so each step
has four micro-batches. With `kgo.FlushAccumulation()` the optimizer takes a step with the
micro-batches that it has, so no gradient is carried into the next epoch.
"""

carried = fit(compiled_model(gradient_accumulation_steps=4), 36, epochs=2).optimizer
callbacks = [kgo.FlushAccumulation()]
flushed = fit(
    compiled_model(gradient_accumulation_steps=4), 36, epochs=2, callbacks=callbacks
).optimizer
for name, optimizer in (("carried", carried), ("flushed", flushed)):
    steps, left_over = int(optimizer.iterations), int(optimizer.micro_batches)
    print(f"{name}: {steps} optimizer steps, {left_over} micro-batches in the open window")
assert (int(carried.iterations), int(carried.micro_batches)) == (3, 2)
assert (int(flushed.iterations), int(flushed.micro_batches)) == (4, 0)

"""
In your own loop, `optimizer.flush()` does the same.

## Micro-batches of different sizes

Three samples with gradient 1 and one with gradient 5 have the mean gradient 2, but the mean of the
two means is 3. If you know how many samples (or tokens) a micro-batch holds, pass `sample_count=`,
and each micro-batch gets its proper weight.
"""

weight = keras.Variable(np.zeros(1, "float32"), name="weight")
optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1.0, gradient_accumulation_steps=2)
for gradient, samples in ((1.0, 3), (5.0, 1)):
    optimizer.apply([keras.ops.full((1,), gradient)], [weight], sample_count=samples)
print("the weight went from 0 to", float(keras.ops.convert_to_numpy(weight)[0]))
assert float(keras.ops.convert_to_numpy(weight)[0]) == -2.0

"""
## A micro-batch that overflows

The optimizer never adds a gradient that is not finite. The window takes the next micro-batch in its
place, and `skipped_steps` counts the one that was left out. `on_nonfinite="raise"` raises an error
instead.
"""

for gradient in (1.0, np.inf, 3.0):
    optimizer.apply([keras.ops.full((1,), gradient)], [weight])
print("skipped:", int(optimizer.skipped_steps), "in group", optimizer.first_nonfinite_group)
assert float(keras.ops.convert_to_numpy(weight)[0]) == -4.0
assert int(optimizer.skipped_steps) == 1

"""
## Save in the middle of a window

The open window is part of the saved state, so an interrupted run does not lose a gradient. Here we
train on the first of four micro-batches, save the model, and train the loaded model on the other
three.
"""

straight = fit(compiled_model(gradient_accumulation_steps=4), 30, rows=slice(120))
interrupted = fit(compiled_model(gradient_accumulation_steps=4), 30, rows=slice(30))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "accumulation.keras"
    interrupted.save(path)
    resumed = keras.saving.load_model(path)

assert int(resumed.optimizer.micro_batches) == 1
assert int(resumed.optimizer.iterations) == 0
fit(resumed, 30, rows=slice(30, 120))
assert int(resumed.optimizer.iterations) == 1
for mine, other in zip(straight.get_weights(), resumed.get_weights(), strict=True):
    np.testing.assert_array_equal(mine, other)

"""
## Where to go from here

* `ema=kgo.EMA(0.999)` averages the weights once per optimizer step, for any length of the window.
* Under `mixed_float16` Keras wraps the optimizer in a `LossScaleOptimizer`. If a micro-batch
  overflows, the window leaves it out in the same way.
* If a variable gets a gradient in only one micro-batch, it moves by the mean over the whole window.
"""
