"""
Title: First groups
Description: Fine-tune a pretrained backbone and a new head at different rates.

## What we want

A network that was trained on CIFAR-10 is to learn to tell clothes apart from 300 pictures. Its
backbone already detects edges and shapes, so it should move little. Its new head starts from
random weights and should move a lot. With one learning rate you have to choose; with groups you do
not.

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

We cut the classifier off ResNet8 and put a layer for ten kinds of clothes in its place. BatchNorm
stays in inference mode: 300 pictures are too few to estimate its statistics again. The backbone was
trained with an L2 penalty toward zero. We pull toward its pretrained weights instead, so we remove
the penalty. (If it stayed, the optimizer would warn that both act.)
"""

pretrained = keras.saving.load_model(assets / "resnet8_cifar10.keras", compile=False)
features = pretrained.get_layer("flatten").output
backbone = keras.Model(pretrained.input, features, name="resnet8")
for layer in backbone.layers:
    if getattr(layer, "kernel_regularizer", None):
        layer.kernel_regularizer = layer.kernel.regularizer = None
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.trainable = False

pictures = keras.Input((32, 32, 3))
logits = keras.layers.Dense(10, name="head")(backbone(pictures, training=False))
model = keras.Model(pictures, logits)

"""
## Layer paths

You choose groups by *layer path*: where a variable sits in the model. `variable.path` is not
enough, since the paths of the backbone's variables do not contain the backbone's name.
"""

first = model.trainable_variables[0]
print("Keras' own path:", first.path)

"""
A group takes a pattern, a layer, or a selector. Here the backbone gets three tenths of the base
rate and is pulled toward its pretrained weights (L2-SP). The head gets the base rate.
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

Nothing has been built yet. The plan says which variable is in which group, at which rate, with
which decay, and how much memory the optimizer will take.
"""

optimizer.plan.summary()

"""
If a selector matches nothing, you get an error that shows the nearest real names:
"""

try:
    print(kgo.GroupedOptimizer([kgo.Group("backbone", "resnet")], model=model).plan)
except ValueError as error:
    print(error)

"""
## Train

The optimizer goes into `compile` like any other. `GroupLogger` puts the rate of every group into
the history, and how far each anchored group has drifted.
"""

data = np.load(assets / "fashion_mini.npz")


def prepare(images):
    """Pad to 32 x 32, scale to [0, 1] and repeat the grey channel."""
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
    return np.repeat(padded[..., None], 3, axis=-1)


x_train, y_train = prepare(data["x_train"]), data["y_train"].astype("int32")
x_test, y_test = prepare(data["x_test"]), data["y_test"].astype("int32")

model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
before = {name: model.get_layer(name).get_weights()[0] for name in ("resnet8", "head")}
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
The two rates keep their ratio at every step of the schedule. A reported rate is not a proof, so
look at the weights as well.
"""

moved = {
    name: float(np.abs(model.get_layer(name).get_weights()[0] - old).mean())
    for name, old in before.items()
}
print("mean change of the first kernel of each part:", moved)
assert 0 < moved["resnet8"] < moved["head"]

"""
## Change a ratio while training

Ratios are variables, so changing one does not compile the step again.
"""

optimizer.set_learning_rate_ratio("backbone", 0.0)
before = {name: model.get_layer(name).get_weights()[0] for name in ("resnet8", "head")}
model.fit(x_train, y_train, batch_size=30, epochs=1, verbose=0)
moves = {
    name: not np.array_equal(old, model.get_layer(name).get_weights()[0])
    for name, old in before.items()
}
assert moves == {"resnet8": False, "head": True}

"""
## Save and go on

`model.save` keeps the groups, their state, the anchors and the changed ratio. The anchor of the
loaded model is still the pretrained backbone, not the weights it was saved with.
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

* Selectors combine: `kgo.path("resnet8") - kgo.rank(max=1)`, `kgo.layer_type("Conv2D") | "head"`.
* Another rule for one group: `kgo.Group("head", "head", rule=kgo.rule("lion", beta_1=0.95))`.
* `unclaimed="error"` makes a plan name every variable that no group claims.
"""
