"""Groups that stand still for a while: fastai's `freeze_to`."""

from __future__ import annotations

from typing import Any

from keras_groupopt.base.checks import check_count
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.optimizer.rebuilding import check_has_values, forget_compiled
from keras_groupopt.plan.plan import Plan
from keras_groupopt.step.built import BuiltOptimizer


class Freezing:
    """The part of `GroupedOptimizer` that freezes groups and lets them go on."""

    _declaration: Declaration
    _built: BuiltOptimizer | None
    build: Any

    def freeze_to(self, n: int) -> list[str]:
        """Freezes all groups before the `n`-th, and trains it and those after it.

        Groups count in the order of the model, by where the first variable of each is among its
        trainable variables: `freeze_to(-1)` trains the last group only, `freeze_to(-2)` the last
        two, `freeze_to(0)` all. Variables of frozen groups stop being `trainable`: they stay
        bit-identical, have no part in the norm, and keep their state for when they go on. `fit`
        compiles its step again; a `tf.function` or `jax.jit` of one's own has to be made again.
        BatchNorm layers go on as `layer.trainable` says. It is saved with the optimizer.

        Groups declared `frozen` stay so. To open groups one by one without compiling again, see
        `kgo.recipes.gradual_unfreezing`.

        Args:
            n: The first group to train; from the end if negative.

        Returns:
            The names of the groups that train now.

        Raises:
            TypeError: If `n` is no integer.
            ValueError: If there is no such group, it leaves none to train, or the optimizer is not
                built and has no model.

        Example:

        >>> import keras, keras_groupopt as kgo
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="backbone"),
        ...                           keras.layers.Dense(2, name="head")])
        >>> optimizer = kgo.GroupedOptimizer({"backbone": "backbone", "head": "head"}, model=model)
        >>> optimizer.freeze_to(-1)
        ['head']
        >>> [layer.name for layer in model.layers if layer.trainable_variables]
        ['head']
        >>> optimizer.freeze_to(0)
        ['backbone', 'head']

        Reference:
            Howard & Ruder 2018, arXiv:1801.06146; `Learner.freeze_to` of fastai.
        """
        n = check_count("n", n, -(2**31), where="freeze_to")
        model = self._declaration.live_model(required=False)
        if model is not None:
            check_has_values(model)
        if self._built is None:
            if model is None:
                raise ValueError(
                    "`freeze_to` needs a model before the optimizer is built. Received: no model. "
                    "Pass `GroupedOptimizer(model=...)` or call `optimizer.bind(model)`."
                )
            # What is frozen has to be built, to go on later.
            self.build(model.trainable_variables)
        assert self._built is not None
        names = in_model_order(self._built.plan)
        first = n + len(names) if n < 0 else n
        moving = [name for name in names[first:] if not self._built.plan[name].group.frozen]
        if not 0 <= first < len(names) or not moving:
            raise ValueError(
                f"`n` must leave a group to train. Received: freeze_to({n}) with {len(names)} "
                f"groups, in this order: {', '.join(names)}."
            )
        self._declaration.frozen_groups = tuple(names[:first])
        self._hold(self._built)
        if model is not None:
            forget_compiled(model)
        return moving

    def _hold(self, built: BuiltOptimizer) -> None:
        for group in built.groups:
            frozen = group.name in self._declaration.frozen_groups
            for variable in [] if group.frozen else group.variables:
                held = id(variable) in self._declaration.held
                if frozen and variable.trainable:
                    variable.trainable = False
                    self._declaration.held.add(id(variable))
                elif held and not frozen:
                    variable.trainable = True
                    self._declaration.held.discard(id(variable))


def in_model_order(plan: Plan) -> list[str]:
    """Returns the names of the groups with variables, by the place of the first of each."""
    filled = [planned for planned in plan.groups if planned.variables]
    groups = sorted(filled, key=lambda planned: planned.variables[0].position)
    return [planned.name for planned in groups]
