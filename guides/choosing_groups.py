"""
Title: Choosing groups
Description: Choose recipes, rules and rates, read a plan, find a rate, and watch a run.

## What you will learn

You will decide which part of a model trains by which rule and at which rate. Recipes write the
usual answers as plain lists, the plan shows them before anything trains, a sweep suggests rates,
and the logs show whether they were right. The last section is a table of starting points by task.

Set `KERAS_BACKEND` to `tensorflow`, `jax` or `torch`; nothing below changes. XPath queries and
plots need extra packages: `pip install keras-groupopt[xpath,plots]`.
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
head = keras.layers.Dense(10, name="head")
model = keras.Sequential([keras.Input((32, 32, 3)), backbone, head])

"""
## Choose a recipe

| you have | use | it returns |
| --- | --- | --- |
| a pretrained backbone and a new head | `recipes.backbone_and_head(model, 0.1)` | groups |
| a deep pretrained model, such as a transformer | `recipes.layerwise_decay(model, 0.75)` | ratios |
| rates from fastai, `slice(1e-5, 1e-3)` | `recipes.discriminative(model, slice(...))` | groups |
| matrices to train by Muon | `recipes.muon_with_adamw(model)` | groups |
| a head that should train alone at first | `recipes.gradual_unfreezing(model, steps)` | ratios |
| layers with `enable_lora` | `recipes.lora(model)` | groups |
| phases that you end by hand | `optimizer.freeze_to(n)` | names of the trained groups |
| anything else | `kgo.Group(name, selector, ...)` | a group |

Groups declare rules, decays and anchors. Ratios multiply the rates of variables and do not change
the groups. So you can combine a recipe that returns groups with one that returns ratios.

A recipe reads the layer graph, not names. It finds the head behind the last pooling or flattening
layer, and treats a residual or attention block as one part. If the graph is ambiguous, the recipe
raises an error that asks for `head=` or `blocks=`. A recipe returns a list that you can print and
change.
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

A selector is a path, a layer, or a combination by `|`, `&`, `~` and `-`. A selector that matches
nothing raises an error. With `unclaimed="error"`, so does a variable that no group claims.
"""

by_hand = [
    kgo.Group("biases", kgo.path("resnet8/**/bias"), frozen=True),
    kgo.Group("body", kgo.path("resnet8") - "**/bias", learning_rate_ratio=0.1),
    kgo.Group("head", "head", rule=kgo.rule("sgd", momentum=0.9)),
]
plan = kgo.GroupedOptimizer(by_hand, model=model, rule="adam", unclaimed="error").plan
assert [planned.name for planned in plan.groups] == ["biases", "body", "head"]

"""
If you want to select by structure, query the model as an XML document. `kgo.to_xml(model)` returns
it: each layer is an element with the name of its class, and each weight is a `variable` in it.
`kgo.xpath` takes a query in XPath 2.0, such as `//Dense[@name='head']`.
"""

print("\n".join(kgo.to_xml(model).splitlines()[:6]))
wide = kgo.xpath("//Conv2D[variable[@name='kernel'][ends-with(@shape, ' 64)')]]")
plan = kgo.GroupedOptimizer([kgo.Group("wide", wide)], model=model).plan
print([variable.path for variable in plan["wide"].variables])
assert {variable.shape[-1] for variable in plan["wide"].variables} == {64}

"""
## Combine rules and rates

Suppose Muon should train the hidden matrices and AdamW the rest, and layers near the input should
train slower than layers near the head. With groups alone you would need one per rule and depth.
With `ratios=` you need two groups and one list of ratios.
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
`muon_with_adamw` gives only matrices (rank 2) to Muon. The kernels of convolutions and of
`keras.layers.MultiHeadAttention` have higher ranks, so AdamW trains them. If nothing is left for
Muon, the recipe raises an error.

## Train one part after another

`gradual_unfreezing` returns ratios that are 0 until a step. Nothing is compiled again, the moments
of a waiting part are updated, and a resumed run continues at its stage. It can start from the
ratios of another recipe. A waiting part still costs its gradient and its state.
"""

waiting = kgo.recipes.gradual_unfreezing(ratios, 10)
optimizer = kgo.GroupedOptimizer(ratios=waiting, model=model, rule="adam")
print(*optimizer.plan.bindings(), sep="\n")

"""
`freeze_to(n)` works as in fastai: it sets `trainable = False` in all groups before the `n`-th. They
do not need a gradient, and `fit` compiles its step again. You decide when the next phase begins.
"""

optimizer = kgo.GroupedOptimizer(by_hand[1:], model=model, rule="adam", unclaimed="freeze")
assert optimizer.freeze_to(-1) == ["head"]
assert optimizer.freeze_to(0) == ["body", "head"]

"""
## LoRA

Call `enable_lora` first, on the layers that you want to adapt. Keras freezes their kernels. The
recipe `lora` gives the factor B 16 times the rate of A (LoRA+, arXiv:2402.12354). Heads and biases
stay in the default group, unless you pass `freeze_rest=True`.
"""

for name in ("first_up", "first_down", "second_up", "second_down"):
    text.get_layer(name).enable_lora(4)
optimizer = kgo.GroupedOptimizer(kgo.recipes.lora(text), model=text, rule="adam")
assert len(optimizer.plan["lora_a"].variables) == len(optimizer.plan["lora_b"].variables) == 4

"""
## Look at the plan before training

| method of `optimizer.plan` | shows |
| --- | --- |
| `summary()` | the rate, the decay and the memory of each group |
| `summary(expand=True)` | the variables of each group as well |
| `summary(at=[0, 0.5, 1.0])` | the rates at these points of the run as well |
| `bindings()` | which schedule drives which number |
| `compare(other)` | what differs from another plan |
| `plot()` | rates, ratios and decays over the run |
"""


def optimizer_of(groups):
    return kgo.GroupedOptimizer(
        groups,
        model=model,
        rule="adam",
        learning_rate=keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=40),
        global_clipnorm=1.0,
    )


optimizer = optimizer_of(groups)
optimizer.plan.summary(at=[0, 0.5, 1.0])
print(*optimizer.plan.bindings(), sep="\n")

difference = optimizer.plan.compare(optimizer_of(slower).plan)
print(difference)
assert [change.subject for change in difference.groups_changed]

if importlib.util.find_spec("matplotlib"):
    with tempfile.TemporaryDirectory() as folder:
        optimizer.plan.plot(path=Path(folder) / "rates.png")

"""
## Find a rate

`LearningRateFinder` raises the rate step by step until the loss diverges (arXiv:1506.01186). It
does so once per group while the others stand still, and once for all groups together with their
ratios. Then it restores model and optimizer bit for bit. It suggests a tenth of the rate with the
lowest loss. Take this as a start: losses of single batches are noisy, so plot the curves, and use
the batches and the augmentation that you will train with.
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
`found.learning_rate` is a suggestion for the base rate, or for the peak of its schedule.
`found.suggestions` has one rate per group. If their ratios differ from yours, try these ratios too.
A sweep shows how fast each part can move, but not how far it should move.

## Watch the run

`GroupLogger` writes the rate of each group into the logs, and more if you ask for it. The history,
`CSVLogger` and `TensorBoard` show the logs.
"""

logger = kgo.GroupLogger(drift=True, gradient_norm=True, update_ratio=True, clip_share=True)
history = model.fit(x_train, y_train, batch_size=30, epochs=2, verbose=0, callbacks=[logger])
for name, values in history.history.items():
    print(f"{name:24}", [f"{value:.3g}" for value in values])
assert {"learning_rate_head", "update_ratio_backbone", "clip_share"} <= set(history.history)
assert history.history["drift_backbone"][-1] > 0

"""
* Look at `update_ratio_<group>` first. It is `‖Δw‖ / ‖w‖` of a step, and about 1e-3 is a common
  rule of thumb. A group far below the others hardly learns, and a group far above them forgets.
* `drift_<group>` is the distance of an anchored group from its anchor, here the pretrained weights.
  If it grows while the loss does not fall, lower the ratio of the group or raise its decay.
* `clip_share` near 1 means that `global_clipnorm` clips nearly every gradient. With SGD the limit
  then sets the length of the steps, while Adam divides the scale out again. If it is near 0,
  clipping affects outliers only.
* `gradient_norm_<group>` shows which groups contribute to the global norm.
* A step with gradients that are not finite is skipped and counted, and a warning names the group.

Then change one thing at a time, in this order: base rate, ratios, decay, rule. You can change a
ratio while you train: `optimizer.set_learning_rate_ratio("backbone", 0.1)`.

## Rules

`rule=` takes a name, a class or an instance of any optimizer for Keras. The default is `"radam"`.
These rules come from this package, and you can also pass their classes to `compile` alone, as in
`kgo.Adan(1e-3)`:

* `"radam"`, `"adan"`, `"ademamix"`, `"lars"`, `"adabelief"` and `"nadamw"`.
* `kgo.rule("lookahead", rule="adam")`, which works around any rule.
* `"adafactor"`, `"muon"` and `"schedulefreeadamw"`, because the classes of Keras with these names
  do not work correctly within a group. In our Adafactor, ratios hold, and matrices keep no full
  second moment. Our Muon raises an error if a variable is not a matrix. Our schedule-free AdamW
  keeps its average on all backends.

## Starting points

The table gives starting points and their sources. Papers tune for their own data, batch size and
number of steps, so begin with the nearest row and watch the run. The numbers are those of the
papers. If a row has no rate, sweep.

| task | rule | groups and ratios |
| --- | --- | --- |
| 1 few images, pretrained CNN | `"sgd"` or `"adam"` | `backbone_and_head`, `anchor="initial"` |
| 2 images, pretrained transformer | `"adamw"` | `layerwise_decay` |
| 3 text, pretrained encoder | `"adamw"` | `layerwise_decay`, or `discriminative` |
| 4 CNN from scratch | `"sgd"`, momentum 0.9 | none |
| 5 transformer from scratch | `"adamw"`, or `"muon"` with it | `muon_with_adamw` for both |
| 6 LoRA | `"adamw"` | `lora` |
| 7 large batch | `"lars"`, `"lamb"` | biases and norms apart, for LARS |
| 8 few or noisy labels | as for the task | as for the task, and `kgo.SAM` |
| 9 little memory | `"adafactor"`, `"lion"` | any, also `lora` or `frozen=True` |

1. BiT trains the whole network by SGD with momentum 0.9 and a rate of 0.003 at batches of 512
   (arXiv:1912.11370). Decay toward the pretrained weights instead of zero is L2-SP
   (arXiv:1802.01483). If the head is new, training everything at once can distort good features,
   and training the head first helps on shifted data (arXiv:2202.10054): use `gradual_unfreezing` or
   `freeze_to`. If only the inputs differ, such as blurred pictures, training the first layers may
   be enough. If only the meaning of the labels differs, training the last layers may be enough
   (arXiv:2210.11466).
2. MAE fine-tunes by AdamW with a layer decay of 0.75 and a weight decay of 0.05 (arXiv:2111.06377),
   and so does BEiT (arXiv:2106.08254).
3. BERT was fine-tuned at the best of the rates 5e-5, 3e-5 and 2e-5, at batches of 16 or 32, for 2
   to 4 epochs (arXiv:1810.04805). ELECTRA added a layer decay of 0.8 for its smaller models and 0.9
   for the large one (arXiv:2003.10555). If you have few texts, runs fail less often with a small
   rate, a warm-up, bias correction (which Adam and AdamW have here) and more steps
   (arXiv:2006.04884). ULMFiT divides the rate by 2.6 from layer to layer and unfreezes from the top
   (arXiv:1801.06146): `gradual_unfreezing(layerwise_decay(model, 1 / 2.6), steps)`.
4. A common rate is 0.1 at a batch of 256. It grows in proportion to the batch, and large batches
   need a warm-up of 5 epochs (arXiv:1706.02677). One cycle trains in fewer epochs
   (arXiv:1708.07120).
5. Use a warm-up and then a cosine (arXiv:1608.03983), or a constant rate that decays at the end,
   which leaves the number of steps open (arXiv:2404.06395). `"radam"`, the default here, was
   designed to work without a warm-up (arXiv:1908.03265). The steps of Muon are scaled so that rates
   and decays of AdamW fit (arXiv:2502.16982). Lion needs a rate that is 3 to 10 times smaller, and
   a decay that is larger by the same factor (arXiv:2302.06675). Adan allows larger rates than Adam
   (arXiv:2208.06677). `"schedulefreeadamw"` needs a constant rate (arXiv:2405.15682).
6. Use LoRA (arXiv:2106.09685) on all layers, at the highest rate that is stable. It forgets less
   than full training, but it also learns less (arXiv:2405.09673). If B has a ratio of 16, the base
   rate is the rate of A, so begin with a lower one than for plain LoRA.
7. The rate of SGD grows in proportion to the batch, after a warm-up (arXiv:1706.02677), and that of
   Adam with the square root of the batch (arXiv:2205.10287). LARS (arXiv:1708.03888) and LAMB
   (arXiv:1904.00962) scale the step of each variable by its norms. If a batch does not fit into
   memory, use `gradient_accumulation_steps=`.
8. SAM does well if labels are wrong (arXiv:2010.01412), and takes two passes per step: see
   `guides/sharpness.py`. An average of the weights costs little time (arXiv:1803.05407): use
   `ema=`. Smaller ratios, L2-SP and LoRA keep pretrained weights near their start.
   `global_clipnorm=1.0` clips outliers (arXiv:1211.5063).
9. Adafactor keeps a row and a column per matrix (arXiv:1804.04235). Lion keeps one array per
   weight, and Adam keeps two. A frozen group has no state. `plan.summary()` shows the bytes.

Three examples measure such settings: `examples/finetune_backbone_and_head.py` (row 1),
`examples/finetune_text_encoder.py` (row 3) and `examples/train_transformer_muon.py` (row 5).

If no row fits, start with `kgo.GroupedOptimizer(model=model)`, which is RAdam at 1e-3. Sweep the
rate, and add a group if the logs show that one part needs another rate.
"""
