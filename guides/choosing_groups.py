"""
Title: Choosing groups
Description: Which recipe when, how to read a plan, find a rate, watch a run; what to start from.

## What we want

To decide who trains how: which rule, which rate, for which part of a model. A recipe writes the
usual answers as plain lists, the plan shows them before anything trains, a sweep suggests rates,
and the logs say whether they were right. The last part is a page to look up: what to start from,
by task.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes. The query language and
the pictures need the extras: `pip install keras-groupopt[xpath,plots]`.
"""

import dataclasses
import importlib.util
import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_groupopt as kgo

assets = Path(__file__).parents[1] / "examples" / "assets"
keras.utils.set_random_seed(0)

pretrained = keras.saving.load_model(assets / "resnet8_cifar10.keras", compile=False)
backbone = keras.Model(pretrained.input, pretrained.get_layer("flatten").output, name="resnet8")
for layer in backbone.layers:
    if getattr(layer, "kernel_regularizer", None):
        layer.kernel_regularizer = layer.kernel.regularizer = None
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.trainable = False
pictures = keras.Input((32, 32, 3))
logits = keras.layers.Dense(10, name="head")(backbone(pictures, training=False))
model = keras.Model(pictures, logits)

"""
## Which recipe when

| you have | take | it returns |
| --- | --- | --- |
| a pretrained body and a new head | `recipes.backbone_and_head(model, 0.1)` | groups |
| a deep pretrained model, such as a transformer | `recipes.layerwise_decay(model, 0.75)` | ratios |
| rates from fastai, `slice(1e-5, 1e-3)` | `recipes.discriminative(model, slice(...))` | groups |
| matrices to train by Muon | `recipes.muon_with_adamw(model)` | groups |
| a head that shall settle first | `recipes.gradual_unfreezing(model, steps)` | ratios |
| layers with `enable_lora` | `recipes.lora(model)` | groups |
| phases that you end by hand | `optimizer.freeze_to(n)` | names of what trains now |
| anything else | `kgo.Group(name, selector, ...)` | a group |

Groups say who has which rule, decay and anchor. Ratios multiply rates, variable by variable, and
leave the groups alone. So a recipe of groups and a recipe of ratios combine.

A recipe reads the layer graph, not names. It finds the head behind the last pooling or flattening,
and a residual or attention block counts as one part. Where it would guess, it raises an error and
asks for `head=` or `blocks=`. What it returns is a list that you can print and change.
"""

groups = kgo.recipes.backbone_and_head(model, 0.3, anchor="initial", weight_decay=10.0)
for group in groups:
    print(group.name, group.selector, group.learning_rate_ratio)

ratios = kgo.recipes.layerwise_decay(model, 0.7)
for selector, ratio in ratios:
    print(f"{ratio:.4f}", selector)

slower = [dataclasses.replace(groups[0], learning_rate_ratio=0.1), groups[1]]
assert [group.learning_rate_ratio for group in slower] == [0.1, None]

"""
## Groups by hand

A selector is a path, a layer, or a combination by `|`, `&`, `~` and `-`. One that matches nothing
is an error. `unclaimed="error"` asks for a group for everything.
"""

by_hand = [
    kgo.Group("biases", kgo.path("resnet8/**/bias"), frozen=True),
    kgo.Group("body", kgo.path("resnet8") - "**/bias", learning_rate_ratio=0.1),
    kgo.Group("head", "head", rule=kgo.rule("sgd", momentum=0.9)),
]
plan = kgo.GroupedOptimizer(by_hand, model=model, rule="adam", unclaimed="error").plan
assert [planned.name for planned in plan.groups] == ["biases", "body", "head"]

"""
Where a question is about structure, ask the model as a document. `kgo.to_xml(model)` prints it: an
element per layer, named as its class, and a `variable` for each weight. `kgo.xpath` takes XPath
2.0.
"""

print("\n".join(kgo.to_xml(model).splitlines()[:6]))
wide = kgo.xpath("//Conv2D[variable[@name='kernel'][ends-with(@shape, ' 64)')]]")
plan = kgo.GroupedOptimizer([kgo.Group("wide", wide)], model=model).plan
print([variable.path for variable in plan["wide"].variables])
assert {variable.shape[-1] for variable in plan["wide"].variables} == {64}

"""
## Rules and rates apart

Hidden matrices to Muon, the rest to AdamW, and all of them slower toward the input: written as
groups that takes one per rule and depth. With `ratios=` it is two groups and one list.
"""

tokens = keras.Input((12,), dtype="int32")
x = keras.layers.Embedding(50, 16, name="embedding")(tokens)
for block in ("first", "second"):
    y = keras.layers.LayerNormalization(name=f"{block}_norm")(x)
    y = keras.layers.Dense(32, activation="gelu", name=f"{block}_up")(y)
    x = keras.layers.Add(name=f"{block}_sum")([x, keras.layers.Dense(16, name=f"{block}_down")(y)])
x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
text = keras.Model(tokens, keras.layers.Dense(2, name="head")(x))

optimizer = kgo.GroupedOptimizer(
    kgo.recipes.muon_with_adamw(text),
    ratios=kgo.recipes.layerwise_decay(text, 0.5),
    model=text,
)
optimizer.plan.summary()
assert [v.path for v in optimizer.plan["muon"].variables] == [
    f"{block}_{layer}/kernel" for block in ("first", "second") for layer in ("up", "down")
]

"""
`muon_with_adamw` gives Muon matrices of rank 2 only. A convnet has none below its head, and
`keras.layers.MultiHeadAttention` has kernels of rank 3: those are AdamW's, and the recipe raises an
error where nothing is left for Muon.

## One part after another

`gradual_unfreezing` gives ratios that are 0 up to a step. Nothing is compiled again, the moments of
a part that waits are kept up, and a resumed run knows its stage. It may carry the ratios of another
recipe. A part that waits still costs its gradient and its state.
"""

waiting = kgo.recipes.gradual_unfreezing(ratios, 10)
optimizer = kgo.GroupedOptimizer(ratios=waiting, model=model, rule="adam")
print(*optimizer.plan.bindings(), sep="\n")

"""
`freeze_to(n)` is fastai's: all groups before the `n`-th stop being `trainable`. They have no
gradient, and `fit` compiles its step again. You say when the next phase begins.
"""

optimizer = kgo.GroupedOptimizer(by_hand[1:], model=model, rule="adam", unclaimed="freeze")
assert optimizer.freeze_to(-1) == ["head"]
assert optimizer.freeze_to(0) == ["body", "head"]

"""
## LoRA

Call `enable_lora` first, on the layers that shall have it; a kernel below it is frozen by Keras.
`lora` gives the factor B 16 times the rate of A (LoRA+, arXiv:2402.12354). A head and biases stay
in the default group, unless `freeze_rest=True`.
"""

for name in ("first_up", "first_down", "second_up", "second_down"):
    text.get_layer(name).enable_lora(4)
optimizer = kgo.GroupedOptimizer(kgo.recipes.lora(text), model=text, rule="adam")
assert len(optimizer.plan["lora_a"].variables) == len(optimizer.plan["lora_b"].variables) == 4

"""
## Look at the plan before training

`summary` says who is where, at which rate, with which decay, and how much memory it takes; `at=`
adds rates over the run, `expand=` lists variables. `bindings` says what drives what. `compare` says
what a change of yours changes. `plot` draws the curves.
"""

optimizer = kgo.GroupedOptimizer(
    groups,
    model=model,
    rule="adam",
    learning_rate=keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=40),
    global_clipnorm=1.0,
)
optimizer.plan.summary(at=[0, 0.5, 1.0])
print(*optimizer.plan.bindings(), sep="\n")

other = kgo.GroupedOptimizer(
    slower,
    model=model,
    rule="adam",
    learning_rate=keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=40),
    global_clipnorm=1.0,
)
difference = optimizer.plan.compare(other.plan)
print(difference)
assert [change.subject for change in difference.groups_changed]

if importlib.util.find_spec("matplotlib"):
    with tempfile.TemporaryDirectory() as folder:
        optimizer.plan.plot(path=Path(folder) / "rates.png")

"""
## Find a rate

`LearningRateFinder` raises the rate step by step until the loss diverges (arXiv:1506.01186), once
per group with the others standing still, and once for all together with the ratios held. Then model
and optimizer are what they were, bit for bit. A suggestion is a tenth of the rate with the lowest
loss: a start. Losses of single batches are noisy, so plot the curves, and use batches and
augmentation as in training.
"""

data = np.load(assets / "fashion_mini.npz")
images = np.pad(data["x_train"], ((0, 0), (2, 2), (2, 2))).astype("float32") / 255
x_train = np.repeat(images[..., None], 3, axis=-1)
y_train = data["y_train"].astype("int32")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss)

before = model.get_weights()
finder = kgo.LearningRateFinder(minimum=1e-5, maximum=1.0, steps=20)
found = finder.find(model, x_train, y_train, batch_size=30)
found.summary()
assert list(found.curves) == ["backbone", "head", None]
assert all(map(np.array_equal, before, model.get_weights()))

"""
`found.learning_rate` is for the base, and peak of its schedule. `found.suggestions` has one per
group. Where they lie in another proportion than your ratios, try that proportion too: a sweep sees
how fast each part may move, but not how far it should.

## Watch

`GroupLogger` writes what each group does into the history, and so to CSV and TensorBoard.
"""

logger = kgo.GroupLogger(drift=True, gradient_norm=True, update_ratio=True, clip_share=True)
history = model.fit(x_train, y_train, batch_size=30, epochs=2, verbose=0, callbacks=[logger])
for name, values in history.history.items():
    print(f"{name:24}", [f"{value:.3g}" for value in values])
assert {"learning_rate_head", "update_ratio_backbone", "clip_share"} <= set(history.history)
assert history.history["drift_backbone"][-1] > 0

"""
* `update_ratio_<group>` is `‖Δw‖ / ‖w‖` of a step. About 1e-3 is a common rule of thumb. A group
  far below the others hardly learns; one far above them forgets. It is the first thing to look at.
* `drift_<group>`, where there is an anchor, is the distance from the pretrained weights. If it
  grows without the loss falling, lower that group's ratio or raise its decay.
* `clip_share` near 1 means that `global_clipnorm` shortens nearly every gradient. Under SGD the
  limit then sets the step; Adam divides such a scale out again. Near 0 it only stops outliers.
* `gradient_norm_<group>` shows which group the global norm is made of.
* Skipped steps are counted, and a warning names the group at fault.

Then change one thing at a time, in this order: base rate, ratios, decay, rule. A ratio is a
variable: `optimizer.set_learning_rate_ratio("backbone", 0.1)` works in mid-run.

## What to start from

Starting points with their sources, no promises: papers tune for their own data, batch and length.
Numbers are the papers'; where there is none, sweep. Take the row that is nearest, then watch.

| task | rule | groups and ratios |
| --- | --- | --- |
| 1 few images, pretrained convnet | `"sgd"` or `"adam"` | `backbone_and_head`, `anchor="initial"` |
| 2 images, pretrained transformer | `"adamw"` | `layerwise_decay` |
| 3 text, pretrained encoder | `"adamw"` | `layerwise_decay`, or `discriminative` |
| 4 convnet from scratch | `"sgd"`, momentum 0.9 | none |
| 5 transformer from scratch | `"adamw"`, or Muon with it | `muon_with_adamw` |
| 6 LoRA | `"adamw"` | `lora` |
| 7 large batch | `"lars"`, `"lamb"` | biases and norms apart, for LARS |
| 8 few or noisy labels | that of the task | that of the task, and `kgo.SAM` |
| 9 little memory | `"adafactor"`, `"lion"` | any; LoRA, or `frozen=True` |

1. BiT trains the whole network by SGD with momentum 0.9 and a rate of 0.003 at batches of 512
   (arXiv:1912.11370). Decay toward the pretrained weights in place of zero is L2-SP
   (arXiv:1802.01483). With a new head, training all at once can distort good features; training the
   head first helps on shifted data (arXiv:2202.10054): `gradual_unfreezing`, or `freeze_to`. If
   only the input looks different, such as blurred pictures, the first layers may be all that has to
   move; if only the labels mean something else, the last ones (arXiv:2210.11466).
2. MAE fine-tunes by AdamW with a layer decay of 0.75 and a weight decay of 0.05
   (arXiv:2111.06377). BEiT does likewise (arXiv:2106.08254).
3. BERT took the best of 5e-5, 3e-5 and 2e-5, at batches of 16 or 32, for 2 to 4 epochs
   (arXiv:1810.04805). ELECTRA added a layer decay of 0.8 for its smaller models and 0.9 for the
   large one (arXiv:2003.10555). Few texts: a small rate, warm-up, bias correction (which Adam and
   AdamW here have), and more steps make runs fail less often (arXiv:2006.04884). ULMFiT
   divides the rate by 2.6 from layer to layer, and unfreezes from the top (arXiv:1801.06146):
   `gradual_unfreezing(layerwise_decay(model, 1 / 2.6), steps)`.
4. Rate 0.1 at a batch of 256, in proportion to the batch, after a warm-up of 5 epochs for large
   ones (arXiv:1706.02677). One cycle is the short way (arXiv:1708.07120).
5. Warm-up, then a cosine (arXiv:1608.03983), or a peak that is held and decays at the end, which
   leaves the length open (arXiv:2404.06395). `"radam"`, the default here, was made to do without a
   warm-up (arXiv:1908.03265). Muon's steps are scaled so that rates and decays of AdamW fit
   (arXiv:2502.16982). Lion wants a rate 3 to 10 times smaller, and a decay as much larger
   (arXiv:2302.06675). Adan bears larger rates than Adam (arXiv:2208.06677). `"schedulefreeadamw"`
   wants a constant rate (arXiv:2405.15682).
6. LoRA (arXiv:2106.09685) wants the highest rate that is stable, on all layers, and forgets less
   than full training, but learns less too (arXiv:2405.09673). With a ratio of 16 for B the base
   rate is that of A, so begin with a lower one than for plain LoRA.
7. The rate of SGD grows with the batch, behind a warm-up (arXiv:1706.02677); that of the Adam
   family with its square root (arXiv:2205.10287). LARS (arXiv:1708.03888) and LAMB
   (arXiv:1904.00962) scale each variable's step by its own norms. A batch that does not fit is
   `gradient_accumulation_steps=`.
8. SAM does well where labels are wrong (arXiv:2010.01412), for two passes per step; see the guide
   on flat minima. An average of the weights costs next to nothing (arXiv:1803.05407): `ema=`. Keep
   what is pretrained near to where it was: smaller ratios, L2-SP, LoRA. `global_clipnorm=1.0` stops
   outliers (arXiv:1211.5063).
9. Adafactor keeps a row and a column per matrix (arXiv:1804.04235), Lion one array per weight where
   Adam keeps two. A frozen group has no state, and `plan.summary()` counts the bytes.

No row at all? `kgo.GroupedOptimizer(model=model)` is RAdam at 1e-3: sweep the rate, and add a group
when the logs show that one part wants another.
"""
