"""
Title: Coming from elsewhere
Description: Translate settings from torch, timm, fastai, transformers, Addons, optax and Keras.

## What you will learn

You will translate code that trains parts of a model differently from another library. The tables
give the counterpart of each name and say if its meaning differs. The examples show the most common
cases.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes.
"""

import keras
import numpy as np

import keras_groupopt as kgo

keras.utils.set_random_seed(0)


def new_model():
    """Returns a stem, a body and a head."""
    names = ("stem", "body", "head")
    layers = [keras.layers.Dense(6, activation="relu", name=name) for name in names]
    return keras.Sequential([keras.Input((4,)), *layers])


def ratios_of(optimizer):
    """Returns the learning-rate ratio of each group."""
    return {planned.name: planned.group.learning_rate_ratio for planned in optimizer.plan.groups}


"""
## torch

| torch | here |
| --- | --- |
| `param_groups` | `kgo.from_param_groups(param_groups, model, "adamw", lr=1e-3)`, or a list of `kgo.Group` |
| read or set `group["lr"]` | `optimizer.learning_rates` reads all rates, `optimizer.learning_rate = 1e-3` sets the base and keeps the ratios, `optimizer.set_learning_rate_ratio("head", 2.0)` sets a ratio |
| `add_param_group` | `optimizer.add_group(kgo.Group(...))`, or `optimizer.rebuild(model)`: both keep the state of the rest |
| `p.requires_grad = False` | `layer.trainable = False`, `kgo.Group(frozen=True)`, or `optimizer.freeze_to(-1)` |
| `weight_decay` of Adam, SGD | `weight_decay=` is decoupled here and never enters a moment; for the meaning in torch, use a regularizer of the layer |
| `fused=True`, `foreach=True` | the default for SGD, Adam, AdamW, RAdam, Adan, AdEMAMix, Lion, RMSprop and Adagrad; `fused=False` uses the update of the rule itself |
| `clip_grad_norm_` | `global_clipnorm=1.0`: one norm over all groups, before each step |
| `StepLR`, `OneCycleLR`, `CyclicLR`, `SequentialLR`, … | `kgo.schedules`; `kgo.warmup(schedule, 500)`; `total_steps="fit"` ends a schedule with the run |
| `ReduceLROnPlateau` | `ReduceLROnPlateau` of Keras, or `kgo.PlateauRatio` beside a schedule |
| `AveragedModel`, `swa_utils`, `update_bn` | `ema=kgo.EMA(0.999)` or `ema=kgo.SWA(every=100)`, and the callback `kgo.UseAveragedWeights()`; `kgo.update_batch_norm` |
| `GradScaler`, skipped steps | `kgo.LossScaleOptimizer(optimizer)` for `mixed_float16`; `on_nonfinite="skip"`, the default |
| accumulating over `backward()` | `gradient_accumulation_steps=4`: schedules count optimizer steps |
| `state_dict`, `load_state_dict` | `optimizer.state_dict()`, `optimizer.load_state_dict(...)`; for the state of a torch optimizer `kgo.load_torch_state` |
| `load_state_dict(strict=False)` | `with kgo.resuming(strict=False) as report:` around any load of Keras |
| `SAM` of davda54 | `kgo.sharpness_aware(model, kgo.SAM(0.05))`, and `fit` as before |

`params` can be Keras variables, layers, layer paths or selectors.
"""

model = new_model()
optimizer = kgo.from_param_groups(
    [
        {"params": [model.get_layer("stem"), model.get_layer("body")], "lr": 1e-4},
        {"params": "head", "weight_decay": 0.0, "name": "head"},
    ],
    model,
    "adamw",
    lr=1e-3,
    weight_decay=0.05,
)
assert ratios_of(optimizer) == {"group_0": 0.1, "head": 1.0}

"""
You can write the same as a list of groups. Here biases and norms are not decayed. torch decays
everything: pass `exclude_from_decay=()` for this.
"""

optimizer = kgo.GroupedOptimizer(
    [kgo.Group("backbone", ["stem", "body"], learning_rate_ratio=0.1)],
    model=model,
    rule="adamw",
    learning_rate=1e-3,
    weight_decay=0.05,
)
assert ratios_of(optimizer) == {"backbone": 0.1, "default": 1.0}

"""
## timm

| timm | here |
| --- | --- |
| `layer_decay=0.75` | `ratios=kgo.recipes.layerwise_decay(model, 0.75)`, beside any groups; the depth comes from the layer graph |
| `lr_scale` | `learning_rate_ratio=` of a group, or an entry of `ratios=`; ratios hold under each schedule |
| `no_weight_decay()`, `filter_bias_and_bn` | `exclude_from_decay=kgo.default_exclude_from_decay | "**/pos_embed"` |
| `ModelEmaV3` | `ema=kgo.EMA(0.9999, warmup=True)` |
| `--sched cosine --warmup-epochs` | `kgo.warmup(keras.optimizers.schedules.CosineDecay(...), 500)` |
| `--opt lookahead_adam` | `kgo.rule("lookahead", rule="adam")` |
"""

ratios = kgo.recipes.layerwise_decay(model, 0.75)
print(ratios)
optimizer = kgo.GroupedOptimizer(ratios=ratios, model=model, rule="adamw", weight_decay=0.05)
optimizer.plan.summary(expand=True)

"""
## fastai

| fastai | here |
| --- | --- |
| `slice(1e-5, 1e-3)`, `slice(1e-3)` | `kgo.recipes.discriminative` |
| `freeze()`, `freeze_to(n)`, `unfreeze()` | `optimizer.freeze_to(-1)`, `optimizer.freeze_to(n)`, `optimizer.freeze_to(0)` |
| `lr_find()` | `kgo.LearningRateFinder().find(model, x, y)` |
| `fit_one_cycle` | `kgo.schedules.OneCycle(1e-3, total_steps="fit")` |
| `wd_bn_bias=False` | the default |
| gradual unfreezing by hand | `kgo.recipes.gradual_unfreezing`, in a single `fit` |
"""

groups = kgo.recipes.discriminative(["stem", "body", "head"], slice(1e-5, 1e-3))
optimizer = kgo.GroupedOptimizer(groups, model=model, rule="adam", learning_rate=1e-3)
np.testing.assert_allclose(list(ratios_of(optimizer).values()), [0.01, 0.1, 1.0])
assert len(optimizer.freeze_to(-1)) == 1
assert len(optimizer.freeze_to(0)) == 3

"""
## transformers

| transformers | here |
| --- | --- |
| the list `no_decay = ["bias", "LayerNorm.weight"]` | the default; extend it by `kgo.default_exclude_from_decay | kgo.variable_name(...)` |
| `get_linear_schedule_with_warmup` | `kgo.schedules.Polynomial(1e-3, "fit", warmup_steps=100)` |
| `get_cosine_schedule_with_warmup`, `get_wsd_schedule` | `kgo.warmup(...)`, `kgo.schedules.WarmupStableDecay` |
| `max_grad_norm=1.0` | `global_clipnorm=1.0` |
| `gradient_accumulation_steps` | the same name |
| `--optim adafactor` | `rule="adafactor"`; the rate multiplies its relative step too |
| `Trainer(resume_from_checkpoint=)` | `kgo.BackupAndRestore`, or `.keras` files |
"""

model = new_model()
optimizer = kgo.GroupedOptimizer(
    model=model,
    rule="adamw",
    learning_rate=kgo.schedules.Polynomial(1e-3, "fit", warmup_steps=2),
    weight_decay=0.01,
    exclude_from_decay=kgo.default_exclude_from_decay | "stem",
    global_clipnorm=1.0,
)
decayed = [variable.path for variable in optimizer.plan.variables if variable.decayed]
assert decayed == ["body/kernel", "head/kernel"]
optimizer.plan.summary(at=[0, 0.25, 0.5, 1.0], steps=16)
model.compile(optimizer=optimizer, loss="mse")
model.fit(np.ones((64, 4)), np.ones((64, 6)), batch_size=16, epochs=4, verbose=0)

"""
## TensorFlow Addons

| TensorFlow Addons | here |
| --- | --- |
| `MultiOptimizer(optimizers_and_layers)` | one group per pair |
| `extend_with_decoupled_weight_decay`, `AdamW` | `weight_decay=`, for each rule; here the rate multiplies the decay, in Addons it did not |
| `RectifiedAdam`, `LAMB` | `rule="radam"`, `rule="lamb"` |
| `LazyAdam` | `rule="adam"`, which also moves rows without a gradient |
| `Lookahead(optimizer, 6, 0.5)` | `kgo.rule("lookahead", rule="adam", sync_period=6, slow_step_size=0.5)` |
| `SWA`, `MovingAverage`, `AverageModelCheckpoint` | `ema=kgo.SWA(...)`, `ema=kgo.EMA(...)`, `kgo.UseAveragedWeights()` |
| `CyclicalLearningRate` | `kgo.schedules.Cyclic` |
"""

model = new_model()
optimizers_and_layers = [
    (keras.optimizers.Adam(1e-4), model.layers[:2]),
    (keras.optimizers.SGD(1e-2, momentum=0.9), model.layers[2:]),
]
optimizer = kgo.GroupedOptimizer(
    [
        kgo.Group(f"part_{number}", layers, rule=instance)
        for number, (instance, layers) in enumerate(optimizers_and_layers)
    ],
    model=model,
)
assert [planned.group.rule.label for planned in optimizer.plan.groups] == ["adam", "sgd"]

"""
An optimizer instance has its own rate, which becomes a ratio of the base. If you pass a rule and a
ratio instead, one schedule can drive both groups.

## optax

| optax | here |
| --- | --- |
| `multi_transform`, `partition` | one group per label, such as `kgo.Group("head", "head", rule=keras.optimizers.Lion(1e-4))` |
| `masked(add_decayed_weights(...))` | `exclude_from_decay=` |
| `set_to_zero()` for a label, `freeze` | `kgo.Group(frozen=True)`: no state, no part in the norm |
| `chain(clip_by_global_norm(1.0), ...)` | `global_clipnorm=1.0` over all labels, `kgo.Group(global_clipnorm=)` within a label |
| `inject_hyperparams` | a schedule in place of any number: `kgo.rule("adam", beta_1=schedule)` |
| `join_schedules`, `warmup_cosine_decay_schedule` | `kgo.schedules.Sequential`, `kgo.warmup` |
| `MultiSteps` | `gradient_accumulation_steps=` |
| `apply_if_finite` | `on_nonfinite="skip"`, the default |
| `lookahead`, `contrib.sam`, `contrib.muon` | `kgo.rule("lookahead", rule=...)`, `kgo.sharpness_aware(model, kgo.SAM(0.05))`, `kgo.recipes.muon_with_adamw(model)` |
| `ema`, `incremental_update` | `ema=kgo.EMA(0.999)` |
"""

model = new_model()
optimizer = kgo.GroupedOptimizer(
    {
        "matrices": kgo.Group("matrices", kgo.rank(2), rule="lion", learning_rate_ratio=0.1),
        "vectors": kgo.Group("vectors", kgo.rank(1), rule=kgo.rule("adam", beta_2=0.95)),
    },
    model=model,
    learning_rate=1e-3,
    unclaimed="error",
    global_clipnorm=1.0,
)
print(optimizer.plan.to_dict()["options"])

"""
## Keras

| Keras | here |
| --- | --- |
| `MultiOptimizer` | `kgo.from_multi_optimizer(optimizer, model)`, which keeps its state |
| one optimizer that you want to split into groups | `kgo.from_optimizer(optimizer, model, groups)`, which keeps its state |
| `exclude_from_weight_decay(var_names=)` | `exclude_from_decay=`, the same on all backends |
| `use_ema=True`, `SwapEMAWeights` | `use_ema=True`, or `ema=` and `kgo.UseAveragedWeights()` |
| `LossScaleOptimizer` | `kgo.LossScaleOptimizer` |
| `ReduceLROnPlateau`, `LearningRateScheduler` | the same callbacks, with a number as base rate: all groups follow, and ratios hold; put `GroupLogger` before them |

A run that began with Keras' Adam can go on in groups. The moments and the step are kept.
"""

model = new_model()
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
model.fit(np.ones((32, 4)), np.ones((32, 6)), verbose=0)
optimizer = kgo.from_optimizer(
    model.optimizer, model, [kgo.Group("head", "head", learning_rate_ratio=3.0)]
)
model.compile(optimizer=optimizer, loss="mse")
model.fit(np.ones((32, 4)), np.ones((32, 6)), verbose=0)
assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2
