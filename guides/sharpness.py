"""
Title: Flat minima
Description: Train with SAM, ASAM, LookSAM or GSAM, or with a rule of your own in ten lines.

## What we want

Of two sets of weights with the same training loss, the one in the wider valley often does better
on pictures that were not seen. Sharpness-aware rules look for it: a batch's gradient is taken not
at the weights, but at weights moved a little toward a higher loss. Here a network that knows
CIFAR-10 learns to tell clothes apart from 300 pictures.

![Training loss along random directions](../docs/sharpness.png)

The picture is of the same task, made by `examples/loss_around_minimum.py`. Plain training ends with
the lower training loss, 0.05; SAM and ASAM end at 0.14, and 0.3 of each filter's norm away from
there the loss is 0.83 and 0.59 instead of 1.64. Test accuracies are alike: 80.0, 80.6 and 81.0 %,
one seed each. The radii were chosen with an eye on these, so the picture compares valleys, not
accuracies; `examples/finetune_sharpness.py` compares those, with settings chosen on a part of the
training images.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

assets = Path(__file__).parents[1] / "examples" / "assets"
data = np.load(assets / "fashion_mini.npz")


def prepare(images):
    """Pad to 32 x 32, scale to [0, 1] and repeat the grey channel."""
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
    return np.repeat(padded[..., None], 3, axis=-1)


x_train, y_train = prepare(data["x_train"]), data["y_train"].astype("int32")

"""
## A model that asks a rule

`kgo.SharpnessAwareModel` is `keras.Model` with one argument more. A functional or Sequential model
becomes one of the same layers by `kgo.sharpness_aware(model, rule)`; for a subclassed model put
`kgo.SharpnessAware` before its base class. Everything else stays: `compile`, `fit`, callbacks,
`evaluate`, `predict`. A model has one rule, and a rule one model.

| rule | gradient | passes per step |
| --- | --- | --- |
| `kgo.SingleGradient()` | of the batch, as always | 1 |
| `kgo.SAM(rho)` | at `w + ε`, with `‖ε‖ = rho` along the gradient (arXiv:2010.01412) | 2 |
| `kgo.ASAM(rho, eta)` | the same, with `ε` in proportion to `abs(w)` (arXiv:2102.11600) | 2 |
| `kgo.LookSAM(rho, every)` | SAM's each `every`-th step, reused between (arXiv:2203.02714) | 1–2 |
| `kgo.GSAM(rho, alpha)` | SAM's, and a pull on the gap between both losses (arXiv:2203.08065) | 2 |

Begin with `SAM(0.05)`. Take `ASAM` where scales of layers differ much, as rescaling a layer and the
next one back changes nothing for it; its `rho` is about ten times SAM's. Take `LookSAM` where twice
the time is too much; it needs a `GroupedOptimizer`, which keeps one array more per weight. Take
`GSAM` where `sam_gap` stays large: it lowers the gap itself, not only the perturbed loss.

`rho` is a distance in weight space, over all perturbed weights together: the more there are, the
less each of them moves. Too large a `rho` shows as a `sam_gap` near the loss, and as underfitting.
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
`sam_gap` is the perturbed loss minus the loss, averaged over the batches that took a second pass:
how sharp the place is, as far as `rho` sees. It is NaN where none did, and evaluation has none.
`gradient_norm` is the norm of the first gradient over all groups that move. To first order the gap
is `rho` times that norm; what differs is curvature.
"""

assert all(gap > 0 for gap in logs["sam_gap"])

"""
## What is perturbed, and how far

`exclude_from_perturbation` takes the selectors that groups take. What it chooses stays in place and
does not count in the norm, but is trained with the gradient of the second pass as the rest. Frozen
groups are never perturbed. ASAM's `adaptive_on` chooses where `ε` grows with the weight; elsewhere
it is SAM's. By default these are the weights that decay applies to, so not biases, nor scales and
offsets of normalization.

`rho` may be a schedule over optimizer steps. A number can be set while the model trains, without
compiling anew; here a few steps of plain training first.
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
## Beside everything else

* **Accumulation**: each micro-batch is perturbed by its own gradient. A smaller micro-batch has a
  noisier direction, which the paper found to help (it calls the size `m`).
* **Mixed precision**: both passes run on the scaled loss; an overflow in either skips the step.
  `sam_gap` and `gradient_norm` are unscaled.
* **BatchNormalization**: its statistics move by the first pass alone. In the second one batch
  statistics are those of the perturbed weights, and nothing of them is kept.
* **Dropout**: both passes have the same masks.
* **Global clipping, decay, anchors, averages** see one gradient per step, the rule's.
* **Several devices**: the perturbation is made of the gradient over all replicas.

## A rule of your own

`gradients` gets the first gradients and may ask for others at `w + ε`. Numbers that may change or
follow a schedule are `kgo.Hyperparameter`. This one goes the other way too, and takes the mean of
both sides: the gradient of a loss averaged over two opposite neighbours. `sam_gap` is that of the
last pass, here of the way down.
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
assert np.isfinite(logs["loss"][0])

"""
## Saving

The rule and its present numbers are in the `.keras` file, and with a `GroupedOptimizer` they are
optimizer state, with LookSAM's direction: a resumed run goes on as if it had not stopped. A rule
of your own must be registered, as above. Weights files fit the plain model, for which
`keras.Model(model.inputs, model.outputs)` is enough.
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "sharpness.keras"
    model.save(path)
    resumed = keras.saving.load_model(path)
print("resumed with", resumed.gradient_rule)
assert resumed.gradient_rule.rho == 0.02
assert int(resumed.optimizer.iterations) == 10

"""
## A loop of your own

On TensorFlow and torch ask the model for gradients, and give it a function that computes the loss;
it is called once per pass. On JAX a step is a function of values: `model.train_step(state, data)`.
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
## What to know before

* A step of SAM takes two passes, and holds at most one more copy of the perturbed weights and one
  more set of gradients. `benchmarks/training_step.py` measures both: on two CPU cores SAM took 1.6
  to 1.9 times a plain step, and `LookSAM(every=5)` 1.2 times, on each backend.
* Compare with plain training of the same *time*, not the same epochs.
* A few hundred steps of fine-tuning gain little; the papers train from the beginning.
* A flat valley is no promise: in the picture above, 500 test pictures hardly tell the rules apart.
* Layers must read their weights as Keras variables. A `train_step` of your own must call
  `super().train_step`.
"""
