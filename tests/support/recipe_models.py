"""Small models of the known families, for recipes: built by hand, named as they are."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from chosen_gradients import weights
from keras import layers, ops


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Tokens(layers.Layer):
    """Puts a class token in front and adds position embeddings, which are one array."""

    def build(self, shape: Any) -> None:
        self.token = self.add_weight((1, 1, shape[-1]), name="class_token")
        self.positions = self.add_weight((1, shape[1] + 1, shape[-1]), name="positions")

    def call(self, x: Any) -> Any:
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([token, x], axis=1) + self.positions

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], shape[1] + 1, shape[2])


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Attention(layers.Layer):
    """An attention with kernels of rank 2."""

    def build(self, shape: Any) -> None:
        self.queries, self.values, self.out = (
            layers.Dense(shape[-1], name=name) for name in ("queries", "values", "out")
        )
        for dense in (self.queries, self.values, self.out):
            dense.build(shape)

    def call(self, x: Any) -> Any:
        scores = ops.softmax(ops.matmul(self.queries(x), ops.swapaxes(x, 1, 2)))
        return self.out(ops.matmul(scores, self.values(x)))


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Block(layers.Layer):
    """A transformer block as one layer."""

    def build(self, shape: Any) -> None:
        self.norm = layers.LayerNormalization(name="norm")
        self.attention = Attention(name="attention")
        self.mlp = layers.Dense(shape[-1], activation="gelu", name="mlp")
        for part in (self.norm, self.attention, self.mlp):
            part.build(shape)

    def call(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Scale(layers.Layer):
    """A factor per feature."""

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight((shape[-1],), name="gamma", initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.gamma


def vit(depth: int = 2, *, flat: bool = True, dense: bool = False, width: int = 4) -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(width, 4, 4, name="patches")(inputs)
    x = Tokens(name="tokens")(layers.Reshape((4, width))(x))
    for k in range(depth):
        if not flat:
            x = Block(name=f"block_{k}")(x)
            continue
        y = layers.LayerNormalization(name=f"block_{k}_norm1")(x)
        if dense:
            q, k_, v = (layers.Dense(width, name=f"block_{k}_{name}")(y) for name in "qkv")
            y = ops.dot_product_attention(*(layers.Reshape((5, 2, 2))(z) for z in (q, k_, v)))
            x = x + layers.Dense(width, name=f"block_{k}_out")(layers.Reshape((5, width))(y))
        else:
            x = x + layers.MultiHeadAttention(2, 2, name=f"block_{k}_attention")(y, y)
        y = layers.LayerNormalization(name=f"block_{k}_norm2")(x)
        y = layers.Dense(2 * width, activation="gelu", name=f"block_{k}_mlp1")(y)
        x = x + layers.Dense(width, name=f"block_{k}_mlp2")(y)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(x[:, 0]), name="vit")


def convnext(depths: tuple[int, ...] = (1, 1, 2, 1)) -> keras.Model:
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(4, 2, 2, name="stem_conv")(inputs)
    x = layers.LayerNormalization(name="stem_norm")(x)
    for stage, depth in enumerate(depths):
        if stage:
            x = layers.LayerNormalization(name=f"stage_{stage}_down_norm")(x)
            x = layers.Conv2D(4, 2, 1 + (stage < 3), "same", name=f"stage_{stage}_down_conv")(x)
        for k in range(depth):
            name = f"stage_{stage}_block_{k}"
            y = layers.DepthwiseConv2D(3, padding="same", name=f"{name}_depthwise")(x)
            y = layers.LayerNormalization(name=f"{name}_norm")(y)
            y = layers.Dense(8, activation="gelu", name=f"{name}_mlp1")(y)
            y = Scale(name=f"{name}_scale")(layers.Dense(4, name=f"{name}_mlp2")(y))
            x = layers.Add()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.LayerNormalization(name="head_norm")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(x), name="convnext")


def _conv_norm(x: Any, name: str, *, strides: int = 1, kernel: int = 3) -> Any:
    x = layers.Conv2D(4, kernel, strides, "same", use_bias=False, name=f"{name}_conv")(x)
    return layers.BatchNormalization(name=f"{name}_norm")(x)


def resnet(stages: int = 4, blocks: int = 2, *, top: bool = True) -> keras.Model:
    inputs = keras.Input((16, 16, 3))
    x = layers.ReLU()(_conv_norm(inputs, "stem"))
    for stage in range(stages):
        for k in range(blocks):
            name, strides = f"stage_{stage}_block_{k}", 2 if stage and not k else 1
            y = layers.ReLU()(_conv_norm(x, f"{name}_1", strides=strides))
            y = _conv_norm(y, f"{name}_2")
            if strides > 1:
                x = _conv_norm(x, f"{name}_shortcut", strides=2, kernel=1)
            x = layers.ReLU()(layers.Add()([x, y]))
    if top:
        x = layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, x, name="resnet")


def vgg(convolutions: int = 8) -> keras.Model:
    inputs = x = keras.Input((8, 8, 3))
    for k in range(convolutions):
        x = layers.Conv2D(2, 3, padding="same", activation="relu", name=f"conv_{k}")(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.Dense(4, activation="relu", name="fc1")(x)
    return keras.Model(inputs, layers.Dense(3, name="fc2")(x), name="vgg")


def inverted(*, gate: bool = False) -> keras.Model:
    """Inverted bottlenecks, the first two and the last without a shortcut."""
    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(_conv_norm(inputs, "stem"))
    for k, shortcut in enumerate((False, False, True, False)):
        y = x if k == 0 else layers.ReLU()(_conv_norm(x, f"block_{k}_expand", kernel=1))
        y = layers.DepthwiseConv2D(3, padding="same", name=f"block_{k}_depthwise")(y)
        y = layers.ReLU()(layers.BatchNormalization(name=f"block_{k}_norm")(y))
        if gate:
            g = layers.Reshape((1, 1, 4))(layers.GlobalAveragePooling2D()(y))
            g = layers.Conv2D(2, 1, activation="relu", name=f"block_{k}_squeeze")(g)
            g = layers.Conv2D(4, 1, activation="sigmoid", name=f"block_{k}_excite")(g)
            y = layers.Multiply()([y, g])
        y = _conv_norm(y, f"block_{k}_project", kernel=1)
        x = layers.Add()([x, y]) if shortcut else y
    x = layers.ReLU()(_conv_norm(x, "last", kernel=1))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(x), name="inverted")


def text(*, post_norm: bool = False, two_outputs: bool = False) -> keras.Model:
    """A language model whose attention gets a mask, an input of its own."""
    tokens, mask = keras.Input((6,), dtype="int32"), keras.Input((6,))
    x = layers.Embedding(10, 4, name="embedding")(tokens)
    x = x + Positions(name="positions")(x)
    allowed = (mask[:, None, :] * 2.0) > 0
    for k in range(2):
        y = x if post_norm else layers.LayerNormalization(name=f"block_{k}_norm1")(x)
        y = layers.MultiHeadAttention(2, 2, name=f"block_{k}_attention")(
            y, y, attention_mask=allowed
        )
        x = x + y
        x = y = layers.LayerNormalization(name=f"block_{k}_norm1")(x) if post_norm else x
        y = y if post_norm else layers.LayerNormalization(name=f"block_{k}_norm2")(y)
        x = x + layers.Dense(4, name=f"block_{k}_mlp")(y)
        x = layers.LayerNormalization(name=f"block_{k}_norm2")(x) if post_norm else x
    outputs = [layers.Dense(10, name="head")(x)]
    if two_outputs:
        outputs.append(layers.Dense(2, name="class")(x[:, 0]))
    return keras.Model([tokens, mask], outputs, name="text")


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Positions(layers.Layer):
    """A table of vectors, one per position, which is as large as the longest text."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight((9, shape[-1]), name="table")

    def call(self, x: Any) -> Any:
        return ops.broadcast_to(self.table[: x.shape[1]], ops.shape(x))


def unet(depth: int = 4) -> keras.Model:
    inputs = x = keras.Input((16, 16, 1))
    skips = []
    for k in range(depth):
        x = layers.Conv2D(2, 3, padding="same", name=f"down_{k}a")(x)
        x = layers.Conv2D(2, 3, padding="same", name=f"down_{k}b")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for k in reversed(range(depth)):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skips[k]])
        x = layers.Conv2D(2, 3, padding="same", name=f"up_{k}a")(x)
        x = layers.Conv2D(2, 3, padding="same", name=f"up_{k}b")(x)
    return keras.Model(inputs, layers.Conv2D(2, 1, name="head")(x), name="unet")


def towers() -> keras.Model:
    """An image and a table, joined after the pooling."""
    image, table = keras.Input((8, 8, 3)), keras.Input((5,))
    x = image
    for k in range(3):
        x = layers.Conv2D(2, 3, padding="same", name=f"conv_{k}")(x)
    x = layers.GlobalAveragePooling2D()(x)
    y = layers.Dense(2, name="table")(table)
    x = layers.Dense(4, name="fuse")(layers.Concatenate()([x, y]))
    return keras.Model([image, table], layers.Dense(2, name="head")(x), name="towers")


def nested(backbone: keras.Model, *, hidden: bool = True) -> keras.Model:
    """A backbone without its own head in a Sequential model with a new one."""
    inner = keras.Model(backbone.input, backbone.layers[-1].output, name="backbone")
    new = [layers.Dense(4, activation="relu", name="hidden")] if hidden else []
    pooling = layers.GlobalAveragePooling2D()
    start = keras.Input(backbone.input_shape[1:])
    return keras.Sequential([start, inner, pooling, *new, layers.Dense(2, name="head")])


def chain(names: str, *, width: int = 4, name: str = "chain") -> keras.Model:
    inputs = x = keras.Input((width,))
    for layer in names.split():
        x = layers.Dense(width, name=layer)(x)
    return keras.Model(inputs, x, name=name)


class Subclassed(keras.Model):
    """No graph: what calls what is in the code alone."""

    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.first, self.second, self.last = (
            layers.Dense(4, name=name) for name in ("first", "second", "last")
        )

    def call(self, x: Any) -> Any:
        return self.last(self.second(self.first(x)))


def subclassed() -> keras.Model:
    model = Subclassed()
    model(np.ones((1, 4), "float32"))
    return model


def batch(model: keras.Model, count: int = 4) -> tuple[Any, Any]:
    """Inputs and targets for `fit`, the same at each call."""
    random = np.random.default_rng(0)

    def one(tensor: Any) -> np.ndarray:
        shape = (count, *tensor.shape[1:])
        if tensor.dtype == "int32":
            return random.integers(0, 9, shape).astype("int32")
        return random.normal(size=shape).astype("float32")

    inputs = [one(tensor) for tensor in getattr(model, "inputs", None) or [keras.Input((4,))]]
    outputs = getattr(model, "outputs", None) or [keras.Input((4,))]
    targets = [random.normal(size=(count, *out.shape[1:])).astype("float32") for out in outputs]
    return (inputs if len(inputs) > 1 else inputs[0], targets if len(targets) > 1 else targets[0])


def fit(model: keras.Model, optimizer: Any = None, steps: int = 1) -> None:
    """Trains on the batch, and compiles the model first if it gets an optimizer."""
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse")
    x, y = batch(model)
    model.fit(x, y, batch_size=4, epochs=steps, shuffle=False, verbose=0)


def moved(model: keras.Model, optimizer: Any = None, steps: int = 1) -> dict[str, np.ndarray]:
    """How each weight changes in `fit`, by its layer path."""
    before = weights(model)
    fit(model, optimizer, steps)
    return {path: after - before[path] for path, after in weights(model).items()}
