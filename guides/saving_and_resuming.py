"""
Title: Saving and resuming
Description: Stop a run, go on bit for bit, change the model in between, and trust the file.

## What we want

A run that is stopped and resumed shall give the same numbers as one that was not. A model that
changed in between shall keep the state of what is still there, and say what starts fresh. And a
damaged file shall be an error, never a silent loss of what a week of training has gathered.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

folder = Path(tempfile.mkdtemp())
numbers = np.random.default_rng(0)
x, y = numbers.normal(size=(64, 4)), numbers.normal(size=(64, 2))


def make_model(head="head", anchor="initial", backbone="backbone"):
    """A backbone pulled toward its first weights, and a head with another rule."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="tanh", name="body"),
            keras.layers.Dense(2, name=head),
        ]
    )
    groups = [
        kgo.Group(backbone, "body", learning_rate_ratio=0.1, weight_decay=0.1, anchor=anchor),
        kgo.Group("head", head, rule=kgo.rule("lion", beta_1=0.95)),
    ]
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam", learning_rate=1e-2)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def train(model, epochs=1, callbacks=()):
    model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def same_weights(first, second):
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


"""
## Stop and go on

Keras' own ways of saving hold all of the optimizer: moments, step counts, rates changed while
training, averages, an open window of micro-batches, and anchors. The anchor of a resumed run is
the first run's, not the restored weights. They leave out the seeds of random layers, and the order
of the data is yours to keep: `kgo.BackupAndRestore` and `shuffle=False` see to both.

`ema=`, accumulation or a schedule may be new in the code that loads weights: the rest of the state
is kept, and an average starts at the loaded weights. What `load_model` gives has the file's
optimizer: compile it with a new one and call `kgo.transfer_state(old, new)`.
"""

straight = train(make_model(), epochs=4)

half = train(make_model(), epochs=2)
half.save(folder / "half.keras")
half.save_weights(folder / "half.weights.h5")

assert same_weights(train(keras.saving.load_model(folder / "half.keras"), epochs=2), straight)

resumed = make_model()
resumed.load_weights(folder / "half.weights.h5")
assert same_weights(train(resumed, epochs=2), straight)

"""
In the second case the optimizer was not built yet: the state waits, and is applied at the build.
`BackupAndRestore` and `ModelCheckpoint` use the same roads.

Values that you declare, such as a rate, come from the file only if code and file declared the same.
If you changed the code, the code counts, and a log line says so. So a float rate may become a
schedule, and the moments stay.

## What is in a file

The manifest tells, and nothing else is read. It is plain JSON.
"""

manifest = kgo.read_manifest(folder / "half.keras")
print("step", manifest["iterations"], "by version", manifest["keras_groupopt"])
for name, group in manifest["groups"].items():
    print(name, group["rule"], list(group["variables"]), "anchors:", group["anchors"])

"""
## When the model has changed

State is matched by group, layer path and slot. Another layout is refused, with the differences:
"""

changed = make_model(head="classifier")
changed.optimizer.build(changed.trainable_variables)
try:
    changed.load_weights(folder / "half.weights.h5")
except ValueError as error:
    print(error)

"""
If the layer only has another name, say so, and nothing is lost. Layer paths go by their beginning;
a group is written `"group:<name>"`.
"""

renames = {"head": "classifier", "group:backbone": "group:trunk"}
changed = make_model(head="classifier", backbone="trunk")
changed.optimizer.build(changed.trainable_variables)
with kgo.resuming(renames=renames) as report:
    changed.load_weights(folder / "half.weights.h5")
print(report)
assert not report.fresh
assert not report.dropped
assert same_weights(train(changed, epochs=2), straight)

"""
If it is a new head, accept that it starts fresh. What is not kept stays as the new optimizer has
it, and a group of which nothing is kept takes the first steps of a new optimizer: it counts them
itself, for its bias correction.
"""

changed = make_model(head="classifier")
with kgo.resuming(strict=False) as report:
    changed.load_weights(folder / "half.weights.h5")
changed.optimizer.build(changed.trainable_variables)
print("starts fresh:", report.fresh)
assert "backbone/body/kernel/momentums" in report.kept
assert "head/classifier/kernel/momentums" in report.fresh

"""
The block goes around any load of Keras: `load_model`, `load_weights`, or a `fit` with
`BackupAndRestore`. In `mixed_float16`, Keras wraps the optimizer in a `LossScaleOptimizer` that
restores by position before ours is asked; there a layout that differs may be refused as a whole.

## Damaged files

Arrays, anchors, the manifest and, where the optimizer knows its model, the weights have checksums.
`kgo.load_weights` verifies all of a file before it assigns anything, and puts the model back on
any failure, even Ctrl-C.
"""

data = bytearray((folder / "half.weights.h5").read_bytes())
kernel = half.get_layer("head").get_weights()[0]
data[data.index(kernel.tobytes())] ^= 1
(folder / "damaged.weights.h5").write_bytes(data)

model = train(make_model())
before = model.get_weights()
try:
    kgo.load_weights(model, folder / "damaged.weights.h5")
except ValueError as error:
    print(error)
assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))

"""
It also takes the weights alone, for a new task: step, moments and rates stay as they are.
"""

model = make_model()
model.optimizer.build(model.trainable_variables)
kgo.load_weights(model, folder / "half.keras", optimizer=False)
assert same_weights(model, half)
assert int(model.optimizer.iterations) == 0

"""
## State in memory

`state_dict` gives copies, nested by group, layer path and slot. Try something, and go back:
"""

model = train(make_model(), epochs=2)
weights, state = model.get_weights(), model.optimizer.state_dict()
print({slot: array.shape for slot, array in state["groups"]["backbone"]["body/kernel"].items()})

model.optimizer.learning_rate = 1.0
train(model)
model.set_weights(weights)
model.optimizer.load_state_dict(state)
assert same_weights(train(model, epochs=2), straight)

"""
`save_state` and `load_state` do the same with a file, which is written whole or not at all.
"""

half.optimizer.save_state(folder / "optimizer.npz")
model = make_model()
model.set_weights(half.get_weights())
model.optimizer.load_state(folder / "optimizer.npz")
assert same_weights(train(model, epochs=2), straight)
