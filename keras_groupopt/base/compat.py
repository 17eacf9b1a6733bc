"""The only place that touches Keras' internals, with the reason for each."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import stateless_scope
from keras.src.backend.common.variables import get_autocast_scope

# The class of `keras.Model(inputs, outputs)`, which has no public name.
from keras.src.models.functional import Functional

__all__ = [
    "OVERRIDDEN",
    "Functional",
    "ScopeWithin",
    "all_layers",
    "backend_optimizer",
    "build_for",
    "built_variables",
    "call_for_training",
    "callback_list_of",
    "calls",
    "child_layers",
    "compute_loss",
    "current_learning_rate",
    "custom_objects",
    "declared_learning_rate",
    "has_decay_exclusion",
    "inner_optimizer_of",
    "is_backend_variant",
    "is_decayed",
    "is_keras_own",
    "is_purged",
    "is_readable",
    "layer_class_names",
    "layer_classes",
    "layout_map_of",
    "layout_of",
    "moving",
    "note_shardings",
    "optimizer_map_of",
    "overwritten_by_gradient",
    "own_variables",
    "place_in",
    "positions_of",
    "rate_variable",
    "redirect_list_updates",
    "redirect_updates",
    "register_variables",
    "replace_built_variables",
    "set_layout",
    "set_path",
    "share_counter",
    "shared_state",
    "skip_step",
    "start_at_epoch",
    "state_attributes",
    "structures",
    "track_all_state",
    "track_loss",
    "tracked_variables",
    "untrack",
    "update_metrics",
    "update_step_of",
    "values_of",
    "with_layouts",
]

# What our classes override in Keras' by an underscore name, and why there is no public way.
OVERRIDDEN = {
    "_backend_update_step": "It moves all variables at once; `update_step` moves one.",
    "_model_variables_moving_average": "`SwapEMAWeights` reads it, and has to be refused.",
}


def child_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers directly below `layer`, each once, in an order the code decides.

    Functional and Sequential models give their layers in the order of the graph; what is attached
    to a model or layer as an attribute, alone or in lists and dicts, follows in the order of
    assignment.
    """
    layers = list(layer.layers) if isinstance(layer, keras.Model) else []
    # `layers` exists on models only; the tracker's list is what `Layer.weights` itself reads.
    layers += getattr(layer, "_layers", [])
    return list({id(child): child for child in layers if child is not layer}.values())


def calls(model: keras.Model) -> list[tuple[Any, list[Any], list[Any]]] | None:
    """Returns what a functional or built Sequential model calls: operation, inputs, outputs.

    In an order in which inputs come before what needs them; `None` for a model without a graph.
    `operations` names what is called, but not with which tensors.
    """
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(graph, Functional):
        return None
    nodes = [node for _, at in sorted(graph._nodes_by_depth.items(), reverse=True) for node in at]
    return [(node.operation, list(node.input_tensors), list(node.output_tensors)) for node in nodes]


def callback_list_of(callback: keras.callbacks.Callback) -> Any:
    """Returns the list whose hook is calling `callback`, or `None`.

    It is gone when `evaluate` or `predict` is over, also after an exception. Nothing that Keras
    gives to a callback is: `model` and `params` outlive the call, and no hook tells of its end.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList) and any(
            listed is callback for listed in owner.callbacks
        ):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def backend_optimizer() -> type[Any]:
    """Returns the class that a backend puts above every optimizer; it has no public name."""
    return keras.optimizers.Optimizer.__bases__[0]


def layout_of(variable: Any) -> Any:
    """Returns how a variable is laid out over devices, or `None`.

    `add_variable_from_reference` takes it over, but for slots of the variable's own dtype only.
    """
    return getattr(variable, "_layout", None)


def layout_map_of(distribution: keras.distribution.ModelParallel) -> Any:
    """Returns the layout map that a distribution was made with, which has no getter.

    `get_tensor_layout` takes entries for weights as entries for their state too in Keras 3.10,
    which looks for a pattern anywhere in a path.
    """
    return distribution._layout_map


class ScopeWithin(keras.StatelessScope):
    """A stateless scope that has values for some variables; of others the scope around it tells.

    Scopes do not see the one around them, and have no public way to it.
    """

    def __init__(self, state_mapping: Any) -> None:
        super().__init__(state_mapping=state_mapping)
        self._around = stateless_scope.get_stateless_scope()

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value of a variable, or `None` where it is the variable's own."""
        own = super().get_current_value(variable)
        if own is not None or self._around is None:
            return own
        return self._around.get_current_value(variable)


def set_layout(variable: Any, layout: Any) -> None:
    """Lays a variable out over devices; Keras asks for a layout only while it makes a variable."""
    variable._layout = layout
    variable.assign(variable.value)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that `layer` itself owns, each once, without those of layers below."""
    # `Layer.weights` adds those of the children, and leaves out nothing else.
    variables = [*layer._trainable_variables, *layer._non_trainable_variables]
    return list({id(variable): variable for variable in variables}.values())


def layer_class_names(cls: type) -> Iterator[str]:
    """Yields the names of `cls` and its bases up to but without `keras.Layer`.

    Keras' own bases that are no layers, such as a backend's trainer, are left out.
    """
    for base in cls.__mro__:
        if base is keras.Layer:
            return
        # Models mix in classes of Keras that differ per backend.
        if issubclass(base, keras.Layer) or not base.__module__.startswith("keras.src."):
            yield base.__name__


def layer_classes() -> Iterator[type[Any]]:
    """Yields every class of layers that exists in this process."""
    pending = [keras.Layer]
    seen = set()
    while pending:
        cls = pending.pop()
        if cls not in seen:
            seen.add(cls)
            pending += cls.__subclasses__()
            yield cls


def is_backend_variant(cls: type) -> bool:
    """Whether `cls` is what Keras puts in the place of a public class on a backend."""
    return cls.__module__.startswith("keras.src.backend.")


def is_keras_own(cls: type) -> bool:
    """Whether Keras itself defines `cls`, in its public or in a backend's module."""
    return cls.__module__.startswith("keras.src.")


def declared_learning_rate(optimizer: Any) -> Any:
    """Returns the rate an optimizer was made with: a float, a schedule or a function.

    `learning_rate` gives the value of a schedule at the current step, not the schedule.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        # The shortest decimal that rounds to the float32 value: 0.1 rather than 0.10000000149.
        return float(str(np.float32(keras.ops.convert_to_numpy(rate))))
    return rate


def moving(rule: Any) -> Any:
    """Returns the optimizer that moves the variables of a rule: of Lookahead, the one within."""
    return getattr(rule, "ahead", rule)


def skip_step(rule: Any) -> None:
    """Counts a step in which no variable of `rule` has a gradient.

    Keras refuses to apply no gradient at all; among several groups it is an ordinary step.
    """
    mover = moving(rule)
    if isinstance(mover, keras.optimizers.Nadam):
        # The product of its momentum schedule is advanced in a hook of `apply`, once per step.
        product = mover._u_product
        step = keras.ops.cast(mover.iterations + 1, product.dtype)
        mover.assign(product, product * mover.beta_1 * (1.0 - 0.5 * keras.ops.power(0.96, step)))
    rule.iterations.assign_add(1)


def share_counter(inner: Any, outer: Any) -> None:
    """Lets an optimizer count the steps of another one, for which Keras has no public way."""
    inner._iterations = outer._iterations
    # Where gradients are accumulated, `iterations` is the counter divided by it.
    inner.gradient_accumulation_steps = outer.gradient_accumulation_steps


def update_step_of(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
) -> None:
    """Moves variables by an optimizer, without what `apply` does around it.

    The hook, and not `update_step`: some optimizers move lists at once there, or keep state in it.
    """
    optimizer._backend_update_step(gradients, variables, learning_rate)


def state_attributes(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes of a built optimizer that hold the state of its rule."""
    own = ("_variables", "_trainable_variables", "_iterations", "_learning_rate")
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in vars(optimizer).items()
        if name not in own
        and any(
            isinstance(item, keras.Variable)
            for item in (value if isinstance(value, (list, tuple)) else (value,))
        )
    }


def overwritten_by_gradient(variable: Any) -> bool:
    """Whether the gradient is the variable's next value (scales of float8 training)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def rate_variable(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's rate, or `None` where it is computed.

    `optimizer.learning_rate` computes it, which a schedule may not be ready for.
    """
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def redirect_list_updates(rule: Any, around: Any) -> None:
    """Has `around(update, gradients, variables)` called in place of the update of all variables.

    `update(gradients, variables)` is what the rule would have done, at its own rate.
    """
    update = rule._backend_update_step

    def redirected(gradients: Any, variables: Any, learning_rate: Any) -> None:
        def original(gradients: Any, variables: Any) -> None:
            update(gradients, variables, learning_rate)

        around(original, gradients, variables)

    rule._backend_update_step = redirected


def redirect_updates(rule: Any, around: Any) -> None:
    """Has `around(update, gradients, variables)` called in place of each update of variables.

    `update(gradients, variables, learning_rate)` is what the rule would have done. Keras updates
    one variable at a time, but several of its own rules take lists on torch; it has no public
    place for a rate per variable.
    """
    rule = moving(rule)
    one = rule.update_step

    def single(gradients: Any, variables: Any, learning_rate: Any) -> None:
        one(gradients[0], variables[0], learning_rate)

    rule.update_step = lambda gradient, variable, _: around(single, [gradient], [variable])
    several = getattr(rule, "_parallel_update_step", None)
    if several is not None:
        rule._parallel_update_step = lambda gradients, variables, _: around(
            several, gradients, variables
        )


def place_in(rule: Any, variable: Any) -> int:
    """Returns the place of a variable, or of TensorFlow's own, among those of a built rule."""
    return int(rule._get_variable_index(variable))


def shared_state(rule: Any) -> list[Any]:
    """Returns the state that Keras' own rules keep for all variables, beside the step counter."""
    mover = moving(rule)
    return [mover._u_product] if isinstance(mover, keras.optimizers.Nadam) else []


def has_decay_exclusion(optimizer: Any) -> bool:
    """Whether `exclude_from_weight_decay` was called; its effect is in no config."""
    return bool(
        getattr(optimizer, "_exclude_from_weight_decay", None)
        or getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    )


def is_readable(variable: Any) -> bool:
    """Whether a variable's own value can be read.

    Not where it stands for a value that was passed in, nor while `fit` on JAX has it, nor where
    TensorFlow makes it at the first call of the step that is being compiled.
    """
    if stateless_scope.in_stateless_scope() or is_purged(variable):
        return False
    initialized = getattr(getattr(variable, "_value", variable), "is_initialized", None)
    return initialized is None or bool(initialized())


def register_variables(optimizer: Any, build: Any, variables: list[Any]) -> None:
    """Lets Keras' `build` register the variables without averages and accumulators of its own.

    It would make them from arguments that mean something else here.
    """
    own = vars(optimizer)
    names = ("use_ema", "gradient_accumulation_steps")
    declared = {name: own[name] for name in names}
    own.update(dict.fromkeys(names))
    try:
        build(variables)
    finally:
        own.update(declared)


def is_decayed(optimizer: Any, variable: keras.Variable) -> bool:
    """Whether an optimizer with a `weight_decay` decays a variable; its exclusions have no getter.

    On TensorFlow it searches the name of the backend's variable, which is a path.
    """
    asked = variable.value if keras.backend.backend() == "tensorflow" else variable
    return bool(optimizer._use_weight_decay(asked))


def built_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns the model's variables that an optimizer was built with; `variables` are its own."""
    return list(optimizer._trainable_variables)


def inner_optimizer_of(multi: Any, variable: keras.Variable) -> Any:
    """Returns the optimizer that a `MultiOptimizer` trains a variable with, or `None`.

    Its map has no getter, and one that makes an optimizer per call must not be asked again.
    """
    if not multi.built:
        return multi._optimizer_map(variable)
    index = multi._var_to_optimizer_idx.get(multi._var_key(variable))
    return None if index is None else multi.optimizers[index]


def optimizer_map_of(multi: Any) -> Any:
    """Returns the map or function that a `MultiOptimizer` was made with, which has no getter."""
    return multi._optimizer_map


def positions_of(optimizer: Any, variables: Sequence[Any]) -> list[int | None]:
    """Returns the places of variables among those that an optimizer was built with.

    Keras' map has no getter. On TensorFlow it knows the backend's variables too.
    """
    places = optimizer._trainable_variables_indices
    return [places.get(optimizer._var_key(variable)) for variable in variables]


def set_path(variable: keras.Variable, path: str) -> None:
    """Gives a variable a path that is the same in every process.

    Keras makes an optimizer's step counter under the optimizer's automatic name, and Nadam's
    running product under none: `set_state_tree` would pass over both.
    """
    variable._path = path


def track_all_state(optimizer: Any) -> None:
    """Makes sure that every variable an optimizer keeps is among its `variables`.

    Keras builds the optimizer inside a `LossScaleOptimizer` with tracking switched off, and then
    misses what is set as an attribute, such as the running product of Nadam.
    """
    known = {id(variable) for variable in (*optimizer.variables, *optimizer._trainable_variables)}
    for value in list(vars(optimizer).values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, keras.Variable) and id(item) not in known:
                known.add(id(item))
                optimizer._track_variable(item)


def tracked_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns what Keras' `variables` gives, for a class that overrides it.

    `torch.compile` takes `super().variables` for the property itself.
    """
    return list(optimizer._variables)


def current_learning_rate(optimizer: Any) -> Any:
    """Returns what Keras' `learning_rate` gives, for a class that overrides it.

    `torch.compile` takes `super().learning_rate` for the property itself.
    """
    return optimizer._get_current_learning_rate()


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Returns the backend's tensors of variables, in whatever scope this is.

    `variable.value` asks for scopes each time, which is most of a step on many small variables.
    """
    if not stateless_scope.in_stateless_scope() and get_autocast_scope() is None:
        values = [getattr(variable, "_value", None) for variable in variables]
        if all(value is not None for value in values):
            return values
    return [variable.value for variable in variables]


def untrack(optimizer: Any, variable: keras.Variable) -> None:
    """Takes a variable out of an optimizer's `variables`; Keras only ever adds to them."""
    optimizer._tracker.untrack(variable)


def replace_built_variables(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Makes a built optimizer one that was built with other variables of the model.

    The base class' `build` notes the variables and no more, which here is what is wanted: a
    `LossScaleOptimizer`'s own would make its state anew. It adds to the places it knows.
    """
    optimizer._trainable_variables_indices.clear()
    build = functools.partial(keras.optimizers.Optimizer.build, optimizer)
    register_variables(optimizer, build, list(variables))


def note_shardings(model: Any) -> None:
    """Lets `fit` on JAX count the model's variables again.

    Keras 3.10 does when `fit` begins, and looks each variable up in what it found.
    """
    note = getattr(model, "_record_training_state_sharding_spec", None)
    if note is not None:
        note()


def is_purged(variable: keras.Variable) -> bool:
    """Whether `fit` on JAX holds the variable's value at the moment; `value` then only fails."""
    return getattr(variable, "_value", variable) is None


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Lets the `fit` that has just begun start at `epoch`; at its argument's with `None`.

    A callback gets `fit`'s arguments too late to change them; `fit` reads this once it began.
    """
    model._initial_epoch = epoch


def all_layers(model: keras.Sequential) -> list[keras.Layer]:
    """Returns the layers of a Sequential model with its input layer, which `layers` leaves out."""
    return list(model._layers)


def custom_objects(objects: Any) -> AbstractContextManager[Any]:
    """Returns Keras' scope of custom objects, which hides one around it: none opens none."""
    return keras.saving.custom_object_scope(objects) if objects else contextlib.nullcontext()


def structures(model: keras.Model) -> tuple[Any, Any]:
    """Returns a functional model's inputs and outputs as they were given; else they are flat."""
    return model._inputs_struct, model._outputs_struct


def call_for_training(model: Any, x: Any) -> Any:
    """Calls a model as Keras' training step does: `call` may have no `training` argument."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns the loss as Keras' training step does: `compute_loss` may have no `training`."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def track_loss(model: Any, loss: Any, x: Any) -> None:
    """Adds the loss of a batch to the mean that `fit` shows, whose metric has no public name."""
    count = keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
    model._loss_tracker.update_state(loss, sample_weight=count)


def update_metrics(model: Any, values: Any, loss: Any, *batch: Any) -> tuple[Any, Any]:
    """Returns the logs of a batch and the values of the metrics' variables after it (JAX)."""
    return model._update_metrics_variables(values, loss, *batch)


def with_layouts(model: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the state of a training step on JAX, laid out over devices as Keras 3.10 wants it.

    There `fit` notes the layouts when it begins; in a loop of one's own there are none to keep.
    """
    noted = hasattr(model, "_trainable_variable_shardings")
    enforce = getattr(model, "_enforce_jax_state_sharding", None)
    return tuple(enforce(*state)) if enforce is not None and noted else state


def build_for(model: Any, data: Any) -> None:
    """Builds a model, its metrics and its optimizer for batches like `data`, as `fit` does."""
    model._symbolic_build(data_batch=data)
