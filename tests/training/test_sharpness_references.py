"""Gradient rules in `fit`, against their papers in NumPy, and against other implementations.

Weights are compared, after fifty steps, so that the perturbation, its removal and everything that
the optimizer does with the gradients after it are in the numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import network_reference
import numpy as np
import pytest
import saving_models
import sharpness_reference as reference
from saving_models import X, Y

import keras_groupopt as kgo

BACKEND = os.environ["KERAS_BACKEND"]
BATCH, EPOCHS = 4, 17
STARTS = [start for _ in range(EPOCHS) for start in range(0, len(X), BATCH)]
BATCHES = [(X[start : start + BATCH], Y[start : start + BATCH]) for start in STARTS]
TOLERANCE = 1e-5
# By how much training without the second pass differs, at least.
APART = 100 * TOLERANCE

# name: (ours, its paper)
PAPERS: dict[str, tuple[Callable[[], Any], Callable[[], reference.Plain]]] = {
    "single gradient": (kgo.SingleGradient, reference.Plain),
    "SAM": (lambda: kgo.SAM(0.2), lambda: reference.SAM(0.2)),
    "SAM, without the body's kernels": (
        lambda: kgo.SAM(0.2, exclude_from_perturbation="body/**/kernel"),
        lambda: reference.SAM(0.2, network_reference.KERNELS),
    ),
    "ASAM": (lambda: kgo.ASAM(0.4, eta=0.05), lambda: reference.ASAM(0.4, 0.05)),
    "ASAM on everything": (
        lambda: kgo.ASAM(0.4, eta=0.0, adaptive_on=kgo.everything()),
        lambda: reference.ASAM(0.4, 0.0, lambda name: True),
    ),
    "LookSAM": (lambda: kgo.LookSAM(0.2, 3, 0.6), lambda: reference.LookSAM(0.2, 3, 0.6)),
    "GSAM": (lambda: kgo.GSAM(0.2, 0.5), lambda: reference.GSAM(0.2, 0.5)),
}


def schedule(step: int) -> float:
    return 0.05 / (1 + 0.1 * step)


def fitted(model: keras.Model, rule: Any, optimizer: Callable[[Any], Any]) -> list[np.ndarray]:
    """The weights after fifty steps of `fit`."""
    trained = kgo.sharpness_aware(model, rule)
    trained.compile(optimizer=optimizer(trained), loss="mse")
    trained.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return trained.get_weights()


def distance(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", PAPERS)
def test_fit_gives_the_numbers_of_the_paper(name):
    """With Adam and SGD in groups of two rates, a schedule, a clip and decay to the start."""
    ours, paper = PAPERS[name]
    model = saving_models.fill(saving_models.nested())
    start = model.get_weights()
    rate = keras.optimizers.schedules.InverseTimeDecay(0.05, 1, 0.1)
    weights = fitted(
        model,
        ours(),
        lambda model: saving_models.optimizer(model, learning_rate=rate, global_clipnorm=0.5),
    )
    expected = network_reference.trained(start, BATCHES, schedule, 0.5, paper())
    assert distance(weights, expected) < TOLERANCE
    if name != "single gradient":
        plain = network_reference.trained(start, BATCHES, schedule, 0.5)
        assert distance(weights, plain) > APART


# Other implementations ----------------------------------------------------------------------------


def tanh_layer() -> keras.Model:
    """A model of one variable, in which norms per variable are norms over all."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(2, activation="tanh", use_bias=False)(inputs))


class Constant:
    """A schedule as GSAM of pytorch-optimizer wants it."""

    def step(self) -> float:
        return 0.2


def torch_sam(parameters: Any, base: Any, options: Any, **own: Any) -> Any:
    from pytorch_optimizer import SAM

    optimizer = SAM(parameters, base, **own, **options)
    return optimizer, optimizer.first_step, optimizer.second_step


def torch_gsam(parameters: Any, base: Any, options: Any) -> Any:
    import torch
    from pytorch_optimizer.optimizer.sam import GSAM

    # As in the paper, over all parameters. Its `step` calls the model, hence by its parts.
    own = base(parameters, **options)
    optimizer = GSAM(parameters, own, torch.nn.Module(), Constant(), alpha=0.5)

    def second() -> None:
        optimizer.gradient_decompose(optimizer.alpha)
        optimizer.un_perturb()
        own.step()

    return optimizer, lambda: optimizer.perturb_weights(optimizer.rho_t), second


def torch_looksam(parameters: Any, base: Any, options: Any) -> Any:
    from pytorch_optimizer import LookSAM

    # Its norms are per parameter and those of the paper over all: hence a model of one. Between
    # its steps of SAM it would put back the weights of the last one: hence `old_p` here.
    optimizer = LookSAM(parameters, base, rho=0.2, k=3, alpha=0.6, **options)

    def first() -> None:
        optimizer.state[parameters[0]]["old_p"] = parameters[0].detach().clone()
        optimizer.first_step()

    return optimizer, first, optimizer.second_step


# name: (model, ours, that of pytorch-optimizer)
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[..., Any]]] = {
    "SAM": (
        saving_models.nested,
        lambda: kgo.SAM(0.2),
        lambda *args: torch_sam(*args, rho=0.2, adaptive=False),
    ),
    "ASAM": (
        saving_models.nested,
        # Theirs knows no eta, and is adaptive on all parameters.
        lambda: kgo.ASAM(0.4, eta=0.0, adaptive_on=kgo.everything()),
        lambda *args: torch_sam(*args, rho=0.4, adaptive=True),
    ),
    "GSAM": (saving_models.nested, lambda: kgo.GSAM(0.2, 0.5), torch_gsam),
    "LookSAM": (tanh_layer, lambda: kgo.LookSAM(0.2, every=3, alpha=0.6), torch_looksam),
}
# name: (Keras rule, class of torch.optim, its options)
BASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sgd": (kgo.rule("sgd", momentum=0.9), "SGD", {"lr": 0.02, "momentum": 0.9}),
    # Theirs adds epsilon elsewhere.
    "adam": (kgo.rule("adam", epsilon=0.0), "Adam", {"lr": 0.02, "eps": 0.0}),
}


def of_torch(model: Any, name: str, base: str) -> None:
    """Trains as pytorch-optimizer does."""
    pytest.importorskip("pytorch_optimizer")
    import torch

    _, base_class, options = BASES[base]
    parameters = [variable.value for variable in model.trainable_variables]
    base_class = getattr(torch.optim, base_class)
    optimizer, first, second = OTHERS[name][2](parameters, base_class, options)
    for x, y in BATCHES:
        for step in (first, second):
            optimizer.zero_grad()
            torch.mean((model(x) - torch.from_numpy(y)) ** 2).backward()
            step()


def of_optax(model: Any, name: str, base: str) -> None:
    """Trains as Optax does."""
    optax = pytest.importorskip("optax")
    import jax

    outer = optax.sgd(0.02, momentum=0.9) if base == "sgd" else optax.adam(0.02, eps=0.0)
    inner = optax.chain(optax.contrib.normalize(), optax.sgd(0.2))
    optimizer = optax.contrib.sam(outer, inner, sync_period=2, opaque_mode=True)

    @jax.jit
    def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
        def gradients(weights: Any, _: Any) -> Any:
            def loss(weights: Any) -> Any:
                return ((model.stateless_call(weights, [], x)[0] - y) ** 2).mean()

            return jax.grad(loss)(weights)

        updates, state = optimizer.update(gradients(weights, 0), state, weights, grad_fn=gradients)
        return optax.apply_updates(weights, updates), state

    weights = [variable.value for variable in model.trainable_variables]
    state = optimizer.init(weights)
    for x, y in BATCHES:
        weights, state = step(weights, state, x, y)
    model.set_weights(weights)


@pytest.mark.backends("torch", "jax", reason="pytorch-optimizer and Optax")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", OTHERS if BACKEND == "torch" else ["SAM"])
def test_fit_gives_the_numbers_of_other_implementations(name, base):
    if (name, base) == ("LookSAM", "sgd"):
        pytest.skip("their LookSAM reads the step from the state of Adam")
    make, ours, _ = OTHERS[name]
    model, plain, other = (saving_models.fill(make()) for _ in range(3))
    found, single = (
        fitted(
            own,
            rule,
            lambda m: kgo.GroupedOptimizer(model=m, rule=BASES[base][0], learning_rate=0.02),
        )
        for own, rule in ((model, ours()), (plain, kgo.SingleGradient()))
    )
    (of_torch if BACKEND == "torch" else of_optax)(other, name, base)
    assert distance(found, other.get_weights()) < TOLERANCE
    assert distance(found, single) > APART
