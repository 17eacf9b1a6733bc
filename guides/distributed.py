"""
Title: Several devices
Description: Train on several devices, and get the weights of one.

## What we want

Each device takes a share of every batch, and the weights come out as if one device had taken all of
it. Gradients are averaged over the devices first; only then does the optimizer see them. What looks
at all of them at once (the norm, the open window, the average, the loss scale) looks at the same
numbers on each device, and stays the same on each.

| backend | with | gradients are averaged | loop |
| --- | --- | --- | --- |
| JAX | `keras.distribution.DataParallel`, `ModelParallel` | by the compiler | `fit`, yours |
| TensorFlow | `tf.distribute.MirroredStrategy` | in `apply`, before anything else | `fit`, yours |
| torch | `torch.nn.parallel.DistributedDataParallel` | in `loss.backward()` | yours |

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`. Code of the others is shown as text. Each has
an example that trains a real network on several devices and compares it with one:

    python examples/distributed/jax_data_parallel.py
    python examples/distributed/jax_model_parallel.py
    python examples/distributed/tensorflow_mirrored.py
    python examples/distributed/torch_ddp.py
"""

import os

# Four devices, where JAX has only a CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
import numpy as np

import keras_groupopt as kgo

"""
## First the mean, then the norm

Two devices bring the gradients 8 and -2. Their mean is 3, which a limit of 1 shortens to 1. Had
each been shortened by itself, they would have cancelled out.
"""

weight = keras.Variable(np.zeros(1, "float32"), name="weight")
optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1.0, global_clipnorm=1.0)
optimizer.apply([keras.ops.full((1,), (8.0 - 2.0) / 2)], [weight])
print("the weight went from 0 to", float(keras.ops.convert_to_numpy(weight)[0]))
assert float(keras.ops.convert_to_numpy(weight)[0]) == -1.0

"""
## What is the same, and what is not

Weights and state agree with one device up to rounding: sums are taken in another order, and what
that changes grows with the steps. Two layers look at the batch itself:

| | JAX | TensorFlow | torch |
| --- | --- | --- | --- |
| `BatchNormalization` sees | the batch | a share | a share |
| its moving statistics are | as on one device | of each replica | of each process |
| `Dropout` draws | as on one device | for each share | in each process |

On TensorFlow `BatchNormalization(synchronized=True)` sees the whole batch. Otherwise a file gets
the statistics of the first replica, or of the process that saves. Freeze them, as the examples do,
or measure them again with `kgo.update_batch_norm`. On torch
`keras.utils.set_random_seed(seed + rank)` before the model is made gives each process masks of its
own.

A batch is the whole of it, over all devices, and so is a micro-batch. Shares must be of equal size:
a mean of means is the mean only then.

The model we train below has two groups, one norm, decay toward its first weights, windows of two
micro-batches, and an average.
"""

x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
y = x[:, :8] ** 2


def compiled_model():
    """A small network, equal each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(64, activation="relu", name="features"),
            keras.layers.Dense(8, name="head"),
        ]
    )
    optimizer = kgo.GroupedOptimizer(
        groups=[
            kgo.Group(
                "features", "features", learning_rate_ratio=0.3, weight_decay=0.1, anchor="initial"
            ),
            kgo.Group("head", "head"),
        ],
        model=model,
        rule="adam",
        global_clipnorm=1.0,
        gradient_accumulation_steps=2,
        ema=kgo.EMA(0.9),
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


def trained_model():
    model = compiled_model()
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return model


def difference(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)


alone = trained_model()

"""
## JAX

Set the distribution before the model and the optimizer are made; the rest stays as it is. Slots,
anchors, averages and accumulators lie where their weight lies, also after `load_weights`,
`load_model` and `rebuild`.
"""

if keras.backend.backend() == "jax":
    with keras.distribution.DataParallel().scope():
        several = trained_model()
    print("largest difference of a weight:", difference(several, alone))
    assert difference(several, alone) < 1e-6

"""
State may be divided further than the weights. A moment is read and written in one place only, so it
need not be on every device (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054). The layout map of
`ModelParallel` has entries for weights, by Keras' `variable.path`. Entries for state go by its key,
`group/layer path/slot`: the slots of a rule by their names, and `@anchor`, `@average` and
`@accumulator`. A pattern has to match the whole key. What no entry matches lies beside its weight,
and scalars are on every device. An entry may name fewer axes than there are dimensions:
`("batch",)` divides the first one of kernels and biases alike.
"""

if keras.backend.backend() == "jax":
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*features/kernel"] = (None, "model")
    layouts["features/.*/kernel/(momentums|velocities|@.*)"] = ("batch", "model")
    layouts["head/.*/(momentums|velocities|@.*)"] = ("batch",)
    distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    with distribution.scope():
        several = trained_model()
    for variable in several.optimizer.variables:
        part = variable.value.addressable_shards[0].data
        if part.size < variable.value.size:
            print(f"{variable.path}: {variable.shape} in parts of {part.shape}")
    assert difference(several, alone) < 1e-6

"""
A layout that does not fit its state (an axis that is not in the mesh, a dimension that is no
multiple of it) is refused when the optimizer is built, by an error that names the key. To divide
state and no weights, give the map entries for state only, on a mesh with the one axis `batch`.
While the optimizer is built, its state lies beside the weights for a moment. Files do not depend
on layouts: a model that was saved on four devices goes on with one.

In a loop of your own, `optimizer.stateless_apply` keeps the layouts in a compiled step.

## TensorFlow

Make the model and the optimizer under `strategy.scope()`:

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(optimizer=kgo.GroupedOptimizer(..., model=model), loss=...)
    model.fit(dataset)

Gradients are reduced before they are clipped, and everything works as on one device.

## torch

`fit` knows nothing of other processes, so the loop is yours. `DistributedDataParallel` gives all
processes the weights of rank 0, and `loss.backward()` leaves the same mean gradients in each:

    torch.distributed.init_process_group("nccl")             # "gloo" without accelerators
    call = torch.nn.parallel.DistributedDataParallel(model)  # before the first step
    variables = model.trainable_variables
    for images, labels in share_of_this_process:
        loss(labels, call(images)).backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        call.zero_grad()

The first step builds the optimizer, and takes anchors and averages from the weights as they are
then. If you build it before you wrap the model, call `optimizer.capture_anchors()` afterwards.

There are two ways to accumulate, and one mistake:

* `gradient_accumulation_steps=4`: call `backward`, `apply` and `zero_grad` for each micro-batch,
  without `no_sync`. `apply` adds gradients up, so each of them has to be reduced.
* `no_sync` around all but the last of four micro-batches, the loss divided by 4, then one `apply`,
  of an optimizer without accumulation. torch adds up, and reduces once.
* `no_sync` with `gradient_accumulation_steps=4` is wrong: `apply` would take in gradients of one
  process alone, and the processes would drift apart.

A model with a gradient rule (SAM) takes both passes in `compute_gradients`, and neither if the loop
calls `backward` itself. Call the wrapped model in it, or nothing is reduced:

```python
_, gradients = model.compute_gradients(lambda: loss(labels, call(images)))
model.optimizer.apply(gradients, model.trainable_variables)
```

With `kgo.LossScaleOptimizer(optimizer)`, call `optimizer.scale_loss(loss).backward()`. An overflow
in one process is in the mean, so all of them skip the step. Save in one process and load in all:

    if torch.distributed.get_rank() == 0:
        model.save("run.keras")
    torch.distributed.barrier()
    model = keras.saving.load_model("run.keras")
"""
