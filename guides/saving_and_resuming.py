"""
Title: Saving and resuming
Description: Stop a run, go on bit for bit, change the model in between, and trust the file.

## What you will learn

You will stop a run and resume it with the same numbers as if it had not stopped, keep the state of
the layers that remain if the model changes, unfreeze layers while you train, and detect damaged
files before they harm a run.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

folder = Path(tempfile.mkdtemp())
numbers = np.random.default_rng(0)
x, y = numbers.normal(size=(64, 4)), numbers.normal(size=(64, 2))


def make_model(head="head", backbone="backbone"):
    """Returns a backbone pulled toward its first weights, and a head with another rule."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="tanh", name="body"),
            keras.layers.Dense(2, name=head),
        ]
    )
    groups = [
        kgo.Group(backbone, "body", learning_rate_ratio=0.1, weight_decay=10.0, anchor="initial"),
        kgo.Group("head", head, rule=kgo.rule("lion", beta_1=0.95)),
    ]
    optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam", learning_rate=1e-2)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def train(model, epochs=1, callbacks=()):
    model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def same_weights(first, second):
    return all(map(np.array_equal, first.get_weights(), second.get_weights()))


"""
## Stop and go on

Files that Keras writes (`.keras` and `.weights.h5`) hold the whole state of the optimizer, once and
by layer path: moments, step counts, rates that you changed while training, averages, an open window
of micro-batches, and anchors. A resumed run pulls toward the anchor of the first run, not toward
the restored weights.

Two things are not in these files: the seeds of random layers such as `Dropout`, and the order of
the data. Use `kgo.BackupAndRestore` for the seeds, and pass `shuffle=False`, or a dataset whose
order depends on the epoch only.
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
In the second case the optimizer was not built yet. The loaded state waits and is applied when the
optimizer is built.

A value that you declare, such as a rate, comes from the file only if code and file declared the
same. If you changed the code, the code counts, and a log line shows the difference. So you can
replace a number by a schedule and keep the moments.

`ema=`, accumulation or a schedule may be new in the code that loads weights. The rest of the state
is kept, and an average starts at the loaded weights. A model from `load_model` has the optimizer of
the file: compile it with a new one and call `kgo.transfer_state(old, new)`.

## Resume after a kill

`kgo.BackupAndRestore` writes weights, state and seeds after each epoch. It writes a new file and
then replaces the old one, so a process that is killed while it writes leaves a file that can be
read. When you start the same program again, `fit` begins after the last whole epoch. By default the
callback deletes the backups when `fit` ends. Here `delete_checkpoint=False` keeps them, so that a
second `fit` stands for the second process.
"""

for epochs in (2, 4):
    backup = kgo.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    resumed = train(make_model(), epochs, [backup])
assert int(resumed.optimizer.iterations) == int(straight.optimizer.iterations)
assert same_weights(resumed, straight)
assert resumed.history.epoch == [2, 3]

"""
## Read what a file holds

`kgo.read_manifest` returns the manifest, which is plain JSON. It does not read anything else.
"""

manifest = kgo.read_manifest(folder / "half.keras")
print("step", manifest["iterations"], "by version", manifest["keras_groupopt"])
for name, group in manifest["groups"].items():
    print(name, group["rule"], list(group["variables"]), "anchors:", group["anchors"])

"""
## Load into a model that has changed

State is matched by group, layer path and slot. If they differ, loading raises an error that shows
the differences:
"""

changed = make_model(head="classifier")
changed.optimizer.build(changed.trainable_variables)
try:
    changed.load_weights(folder / "half.weights.h5")
except ValueError as error:
    print(error)
else:
    raise AssertionError

"""
If a layer or a group only has another name, pass `renames=`, and all state is kept. A layer path
matches by its beginning, and a group is written `"group:<name>"`.
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
If the head is a new one, `strict=False` lets it start fresh and keeps the rest. A group that starts
fresh counts its steps from 0, because its bias correction depends on them.
"""

changed = make_model(head="classifier")
with kgo.resuming(strict=False) as report:
    changed.load_weights(folder / "half.weights.h5")
changed.optimizer.build(changed.trainable_variables)
print("starts fresh:", report.fresh)
assert "backbone/body/kernel/momentums" in report.kept
assert "head/classifier/kernel/momentums" in report.fresh

"""
The `with` block works around each way in which Keras loads: `load_model`, `load_weights`, or a
`fit` with `BackupAndRestore`. In `mixed_float16` there is one limit: Keras wraps the optimizer in a
`LossScaleOptimizer`, which restores by position before our optimizer sees the file, so it may
refuse a file whose layout differs.

## Freeze, unfreeze and add layers while you train

The optimizer is built for the variables that are trainable at the first step. After you change
`trainable`, call `enable_lora` or add a layer, call `optimizer.rebuild(model)`. It keeps the state
of each variable that is still there and returns a report. You do not have to call `compile` again.
"""

model = make_model()
model.get_layer("body").trainable = False
groups = [kgo.Group("head", "head", rule=kgo.rule("lion", beta_1=0.95))]
optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam", learning_rate=1e-2)
model.compile(optimizer=optimizer, loss="mse")
train(model)
model.get_layer("body").trainable = True
report = optimizer.rebuild(model)
print(report)
assert "head/head/kernel/momentums" in report.kept
assert "default/body/kernel/momentums" in report.fresh

"""
To unfreeze layers at another rate, use `optimizer.add_group`, which declares a group and rebuilds.
`optimizer.freeze_to` freezes and unfreezes whole groups: see [choosing groups](choosing_groups.py).
"""

optimizer.add_group(kgo.Group("backbone", "body", learning_rate_ratio=0.1))
before = model.get_weights()
train(model)
assert not np.array_equal(before[0], model.get_weights()[0])
assert [group.name for group in optimizer.plan.groups] == ["head", "backbone"]

"""
## Damaged files

Checksums cover arrays, anchors and the manifest, and the weights too if the optimizer knows its
model. `kgo.load_weights` verifies a whole file before it assigns anything. If it fails, even by
Ctrl-C, it restores the model.
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
else:
    raise AssertionError
assert all(map(np.array_equal, model.get_weights(), before))

"""
With `optimizer=False` it loads the weights alone, for a new task. The step, the moments and the
rates of the optimizer stay as they are.
"""

model = make_model()
model.optimizer.build(model.trainable_variables)
kgo.load_weights(model, folder / "half.keras", optimizer=False)
assert same_weights(model, half)
assert int(model.optimizer.iterations) == 0

"""
## State in memory

`state_dict` returns copies, nested by group, layer path and slot. You can try something and go
back:
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
