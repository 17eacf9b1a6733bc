"""
Title: Averaging weights
Description: Validate, stop early, save and predict with averages of the weights; resume exactly.

## What you will learn

You will average the weights of a model while it trains, validate and predict with the averages,
save them to a file, and resume the run with both weights and averages.

Late in training the weights jump around a good place instead of settling in it. Their average is
often better than the last weights, and it costs one copy of them. Here a network that was trained
on CIFAR-10 learns to tell clothes apart from 300 pictures, at a high rate that never falls.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

assets = Path(__file__).parents[1] / "examples" / "assets"
folder = Path(tempfile.mkdtemp())
data = np.load(assets / "fashion_mini.npz")


def prepare(images):
    """Pads pictures to 32 × 32, scales them to [0, 1] and repeats the grey channel."""
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
    return np.repeat(padded[..., None], 3, axis=-1)


x_train, y_train = prepare(data["x_train"]), data["y_train"].astype("int32")
x_test, y_test = prepare(data["x_test"]), data["y_test"].astype("int32")
x_val, y_val, x_test, y_test = x_test[:200], y_test[:200], x_test[200:], y_test[200:]

"""
## An optimizer that averages

`kgo.EMA(momentum)` is an exponential moving average over *optimizer steps*. A momentum of 0.9
averages about the last ten steps. With `warmup=True` it forgets the first weights sooner.
`kgo.SWA(every=...)` is an equal average instead. Averaging does not change the training, because
nothing in a training step reads the averages.
"""


def make_model():
    keras.utils.set_random_seed(0)
    pretrained = keras.saving.load_model(assets / "resnet8_cifar10.keras", compile=False)
    backbone = keras.Model(pretrained.input, pretrained.get_layer("flatten").output, name="resnet8")
    head = keras.layers.Dense(10, name="head")
    model = keras.Sequential([keras.Input((32, 32, 3)), backbone, head])
    optimizer = kgo.GroupedOptimizer(
        groups=[kgo.Group("backbone", "resnet8", learning_rate_ratio=0.3)],
        model=model,
        rule="adam",
        learning_rate=4e-2,
        ema=kgo.EMA(0.9, warmup=True),
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


"""
## Batch normalization needs care

The moving statistics of `BatchNormalization` belong to the weights that they were measured with, so
the averages need their own. By default `kgo.UseAveragedWeights()` averages the statistics too, once
per epoch. That is not enough here: the statistics move by a hundredth per step, and the run has
only 60 steps. With `batch_norm=x_train` the callback measures them for the averages, on the
training pictures, before each validation.

## Train, and validate with the averages

While `fit` validates, the averages take the place of the weights. Afterwards the weights come back
bit for bit, even if the validation fails. `EarlyStopping(restore_best_weights=True)` would restore
what was validated, so the averages of the best epoch.

The `ModelCheckpoint` that we pass to `UseAveragedWeights` sees the averages too, so it writes the
best *averaged* model to a file. The other `ModelCheckpoint` sees the weights, as everything outside
of `UseAveragedWeights` does. Its file holds weights *and* averages. Use this file to resume the
run.
"""

model = make_model()
averaged, run = folder / "averaged.keras", folder / "run.keras"
best = keras.callbacks.ModelCheckpoint(averaged, save_best_only=True)
history = model.fit(
    x_train,
    y_train,
    batch_size=30,
    epochs=6,
    verbose=2,
    validation_data=(x_val, y_val),
    callbacks=[
        kgo.UseAveragedWeights([best], batch_norm=x_train),
        keras.callbacks.ModelCheckpoint(run),
    ],
).history
print("validated with the averages:", [f"{value:.3f}" for value in history["val_accuracy"]])

"""
## Use the averages for a while

A `with` block does the same by hand. You can call `evaluate`, `predict` or `export` in it. If you
call `kgo.update_batch_norm` in the block, its end restores the statistics too.
"""


def score(model):
    return model.evaluate(x_test, y_test, verbose=0, return_dict=True)


def has_weights(model, weights):
    return all(map(np.array_equal, model.get_weights(), weights))


raw = model.get_weights()
weights_score = score(model)
with kgo.averaged_weights(model):
    average_score = score(model)
assert has_weights(model, raw)
print("weights, moving statistics:   ", weights_score)
print("averages, measured statistics:", average_score)
assert average_score["accuracy"] > weights_score["accuracy"]

"""
Much of the gain is due to the statistics, which you can measure for the weights as well. The rest
is due to averaging:
"""

kgo.update_batch_norm(model, x_train)
measured_score = score(model)
print("weights, measured statistics: ", measured_score)
assert measured_score["accuracy"] > weights_score["accuracy"]

"""
## Choose the file

| You want to | save by | load by |
| --- | --- | --- |
| resume the run | `model.save`, `ModelCheckpoint`, `kgo.BackupAndRestore` | `load_model` |
| use the averages | `kgo.save_averaged`, `ModelCheckpoint` in `UseAveragedWeights` | `load_model` |
| start a new run from the averages | the same way as to resume | `kgo.load_averages` |

If you save a model while the averages are in place, the file holds no optimizer state. The moments
belong to the weights, so a run resumed from moments and averages would be a different run.
"""

export = keras.saving.load_model(averaged)
assert int(export.optimizer.iterations) == 0
print("best averaged model:", score(export))

resumed = keras.saving.load_model(run)
assert int(resumed.optimizer.iterations) == 60
assert has_weights(resumed, raw)
with kgo.averaged_weights(resumed):
    np.testing.assert_allclose(score(resumed)["loss"], average_score["loss"], rtol=1e-4)

fresh = make_model()
kgo.load_averages(fresh, run)
np.testing.assert_allclose(score(fresh)["loss"], average_score["loss"], rtol=1e-4)

"""
## Where to go from here

* Keras' own argument `use_ema=True` works as in Keras: `fit` ends by writing the averages into the
  weights, so the next `fit` starts from them. With `ema=`, `fit(epochs=1)` three times is the same
  as `fit(epochs=3)`.
* `kgo.EMA(every=..., start=...)` and a schedule as momentum count optimizer steps, also if you
  accumulate gradients over micro-batches.
* If you use `EarlyStopping(restore_best_weights=True)` beside `UseAveragedWeights`, the model ends
  with the averages of the best epoch.
"""
