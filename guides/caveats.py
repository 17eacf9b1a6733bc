"""
Title: Caveats
Description: What to know before you rely on a setting, and what to do instead.

## What you will learn

You will know what each setting does at its limits, by subject, and what to do if you want something
else. The code tests the statements that can be tried in a second.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import keras
import numpy as np

import keras_groupopt as kgo


def new_model():
    """Returns a backbone and a head."""
    keras.utils.set_random_seed(0)
    backbone = keras.Sequential([keras.layers.Dense(4, activation="tanh")], name="backbone")
    return keras.Sequential([keras.Input((3,)), backbone, keras.layers.Dense(2, name="head")])


x, y = np.ones((16, 3), "float32"), np.ones((16, 2), "float32")

"""
## Layer paths

A layer path consists of the names of the layers from the model down, then the name of the variable:
`backbone/dense/kernel`. It contains the names of layers, not of the attributes that hold them. The
path is found by walking the model, so it is the same in each process and after `load_model`. A
pattern also selects everything below the layers that it matches. `*` stays within one level, and
`**` crosses levels.

* If you do not pass `model=`, paths come from `variable.path`, which lacks the names of nested
  models. Selectors that need the tree of layers then raise an error. `load_model` does not need
  `model=`: the file holds the plan.
* If a selector matches nothing, the error comes when you read the plan, or at the first training
  step.
* A layer whose name is its class name and a number, such as `block_1` of a class `Block`, is
  renumbered within its parent, as Keras' automatic names are.
"""

model = new_model()
plan = kgo.GroupedOptimizer([kgo.Group("biases", "**/bias")], model=model).plan
assert [v.path for v in plan["biases"].variables] == ["backbone/dense/bias", "head/bias"]

"""
## Decay

* You set decay by `weight_decay=`, for each rule. `rule="adamw"` alone does not decay anything: the
  default of 0.004 of Keras' AdamW counts only if you pass an optimizer instance.
* Decay is multiplied by the rate. At a rate of 1e-3, a decay of 1.0 pulls a weight by a thousandth
  of the way to its anchor in each step. Values that are usual for AdamW (0.01 to 0.1) therefore
  hardly pull a short fine-tuning run toward `anchor="initial"`, but values from 1 to 10 do.
* Biases, gammas, betas and everything else of rank 0 and 1 are not decayed. If you pass
  `exclude_from_decay=`, it replaces this default. To add to it, write
  `kgo.default_exclude_from_decay | "**/embeddings"`.
* Decay is dense: rows of an embedding that a batch did not look up decay too. If you do not want
  this, exclude the embedding from decay.
"""

model = new_model()
optimizer = kgo.GroupedOptimizer(
    model=model,
    weight_decay=1.0,
    exclude_from_decay=kgo.default_exclude_from_decay | "head",
)
assert [v.path for v in optimizer.plan.variables if v.decayed] == ["backbone/dense/kernel"]

"""
## Frozen, unfrozen and added layers

* The group `default` trains what no group claims. `unclaimed="error"` or `"freeze"` changes this.
* `frozen=True` stops weights. It does not stop the moving statistics of `BatchNormalization`: set
  `layer.trainable = False` for these.
* If you unfreeze layers, add layers or enable LoRA after the first step, the next step raises an
  error that names the variables. Call `optimizer.rebuild(model)`, which keeps the state of the
  rest. A group whose layers are all frozen waits: `plan.summary()` names it, and it takes effect in
  the `rebuild` after you set `layer.trainable = True`. `optimizer.add_group(...)` declares a group
  later.
* A schedule goes on where it was. If it ended with the first phase, the second trains at its last
  rate, and you get a warning. `optimizer.restart_schedules()` starts it over and keeps the rest.
* If you freeze a layer after the first step, its weights and its state stay as they are.
* After you changed `trainable`, call `optimizer.rebuild(model)`, or call `compile` again. Otherwise
  TensorFlow goes on training a layer that you froze, and you get a warning when `fit` ends. With
  `GroupLogger` among the callbacks, `fit` raises an error before it trains.
"""

model = new_model()
model.get_layer("backbone").trainable = False
groups = [kgo.Group("backbone", "backbone", learning_rate_ratio=0.1)]
optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam")
model.compile(optimizer=optimizer, loss="mse")
model.fit(x, y, verbose=0)
assert [group.name for group in optimizer.plan.waiting] == ["backbone"]
model.get_layer("backbone").trainable = True
optimizer.rebuild(model)
optimizer.restart_schedules()
model.fit(x, y, verbose=0)
assert [group.name for group in optimizer.plan.groups] == ["backbone", "default"]

"""
## Accumulation and averages

* Accumulation equals one large batch only if the model has no batch statistics:
  `BatchNormalization` sees micro-batches. In `fit` a short last micro-batch weighs as a full one,
  as an optimizer cannot see its size: choose a batch size that divides the data, or call
  `apply(..., sample_count=...)` in a loop. If a window is open at the end of an epoch, the next
  epoch fills it. `kgo.FlushAccumulation()` closes it instead.
* An optimizer does not see the statistics of `BatchNormalization`. `kgo.UseAveragedWeights`
  averages them once per epoch, and `kgo.update_batch_norm(model, data)` estimates them again.

## Gradients that are not finite

By default the optimizer skips such a step. The check takes one pass over the gradients, unless you
set `global_clipnorm`, which needs their norm anyway. On torch the host reads the result, so it
waits for the GPU in each step, unless `torch.compile` compiles the step. With
`on_nonfinite="propagate"` there is no check.

## Mixed precision

Under `mixed_float16`, `compile` wraps the optimizer in Keras' `LossScaleOptimizer`, which restores
state by position. If you wrap it yourself by `kgo.LossScaleOptimizer(optimizer)`, skipped steps are
counted, and the state is saved once.

## Sharpness-aware training

* A sharpness-aware step takes about as long as two plain steps.
* If the class of your model has its own `train_step` or `compute_loss`, use the mixin
  `kgo.SharpnessAware`. `keras.models.clone_model` does not copy the rule.

## Files

* Import `keras_groupopt` before `load_model`, or Keras cannot find the class. If the package is not
  installed, load a model with `load_model(path, compile=False)`.
* A run resumes bit for bit only if the data come in the same order (`shuffle=False`). Files of
  Keras do not hold the seeds of random layers. If the model has layers such as `Dropout`, use
  `kgo.BackupAndRestore`, which keeps the seeds.
* Files of Keras hold a layer with LoRA merged into its kernel. Such a run goes on from the same
  outputs, but not bit for bit, and a warning shows how to keep it exactly.
* `ModelCheckpoint` and `BackupAndRestore` of Keras empty a file before they write it, so a kill at
  that moment leaves neither the old file nor the new one. `kgo.BackupAndRestore` and
  `kgo.save_weights` write a new file and then replace the old one.
* If you compile a model again, `kgo.transfer_state(old, new)` carries the state over, also if the
  new optimizer has `ema=` or accumulation and the old one did not.

## Several devices

Under a TensorFlow strategy (`MirroredStrategy`, `MultiWorkerMirroredStrategy`, `OneDeviceStrategy`)
make the model and the optimizer in `strategy.scope()`. Other strategies raise an error, and
`jit_compile=True` fails. Batch statistics and dropout masks are per replica.
"""
