"""The attachment of a gradient rule to a model: which variables, which state, and the step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
from keras import ops

from keras_groupopt import backend
from keras_groupopt.base import compat
from keras_groupopt.optimizer import rebuilding
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer
from keras_groupopt.selectors import Selector, layer_paths
from keras_groupopt.step.gradient_rule_state import GradientState, Wanted
from keras_groupopt.training.batch import Batch, one_per_variable
from keras_groupopt.training.gradient_rule import GradientRule
from keras_groupopt.training.means import add, mean
from keras_groupopt.training.passes import Evaluate, Passes, summed

Tensor = Any


class Attachment:
    """A gradient rule in one model, with its state and metrics.

    It is a plain object, because Keras saves layers and metrics that it finds on a model.

    Args:
        rule: The rule. It belongs to this model from now on.
        model: The model, held weakly.

    Raises:
        ValueError: If the rule belongs to another model.
    """

    def __init__(self, rule: GradientRule, model: Any) -> None:
        other = rule._attached()
        if other is not None and other.model is not None and other.model is not model:
            raise ValueError(
                "A gradient rule must belong to one model. Received: "
                f'{rule.label} of the model "{other.model.name}", for "{model.name}". Make another '
                "one."
            )
        self._model = weakref.ref(model)
        self.rule = rule
        rule._attachment = weakref.ref(self)
        self.gap = mean("sam_gap")
        self.norm = mean("gradient_norm")
        # Whether this package's training step ever ran. A subclass may have a step of its own.
        self.used = False
        # What the rule asks for, once the model is compiled with it.
        self.wanted: Wanted | None = None
        # The optimizer that keeps the rule's state. Only a `GroupedOptimizer` can. Beside any
        # other optimizer the state is kept here.
        self._optimizer: GroupedOptimizer | None = None
        self._own: GradientState | None = None
        self.own_variables: list[Any] = []
        # Which variables a selector chooses, by the selector and the variables. It would be too
        # slow to walk through the model in each step.
        self._choices: dict[tuple[Any, ...], list[bool]] = {}

    @property
    def model(self) -> Any:
        """The model, or `None` once it is gone."""
        return self._model()

    @property
    def metrics(self) -> list[Any]:
        """The metrics of the training step."""
        return [self.norm, self.gap] if self.rule.perturbs else [self.norm]

    @property
    def state(self) -> GradientState | None:
        """What is kept for the rule, or `None` before the optimizer is built."""
        return self._own if self._optimizer is None else self._kept_by(self._optimizer)

    def _kept_by(self, optimizer: GroupedOptimizer) -> GradientState | None:
        """Returns the state that an optimizer keeps for this model's rule, or `None`."""
        state = None if optimizer._built is None else optimizer._built.gradient_state
        return state if state is not None and state.wanted is self.wanted else None

    def catalog(self) -> Any:
        """Returns the model's variables by layer path, or `None` if they are not known yet."""
        model = self.model
        return layer_paths.describe_model(model) if model is not None and model.built else None

    # Compile ------------------------------------------------------------------------------------

    def keep_in(self, optimizer: Any) -> None:
        """Makes the state of the rule: in a `GroupedOptimizer`, or here beside any other optimizer.

        Args:
            optimizer: The model's optimizer, as compiled.

        Raises:
            TypeError: If the rule has slots, and the optimizer is not a `GroupedOptimizer`.
        """
        rule = self.rule
        while getattr(optimizer, "inner_optimizer", None) is not None:
            optimizer = optimizer.inner_optimizer
        is_grouped = isinstance(optimizer, GroupedOptimizer)
        if rule.slots and not is_grouped:
            raise TypeError(
                f"{type(rule).__name__} keeps state beside each weight, for which the optimizer "
                f"must be a GroupedOptimizer. Received: {type(optimizer).__name__}. Compile with "
                "`kgo.GroupedOptimizer(model=model, ...)`, or take the optimizer over by "
                "`kgo.from_optimizer(optimizer, model)`."
            )
        if is_grouped and self._kept_by(optimizer) is not None:
            self._optimizer = optimizer
            return
        rule._current = rule.current
        self.wanted = Wanted(
            type(rule).__name__, rule.declared, rule._current, rule.slots, self.reach
        )
        self._own, self.own_variables = None, []
        self._optimizer = optimizer if is_grouped else None
        if is_grouped:
            rebuilding.keep_for_gradient_rule(optimizer, self.wanted, self.model)
        else:
            self._own = GradientState(self.wanted, [])
            self._own.make_variables(_Owner(self.own_variables))

    def check_optimizer(self) -> None:
        """Refuses an optimizer that keeps what the rule of another model asked for.

        A step that was compiled before would go on without an error.

        Raises:
            ValueError: If the optimizer was compiled with another model since.
        """
        if self._optimizer is not None and self._optimizer._link.gradient_rule is not self.wanted:
            raise ValueError(
                "The optimizer must keep what this model's gradient rule asks for. Received: one "
                "that was compiled with another model since. Call `compile` of "
                f'"{self.model.name}" again, with `optimizer=` as before.'
            )

    # Which variables ----------------------------------------------------------------------------

    def reach(self, variables: Sequence[Any]) -> frozenset[int]:
        """Returns the identities of the variables that the rule may perturb.

        Args:
            variables: The variables of groups that are not frozen.

        Raises:
            ValueError: If a selector names what is not there, or leaves none of the variables.
        """
        excluded, name = self.rule.exclude_from_perturbation, type(self.rule).__name__
        try:
            chosen = self._choose(excluded, variables)
        except ValueError as error:
            raise ValueError(f"In `exclude_from_perturbation` of {name}: {error}") from error
        if chosen and all(chosen):
            raise ValueError(
                "A gradient rule must have a variable to perturb. Received: "
                f"exclude_from_perturbation={excluded!r} in {name}, which chooses all of them."
            )
        return frozenset(id(v) for v, out in zip(variables, chosen, strict=True) if not out)

    def _choose(self, selector: Any, variables: Sequence[Any]) -> list[bool]:
        """Returns for each variable whether a selector chooses it; `()` chooses none."""
        if not isinstance(selector, Selector):
            return [False] * len(variables)
        key = (selector, *map(id, variables))
        if key not in self._choices:
            catalog = layer_paths.describe_model(self.model)
            chosen = {catalog[position].identity for position in selector.resolve(catalog)}
            self._choices[key] = [id(variable) in chosen for variable in variables]
        return self._choices[key]

    def _frozen(self) -> set[int]:
        """Returns the identities of variables in frozen groups."""
        built = None if self._optimizer is None else self._optimizer._built
        groups = [] if built is None else built.groups
        return {id(own.variable) for group in groups if group.frozen for own in group.members}

    # Step ---------------------------------------------------------------------------------------

    def gradients(
        self,
        loss: Tensor,
        first: Sequence[Tensor | None],
        variables: Sequence[Any],
        evaluate: Evaluate,
        optimizer: Any,
        is_due: bool | None = None,
    ) -> list[Tensor | None]:
        """Returns the gradients that the rule makes of those of the first pass.

        Args:
            loss: The loss of the first pass, unscaled.
            first: Its gradients, in the order of the variables; `None` for a variable without.
            variables: The trainable variables.
            evaluate: Takes another pass.
            optimizer: The model's optimizer.
            is_due: Whether the optimizer step is one of the rule's `every`, if that is known
                before the step is compiled. Default: it is computed from the step.
        """
        self.used = True
        self.check_optimizer()
        if self.state is None:
            # TensorFlow's `fit` builds the optimizer in the first step.
            backend.once_per_step(lambda: optimizer.build(list(variables)))
        state: Any = self.state
        # Scales of float8 training get values, not gradients.
        present = {
            place: gradient
            for place, (gradient, variable) in enumerate(zip(first, variables, strict=True))
            if gradient is not None and not compat.overwritten_by_gradient(variable)
        }
        frozen = self._frozen()
        moving = [place for place in present if id(variables[place]) not in frozen]
        if not moving:
            return list(first)
        sums = summed(present)
        scale = optimizer.scale_loss(ops.ones((), dtype="float32"))
        norm = backend.global_norm([sums[place] for place in moving])
        finite = ops.isfinite(ops.square(norm))
        add(self.norm, norm / scale, finite)
        if not self.rule.perturbs or backend.concrete(finite) is False:
            return list(first)
        reached = self.reach([v for v in variables if id(v) not in frozen])
        perturbed = [place for place in moving if id(variables[place]) in reached]
        if not perturbed:
            return list(first)
        weights = [variables[place] for place in perturbed]
        if any(id(weight) not in own for own in state.slots.values() for weight in weights):
            # `build` refuses variables that it does not know, and names them.
            optimizer.build(list(variables))
        merges = backend.has_replicas() and any(
            getattr(layer, "synchronized", False) for layer in layer_paths.layers(self.model)
        )
        passes = Passes(loss, present, perturbed, evaluate, merges)
        step = ops.convert_to_tensor(optimizer.iterations)
        if is_due is None:
            is_due = ops.equal(ops.cast(step, "int32") % self.rule.every, 0)
        batch = Batch(
            weights,
            [sums[place] for place in perturbed],
            passes.take,
            self._choose,
            state,
            step,
            is_due,
            scale,
        )
        with nullcontext() if self._optimizer is None else self._optimizer._in_run():
            own = self.rule.gradients(batch)
        own = one_per_variable(f"What {type(self.rule).__name__} returns", own, weights)
        own = [ops.cast(value, g.dtype) for g, value in zip(batch.gradients, own, strict=True)]
        changed = sums | passes.gradients | dict(zip(perturbed, own, strict=True))
        if passes.taken is not None:
            gap = passes.loss - ops.cast(loss, passes.loss.dtype)
            # A perturbed loss may overflow when the loss itself does not.
            counts = ops.logical_and(passes.taken, ops.logical_and(finite, ops.isfinite(gap)))
            add(self.gap, gap, counts)
        results = list(changed.values())
        if backend.concrete(finite) is None:
            # If the first gradients are not finite, the optimizer gets them as they are, and
            # sees in them which group is at fault.
            results = backend.where_lists(finite, results, list(sums.values()))
        gradients = list(first)
        for place, gradient in zip(changed, backend.shares_of_replicas(results), strict=True):
            gradients[place] = gradient
        return gradients


class _Owner:
    """Makes variables in place of an optimizer, and adds them to a list."""

    def __init__(self, variables: list[Any]) -> None:
        self._variables = variables

    def add_variable(self, shape: Any, initializer: Any, dtype: str, **options: Any) -> Any:
        variable = keras.Variable(initializer, shape=shape, dtype=dtype, trainable=False, **options)
        self._variables.append(variable)
        return variable
