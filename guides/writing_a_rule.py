"""
Title: Writing a rule
Description: Write an update rule as one small class; use it in a group, schedule it, save it.

## What you will learn

You will write the update rule of a paper as a small class, check it, use it in one group of a
model, and save and resume it with the rest. A rule is a plain `keras.optimizers.Optimizer`, so you
can pass it to `compile` alone or to `kgo.Group(rule=...)`.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import ops

import keras_groupopt as kgo

"""
## The class

Our rule is momentum with an upper limit on the length of the step of each variable:

    m ← μ m + g
    w ← w - η m / max(1, ‖m‖ / limit)

You write three methods. `build` makes the state, which is one array per variable, and stores it in
an attribute. `update_step` moves one variable. `get_config` returns the arguments.
"""


@keras.saving.register_keras_serializable(package="guide")
class BoundedMomentum(keras.optimizers.Optimizer):
    """Takes momentum steps whose length is at most `limit` times the rate."""

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
Keep to these rules, and yours works on each backend and in each group:

* Read numbers from `self` in `update_step`, as `self.momentum` here, so that a schedule can drive
  them.
* Do not use a Python `if` on a tensor, or on a number that can be a tensor: a compiled step does
  not know its value. Use `ops.where` or `ops.maximum`. An `if` on a boolean argument is fine.
* Keep state in lists parallel to the variables, one attribute per list. State in a dict has no name
  in a file.
* Compute everything for one variable in `update_step`. With `ratios=` the rule is called once for
  each rate, with the variables at that rate; scalars that all variables share are put back between
  these calls.
* Use `assign` and `assign_sub` of `self`, and `_get_variable_index`: on TensorFlow `update_step`
  does not receive the Keras variable.
* Do not decay, clip or average: the base class of Keras and the groups do this.

## Check it

Compare the rule with a few lines of NumPy in float64. Use gradients whose lengths differ from step
to step, so that the limit is active in some steps but not in others.
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

Use it like any other rule: pass the class, or `kgo.rule(class, ...)` with arguments. An argument
can be a schedule. If the rule does not read this argument in `update_step`, making the optimizer
raises an error.
"""


def new_model():
    """Returns a backbone and a head, which start from the same weights each time."""
    keras.utils.set_random_seed(1)
    backbone = keras.layers.Dense(16, activation="relu", name="backbone")
    return keras.Sequential([keras.Input((8,)), backbone, keras.layers.Dense(3, name="head")])


def fit(model):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    model.fit(x, x[:, :3] ** 2, batch_size=16, epochs=2, verbose=0, shuffle=False)


model = new_model()
rising = kgo.schedules.Linear(0.5, total_steps=16, end_learning_rate=0.9)
optimizer = kgo.GroupedOptimizer(
    [kgo.Group("head", "head", rule=kgo.rule(BoundedMomentum, momentum=rising, limit=0.5))],
    ratios=[("head/bias", 2.0)],
    model=model,
    rule="adam",
    learning_rate=0.01,
    weight_decay=1.0,
)
optimizer.plan.summary()
print(*optimizer.plan.bindings(), sep="\n")
model.compile(optimizer=optimizer, loss="mse")
fit(model)

"""
## Save and resume

The file holds the state under `group/layer path/slot`, and a resumed run goes on bit for bit. In
another process, import the module that registers the class before you load the file.
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.keras"
    model.save(path)
    keys = kgo.read_manifest(path)["state"]
    print([key for key in keys if key.startswith("head/head/")])
    resumed = keras.saving.load_model(path)
for each in (model, resumed):
    fit(each)
assert all(map(np.array_equal, model.get_weights(), resumed.get_weights()))

"""
## Speed

Your rule moves one variable after another. SGD, Adam, AdamW, Lion, RMSprop and Adagrad of Keras,
and our RAdam and Adan, move all variables of a group at once if the backend can (a fused step). A
subclass that does not change the update does so too. If a subclass replaces `apply`, `update_step`
or the methods that assign, its methods are called for one variable after another.
`GroupedOptimizer(fused=False)` switches fused steps off. The numbers agree up to rounding, and a
file that was saved with fused steps can go on without them.
"""


class QuietAdam(keras.optimizers.Adam):
    """Has a shorter config. The update is that of Adam, so its step is fused."""

    def get_config(self):
        return {k: v for k, v in super().get_config().items() if k != "weight_decay"}


weights = []
for fused in (True, False):
    model = new_model()
    model.compile(kgo.GroupedOptimizer(model=model, rule=QuietAdam, fused=fused), loss="mse")
    fit(model)
    weights.append(model.get_weights())
for one, other in zip(*weights, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

"""
## Write a recipe

A recipe is a function that returns groups, or pairs of a selector and a ratio. This one trains the
kernels of a new head by our rule and leaves the biases to Adam.
"""


def bounded_head(head, limit):
    """Returns the group of a new head."""
    kernels = kgo.path(head) & kgo.rank(min=2)
    return [kgo.Group("new", kernels, rule=kgo.rule(BoundedMomentum, limit=limit))]


model = new_model()
optimizer = kgo.GroupedOptimizer(bounded_head("head", 0.5), model=model, rule="adam")
assert [v.path for v in optimizer.plan["new"].variables] == ["head/kernel"]

"""
## Where to go from here

* To write a schedule, subclass `kgo.schedules.Schedule`: see [schedules](schedules.py).
* If a rule needs further passes through the model, as SAM does, subclass `kgo.GradientRule`: see
  [flat minima](sharpness.py).
"""
