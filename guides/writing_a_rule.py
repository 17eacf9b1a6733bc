"""
Title: Writing a rule
Description: A rule of your own is one small class; its state, schedules and groups come for free.

## What we want

The update of a paper, tried in one group of a model, saved and resumed with the rest. A rule is a
plain `keras.optimizers.Optimizer`: it goes into `compile` alone, or into `kgo.Group(rule=...)`.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import ops

import keras_groupopt as kgo

keras.utils.set_random_seed(0)

"""
## The class

Momentum whose step has a bounded length per variable:

    m ← μ m + g
    w ← w - η m / max(1, ‖m‖ / limit)

Three methods say it all. `build` makes the state: one array beside each variable, as an attribute
of its name. `update_step` moves one variable. `get_config` gives back the arguments.
"""


@keras.saving.register_keras_serializable(package="guide")
class BoundedMomentum(keras.optimizers.Optimizer):
    """Momentum whose step is at most `limit` long, times the rate."""

    def __init__(self, learning_rate=0.01, momentum=0.9, limit=1.0, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"`momentum` must be in [0, 1). Received: momentum={momentum!r}.")
        self.momentum = momentum
        self.limit = limit

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        velocity = self._momentums[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        m = ops.cast(self.momentum, variable.dtype) * velocity + gradient
        length = ops.sqrt(ops.sum(ops.square(m)))
        self.assign(velocity, m)
        shortened = ops.maximum(length / ops.cast(self.limit, variable.dtype), 1.0)
        self.assign_sub(variable, rate * m / shortened)

    def get_config(self):
        return {**super().get_config(), "momentum": self.momentum, "limit": self.limit}


"""
What keeps it right everywhere:

* Read numbers from `self` in `update_step`, as `self.momentum` here. A schedule then drives them.
* No Python `if` on a tensor, and none on a number that may be one: `ops.where`, `ops.maximum`. A
  compiled step has no value to look at. An `if` on a boolean argument is fine.
* State in lists parallel to the variables, one attribute each. In a dict it has no name in a file.
* Everything in `update_step`, nothing in a loop of your own: `ratios=` give each call its rate.
* `assign` and `assign_sub` of `self`, and `_get_variable_index`: on TensorFlow the variable that
  comes is not the Keras variable.
* No decay, clipping or averaging: Keras' base class and the groups do them.

## Check it

Ten lines of float64 NumPy are an independent opinion. Use sizes that differ from step to step, so
that the bound is active in some steps and not in others.
"""

start = np.array([[0.5, -1.0], [2.0, 0.25]])
steps = [np.random.default_rng(n).normal(size=(2, 2)) * n for n in range(1, 6)]

variable = keras.Variable(start.astype("float32"))
rule = BoundedMomentum(0.1, momentum=0.5, limit=2.0)
w, m = start.copy(), np.zeros((2, 2))
for gradient in steps:
    rule.apply([ops.convert_to_tensor(gradient.astype("float32"))], [variable])
    m = 0.5 * m + gradient
    w = w - 0.1 * m / max(1.0, np.linalg.norm(m) / 2.0)
np.testing.assert_allclose(ops.convert_to_numpy(variable), w, rtol=1e-6)

"""
## In a group

As any rule: the class, or `kgo.rule(class, ...)` with arguments. An argument may be a schedule; it
is tried when the optimizer is made, and one that the rule does not read is an error.
"""


def new_model():
    """Returns a backbone and a head."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, activation="relu", name="backbone")]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3, name="head")])


def compiled(model):
    """Compiles a model with the rule in its head."""
    rising = kgo.schedules.Linear(0.5, total_steps=16, end_learning_rate=0.9)
    optimizer = kgo.GroupedOptimizer(
        [kgo.Group("head", "head", rule=kgo.rule(BoundedMomentum, momentum=rising, limit=0.5))],
        ratios=[("head/bias", 2.0)],
        model=model,
        rule="adam",
        learning_rate=0.01,
        weight_decay=0.01,
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


model = compiled(new_model())
model.optimizer.plan.summary()
for binding in model.optimizer.plan.bindings():
    print(binding)

x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = x[:, :3] ** 2
model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)

"""
## Saved and resumed

The state is in the file under `group/layer path/slot`, and a resumed run goes on bit for bit. Other
processes need the class: import the module that registers it.
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.keras"
    model.save(path)
    keys = kgo.read_manifest(path)["state"]
    print([key for key in keys if key.startswith("head/head/")])
    resumed = keras.saving.load_model(path)
for each in (model, resumed):
    each.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
for one, other in zip(model.weights, resumed.weights, strict=True):
    np.testing.assert_array_equal(*(ops.convert_to_numpy(v) for v in (one, other)))

"""
## Speed

A rule of your own moves one variable after another. Keras' SGD, Adam, AdamW, Lion, RMSprop and
Adagrad, and our RAdam and Adan, move all variables of a group at once where the backend can. So
does a subclass that leaves the update alone; one that replaces `update_step`, or the methods that
assign, is obeyed and does without. `GroupedOptimizer(fused=False)` switches it off: the numbers are
the same to rounding, and a file that was saved with it goes on without.
"""


class QuietAdam(keras.optimizers.Adam):
    """Has a shorter config: the update is Adam's, and so is its speed."""

    def get_config(self):
        return {k: v for k, v in super().get_config().items() if k != "weight_decay"}


weights = []
for fused in (True, False):
    keras.utils.set_random_seed(0)
    model = new_model()
    model.compile(kgo.GroupedOptimizer(model=model, rule=QuietAdam, fused=fused), loss="mse")
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    weights.append(model.get_weights())
for one, other in zip(*weights, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

"""
## A recipe of your own

A recipe is a function that returns groups, or pairs of selector and ratio: nothing else is to be
known. This one bounds the steps of what is new, and leaves biases to Adam.
"""


def bounded_head(head, limit):
    """Returns the group of a new head."""
    kernels = kgo.path(head) & kgo.rank(min=2)
    return [kgo.Group("new", kernels, rule=kgo.rule(BoundedMomentum, limit=limit))]


model = new_model()
optimizer = kgo.GroupedOptimizer(bounded_head("head", 0.5), model=model, rule="adam")
assert [v.path for v in optimizer.plan["new"].variables] == ["head/kernel"]

"""
A schedule of your own is a subclass of `kgo.schedules.Schedule`: [schedules](schedules.py). A rule
that needs further passes through the model, as SAM does, is a `kgo.GradientRule`:
[flat minima](sharpness.py).
"""
