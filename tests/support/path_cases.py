"""Models that are hard to name, each with the layer paths its variables must get.

Every case can be saved and loaded; `test_walk.py` and the process it starts both import this.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import layers

register = keras.saving.register_keras_serializable(package="path_cases")


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], keras.Model]
    paths: list[str]
    # The other places of variables that have several.
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Keras loads a layer that two nested functional models share as two layers.
    can_be_saved: bool = True


CASES: list[Case] = []


def shift_automatic_names() -> None:
    """Makes and drops layers of many classes: Keras' next automatic names carry other numbers."""
    for _ in range(3):
        for cls in (layers.Dense, layers.LSTM, layers.LSTMCell, layers.GRUCell, TransformerBlock):
            cls(**({} if cls is TransformerBlock else {"units": 1}))
        for cls in (layers.Bidirectional, layers.TimeDistributed):
            cls(layers.LSTM(1))
        for cls in (layers.BatchNormalization, layers.LayerNormalization, keras.Sequential):
            cls()
        backbone()
        keras.Variable(0.0)
        keras.optimizers.SGD()
    gc.collect()


def case(
    *paths: str, **options: Any
) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Registers a model under its name, called if it is not built.

    A path that ends in `/` is a kernel and a bias.
    """

    def add(make: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        def built() -> keras.Model:
            model = make()
            if not model.built:
                model(keras.ops.ones((1, 4)))
            return model

        full = [
            path + last
            for path in paths
            for last in (("kernel", "bias") if path.endswith("/") else ("",))
        ]
        CASES.append(Case(make.__name__, built, full, **options))
        return make

    return add


def backbone(name: str | None = None) -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Dense(3, name="stem")(inputs)
    x = layers.Dense(3)(x)
    return keras.Model(inputs, layers.Dense(3)(x), name=name)


BACKBONE = ("stem/", "dense/", "dense_1/")
NORM = ("gamma", "beta", "moving_mean", "moving_variance")


def below(name: str, paths: tuple[str, ...]) -> list[str]:
    return [f"{name}/{path}" for path in paths]


@case(*below("backbone", BACKBONE), "head/")
def functional_in_sequential():
    return keras.Sequential([keras.Input((4,)), backbone("backbone"), layers.Dense(2, name="head")])


@case(*below("functional", BACKBONE), "dense/")
def functional_in_functional_with_automatic_names():
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(backbone()(inputs)))


@case("head/", *below("backbone", BACKBONE))
@register
class FunctionalInSubclassedInTheOrderOfAssignment(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = layers.Dense(2, name="head")
        self.features = backbone("backbone")

    def call(self, inputs):
        return self.head(self.features(inputs))


@case(*below("left", BACKBONE), *below("right", BACKBONE), "head/")
def two_towers_told_apart_by_their_names():
    inputs = keras.Input((4,))
    both = layers.Add()([backbone("left")(inputs), backbone("right")(inputs)])
    return keras.Model(inputs, layers.Dense(2, name="head")(both))


@case(*below("functional", BACKBONE), *below("functional_1", BACKBONE), "head/")
def two_towers_told_apart_by_numbers():
    inputs = keras.Input((4,))
    both = layers.Add()([backbone()(inputs), backbone()(inputs)])
    return keras.Model(inputs, layers.Dense(2, name="head")(both))


@case("twin@1/", "twin@2/")
@register
class EqualNamesSideBySide(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left = layers.Dense(4, name="twin")
        self.right = layers.Dense(4, name="twin")

    def call(self, inputs):
        return self.right(self.left(inputs))


@case("tied/", "dense/")
def one_layer_used_twice():
    inputs = keras.Input((4,))
    tied = layers.Dense(4, name="tied")
    return keras.Model(inputs, layers.Dense(2)(tied(tied(inputs))))


@case(
    *("encoder/tied/", "encoder/dense/", "decoder/dense/"),
    shared={f"encoder/tied/{name}": (f"decoder/tied/{name}",) for name in ("kernel", "bias")},
    can_be_saved=False,
)
def one_layer_in_two_models():
    tied = layers.Dense(4, name="tied")

    def part(name):
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(4)(tied(inputs)), name=name)

    inputs = keras.Input((4,))
    return keras.Model(inputs, part("decoder")(part("encoder")(inputs)))


@register
class TiedHead(layers.Layer):
    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, inputs):
        return keras.ops.matmul(inputs, keras.ops.transpose(self.embedding.embeddings))


@case("tokens/embeddings", "mix/", shared={"tokens/embeddings": ("head/tokens/embeddings",)})
@register
class TiedEmbedding(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(10, 4, name="tokens")
        self.mix = layers.Dense(4, name="mix")
        self.head = TiedHead(self.embedding, name="head")

    def call(self, inputs):
        return self.head(self.mix(self.embedding(inputs)))


@register
class Borrower(layers.Layer):
    """Holds a variable that another layer made."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(4, name="first")
        self.second = layers.Dense(4, name="second")

    def build(self, input_shape):
        self.first.build(input_shape)
        self.borrowed = self.first.kernel
        self.second.build(input_shape)
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, inputs):
        return self.second(self.first(inputs)) * self.scale


@case(
    *("block/kernel", "block/scale", "block/first/bias", "block/second/"),
    shared={"block/kernel": ("block/first/kernel",)},
)
def tied_variable():
    return keras.Sequential([keras.Input((4,)), Borrower(name="block")])


@case(
    *("dense/", "dense_1/", "head_b/", "head_a/", "dense_2/"),
    *below("batch_normalization", NORM),
    "dense_3/",
)
@register
class ListsAndDictsOfLayers(keras.Model):
    """Lists, dicts, dicts of lists, tuples; one layer under two attributes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = [layers.Dense(4), layers.Dense(4)]
        self.heads = {"b": layers.Dense(4, name="head_b"), "a": layers.Dense(4, name="head_a")}
        self.mixed = {"x": [layers.Dense(4), layers.BatchNormalization()]}
        self.pair = (layers.Dense(4), layers.Dropout(0.1))
        self.again = self.steps[0]

    def call(self, inputs):
        x = inputs
        for layer in (*self.steps, *self.heads.values(), *self.mixed["x"], *self.pair, self.again):
            x = layer(x)
        return x


CELL = ("kernel", "recurrent_kernel", "bias")


@case(
    *below("bidirectional/forward_lstm/lstm_cell", CELL),
    *below("bidirectional/backward_lstm/lstm_cell", CELL),
    *below("bidirectional_1/forward_encoder/lstm_cell", CELL),
    *below("bidirectional_1/backward_encoder/lstm_cell", CELL),
    "time_distributed/dense/",
)
def wrappers():
    return keras.Sequential(
        [
            keras.Input((3, 2)),
            layers.Bidirectional(layers.LSTM(2, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(2, return_sequences=True, name="encoder")),
            layers.TimeDistributed(layers.Dense(2)),
        ]
    )


@case(
    *below("rnn/stacked_rnn_cells/lstm_cell", CELL),
    *below("rnn/stacked_rnn_cells/lstm_cell_1", CELL),
    *below("rnn/stacked_rnn_cells/gru_cell", CELL),
    *below("simple_rnn/simple_rnn_cell", CELL),
)
def recurrent_cells():
    cells = [layers.LSTMCell(2), layers.LSTMCell(2), layers.GRUCell(2)]
    return keras.Sequential(
        [keras.Input((3, 2)), layers.RNN(cells, return_sequences=True), layers.SimpleRNN(2)]
    )


@register
class TransformerBlock(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 2)
        self.norm = layers.LayerNormalization()
        self.feed_forward = keras.Sequential([layers.Dense(8), layers.Dense(4)], name="mlp")
        self.norm_2 = layers.LayerNormalization()

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)
        self.norm.build(input_shape)
        self.feed_forward.build(input_shape)
        self.norm_2.build(input_shape)

    def call(self, inputs):
        x = self.norm(inputs + self.attention(inputs, inputs))
        return self.norm_2(x + self.feed_forward(x))


BLOCK = (
    *below("multi_head_attention", ("query/", "key/", "value/", "attention_output/")),
    *below("layer_normalization", ("gamma", "beta")),
    *below("mlp", ("dense/", "dense_1/")),
    *below("layer_normalization_1", ("gamma", "beta")),
)


@case(
    *below("transformer_block", BLOCK), *below("transformer_block_1", BLOCK), "einsum_dense/kernel"
)
def transformer():
    inputs = keras.Input((5, 4))
    x = TransformerBlock()(TransformerBlock()(inputs))
    return keras.Model(inputs, layers.EinsumDense("bte,ef->btf", (None, 3))(x))


@case("token", "variable", "variable_1", "twin@1", "twin@2", "count", "dense/")
@register
class WeightsOfTheModelItself(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.token = self.add_weight(shape=(4,), name="token")
        self.first = self.add_weight(shape=(4,))
        self.second = self.add_weight(shape=(4,))
        self.twins = [self.add_weight(shape=(4,), name="twin") for _ in range(2)]
        self.count = self.add_weight(shape=(), name="count", trainable=False)
        self.project = layers.Dense(4)

    def call(self, inputs):
        own = (self.token, self.first, self.second, *self.twins, self.count)
        return self.project(inputs + sum(own))


@case("dense/", "dense_1@1/kernel", "dense_1@2/", "dense_2/")
@register
class ANameByHandThatIsAlsoANumberGiven(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = [layers.Dense(4), layers.EinsumDense("be,ef->bf", 4, name="dense_1")]
        self.steps += [layers.Dense(4), layers.Dense(4)]

    def call(self, inputs):
        for layer in self.steps:
            inputs = layer(inputs)
        return inputs


@case("dense/", "dense_1/", "dense_2/")
def names_by_hand_that_look_automatic():
    numbered = [layers.Dense(4, name=f"dense_{number}") for number in (7, 3, 12)]
    return keras.Sequential([keras.Input((4,)), *numbered])


@case("dense_0/", "dense_1/", "dense_2/")
def names_by_hand_counted_from_zero():
    numbered = [layers.Dense(4, name=f"dense_{number}") for number in range(3)]
    return keras.Sequential([keras.Input((4,)), *numbered])


@case(*below("a", BACKBONE), *below("a", ("dense_2/",)), "b/dense/", "dense/")
def sequential_of_sequentials():
    a = keras.Sequential([backbone().layers[1], *backbone().layers[2:], layers.Dense(3)], name="a")
    return keras.Sequential(
        [keras.Input((4,)), a, keras.Sequential([layers.Dense(3)], name="b"), layers.Dense(2)]
    )


@case("conv2d/", *below("batch_normalization", NORM), "depthwise_conv2d/", "dense/")
def convolutions_with_statistics_and_dropout():
    start = [keras.Input((6, 6, 2)), layers.RandomFlip(), layers.Conv2D(3, 2)]
    middle = [layers.BatchNormalization(), layers.DepthwiseConv2D(2)]
    end = [layers.GlobalAveragePooling2D(), layers.Dropout(0.5), layers.Dense(2)]
    return keras.Sequential([*start, *middle, *end])
