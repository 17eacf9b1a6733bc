"""
Title: Several devices
Description: Train on several devices, and get the same weights as on one.

## What you will learn

You will train on several devices with each backend, divide the optimizer state over devices on JAX,
and accumulate gradients and save files in several processes on torch.

Each device computes the gradients of its share of a batch, and the weights are the same as if one
device had computed all of them. The gradients are averaged over the devices before the optimizer
sees them. So the global norm, the open window of micro-batches, the averages and the loss scale are
the same on each device.

| backend | API | gradients are averaged | loop |
| --- | --- | --- | --- |
| JAX | `keras.distribution.DataParallel`, `ModelParallel` | by the compiler | `fit` or your own |
| TensorFlow | `tf.distribute.MirroredStrategy` | first of all in `apply` | `fit` or your own |
| torch | `torch.nn.parallel.DistributedDataParallel` | in `loss.backward()` | your own |

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`. The guide runs the code for JAX and shows the
code for the other two as text. For each backend there is an example that trains a real network on
several devices and compares the result with training on one:

    python examples/distributed/jax_data_parallel.py
    python examples/distributed/jax_model_parallel.py
    python examples/distributed/tensorflow_mirrored.py
    python examples/distributed/torch_ddp.py
"""

import os

# Make four virtual devices if JAX has only a CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
import numpy as np

import keras_groupopt as kgo

"""
## First the mean, then the norm

Two devices have the gradients 8 and -2. Their mean is 3, which a limit of 1 clips to 1. If each
device clipped its own gradient, the mean would be 0.
"""

weight = keras.Variable(np.zeros(1, "float32"), name="weight")
optimizer = kgo.GroupedOptimizer(rule="sgd", learning_rate=1.0, global_clipnorm=1.0)
optimizer.apply([keras.ops.full((1,), (8.0 - 2.0) / 2)], [weight])
print("the weight went from 0 to", float(keras.ops.convert_to_numpy(weight)[0]))
assert float(keras.ops.convert_to_numpy(weight)[0]) == -1.0

"""
## What is the same, and what is not

Weights and state agree with one device up to rounding. Sums are computed in another order, and the
differences grow with the number of steps. Two layers depend on how the batch is divided:

| | JAX | TensorFlow | torch |
| --- | --- | --- | --- |
| `BatchNormalization` sees | the whole batch | a share | a share |
| its moving statistics are | as on one device | per replica | per process |
| `Dropout` draws masks | as on one device | per share | per process |

On TensorFlow `BatchNormalization(synchronized=True)` sees the whole batch. Otherwise a file holds
the statistics of the first replica, or of the process that saves. Freeze batch normalization, as
the examples do, or measure the statistics again by `kgo.update_batch_norm`. On torch, call
`keras.utils.set_random_seed(seed + rank)` before you make the model, so that each process draws
other masks.

In settings such as `gradient_accumulation_steps`, a batch or micro-batch means the whole of it,
over all devices. The shares must have equal sizes, because only then is the mean of their means the
mean of the batch.

The model that we train below has two groups, one global norm, decay toward its first weights,
windows of two micro-batches, and an average.
"""

x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
y = x[:, :8] ** 2


def trained_model():
    """Returns a small network, trained from the same weights each time."""
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
                "features", "features", learning_rate_ratio=0.3, weight_decay=10.0, anchor="initial"
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
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return model


def difference(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)


alone = trained_model()

"""
## JAX

Set the distribution before you make the model and the optimizer. Nothing else changes. Slots,
anchors, averages and accumulators are on the same devices as their weight, also after
`load_weights`, `load_model` and `rebuild`.
"""

if keras.backend.backend() == "jax":
    with keras.distribution.DataParallel().scope():
        several = trained_model()
    print("largest difference of a weight:", difference(several, alone))
    assert all(len(variable.value.devices()) == 4 for variable in several.optimizer.variables)
    assert difference(several, alone) < 1e-6

"""
You can divide the optimizer state over more devices than the weights. The forward pass does not
need it, so no device has to hold all of it (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054).

The layout map of `ModelParallel` has entries for weights, which match the `variable.path` of Keras.
Entries for state match the key `group/layer path/slot`. The slot is the name of a rule's slot,
`@anchor`, `@average` or `@accumulator`. A pattern must match the whole key. If no entry matches a
state, it is divided like its weight. Scalars are on each device. An entry can name fewer axes than
the state has dimensions, so `("batch",)` divides the first dimension of kernels and biases alike.
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
    parts = set()
    for variable in several.optimizer.variables:
        part = variable.value.addressable_shards[0].data
        parts.add(variable.value.size // part.size)
        if part.size < variable.value.size:
            print(f"{variable.path}: {variable.shape} in parts of {part.shape}")
    assert parts == {1, 2, 4}
    assert difference(several, alone) < 1e-6

"""
If a layout does not fit its state, building the optimizer raises an error that names the key. This
happens if an axis is not in the mesh, or if a dimension is not a multiple of the axis. To divide
only the state, give the map entries for state alone, on a mesh with the single axis `batch`. While
the optimizer is built, its state is divided like the weights for a moment, so it needs that much
memory. Files do not depend on layouts: a model that was saved on four devices can go on with one.

In your own loop, `optimizer.stateless_apply` keeps the layouts in a compiled step.

## TensorFlow

Make the model and the optimizer in `strategy.scope()`:

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(optimizer=kgo.GroupedOptimizer(..., model=model), loss=...)
    model.fit(dataset)

Gradients are averaged before they are clipped, and everything works as on one device.

## torch

`fit` does not know about other processes, so you write the loop. `DistributedDataParallel` gives
all processes the weights of rank 0, and after `loss.backward()` each process has the same mean
gradients:

    torch.distributed.init_process_group("nccl")             # "gloo" without accelerators
    call = torch.nn.parallel.DistributedDataParallel(model)  # before the first step
    variables = model.trainable_variables
    for images, labels in share_of_this_process:
        loss(labels, call(images)).backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        call.zero_grad()

The first step builds the optimizer, which copies anchors and averages from the weights at that
time. If you build it before you wrap the model, call `optimizer.capture_anchors()` afterwards.

There are two ways to accumulate gradients, and one mistake:

* With `gradient_accumulation_steps=4`, call `backward`, `apply` and `zero_grad` for each
  micro-batch, without `no_sync`. The optimizer adds up gradients that torch has averaged over the
  processes.
* With an optimizer without accumulation, use `no_sync` around all but the last of four
  micro-batches, divide the loss by 4, and call `apply` once. torch adds up the gradients and
  averages them once.
* Do not use `no_sync` with `gradient_accumulation_steps=4`: each process would add up only its own
  gradients, and the weights of the processes would drift apart.

If the model has a gradient rule such as SAM, call `compute_gradients`, which takes both passes. If
the loop calls `backward` itself, the rule is not used. The function that you pass must call the
wrapped model, or the gradients are not averaged:

```python
_, gradients = model.compute_gradients(lambda: loss(labels, call(images)))
model.optimizer.apply(gradients, model.trainable_variables)
```

With `kgo.LossScaleOptimizer(optimizer)`, call `optimizer.scale_loss(loss).backward()`. An overflow
in one process also makes the mean infinite, so all processes skip the step. Save in one process and
load in all:

    if torch.distributed.get_rank() == 0:
        model.save("run.keras")
    torch.distributed.barrier()
    model = keras.saving.load_model("run.keras")
"""
