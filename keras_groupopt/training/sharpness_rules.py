"""Sharpness-aware gradient rules: the gradient at weights perturbed toward a higher loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.selectors import default_exclude_from_decay
from keras_groupopt.training import sharpness
from keras_groupopt.training.batch import Batch
from keras_groupopt.training.gradient_rule import GradientRule, Hyperparameter

Tensor = Any
_register = keras.saving.register_keras_serializable(package="keras_groupopt")


@_register
class SAM(GradientRule):
    """Sharpness-aware minimization: the gradient at the worst point near the weights.

    With the gradient `g` of the batch at the weights `w`, over all perturbed variables:

        ε = rho · g / ‖g‖
        gradient = ∇ loss(w + ε)

    If `‖g‖` is 0, so is `ε`. Each batch takes two forward and backward passes.

    Args:
        rho: The radius `‖ε‖`, a number >= 0 or a schedule over optimizer steps. Default: 0.05.
        exclude_from_perturbation: A selector of variables that are neither perturbed nor counted
            in the norm. Default: none.

    Raises:
        ValueError: If `rho` is negative or not finite.
        TypeError: If an argument is of the wrong type.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> inputs = keras.Input((4,))
    >>> outputs = keras.layers.Dense(2, name="head")(inputs)
    >>> model = kgo.SharpnessAwareModel(inputs, outputs, gradient_rule=kgo.SAM(0.05))
    >>> model.compile(optimizer=kgo.GroupedOptimizer(model=model), loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    >>> sorted(history.history)
    ['gradient_norm', 'loss', 'sam_gap']

    Reference:
        Foret et al. 2021, arXiv:2010.01412.
    """

    rho = Hyperparameter()

    def __init__(self, rho: Any = 0.05, exclude_from_perturbation: Any = ()) -> None:
        super().__init__(exclude_from_perturbation)
        self.rho = rho

    def gradients(self, batch: Batch) -> Sequence[Tensor]:
        """Returns the gradients at the perturbed weights."""
        return batch.gradients_at(
            lambda: sharpness.perturbation(batch.gradients, batch.scalar("rho"))
        )


@_register
class ASAM(GradientRule):
    """Adaptive SAM: perturbs large weights more, so that rescaling a layer changes nothing.

    With the gradient `g` of the batch at the weights `w`, over all perturbed variables:

        T = |w| + eta for variables in adaptive_on, else 1
        ε = rho · T² g / ‖T g‖
        gradient = ∇ loss(w + ε)

    Args:
        rho: The radius `‖ε / T‖`, a number >= 0 or a schedule over optimizer steps. It is about
            ten times SAM's. Default: 0.5.
        eta: Added to `|w|`, a number >= 0 or a schedule. With 0, weights that are 0 stay
            unperturbed. Default: 0.01.
        exclude_from_perturbation: A selector of variables that are neither perturbed nor counted
            in the norm. Default: none.
        adaptive_on: A selector of variables with `T = |w| + eta`. Default: all except those of
            `kgo.default_exclude_from_decay`.

    Raises:
        ValueError: If `rho` or `eta` is negative or not finite.
        TypeError: If an argument is of the wrong type.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.ASAM(0.5, eta=0.0)
    ASAM(rho=0.5, eta=0.0)

    Reference:
        Kwon et al. 2021, arXiv:2102.11600.
    """

    selectors = ("exclude_from_perturbation", "adaptive_on")
    rho = Hyperparameter()
    eta = Hyperparameter()

    def __init__(
        self,
        rho: Any = 0.5,
        eta: Any = 0.01,
        exclude_from_perturbation: Any = (),
        adaptive_on: Any = ~default_exclude_from_decay,
    ) -> None:
        super().__init__(exclude_from_perturbation)
        self.adaptive_on = adaptive_on
        self.rho = rho
        self.eta = eta

    def gradients(self, batch: Batch) -> Sequence[Tensor]:
        """Returns the gradients at the perturbed weights."""
        return batch.gradients_at(
            lambda: sharpness.adaptive_perturbation(
                batch.gradients,
                batch.variables,
                batch.selected(self.adaptive_on),
                batch.scalar("rho"),
                batch.scalar("eta"),
            )
        )


@_register
class LookSAM(GradientRule):
    """SAM at each `every`-th optimizer step, whose direction the steps between use again.

    With the gradient `g` of the batch at the weights `w`, over all perturbed variables, at
    optimizer steps `t` with `t mod every = 0`:

        h = ∇ loss(w + rho · g / ‖g‖)
        v ← h − (⟨h, g⟩ / ‖g‖²) · g,  v ← v / ‖v‖
        gradient = h

    and at the others, in one pass:

        gradient = g + alpha · ‖g‖ · v

    The optimizer keeps and saves `v`, the part of SAM's gradient that is orthogonal to `g`, as one
    float32 array beside each perturbed weight. It must be a `GroupedOptimizer`. With accumulation,
    all micro-batches of an optimizer step take the same form.

    Args:
        rho: The radius `‖ε‖`, a number >= 0 or a schedule over optimizer steps. Default: 0.05.
        every: Optimizer steps from one step of SAM to the next; an integer >= 1. Default: 5.
        alpha: How much of `v` is used again, relative to `‖g‖`; a number >= 0 or a schedule.
            Default: 0.7.
        exclude_from_perturbation: A selector of variables that are neither perturbed nor counted
            in the norms. Default: none.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is of the wrong type. When the model is compiled, if the optimizer
            is not a `GroupedOptimizer`.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.LookSAM(0.05, every=5, alpha=0.7)
    LookSAM(rho=0.05, alpha=0.7, every=5)

    Reference:
        Liu et al. 2022, arXiv:2203.02714, algorithm 1.
    """

    slots = ("direction",)
    rho = Hyperparameter()
    alpha = Hyperparameter()

    def __init__(
        self,
        rho: Any = 0.05,
        every: int = 5,
        alpha: Any = 0.7,
        exclude_from_perturbation: Any = (),
    ) -> None:
        super().__init__(exclude_from_perturbation)
        self.every = every
        self.rho = rho
        self.alpha = alpha

    @property
    def label(self) -> str:
        """The rule with its present hyperparameters, as text."""
        return f"{super().label[:-1]}, every={self.every})"

    def gradients(self, batch: Batch) -> Sequence[Tensor]:
        """Returns SAM's gradients, or those of the batch plus the kept direction."""
        due = batch.is_due
        gradients = [backend.dense(gradient) for gradient in batch.gradients]
        count = len(gradients)
        second = batch.gradients_at(
            lambda: sharpness.perturbation(gradients, batch.scalar("rho")), only_if=due
        )
        second = [backend.dense(gradient) for gradient in second]
        before = batch.kept("direction")

        def anew() -> list[Tensor]:
            # Only the direction is used. It is kept in this precision.
            wide = [
                [ops.cast(v, old.dtype) for v, old in zip(values, before, strict=True)]
                for values in (second, gradients)
            ]
            across = sharpness.without_projection(*wide)
            length = sharpness.quotient(1.0, backend.global_norm(across))
            return [*second, *backend.scale(across, length)]

        def again() -> list[Tensor]:
            factor = batch.scalar("alpha") * backend.global_norm(gradients)
            return [*backend.add_scaled(gradients, before, factor), *before]

        results = backend.cond(due, anew, again)
        batch.keep("direction", results[count:], only_if=due)
        return results[:count]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, and numbers that were set later, as plain JSON."""
        return {**super().get_config(), "every": self.every}


@_register
class GSAM(SAM):
    """Surrogate-gap guided SAM: SAM that also lowers the gap between perturbed and plain loss.

    With the gradient `g` of the batch at the weights `w`, over all perturbed variables:

        h = ∇ loss(w + rho · g / ‖g‖)
        gradient = h − alpha · (g − (⟨g, h⟩ / ‖h‖²) · h)

    The last term is the part of `g` that is orthogonal to `h`. To first order, a step along its
    negative keeps the perturbed loss and raises the plain loss toward it. In the paper `rho`
    follows the learning rate: pass a schedule.

    Args:
        rho: The radius `‖ε‖`, a number >= 0 or a schedule over optimizer steps. Default: 0.05.
        alpha: The weight of the gap, a number >= 0 or a schedule. With 0 it is SAM. Default: 0.4.
        exclude_from_perturbation: A selector of variables that are neither perturbed nor counted
            in the norms and products. Default: none.

    Raises:
        ValueError: If `rho` or `alpha` is negative or not finite.
        TypeError: If an argument is of the wrong type.

    Example:
    >>> import keras_groupopt as kgo
    >>> kgo.GSAM(0.05, alpha=0.4)
    GSAM(rho=0.05, alpha=0.4)

    Reference:
        Zhuang et al. 2022, arXiv:2203.08065.
    """

    alpha = Hyperparameter()

    def __init__(
        self, rho: Any = 0.05, alpha: Any = 0.4, exclude_from_perturbation: Any = ()
    ) -> None:
        super().__init__(rho, exclude_from_perturbation)
        self.alpha = alpha

    def gradients(self, batch: Batch) -> Sequence[Tensor]:
        """Returns the gradients at the perturbed weights, less the orthogonal part of the first."""
        second = [backend.dense(gradient) for gradient in super().gradients(batch)]
        first = [backend.dense(gradient) for gradient in batch.gradients]
        across = sharpness.without_projection(first, second)
        return backend.add_scaled(second, across, -batch.scalar("alpha"))
