"""
Title: First groups
Description: Fine-tune a pretrained backbone and a new head at different rates.

## What you will learn

You will fine-tune a pretrained network in two groups, read its plan before you train, check that
each group moved as planned, and save and load the run.

A network that was trained on CIFAR-10 learns to tell clothes apart from 300 pictures. Its backbone
already detects edges and shapes, so it should move little. Its new head starts from random weights,
so it should move a lot. One learning rate would be a compromise between the two.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

assets = Path(__file__).parents[1] / "examples" / "assets"
keras.utils.set_random_seed(0)

"""
## A pretrained backbone and a new head

We cut the classifier off ResNet8 and put a layer for ten kinds of clothes in its place. We freeze
batch normalization, because 300 pictures are too few to estimate its statistics again.

The backbone was trained with an L2 penalty toward zero. We remove the penalty, because we want to
pull the weights toward their pretrained values instead. If it stayed, the optimizer would warn you
that both act.
"""

pretrained = keras.saving.load_model(assets / "resnet8_cifar10.keras", compile=False)
backbone = keras.Model(pretrained.input, pretrained.get_layer("flatten").output, name="resnet8")
for layer in backbone.layers:
    if getattr(layer, "kernel_regularizer", None):
        layer.kernel_regularizer = layer.kernel.regularizer = None
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.trainable = False
head = keras.layers.Dense(10, name="head")
model = keras.Sequential([keras.Input((32, 32, 3)), backbone, head])

"""
## Layer paths

You choose groups by *layer path*, which says where a variable sits in the model. `variable.path` of
Keras is not enough: the paths of the backbone's variables do not mention the backbone.
"""

print("path in Keras:", model.trainable_variables[0].path)
print("layer path:", kgo.GroupedOptimizer(model=model).plan.variables[0].path)

"""
A group takes a pattern, a layer or a selector. We give the backbone three tenths of the base rate
and pull it toward its pretrained weights (L2-SP). The head trains at the base rate.
"""

optimizer = kgo.GroupedOptimizer(
    groups=[
        kgo.Group(
            "backbone", "resnet8", learning_rate_ratio=0.3, weight_decay=10.0, anchor="initial"
        ),
        kgo.Group("head", "head"),
    ],
    model=model,
    rule="adam",
    learning_rate=keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=50),
    global_clipnorm=1.0,
)

"""
## Read the plan before you train

Nothing has been built yet. The plan shows which variable is in which group, at which rate and with
which decay, and how much memory the optimizer will take.
"""

optimizer.plan.summary()

"""
If a selector matches nothing, reading the plan raises an error that shows the nearest layer paths.
If you do not read the plan, the first training step raises it.
"""

try:
    print(kgo.GroupedOptimizer([kgo.Group("backbone", "resnet")], model=model).plan)
except ValueError as error:
    print(error)
else:
    raise AssertionError

"""
## Train

You pass the optimizer to `compile` like any other. `GroupLogger` adds two things to the history:
the rate of each group, and how far each group has drifted from its anchor.
"""

data = np.load(assets / "fashion_mini.npz")


def prepare(images):
    """Pads pictures to 32 × 32, scales them to [0, 1] and repeats the grey channel."""
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
    return np.repeat(padded[..., None], 3, axis=-1)


x_train, y_train = prepare(data["x_train"]), data["y_train"].astype("int32")
x_test, y_test = prepare(data["x_test"]), data["y_test"].astype("int32")

model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
before = {layer.name: layer.get_weights()[0] for layer in (backbone, head)}
history = model.fit(
    x_train,
    y_train,
    batch_size=30,
    epochs=4,
    verbose=2,
    callbacks=[kgo.GroupLogger(drift=True)],
)
print({name: [f"{value:.2g}" for value in values] for name, values in history.history.items()})
print("test:", model.evaluate(x_test, y_test, verbose=0, return_dict=True))

"""
The two rates keep their ratio at each step of the schedule. A reported rate proves little, so look
at the weights as well: the backbone has moved by less than a quarter as much as the head. With one
rate for both it would be a third.
"""

moved = {
    layer.name: float(np.abs(layer.get_weights()[0] - before[layer.name]).mean())
    for layer in (backbone, head)
}
print("mean change of the first kernel of each part:", moved)
assert 0 < moved["resnet8"] < moved["head"] / 4

"""
## Change a ratio while training

Ratios are stored in variables, so a change does not compile anything again. At a ratio of 0 the
backbone stands still while the head goes on.
"""

optimizer.set_learning_rate_ratio("backbone", 0.0)
before = {layer.name: layer.get_weights()[0] for layer in (backbone, head)}
model.fit(x_train, y_train, batch_size=30, epochs=1, verbose=0)
assert np.array_equal(before["resnet8"], backbone.get_weights()[0])
assert not np.array_equal(before["head"], head.get_weights()[0])

"""
## Save and go on

`model.save` keeps the groups, their state, the anchors and the changed ratio. The anchor of the
loaded model is still the pretrained backbone, not the weights that were saved.
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "first_groups.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)

assert [group.name for group in loaded.optimizer.plan.groups] == ["backbone", "head"]
assert int(loaded.optimizer.iterations) == int(optimizer.iterations)
drift = {name: float(value) for name, value in loaded.optimizer.anchor_drift().items()}
print("drift of the loaded model:", drift)
assert drift["backbone"] > 0

"""
## Where to go from here

* You can pass a layer: `kgo.Group("head", model.get_layer("head"))`.
* You can combine selectors: `kgo.path("resnet8") - kgo.rank(max=1)`,
  `kgo.layer_type("Conv2D") | "head"`.
* One group can use another rule: `kgo.Group("head", "head", rule=kgo.rule("lion", beta_1=0.95))`.
* `unclaimed="error"` raises an error that names each variable that no group claims.
* `help(kgo.Group)` explains each option. [Choosing groups](choosing_groups.py) goes on from here.
"""
