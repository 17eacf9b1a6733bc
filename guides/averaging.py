"""
Title: Averaging weights
Description: Validate, stop early, save and predict with averages of the weights; resume exactly.

## What we want

Late in training the weights hop around a good place instead of sitting in it. The average of where
they were is often better than where they are, and it costs one copy of the weights. Here a network
that knows CIFAR-10 learns to tell clothes apart from 300 pictures, at a high rate that is never
lowered.

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
    """Pad to 32 x 32, scale to [0, 1] and repeat the grey channel."""
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
    return np.repeat(padded[..., None], 3, axis=-1)


x_train, y_train = prepare(data["x_train"]), data["y_train"].astype("int32")
x_test, y_test = prepare(data["x_test"]), data["y_test"].astype("int32")
x_val, y_val, x_test, y_test = x_test[:200], y_test[:200], x_test[200:], y_test[200:]

"""
## An optimizer that averages

`kgo.EMA(momentum)` is an exponential moving average over *optimizer steps*; at 0.9 it looks back
over some ten of them. `warmup=True` lets it forget the first weights sooner. `kgo.SWA(every=...)`
is an equal average instead. The optimizer trains as it would without: nothing reads the averages.
"""


def make_model():
    keras.utils.set_random_seed(0)
    pretrained = keras.saving.load_model(assets / "resnet8_cifar10.keras", compile=False)
    backbone = keras.Model(pretrained.input, pretrained.get_layer("flatten").output, name="resnet8")
    pictures = keras.Input((32, 32, 3))
    model = keras.Model(pictures, keras.layers.Dense(10, name="head")(backbone(pictures)))
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

Its moving statistics belong to the weights they were measured with; the averages need their own.
`kgo.UseAveragedWeights()` averages the statistics too, once per epoch. Here that will not do: the
statistics move by a hundredth per step, and 60 steps are few. So we let it measure them anew, for
the averages, on the training pictures before each validation: `batch_norm=x_train`.

## Train, and validate with the averages

While `fit` validates, the averages are in the weights' place; then the weights are back, bit for
bit, whatever happens. `EarlyStopping` would restore what was validated: the averages of the best
epoch. The `ModelCheckpoint` passed to `UseAveragedWeights` sees the averages too, so the best
*averaged* model gets a file of its own.

The other `ModelCheckpoint` sees the weights, as everything outside of `UseAveragedWeights` does.
Its file holds weights *and* averages, and is the one to resume from.
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
## The averages for a while

A `with` block does the same by hand, for whatever you like: `evaluate`, `predict`, `export`. What
`kgo.update_batch_norm` measures within it is undone at its end with the rest.
"""


def score(model):
    return model.evaluate(x_test, y_test, verbose=0, return_dict=True)


raw = model.get_weights()
weights_score = score(model)
with kgo.averaged_weights(model):
    average_score = score(model)
assert all(np.array_equal(old, new) for old, new in zip(raw, model.get_weights(), strict=True))
print("weights, moving statistics:   ", weights_score)
print("averages, measured statistics:", average_score)
assert average_score["accuracy"] > weights_score["accuracy"]

"""
Much of that is due to the statistics, which can be measured for the weights as well. What is left
is due to averaging:
"""

kgo.update_batch_norm(model, x_train)
print("weights, measured statistics: ", score(model))

"""
## Which file is for what

| to | save | load |
| --- | --- | --- |
| resume the run | `model.save`, `ModelCheckpoint`, `kgo.BackupAndRestore` | `load_model` |
| use the averages | `kgo.save_averaged`, `ModelCheckpoint` in `UseAveragedWeights` | `load_model` |
| start anew from a run's averages | as for resuming | `kgo.load_averages` |

A file saved while the averages are in place holds no optimizer state: moments beside weights they
never saw would make a resumed run another one.
"""

export = keras.saving.load_model(averaged)
assert int(export.optimizer.iterations) == 0
print("best averaged model:", score(export))

resumed = keras.saving.load_model(run)
assert int(resumed.optimizer.iterations) == 60
assert all(np.array_equal(old, new) for old, new in zip(raw, resumed.get_weights(), strict=True))
with kgo.averaged_weights(resumed):
    np.testing.assert_allclose(score(resumed)["loss"], average_score["loss"], rtol=1e-4)

fresh = make_model()
kgo.load_averages(fresh, run)
np.testing.assert_allclose(score(fresh)["loss"], average_score["loss"], rtol=1e-4)

"""
## Where to go from here

* `use_ema=True` is Keras' own way: `fit` ends by writing the averages into the weights, so the next
  `fit` starts from them. With `ema=` three times `fit(epochs=1)` is `fit(epochs=3)`.
* `kgo.EMA(every=..., start=...)` and schedules as momentum count optimizer steps, also where
  gradients are accumulated over micro-batches.
* `EarlyStopping(restore_best_weights=True)` beside `UseAveragedWeights` leaves the model with the
  averages of the best epoch.
"""
