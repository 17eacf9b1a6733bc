"""Which model an optimizer belongs to, and the plan for its variables."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from keras_groupopt import backend
from keras_groupopt.base import compat, text
from keras_groupopt.optimizer.declaration import Declaration
from keras_groupopt.plan import resolve
from keras_groupopt.plan.plan import Plan, with_state_bytes, without_decay
from keras_groupopt.rules import registry, state_size
from keras_groupopt.selectors import layer_paths
from keras_groupopt.step import gradient_rule_state
from keras_groupopt.step.built import BuiltOptimizer
from keras_groupopt.step.gradient_rule_state import Wanted
from keras_groupopt.step.run_length import is_needed


class Binding:
    """The part of `GroupedOptimizer` that knows the model, its paths and its plan."""

    _declaration: Declaration
    _built: BuiltOptimizer | None
    _trainable_variables: list[Any]
    _trainable_variables_indices: Any
    _var_key: Any
    _require_built: Any
    rebuild: Any
    _change_gradient_state: Any

    @property
    def plan(self) -> Plan:
        """The plan: the built one, or a preview for the model as it is now.

        Raises:
            ValueError: If the optimizer is not built and has no model.
        """
        if self._built is not None:
            return self._built.plan
        model = self._declaration.live_model()
        if model is None:
            raise ValueError(
                "`plan` needs a model before the optimizer is built. Received: no model. Pass "
                "`GroupedOptimizer(model=...)` or call `optimizer.bind(model)`."
            )
        preview = self._resolve(list(model.trainable_variables))
        self._declaration.preview = with_state_bytes(preview, state_size.estimate(preview))
        return self._declaration.preview

    def bind(self, model: Any) -> None:
        """Attaches a model, from which layer paths come. It is held weakly.

        Args:
            model: The Keras model whose variables this optimizer trains.

        Raises:
            TypeError: If it is no model.
            ValueError: If the optimizer was built with variables of another model.
        """
        if not isinstance(model, keras.layers.Layer):
            raise TypeError(
                "`model` must be a Keras model. Received: "
                f"model={model!r} of type {type(model).__name__}."
            )
        if self._built is not None:
            own = {id(variable) for variable in model.variables}
            if any(id(variable) not in own for variable in self._trainable_variables):
                raise ValueError(
                    "`model` must hold the variables that this optimizer was built with. "
                    f'Received: model "{model.name}", which does not. Call '
                    "`optimizer.rebuild(model)` if it took the place of that model, or make a new "
                    "GroupedOptimizer for another model."
                )
        self._declaration.model = weakref.ref(model)

    def keep_for_gradient_rule(self, wanted: Wanted, model: Any) -> None:
        """Keeps, and saves, what the gradient rule of a model asks for, instead of another's.

        A model with a gradient rule calls it when it is compiled.

        Args:
            wanted: What to keep.
            model: The model. It becomes the optimizer's, where that has another or none.

        Raises:
            ValueError: If a built optimizer does not fit the model.
        """
        declaration = self._declaration
        before = declaration.gradient_rule
        if self._built is None:
            declaration.gradient_rule = wanted
            if declaration.records is None:
                self.bind(model)
            return
        if declaration.live_model(required=False) is not model:
            self.bind(model)
        declaration.gradient_rule = wanted
        try:
            if self._is_built_for(model):
                self._change_gradient_state(self._built, wanted)
                return
            report = self.rebuild(model)
        except BaseException:
            declaration.gradient_rule = before
            raise
        dropped = [key for key in report.dropped if gradient_rule_state.PREFIX not in key]
        if dropped:
            warnings.warn(
                f"State of variables that are frozen now was dropped: {text.listing(dropped)}.",
                stacklevel=4,
            )

    def _is_built_for(self, model: Any) -> bool:
        """Whether nothing but a gradient rule's state could come out otherwise in a rebuild."""
        built = self._built
        if built is None or built.plan.provisional or self._declaration.pending is not None:
            return False
        if is_needed(self._with_gradient_rule(built.plan)) != (built.run_length is not None):
            return False
        present = layer_paths.describe_model(model)
        own = [id(variable) for variable in model.trainable_variables]
        paths = {variable.identity: variable.path for variable in present}
        held = self._declaration.held
        return own == [id(v) for v in built.variables if id(v) not in held] and all(
            paths.get(identity) == path for identity, path in built.paths.items()
        )

    def keeps_for(self, wanted: Wanted | None) -> bool:
        """Whether this was what `keep_for_gradient_rule` was called with last."""
        return self._declaration.gradient_rule is wanted

    def check_model(self, model: Any) -> None:
        """Refuses a model that the built optimizer cannot go on training as it is now.

        Attaches the model if none is attached. `GroupLogger` calls it when training begins.

        Args:
            model: The Keras model whose variables this optimizer trains.

        Raises:
            ValueError: If the optimizer is not built, if the model has trainable variables it was
                not built with, or if `trainable` changed since `fit` last made its training step.
        """
        built = self._require_built("check_model")
        if self._declaration.live_model(required=False) is None:
            self.bind(model)
        now = frozenset(self._positions(model.trainable_variables))
        made = None if built.received_in is None else built.received_in()
        received = built.received
        if received is None or made is None or made is not model.train_function:
            return
        changed = [v.path for v in built.plan.variables if v.position in now ^ received]
        if not changed:
            return
        raise ValueError(
            "`trainable` must not change between `compile` and `fit`: a compiled step keeps "
            "training the variables it was made for. Received: changed "
            f"{text.listing(changed)}. Call `model.compile(optimizer=model.optimizer, ...)` "
            "again; the optimizer keeps its state."
        )

    def _resolve(self, variables: list[Any]) -> Plan:
        plan = self._resolve_declared(variables)
        overwritten = [i for i, v in enumerate(variables) if compat.overwritten_by_gradient(v)]
        for planned in plan.groups:
            ruled = [v for v in planned.variables if v.position not in overwritten]
            shapes = [(variable.path, variable.shape) for variable in ruled]
            registry.check_shapes(planned.group.rule, shapes, planned.group.where)
        return self._with_gradient_rule(without_decay(plan, overwritten))

    def _with_gradient_rule(self, plan: Plan) -> Plan:
        wanted = self._declaration.gradient_rule
        if wanted is None:
            return plan
        scalars = {f"{wanted.name}.{name}": value for name, value in wanted.scalars.items()}
        return dataclasses.replace(plan, gradient_rule=scalars)

    def _resolve_declared(self, variables: list[Any]) -> Plan:
        declaration = self._declaration
        groups, defaults = declaration.groups, declaration.defaults
        if declaration.records is not None:
            infos = layer_paths.describe_variables(variables).infos
            return resolve.plan_from_records(
                declaration.records, groups, defaults, infos, declaration.records_provisional
            )
        model = declaration.live_model()
        catalog = (
            layer_paths.describe_variables(variables)
            if model is None
            else layer_paths.describe_model(model)
        )
        places = {info.identity: place for place, info in enumerate(catalog.infos)}
        unknown = [v.path for v in variables if id(v) not in places]
        if unknown:
            raise ValueError(
                "The optimizer must be built with variables of its model. Received: "
                f'{", ".join(unknown[:5])}, not in the model "{model.name}" given as `model=`.'
            )
        declaration.catalog = catalog
        trainable = [places[id(variable)] for variable in variables]
        return resolve.resolve(groups, defaults, catalog, trainable)

    def _positions(self, variables: Sequence[Any]) -> list[int]:
        known = self._trainable_variables_indices
        positions = [known.get(self._var_key(variable)) for variable in variables]
        unknown = [v for v, position in zip(variables, positions, strict=True) if position is None]
        if unknown:
            raise ValueError(
                "Every variable must be one the optimizer was built with. Received: unknown "
                f"{', '.join(self._name_of(v) for v in unknown[:5])}"
                f"{' …' if len(unknown) > 5 else ''}. They became trainable, or were added, after "
                "the optimizer was built, or belong to another model. Call "
                "`optimizer.rebuild(model)`, which keeps the state of every variable that stays."
            )
        return positions

    @staticmethod
    def _in_order(positions: Sequence[Any]) -> bool:
        """Whether values of variables at `positions` can go by their order, where that matters."""
        return not backend.BY_ORDER or list(positions) == sorted(positions)

    def _name_of(self, variable: Any) -> str:
        """Returns a variable's layer path where the model is known, else Keras' own name."""
        model = self._declaration.live_model(required=False)
        if model is not None:
            for info in layer_paths.describe_model(model).infos:
                if info.identity == id(variable):
                    return info.path
        return str(getattr(variable, "path", variable.name))

    def _say_if_changed(self, plan: Plan) -> None:
        preview = self._declaration.preview
        difference = preview.compare(plan) if preview is not None else None
        if difference:
            warnings.warn(
                "The plan differs from the one last shown, because the model changed:\n  "
                + "\n  ".join(difference.first(5)),
                stacklevel=3,
            )
