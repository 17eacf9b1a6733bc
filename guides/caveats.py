"""
Title: Caveats
Description: What to know before you rely on a setting, by subject, with the way out.

## What we want

No surprises. Each section says what happens, and what to do if you want something else. The
assertions hold each statement that can be tried in a second.

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

A layer path holds the names of the layers from the model down, then the name of the variable:
`backbone/dense/kernel`. It holds names of layers, not the attributes they are stored in. The path
is found by walking the model, so it is the same in every process and after `load_model`. A path
claims everything below it. `*` stays within one level, and `**` crosses levels.

* If you do not pass `model=`, paths come from `variable.path`, which lacks the names of nested
  models. Selectors that need the tree of layers then raise an error. `load_model` does not need
  `model=`: the file holds the plan.
* A layer whose name is its class name and a number, such as `block_1` of a class `Block`, is
  renumbered within its parent, as Keras' automatic names are.
"""

model = new_model()
plan = kgo.GroupedOptimizer([kgo.Group("biases", "**/bias")], model=model).plan
assert [v.path for v in plan["biases"].variables] == ["backbone/dense/bias", "head/bias"]

"""
## Decay

* Decay is `weight_decay=`, for every rule. `rule="adamw"` alone does not decay anything: the
  default of 0.004 of Keras' AdamW counts only if you pass an optimizer instance.
* Decay is multiplied by the rate. At a rate of 1e-3, a decay of 1.0 pulls a weight by a thousandth
  of the way to its anchor in each step. Values that are usual for AdamW (0.01 to 0.1) therefore
  hardly pull a short fine-tuning run toward `anchor="initial"`; values from 1 to 10 do.
* Biases, gammas, betas and everything else of rank 0 and 1 are not decayed. Your own
  `exclude_from_decay=` replaces this default. To add to it, write
  `kgo.default_exclude_from_decay | "**/embeddings"`.
* Decay is dense: rows of an embedding that a batch did not look up decay too. Exclude the embedding
  if you do not want that.
"""

model = new_model()
optimizer = kgo.GroupedOptimizer(
    model=model,
    weight_decay=0.01,
    exclude_from_decay=kgo.default_exclude_from_decay | "head",
)
assert [v.path for v in optimizer.plan.variables if v.decayed] == ["backbone/dense/kernel"]

"""
## Frozen, unfrozen and added layers

* The group `default` trains what no group claims. `unclaimed="error"` or `"freeze"` changes that.
* `frozen=True` stops weights. It does not stop BatchNorm's moving statistics: set
  `layer.trainable = False` for those.
* Layers that were unfrozen, added or given LoRA after the first step raise an error that names
  them. Call `optimizer.rebuild(model)`, which keeps the state of the rest. To unfreeze a part at a
  rate of its own, set `layer.trainable = True` and call
  `optimizer.add_group(kgo.Group("backbone", "backbone", learning_rate_ratio=0.1))`.
* A layer that is frozen later is left alone.
* After you changed `trainable`, call `compile` again, or `optimizer.rebuild(model)`, which does
  without. `GroupLogger` refuses to start a `fit` otherwise. Without it, TensorFlow goes on training
  a layer that you froze, and a warning comes when `fit` ends.
"""

model = new_model()
model.get_layer("backbone").trainable = False
optimizer = kgo.GroupedOptimizer(model=model, rule="adam")
model.compile(optimizer=optimizer, loss="mse")
model.fit(x, y, verbose=0)
model.get_layer("backbone").trainable = True
optimizer.add_group(kgo.Group("backbone", "backbone", learning_rate_ratio=0.1))
model.fit(x, y, verbose=0)
assert [group.name for group in optimizer.plan.groups] == ["backbone", "default"]

"""
## Accumulation and averages

* Accumulation equals one large batch only if the model has no batch statistics:
  `BatchNormalization` sees micro-batches. If a window is open at the end of an epoch, the next
  epoch fills it; `kgo.FlushAccumulation()` closes it instead.
* An optimizer does not see BatchNorm statistics. `kgo.UseAveragedWeights` averages them once per
  epoch, and `kgo.update_batch_norm(model, data)` estimates them again.

## Gradients that are not finite

The check takes one pass over the gradients, unless there is a `global_clipnorm`, which needs their
norm anyway. On torch the host reads the answer: on a GPU it waits for it, unless `torch.compile`
compiles the step. `on_nonfinite="propagate"` does without the check.

## Mixed precision

`mixed_float16` gets Keras' `LossScaleOptimizer` by itself, which restores state by position. If you
wrap the optimizer yourself, `kgo.LossScaleOptimizer(optimizer)` counts the steps that it skips and
saves its state once.

## Sharpness-aware training

* A sharpness-aware step costs two steps.
* A model whose class has its own `train_step` or `compute_loss` takes the mixin
  `kgo.SharpnessAware`. `keras.models.clone_model` does not copy the rule.

## Files

* Import `keras_groupopt` before `load_model`, or Keras cannot find the class. If the package is not
  installed, load an export with `load_model(path, compile=False)`.
* Files are resumed bit for bit if the data come in the same order (`shuffle=False`). Keras' files
  leave out the seeds of random layers: with `Dropout`, use `kgo.BackupAndRestore`, which goes on
  exactly.
* Keras' files hold a layer with LoRA merged into its kernel. Such a run goes on from equal outputs,
  not bit for bit, and a warning says how to keep it exactly.
* Keras' `ModelCheckpoint` and `BackupAndRestore` empty a file before they write it, so a kill at
  that moment leaves neither the old file nor the new one. `kgo.BackupAndRestore` and
  `kgo.save_weights` write a new file and then replace the old one.
* `kgo.transfer_state(old, new)` serves a model that is compiled again, also if the new optimizer
  has `ema=` or accumulation that the old one had not.

## Several devices

Under a TensorFlow strategy (`MirroredStrategy`, `MultiWorkerMirroredStrategy`, `OneDeviceStrategy`)
make the model and the optimizer in `strategy.scope()`. Other strategies are refused, and
`jit_compile=True` fails. Batch statistics and dropout masks are per replica there.
"""
