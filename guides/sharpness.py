"""
Title: Flat minima
Description: Train with SAM, ASAM, LookSAM or GSAM, or write a gradient rule in ten lines.

## What you will learn

You will train a model by SAM or a relative of it, choose which weights are perturbed and how far,
write your own gradient rule, and save and resume such a run.

Of two sets of weights with the same training loss, the one in the flatter minimum often does better
on new data. Sharpness-aware rules look for flat minima: they compute the gradient of a batch not at
the weights, but at weights moved a little toward a higher loss. Here a network that was trained on
CIFAR-10 learns to tell clothes apart from 300 pictures.

![Training loss along random directions](../docs/sharpness.png)

`examples/loss_around_minimum.py` drew this plot for the same task. Plain training ends with the
lowest training loss, 0.05, while SAM and ASAM end at 0.14. At a distance of 0.3 times the norm of
each filter, the loss is 1.64 after plain training, 0.83 after SAM and 0.59 after ASAM. The test
accuracies are alike: 80.0, 80.6 and 81.0 %, from one seed each. The radii were chosen with these
accuracies in view, so the plot compares minima, not accuracies. `examples/finetune_sharpness.py`
compares accuracies, with settings that were chosen on held-out training images.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

assets = Path(__file__).parents[1] / "examples" / "assets"
data = np.load(assets / "fashion_mini.npz")
images = np.pad(data["x_train"], ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
x_train = np.repeat(images[..., None], 3, axis=-1)
y_train = data["y_train"].astype("int32")

"""
## A model with a gradient rule

`kgo.SharpnessAwareModel` is `keras.Model` with one more argument.
`kgo.sharpness_aware(model, rule)` makes such a model from the layers of a functional or Sequential
model. For a subclassed model, put `kgo.SharpnessAware` before its base class. Everything else stays
the same: `compile`, `fit`, callbacks, `evaluate`, `predict`. A model has one rule, and a rule
belongs to one model.

| rule | gradient | passes per step |
| --- | --- | --- |
| `kgo.SingleGradient()` | of the batch, as in plain training | 1 |
| `kgo.SAM(rho)` | at `w + ε`, with `‖ε‖ = rho` along the gradient (arXiv:2010.01412) | 2 |
| `kgo.ASAM(rho, eta)` | the same, with `ε` in proportion to `abs(w)` (arXiv:2102.11600) | 2 |
| `kgo.LookSAM(rho, every)` | of SAM in some steps, reused in others (arXiv:2203.02714) | 1–2 |
| `kgo.GSAM(rho, alpha)` | of SAM, lowering the gap of both losses (arXiv:2203.08065) | 2 |

`LookSAM` takes the second pass in each `every`-th step, by default in each fifth.

Begin with `SAM(0.05)`.

* Use `ASAM` if the scales of layers differ much: its result does not change if you rescale one
  layer and scale the next one back. Its `rho` is about ten times that of SAM.
* Use `LookSAM` if twice the time is too much. It needs a `GroupedOptimizer`, which keeps one more
  array per weight.
* Use `GSAM` if `sam_gap` stays large. It lowers the gap itself, not only the perturbed loss.

`rho` is a distance in weight space over all perturbed weights together, so the more weights there
are, the less each of them moves. If `rho` is too large, `sam_gap` gets near the loss, and the model
underfits.
"""


def make_model(rule, **options):
    keras.utils.set_random_seed(0)
    pretrained = keras.saving.load_model(assets / "resnet8_cifar10.keras", compile=False)
    backbone = keras.Model(pretrained.input, pretrained.get_layer("flatten").output, name="resnet8")
    pictures = keras.Input((32, 32, 3))
    outputs = keras.layers.Dense(10, name="head")(backbone(pictures))
    model = kgo.SharpnessAwareModel(pictures, outputs, gradient_rule=rule)
    optimizer = kgo.GroupedOptimizer(
        groups=[kgo.Group("backbone", "resnet8", learning_rate_ratio=0.3)],
        model=model,
        rule="adam",
        learning_rate=1e-2,
        **options,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


def fit(model, epochs=1):
    return model.fit(x_train, y_train, batch_size=60, epochs=epochs, verbose=0).history


model = make_model(kgo.SAM(0.05))
logs = fit(model, epochs=2)
for name in ("loss", "sam_gap", "gradient_norm"):
    print(f"{name:13}", [f"{value:.3f}" for value in logs[name]])

"""
`sam_gap` is the perturbed loss minus the loss, averaged over the batches that took a second pass.
It measures how sharp the minimum is within a distance of `rho`. It is NaN if no batch took a second
pass, and `evaluate` does not report it. `gradient_norm` is the norm of the first gradient over all
groups that move. To first order the gap is `rho` times this norm; the rest is due to curvature.
"""

assert all(gap > 0 for gap in logs["sam_gap"])

"""
## Choose what is perturbed, and how far

`exclude_from_perturbation` takes the same selectors as groups do. The selected weights are not
perturbed and do not count in the norm, but they are trained with the gradient of the second pass
like the rest. Frozen groups are never perturbed. `adaptive_on` of ASAM selects the weights whose
`ε` grows with the weight; the other weights get the `ε` of SAM. By default it selects the weights
that decay applies to, so it leaves out biases and the scales and offsets of normalization.

`rho` can be a schedule over optimizer steps. Here it begins with a few steps of plain training. If
`rho` is a number, you can set it while the model trains, and nothing is compiled again.
"""

rule = kgo.ASAM(
    rho=keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.0, 0.5]),
    exclude_from_perturbation=kgo.path("head"),
    adaptive_on="kernel",
)
print(rule)
model.gradient_rule.rho = 0.02
print(model.gradient_rule)
assert model.gradient_rule.rho == 0.02

"""
## How other features behave

* **Accumulation**: each micro-batch is perturbed by its own gradient. A smaller micro-batch has a
  noisier direction, which the paper found to help (it calls the size `m`).
* **Mixed precision**: both passes use the scaled loss, and an overflow in either skips the step.
  `sam_gap` and `gradient_norm` are unscaled.
* **BatchNormalization**: only the first pass moves its statistics. The second pass uses the batch
  statistics of the perturbed weights and does not keep them.
* **Dropout**: both passes use the same masks.
* **Metrics and logs**: they come from the first pass.
* **Global clipping, decay, anchors and averages**: they see one gradient per step, which the rule
  returns.
* **Several devices**: the rule computes the perturbation from the gradient over all replicas.

After the second pass the weights are restored from a copy, bit for bit.

## Write a gradient rule

`gradients` receives a batch, which has the first gradients and computes others at `w + ε`. Declare
numbers that can change or follow a schedule as `kgo.Hyperparameter`. The rule below perturbs the
weights in both directions and returns the mean of both gradients. `sam_gap` belongs to the last
pass, so here to the one down the slope.
"""


@keras.saving.register_keras_serializable(package="guide")
class BothSides(kgo.GradientRule):
    rho = kgo.Hyperparameter()

    def __init__(self, rho=0.05, exclude_from_perturbation=()):
        super().__init__(exclude_from_perturbation)
        self.rho = rho

    def gradients(self, batch):
        norm = sum(keras.ops.sum(keras.ops.square(g)) for g in batch.gradients) ** 0.5
        step = batch.scalar("rho") / keras.ops.maximum(norm, 1e-12)
        up = batch.gradients_at([step * g for g in batch.gradients])
        down = batch.gradients_at([-step * g for g in batch.gradients])
        return [(a + b) / 2 for a, b in zip(up, down, strict=True)]


custom = make_model(BothSides(0.1), gradient_accumulation_steps=2)
logs = fit(custom)
print("both sides:", {name: f"{values[0]:.3f}" for name, values in logs.items()})
assert logs["sam_gap"][0] < 0

"""
## Save and resume

A `.keras` file holds the rule and its current numbers. With a `GroupedOptimizer` these numbers and
the direction of LookSAM are optimizer state, so a resumed run goes on as if it had not stopped.
Register your own rule, as above. A weights file also fits the plain model, which is
`keras.Model(model.inputs, model.outputs)`.
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "sharpness.keras"
    model.save(path)
    resumed = keras.saving.load_model(path)
print("resumed with", resumed.gradient_rule)
assert resumed.gradient_rule.rho == 0.02
assert int(resumed.optimizer.iterations) == 10

"""
## Your own training loop

On TensorFlow and torch, pass a function that computes the loss to `model.compute_gradients`, which
calls it once per pass. On JAX a step is a function of values: `model.train_step(state, data)`.
"""

x, y = keras.ops.convert_to_tensor(x_train[:60]), keras.ops.convert_to_tensor(y_train[:60])
if keras.backend.backend() == "jax":
    import jax

    variables = [
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    ]
    state = tuple([variable.value for variable in group] for group in variables)
    logs, state = jax.jit(model.train_step)(state, (x, y))
    for group, values in zip(variables, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
else:
    loss, gradients = model.compute_gradients(lambda: model.loss(y, model(x, training=True)))
    model.optimizer.apply(gradients, model.trainable_variables)
assert int(model.optimizer.iterations) == 11

"""
## What to know before you use it

* A step of SAM takes two passes. It holds at most one more copy of the perturbed weights and one
  more set of gradients. `benchmarks/training_step.py` measures time and memory: on two CPU cores a
  step took 1.6 to 1.9 times as long with SAM as a plain step, and 1.2 times as long with
  `LookSAM(every=5)`, on each backend.
* Compare it with plain training of the same *time*, not of the same number of epochs.
* A few hundred steps of fine-tuning gain little; the papers train from random weights.
* A flat minimum does not guarantee a better model: 500 test pictures hardly tell the rules in the
  plot apart.
* Layers must read their weights as Keras variables. If your model has its own `train_step`, it must
  call `super().train_step`.
"""
