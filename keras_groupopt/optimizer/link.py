"""The link between an optimizer and its model: from the model to a plan for its variables."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from keras_groupopt.base import compat
from keras_groupopt.optimizer.declaration import Declared
from keras_groupopt.plan import plan as planning
from keras_groupopt.plan.plan import Plan
from keras_groupopt.plan.records import plan_from_records
from keras_groupopt.plan.resolve import resolve
from keras_groupopt.rules import making
from keras_groupopt.selectors import layer_paths
from keras_groupopt.selectors.variable_info import VariableCatalog
from keras_groupopt.step.gradient_rule_state import Wanted


@dataclasses.dataclass
class Link:
    """What an optimizer knows about its model.

    Args:
        reference: The model, held weakly. Default: none.
        catalog: The variables that the optimizer was built over, which give selectors of objects
            their paths. Default: `None`.
        records: The plan in the config that the optimizer was made from. Default: `None`.
        records_provisional: Whether their paths come from `variable.path`. Default: `False`.
        gradient_rule: What the gradient rule of the model asks to be kept. Default: `None`.
        shown: The plan that was last shown before the build. Default: `None`.
    """

    reference: weakref.ref[Any] | None = None
    catalog: VariableCatalog | None = None
    records: list[dict[str, Any]] | None = None
    records_provisional: bool = False
    gradient_rule: Wanted | None = None
    shown: Plan | None = None

    @property
    def model(self) -> Any:
        """The model, or `None` if none was given or it no longer exists."""
        return None if self.reference is None else self.reference()

    def required_model(self) -> Any:
        """Returns the model, or `None` if none was given.

        Raises:
            ValueError: If one was given that no longer exists.
        """
        model = self.model
        if model is None and self.reference is not None:
            raise ValueError(
                "The model given as `model=` must exist until the optimizer is built. Received: "
                "a model that was deleted. Keep a reference to it, or call "
                "`optimizer.bind(model)` with the model you train."
            )
        return model

    def train_function(self) -> weakref.ref[Any] | None:
        """Returns the training function that `fit` made for the model, held weakly, if any.

        `compile` drops it, so it tells the steps before a `compile` from those after it.
        """
        function = getattr(self.model, "train_function", None)
        return None if function is None else weakref.ref(function)

    @property
    def resting(self) -> list[dict[str, Any]]:
        """The records of variables that were frozen when the config was saved."""
        return [record for record in self.records or () if not record.get("trainable", True)]

    def name_of(self, variable: Any) -> str:
        """Returns a variable's layer path if the model is known, else Keras' own name."""
        model = self.model
        if model is not None:
            for info in layer_paths.describe_model(model).infos:
                if info.identity == id(variable):
                    return info.path
        return str(getattr(variable, "path", variable.name))

    def describe(self, variables: Sequence[Any]) -> VariableCatalog:
        """Returns the variables of the model, or `variables` if there is no model.

        Raises:
            ValueError: If a variable does not belong to the model.
        """
        model = self.required_model()
        if model is None:
            return layer_paths.describe_variables(variables)
        catalog = layer_paths.describe_model(model)
        known = {info.identity for info in catalog.infos}
        unknown = [v.path for v in variables if id(v) not in known]
        if unknown:
            raise ValueError(
                "The optimizer must be built with variables of its model. Received: "
                f'{", ".join(unknown[:5])}, not in the model "{model.name}" given as `model=`.'
            )
        return catalog

    def resolve(
        self, declared: Declared, variables: Sequence[Any]
    ) -> tuple[Plan, VariableCatalog | None]:
        """Returns the plan for variables, and the catalog it was resolved over.

        Args:
            declared: What the user declared.
            variables: The trainable variables, in order.

        Raises:
            ValueError: If the plan cannot be made.
        """
        groups, defaults, catalog = declared.groups, declared.defaults, None
        if self.records is not None:
            infos = layer_paths.describe_variables(variables).infos
            provisional = self.records_provisional
            plan = plan_from_records(self.records, groups, defaults, infos, provisional)
        else:
            catalog = self.describe(variables)
            places = {info.identity: place for place, info in enumerate(catalog.infos)}
            plan = resolve(groups, defaults, catalog, [places[id(v)] for v in variables])
        overwritten = [i for i, v in enumerate(variables) if compat.overwritten_by_gradient(v)]
        for planned in plan.groups:
            ruled = [v for v in planned.variables if v.position not in overwritten]
            making.check_variables(planned.group.rule, ruled, planned.group.where)
        plan = self.with_gradient_rule(planning.without_decay(plan, overwritten))
        return plan, catalog

    def with_gradient_rule(self, plan: Plan) -> Plan:
        """Returns a plan with the numbers of the model's gradient rule."""
        wanted = self.gradient_rule
        if wanted is None:
            return plan
        scalars = {f"{wanted.name}.{name}": value for name, value in wanted.scalars.items()}
        return dataclasses.replace(plan, gradient_rule=scalars)
