"""An optimizer that measures its steps when it is asked to."""

from __future__ import annotations

from typing import Any

from keras_groupopt import backend, checkpoint
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.optimizer.rebuilding import forget_compiled
from keras_groupopt.step import measurements
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.measurements import CLIP_SHARE, Means, Measurements


class Measuring:
    """The part of `GroupedOptimizer` that measures its steps."""

    _declaration: Declaration
    _built: BuiltOptimizer | None
    _require_built: Any
    iterations: Any
    global_clipnorm: float | None

    def measure(self, *names: str, model: Any = None) -> None:
        """Measures every optimizer step from now on, for `measurements`.

        `kgo.GroupLogger` calls it. A loop of one's own calls it before it compiles its step.
        What is measured costs a pass over gradients or weights in each step: `"gradient_norm"` and
        `"clip_share"` take norms that the step has anyway, as far as it has them; `"update_ratio"`
        keeps a copy of the weights for the length of a step.

        Args:
            *names: Some of `"gradient_norm"`, `"update_ratio"` and `"clip_share"`.
            model: The model whose compiled training step is made anew, as it does not measure yet.
                Default: the optimizer's model.

        Raises:
            ValueError: If a name is none of these, or it is `"clip_share"` and nothing clips.

        Example:
        >>> import keras, numpy as np, keras_groupopt as kgo
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> optimizer = kgo.GroupedOptimizer(
        ...     model=model, rule="sgd", learning_rate=0.5, global_clipnorm=1.0)
        >>> optimizer.measure("gradient_norm", "clip_share")
        >>> ones = [np.ones(v.shape, "float32") for v in model.trainable_variables]
        >>> optimizer.apply(ones, model.trainable_variables)
        >>> measured = optimizer.measurements()
        >>> round(measured["gradient_norm"]["default"], 4), measured["clip_share"]
        (3.1623, {None: 1.0})
        """
        measurements.check_names(names)
        declaration = self._declaration
        wanted = declaration.measured | set(names)
        if CLIP_SHARE in names and not self._clips():
            raise ValueError(
                '"clip_share" needs an optimizer that clips gradients. Received: one that does '
                "not. Make it with `GroupedOptimizer(global_clipnorm=1.0)`."
            )
        if wanted == declaration.measured:
            return
        if self._built is not None:
            self._built.measurements = self.make_measurements(self._built, wanted)
        declaration.measured = wanted
        model = declaration.live_model(required=False) if model is None else model
        if model is not None and getattr(model, "train_function", None) is not None:
            forget_compiled(model, ("train",))

    def make_measurements(
        self, built: BuiltOptimizer, wanted: frozenset[str]
    ) -> Measurements | None:
        """Makes the sums of what is wanted beside the variables of the built optimizer."""
        if not wanted:
            return None
        with (
            checkpoint.beside_weights(),
            backend.on_devices_of([self.iterations, *built.variables]),
        ):
            return Measurements(wanted, built.groups)

    def _clips(self) -> bool:
        declared = (*self._declaration.groups, self._declaration.defaults)
        return any(
            limit is not None
            for one in declared
            for limit in (one.clipnorm, one.global_clipnorm, one.clipvalue)
        )

    def measurements(self) -> Means:
        """Returns the means over the optimizer steps since the last `reset_measurements`.

        Per group that moves: `"gradient_norm"`, the norm of its gradients before any clipping;
        `"update_ratio"`, how far a step moves its weights over the norm of its weights;
        `"clip_share"`, the share of steps in which its own clipping shortened a gradient, for
        groups that have one. Under the key `None`: the norm over all groups, and the share of steps
        in which `global_clipnorm` shortened the gradients. Steps that were skipped do not count, a
        step without a gradient counts with 0, and what no step measured is NaN.

        Reads values of the device.

        Returns:
            A dict by measurement of dicts by group, with what `measure` was called for.

        Raises:
            ValueError: If the optimizer is not built.
        """
        own = self._require_built("measurements").measurements
        return {} if own is None else own.means(self.global_clipnorm is not None)

    def reset_measurements(self) -> None:
        """Starts the means of `measurements` over; outside of a compiled step."""
        if self._built is not None and self._built.measurements is not None:
            self._built.measurements.reset()
