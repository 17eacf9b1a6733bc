"""A recipe for Muon on hidden matrices and AdamW on all other variables."""

from __future__ import annotations

from typing import Any

import keras

from keras_groupopt.base import text
from keras_groupopt.plan.group import Group
from keras_groupopt.plan.rule_spec import rule
from keras_groupopt.recipes.graph import ancestors, calls_of
from keras_groupopt.recipes.parts import check_graph, positions_of, resolved, selector_for
from keras_groupopt.selectors import Selector, as_selector, rank, variable_name
from keras_groupopt.selectors.layer_paths import describe_model
from keras_groupopt.selectors.variable_info import VariableCatalog

_KERNELS = ("kernel", "recurrent_kernel")


def muon_with_adamw(
    model: keras.Model,
    *,
    head: Any = None,
    adamw: Any = (),
    muon_ratio: float = 1.0,
    muon_arguments: Any = None,
    adamw_arguments: Any = None,
) -> list[Group]:
    """Returns two groups: hidden matrices with Muon, and all other variables with AdamW.

    Muon trains the variables of rank 2 called "kernel" or "recurrent_kernel", except those of the
    head, which is the last layers with a matrix before the outputs. AdamW trains embeddings, norms,
    biases, the head, LoRA's factors and kernels of another rank: those of convolutions, of
    `keras.layers.MultiHeadAttention` and of most `EinsumDense` layers, which have rank 3. Keras'
    Muon has no orthogonal step for them on any backend. An attention made of `Dense` layers has
    kernels of rank 2. The plan decides which rule trains a variable, in the same way on all
    backends. Muon's own search for "embedding" in names is off.

    Args:
        model: A built Keras model: functional or Sequential, or any model if `head` is given.
        head: The output layers: a selector, path, layer or list of these, or `()` for none.
            Default: those that are found.
        adamw: Further variables for AdamW, such as the projection of patches: a selector, path,
            layer or list of these. Default: none.
        muon_ratio: Muon's rate over the base rate, a number >= 0 or a schedule. The default suits a
            Muon whose steps are scaled to those of AdamW, as `rms_rate` does in Keras. Default: 1.
        muon_arguments: Arguments of `kgo.Muon`, a dict. Default: none.
        adamw_arguments: Arguments of `keras.optimizers.AdamW`, a dict. Default: none.

    Returns:
        The groups "muon" and "adamw". Every variable is in one of them.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the head cannot be found, or no trainable matrix is left for Muon.

    Example:
    >>> import keras, keras_groupopt as kgo
    >>> layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="head")]
    >>> model = keras.Sequential([keras.Input((3,)), *layers])
    >>> optimizer = kgo.GroupedOptimizer(kgo.recipes.muon_with_adamw(model), model=model)
    >>> [variable.path for variable in optimizer.plan["muon"].variables]
    ['hidden/kernel']

    Reference:
        Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., Muon is
        scalable for LLM training, 2025, arXiv:2502.16982.
    """
    catalog = describe_model(model)
    top = _output_layers(model, catalog) if head is None else resolved(head, catalog, "head")
    hidden: Selector = rank(2) & variable_name(*_KERNELS)
    matrices = {at for at, info in enumerate(catalog) if info.rank == 2 and info.name in _KERNELS}
    if matrices & top:
        hidden = hidden - selector_for(catalog, top)
    for_adamw = resolved(adamw, catalog, "adamw")
    if for_adamw:
        hidden = hidden - as_selector(adamw, "adamw")
    left = matrices - top - for_adamw
    if not any(catalog[at].trainable for at in left):
        shown = [f"{info.path} {info.shape}" for info in catalog if info.name.endswith("kernel")]
        raise ValueError(
            "`model` must have a trainable matrix for Muon: a variable of rank 2 called "
            f"{' or '.join(map(repr, _KERNELS))} outside the head. Received: model named "
            f"{model.name!r}, with kernels {text.listing(shown) or 'none'}. Use AdamW alone, or "
            "set the head with `head=`."
        )
    muon = rule("muon", **(muon_arguments or {}))
    groups = [Group("muon", hidden, rule=muon, learning_rate_ratio=muon_ratio)]
    if any(catalog[at].trainable for at in catalog.everything - left):
        groups.append(Group("adamw", ~hidden, rule=rule("adamw", **(adamw_arguments or {}))))
    return groups


def _output_layers(model: Any, catalog: VariableCatalog) -> frozenset[int]:
    """Returns the positions of the weights of the last layers that own a matrix."""
    check_graph(model, "`head` must be given", "Pass `head=`, or `head=()` for none.")
    calls = calls_of(model)
    owners = [at for at, call in enumerate(calls) if any(len(v.shape) > 1 for v in call.weights)]
    followed = ancestors(calls, {before for at in owners for before in calls[at].before})
    last = [calls[at] for at in reversed(owners) if at not in followed]
    for call in last:
        if call.kernels > 1:
            raise ValueError(
                "`head` must be given if the last layer holds several kernels. Received: "
                f"model named {model.name!r}, which ends in {call.operation.name!r}. Pass `head=`, "
                "or `head=()` for none."
            )
    return positions_of(last, catalog)
