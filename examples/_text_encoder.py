"""A pretrained text encoder like BERT in Keras: tokens, weights and layers."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from train_transformer_muon import Positions

LENGTH = 64  # tokens per text
_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}


class WordPieces:
    """Turns texts into rows of token numbers: lower case, no accents, the longest known pieces."""

    def __init__(self, vocabulary: Path):
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self.numbers = {piece: number for number, piece in enumerate(lines)}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns one row of LENGTH numbers per text, padded by 0."""
        rows = np.zeros((len(texts), LENGTH), "int32")
        for row, text in zip(rows, texts, strict=True):
            numbers = self._numbers(text)
            row[: len(numbers)] = numbers
        return rows

    def _numbers(self, text: str) -> list[int]:
        found = [self.numbers["[CLS]"]]
        for word in _words(text):
            found += self._pieces(word)
            if len(found) >= LENGTH:
                break
        return [*found[: LENGTH - 1], self.numbers["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = "##" * (start > 0) + word[start:end]
                if piece in self.numbers:
                    break
            else:
                return [self.numbers["[UNK]"]]
            found.append(self.numbers[piece])
            start = end
        return found


def _words(text: str) -> list[str]:
    spaced = ""
    for character in unicodedata.normalize("NFD", text.lower()):
        category = unicodedata.category(character)
        if category[0] == "P" or character in "$+<=>^`|~":
            spaced += f" {character} "
        elif category != "Mn":
            spaced += " " if category in ("Cc", "Cf") else character
    return spaced.split()


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file: the length of a JSON header, the header, then the data."""
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        array = content[begin:end].view(_DTYPES[entry["dtype"]])
        found[name] = array.reshape(entry["shape"])
    return found


def load_encoder(folder: Path) -> keras.Model:
    """Returns the encoder in a folder. Its output is the mean of the token vectors of each text."""
    config = json.loads((folder / "config.json").read_text())
    blocks, heads = config["num_hidden_layers"], config["num_attention_heads"]
    width, hidden = config["hidden_size"], config["intermediate_size"]
    epsilon = config["layer_norm_eps"]
    tokens = keras.Input((LENGTH,), dtype="int32")
    there = ops.not_equal(tokens, 0)
    x = layers.Embedding(config["vocab_size"], width, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    x = layers.LayerNormalization(epsilon=epsilon, name="norm")(x)
    for k in range(blocks):
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"block_{k}_attention")
        y = attention(x, x, attention_mask=ops.expand_dims(there, 1))
        x = layers.LayerNormalization(epsilon=epsilon, name=f"block_{k}_norm1")(x + y)
        y = layers.Dense(hidden, activation="gelu", name=f"block_{k}_mlp1")(x)
        y = layers.Dense(width, name=f"block_{k}_mlp2")(y)
        x = layers.LayerNormalization(epsilon=epsilon, name=f"block_{k}_norm2")(x + y)
    weight = ops.expand_dims(ops.cast(there, "float32"), -1)
    model = keras.Model(tokens, ops.sum(x * weight, 1) / ops.sum(weight, 1), name="encoder")
    _fill(model, read_safetensors(folder / "model.safetensors"), blocks)
    return model


def _fill(model: keras.Model, arrays: dict[str, np.ndarray], blocks: int) -> None:
    """Assigns the weights of each layer. In torch the first axis of a kernel is its output."""

    def assign(layer: str, *values: Any) -> None:
        variables = model.get_layer(layer).weights
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.reshape(value, variable.shape))

    def norm(layer: str, name: str) -> None:
        assign(layer, arrays[f"{name}.weight"], arrays[f"{name}.bias"])

    def dense(*names: str) -> list[np.ndarray]:
        pairs = [(arrays[f"{name}.weight"].T, arrays[f"{name}.bias"]) for name in names]
        return [array for pair in pairs for array in pair]

    first_type = arrays["embeddings.token_type_embeddings.weight"][0]
    assign("tokens", arrays["embeddings.word_embeddings.weight"])
    assign("positions", arrays["embeddings.position_embeddings.weight"][:LENGTH] + first_type)
    norm("norm", "embeddings.LayerNorm")
    for k in range(blocks):
        here = f"encoder.layer.{k}"
        parts = ("self.query", "self.key", "self.value", "output.dense")
        assign(f"block_{k}_attention", *dense(*(f"{here}.attention.{part}" for part in parts)))
        norm(f"block_{k}_norm1", f"{here}.attention.output.LayerNorm")
        assign(f"block_{k}_mlp1", *dense(f"{here}.intermediate.dense"))
        assign(f"block_{k}_mlp2", *dense(f"{here}.output.dense"))
        norm(f"block_{k}_norm2", f"{here}.output.LayerNorm")
