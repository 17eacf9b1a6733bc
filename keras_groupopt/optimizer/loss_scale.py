"""Dynamic loss scaling for `mixed_float16` that counts what it skips and saves what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.base.checks import check_count, check_positive
from keras_groupopt.optimizer import applying, loss_scale_file
from keras_groupopt.optimizer.grouped_optimizer import FIXED, GroupedOptimizer
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.nonfinite import NONE
from keras_groupopt.step.one_step import on_each_device

Tensor = Any

# The scale stays within powers of two of float32: at 0 or infinity it would never move again.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


@keras.saving.register_keras_serializable(package="keras_groupopt")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    With the scale `s`, the gradients `g` of `s · loss` and `n = dynamic_growth_steps`:

        all g finite:   one step of the inner optimizer with g / s;
                        s ← 2 s after n such steps in a row
        otherwise:      nothing of the inner optimizer moves; skipped_steps ← skipped_steps + 1,
                        s ← s / 2

    `compile` does not wrap it again. It differs from `keras.optimizers.LossScaleOptimizer`, which
    `compile` puts around an optimizer by itself in `mixed_float16`, in this: skipped steps are
    counted and the group at fault is kept; the scale and the counters are saved once, and loaded
    before the build too; whatever is public on the inner optimizer can be used on this one;
    `apply` works outside a compiled step on JAX; the scale never gets stuck at 0 or infinity; and
    under a TensorFlow strategy it looks at the gradients of all replicas, not of the first.
    The scale may fall below 1, as gradients of a large loss may overflow without any scale.

    Gradients of frozen groups are not checked. With gradient accumulation a micro-batch that
    overflows is dropped and does not fill the window; `skipped_steps` counts it.

    A file holds the inner optimizer's state as a `GroupedOptimizer` writes it, under
    `inner_optimizer`. Files written by Keras' class around a `GroupedOptimizer` can be loaded.

    Args:
        inner_optimizer: The `GroupedOptimizer` that does the steps, without `loss_scale_factor`.
        initial_scale: The first scale, a positive number; a power of two divides without rounding.
            Default: 32768.
        dynamic_growth_steps: After how many finite steps in a row the scale doubles; >= 1.
            Default: 2000.
        name: The optimizer's name. Default: Keras numbers one.

    Attributes:
        dynamic_scale: The present scale, a float32 variable.
        step_counter: Finite steps since the scale last changed, an integer variable.
        skipped_steps: Steps skipped so far, an integer variable.
        nonfinite_group_index: The index in `plan.groups` of the first group with a gradient that
            was not finite in the last step skipped; -1 if none was. An integer variable.

    Raises:
        TypeError: If `inner_optimizer` is not a `GroupedOptimizer`, or an argument is of the wrong
            type.
        ValueError: If a value is out of range, or `inner_optimizer` has a `loss_scale_factor`.

    Example:

    >>> import keras, numpy as np, keras_groupopt as kgo
    >>> keras.config.set_dtype_policy("mixed_float16")
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> optimizer = kgo.LossScaleOptimizer(kgo.GroupedOptimizer(model=model, learning_rate=0.5),
    ...                                    initial_scale=2.0**30)
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, verbose=0)
    >>> int(optimizer.skipped_steps), int(optimizer.iterations), float(optimizer.dynamic_scale)
    (2, 0, 268435456.0)
    >>> optimizer.first_nonfinite_group, float(optimizer.learning_rate)
    ('default', 0.5)

    Reference:
        Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.
    """

    inner_optimizer: GroupedOptimizer

    def __init__(
        self,
        inner_optimizer: GroupedOptimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
    ) -> None:
        where = "LossScaleOptimizer"
        _check_inner(inner_optimizer)
        initial_scale = check_positive("initial_scale", initial_scale, where=where)
        growth = check_count("dynamic_growth_steps", dynamic_growth_steps, 1, where=where)
        super().__init__(
            inner_optimizer, initial_scale=initial_scale, dynamic_growth_steps=growth, name=name
        )
        # Arguments of the inner optimizer read the same here.
        for fixed in FIXED:
            super().__setattr__(fixed, getattr(inner_optimizer, fixed))
        # In the order of Keras' class. They are made now, so that they can be loaded before the
        # build.
        self.step_counter = self._make("step_counter", 0, "int")
        self.dynamic_scale = self._make("dynamic_scale", initial_scale, "float32")
        self.skipped_steps = self._make("skipped_steps", 0, "int32")
        self.nonfinite_group_index = self._make("nonfinite_group_index", NONE, "int32")

    def _make(self, name: str, value: float, dtype: str) -> Any:
        return self.add_variable(
            shape=(),
            initializer=lambda shape, dtype=None: ops.full(shape, value, dtype=dtype),
            dtype=dtype,
            aggregation="none",
            name=name,
        )

    # The inner optimizer through this one -------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the inner optimizer is built, and still knows its model's variables."""
        inner = vars(self).get("inner_optimizer")
        return inner is not None and inner.built

    @built.setter
    def built(self, value: bool) -> None:
        """Ignored: only `build` builds."""

    def build(self, var_list: Sequence[Any]) -> None:
        """Builds the inner optimizer.

        Args:
            var_list: The trainable Keras variables, in the order gradients will come in.

        Raises:
            ValueError: As the inner optimizer's `build`.
        """
        self.inner_optimizer.build(var_list)

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(inner, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self.inner_optimizer!r}>"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Always raises, as for the inner optimizer.

        Raises:
            ValueError: Always.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    @property
    def first_nonfinite_group(self) -> str | None:
        """The name of the group at `nonfinite_group_index`, or `None` if no step was skipped."""
        index = backend.on_host(self.nonfinite_group_index)
        return None if index == NONE else str(self.inner_optimizer.plan.groups[index].name)

    # Step ---------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss times the present scale."""
        return ops.multiply(loss, self.dynamic_scale)

    def apply(
        self,
        grads: Sequence[Tensor],
        trainable_variables: Sequence[Any] | None = None,
        sample_count: Any = None,
    ) -> None:
        """Does one step of the inner optimizer with unscaled gradients, or skips it.

        Args:
            grads: One gradient of the scaled loss per variable; `None` for a variable without one.
            trainable_variables: Their variables, as for the inner optimizer. Default: all variables
                it was built with.
            sample_count: As for the inner optimizer. Default: `None`.

        Raises:
            ValueError: As the inner optimizer's `apply`.
        """
        inner, grads = self.inner_optimizer, list(grads)
        if not grads:
            return
        positions = applying.take_in(inner, grads, trainable_variables)
        built = inner._require_built("apply")
        known = [built.variables[position] for position in positions]

        def step_on_device(sums: list[Tensor | None], samples: Tensor | None) -> None:
            flags = _group_flags(built, sums, positions)
            unscaled = _unscale(sums, known, self.dynamic_scale)
            backend.run_if(
                ops.all(flags),
                lambda: inner.apply(unscaled, known, **applying.given(samples)),
                [*known, *applying.changing_variables(inner)],
            )
            self._record(flags)

        on_each_device(step_on_device, grads, known, sample_count, self.variables)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Tensor],
        trainable_variables: Sequence[Tensor],
        sample_count: Any = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Does one step on values instead of variables (JAX and torch).

        Args:
            optimizer_variables: Values of `optimizer.variables`, in order.
            grads: One gradient of the scaled loss per value of `trainable_variables`.
            trainable_variables: Values of the trainable variables, as for the inner optimizer.
            sample_count: As for the inner optimizer. Default: `None`.

        Returns:
            The new values of `trainable_variables` and of `optimizer_variables`.

        Raises:
            ValueError: As the inner optimizer's `stateless_apply`.
        """
        return applying.apply_to_values(
            self,
            self.inner_optimizer,
            (optimizer_variables, grads, trainable_variables),
            lambda variables: self.apply(grads, variables, **applying.given(sample_count)),
        )

    def _record(self, flags: Tensor) -> None:
        """Moves the scale and the counters after a step.

        Args:
            flags: Per group, whether its gradients were finite.
        """
        finite = ops.all(flags)
        scale = ops.convert_to_tensor(self.dynamic_scale)
        counter = ops.convert_to_tensor(self.step_counter) + 1
        due = ops.equal(counter, self.dynamic_growth_steps)
        grown = ops.where(due, ops.minimum(scale * 2.0, LARGEST_SCALE), scale)
        halved = ops.maximum(scale * 0.5, SMALLEST_SCALE)
        restart = ops.logical_or(due, ops.logical_not(finite))
        first = ops.cast(ops.argmin(ops.cast(flags, "int32")), "int32")
        last = ops.convert_to_tensor(self.nonfinite_group_index)
        self.dynamic_scale.assign(ops.where(finite, grown, halved))
        self.step_counter.assign(ops.where(restart, ops.zeros_like(counter), counter))
        self.skipped_steps.assign_add(1 - ops.cast(finite, "int32"))
        self.nonfinite_group_index.assign(ops.where(finite, last, first))

    # State --------------------------------------------------------------------------------------

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets `optimizer.variables`, in order.

        Args:
            weights: One value per variable.

        Raises:
            ValueError: If the optimizer is not built, or counts or shapes differ.
        """
        inner = self.inner_optimizer
        if len(weights) != len(self.variables):
            raise ValueError(
                "`weights` must have the shapes of `optimizer.variables`. Received: "
                f"{len(weights)} values for {len(self.variables)} variables."
            )
        count = len(self.variables) - len(inner.variables)
        own = list(weights[:count])
        if any(np.shape(weight) != () for weight in own):
            raise ValueError(
                f"`weights` must start with the {count} scalars of LossScaleOptimizer. Received: "
                f"shapes {[np.shape(weight) for weight in own]}."
            )
        inner.set_weights(weights[count:])
        for variable, weight in zip(self.variables, own, strict=False):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        """Writes the scale and the counters. Keras then writes the inner optimizer beside them.

        Args:
            store: Where to write: a mapping from names to arrays.
        """
        inner = self.inner_optimizer
        if inner._built is not None or inner._run.pending is not None:
            for name in loss_scale_file.NAMES:
                store[name] = ops.convert_to_numpy(getattr(self, name))

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, or the scale that Keras' class wrote.

        Args:
            store: Where to read: a mapping from names to arrays.

        Raises:
            ValueError: If it is damaged, or was saved by another optimizer. Nothing is assigned
                then.
        """
        for name, value in loss_scale_file.read(store).items():
            getattr(self, name).assign(value)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, with the inner optimizer's config."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Any = None
    ) -> LossScaleOptimizer:
        """Returns the optimizer that `get_config` described, without its state."""
        # Keras takes the inner optimizer out of the config that it is given.
        arguments = dict(config)
        inner = keras.saving.deserialize_keras_object(
            arguments.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **arguments)


def _group_flags(
    built: BuiltOptimizer, gradients: Sequence[Tensor | None], positions: Sequence[int]
) -> Tensor:
    """Returns, per group, whether its gradients are finite; a boolean vector.

    Frozen groups and missing gradients count as finite.

    Args:
        built: The built groups.
        gradients: One per position; `None` if there is none.
        positions: Places of their variables among those the optimizer was built with.
    """
    finite: list[list[Tensor]] = [[ops.convert_to_tensor(True)] for _ in built.groups]
    for gradient, position in zip(gradients, positions, strict=True):
        group, _ = built.places[position]
        if gradient is not None and not group.frozen:
            finite[group.number].append(ops.all(ops.isfinite(_elements(gradient))))
    return ops.stack([ops.all(ops.stack(flags)) for flags in finite])


def _elements(gradient: Tensor) -> Tensor:
    """Returns the elements of a gradient: those of a sparse one (TensorFlow's slices) are rows."""
    values = getattr(gradient, "values", gradient)
    return gradient if callable(values) else values


def _unscale(grads: Sequence[Tensor | None], variables: Sequence[Any], scale: Any) -> list[Any]:
    """Returns the gradients of the unscaled loss; one that is a next value stays as it is."""
    return [
        gradient
        if gradient is None or compat.overwritten_by_gradient(variable)
        else ops.divide(gradient, scale)
        for gradient, variable in zip(grads, variables, strict=True)
    ]


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, GroupedOptimizer):
        raise TypeError(
            "`inner_optimizer` must be a GroupedOptimizer. Received: "
            f"{inner!r} of type {type(inner).__name__}. Around another optimizer use "
            "`keras.optimizers.LossScaleOptimizer`."
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            "`inner_optimizer` must have no scale of its own. Received: "
            f"loss_scale_factor={inner.loss_scale_factor!r}. Leave it out: LossScaleOptimizer "
            "scales the loss."
        )
