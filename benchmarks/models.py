"""The models of the benchmark, and the pattern of the paths in their first group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


class Tokens(layers.Layer):
    """Puts a class token before the patches, and adds a position vector to each."""

    def build(self, shape: Any) -> None:
        """Makes the token and the position vectors."""
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")
        self.position = self.add_weight(shape=(1, shape[1] + 1, shape[-1]), name="position")

    def call(self, patches: Any) -> Any:
        """Returns the class token and the patches with their positions."""
        token = keras.ops.tile(self.token, (keras.ops.shape(patches)[0], 1, 1))
        return keras.ops.concatenate([token, patches], axis=1) + self.position


def vit_b16() -> Any:
    """Returns ViT-B/16 for pictures of 224 × 224 pixels (86 million weights, arXiv:2010.11929)."""
    width, heads = 768, 12
    inputs = keras.Input((224, 224, 3))
    x = layers.Conv2D(width, 16, 16, name="patches")(inputs)
    x = Tokens(name="tokens")(layers.Reshape((196, width))(x))
    for block in range(12):
        name = f"block{block:02}"
        y = layers.LayerNormalization(name=f"{name}_norm_1")(x)
        y = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization(name=f"{name}_norm_2")(x)
        y = layers.Dense(4 * width, "gelu", name=f"{name}_wide")(y)
        x = layers.Add()([x, layers.Dense(width, name=f"{name}_narrow")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(1000, name="head")(x[:, 0]))


def small_variables(count: int) -> Any:
    """Returns a model with `count` variables. Half have 32 × 32 values, and half have 32."""
    # The layers are parallel, because Keras walks a chain by recursion.
    inputs = keras.Input((32,))
    outputs = [layers.Dense(32, name=f"layer{index:04}")(inputs) for index in range(count // 2)]
    return keras.Model(inputs, layers.Add(name="sum")(outputs))


def small() -> Any:
    """Returns a small model, for a quick trial of the benchmark."""
    blocks = []
    for index in range(3):
        blocks.append(layers.Conv2D(128, 3, padding="same", name=f"conv{index}"))
        blocks.append(layers.BatchNormalization(name=f"norm{index}"))
    head = [layers.GlobalAveragePooling2D(name="pool"), layers.Dense(10, name="head")]
    return keras.Sequential([keras.Input((16, 16, 3)), *blocks, *head])


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "resnet50": (lambda: keras.applications.ResNet50(weights=None), "conv[1-4]_.*"),
    "efficientnetb7": (
        lambda: keras.applications.EfficientNetB7(weights=None),
        "(stem|block[1-5]).*",
    ),
    "vit_b16": (vit_b16, "(patches|tokens|block0[0-5]).*"),
    "variables2000": (lambda: small_variables(2000), "layer0[0-4].*"),
    "variables200": (lambda: small_variables(200), "layer00[0-4].*"),
    "small": (small, "(conv|norm)[01]/.*"),
}


def make(name: str, dtype: str = "float32") -> tuple[Any, str]:
    """Returns a model with random weights of a dtype, and the pattern of its first group."""
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)
    build, pattern = MODELS[name]
    return build(), pattern


def describe(model: Any, name: str) -> dict[str, Any]:
    """Returns the number and the size of the trainable variables."""
    variables = model.trainable_variables
    values = sum(int(np.prod(variable.shape)) for variable in variables)
    return {
        "name": name,
        "trainable_variables": len(variables),
        "trainable_values": values,
        "bytes": nbytes(variables),
    }


def nbytes(variables: Any) -> int:
    """Returns the bytes that Keras variables hold."""
    total = 0
    for variable in variables:
        bits = "".join(filter(str.isdigit, keras.backend.standardize_dtype(variable.dtype)))
        total += int(np.prod(variable.shape)) * int(bits or 8) // 8
    return total


def fixed_gradients(model: Any, seed: int) -> list[np.ndarray]:
    """Returns one random gradient per trainable variable, the same in each run."""
    generator = np.random.default_rng(seed)
    return [
        np.float32(0.01) * generator.standard_normal(variable.shape, dtype=np.float32)
        for variable in model.trainable_variables
    ]
