"""A recipe for the two factors of LoRA at different rates."""

from __future__ import annotations

import keras

from keras_groupopt.base import text
from keras_groupopt.plan.group import Group
from keras_groupopt.selectors import variable_name
from keras_groupopt.selectors.layer_paths import describe_model, layers

_A = ("lora_kernel_a", "lora_embeddings_a")
_B = ("lora_kernel_b", "lora_embeddings_b")


def lora(model: keras.Model, ratio: float = 16.0, *, freeze_rest: bool = False) -> list[Group]:
    """Returns groups for LoRA's factors: A at the base rate, B at `ratio` times it (LoRA+).

    The weights are W + A·B, where A is "lora_kernel_a" or "lora_embeddings_a", and B, which starts
    at zero, is "lora_kernel_b" or "lora_embeddings_b". η_A = learning_rate,
    η_B = ratio · learning_rate.

    Args:
        model: A built Keras model on whose layers `layer.enable_lora(rank)` was called.
        ratio: The rate of B over that of A, a number >= 0 or a schedule. Default: 16.
        freeze_rest: Whether other trainable variables, such as biases, norms and a head, are
            frozen. Otherwise they are in the default group, at the base rate. Default: False.

    Returns:
        The groups "lora_a" and "lora_b". If `freeze_rest` is True and there are other variables,
        also the group "rest".

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If no layer has trainable LoRA variables.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")])
    >>> model.layers[0].enable_lora(2)
    >>> [(group.name, group.learning_rate_ratio) for group in kgo.recipes.lora(model)]
    [('lora_a', None), ('lora_b', 16.0)]

    Reference:
        Hu et al., LoRA, 2021, arXiv:2106.09685; Hayou et al., LoRA+, 2024, arXiv:2402.12354.
    """
    catalog = describe_model(model)
    factors = {info.name for info in catalog if info.trainable and info.name in (*_A, *_B)}
    if not factors & {*_A} or not factors & {*_B}:
        able = [layer.name for layer in layers(model) if hasattr(layer, "enable_lora")]
        raise ValueError(
            "`model` must have trainable LoRA variables. Received: model named "
            f"{model.name!r}, without them. Call `layer.enable_lora(rank)` first, on layers such "
            f"as {text.listing(able) or 'Dense or Embedding'}."
        )
    a = variable_name(*(name for name in _A if name in factors))
    b = variable_name(*(name for name in _B if name in factors))
    groups = [Group("lora_a", a), Group("lora_b", b, learning_rate_ratio=ratio)]
    if freeze_rest and any(info.trainable and info.name not in factors for info in catalog):
        groups.append(Group("rest", ~(a | b), frozen=True))
    return groups
