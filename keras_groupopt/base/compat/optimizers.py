"""Optimizers: their rate, counter, state and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

# The underscore names of Keras that our classes override, and why there is no public way.
OVERRIDDEN = {
    "_backend_update_step": "It moves all variables at once; `update_step` moves one.",
    "_model_variables_moving_average": "`SwapEMAWeights` reads it, and must be refused.",
}


def backend_optimizer() -> type[Any]:
    """Returns the backend's base class of every optimizer, which has no public name."""
    return keras.optimizers.Optimizer.__bases__[0]


def declared_learning_rate(optimizer: Any) -> Any:
    """Returns the rate an optimizer was made with: a float, a schedule or a function.

    `learning_rate` computes the value of a schedule at the present step.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        # The shortest decimal that rounds to the float32 value: 0.1 rather than 0.10000000149.
        return float(str(np.float32(keras.ops.convert_to_numpy(rate))))
    return rate


def skip_step(rule: Any) -> None:
    """Counts a step in which no variable of `rule` has a gradient.

    Keras' `apply` refuses a list without gradients, which is an ordinary step for one of several
    groups.
    """
    # Lookahead moves variables by the optimizer within it.
    mover = getattr(rule, "ahead", rule)
    if isinstance(mover, keras.optimizers.Nadam):
        # `apply` advances the product of the momentum schedule once per step, in a hook.
        product = mover._u_product
        step = keras.ops.cast(mover.iterations + 1, product.dtype)
        mover.assign(product, product * mover.beta_1 * (1.0 - 0.5 * keras.ops.power(0.96, step)))
    rule.iterations.assign_add(1)


def share_counter(inner: Any, outer: Any) -> None:
    """Gives an optimizer the step counter of another one; `iterations` has no setter."""
    inner._iterations = outer._iterations
    # With accumulation, `iterations` is the counter divided by this number.
    inner.gradient_accumulation_steps = outer.gradient_accumulation_steps


def update_step_of(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
) -> None:
    """Moves variables by an optimizer, without what `apply` does around it.

    `update_step` moves one variable. Some optimizers move lists at once in this hook, or keep
    state in it.
    """
    optimizer._backend_update_step(gradients, variables, learning_rate)


def state_attributes(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes of a built optimizer that hold the state of its rule.

    These names are of every optimizer, and have no common public name.
    """
    own = ("_variables", "_trainable_variables", "_iterations", "_learning_rate")
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in vars(optimizer).items()
        if name not in own and _variables_in(value)
    }


def _variables_in(value: Any) -> list[keras.Variable]:
    """Returns the variables among a value, or in a list or tuple."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, keras.Variable)]


def rate_variable(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's rate, or `None` if the rate is computed.

    `learning_rate` would compute it, which a schedule may not be ready for.
    """
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def place_in(rule: Any, variable: Any) -> int:
    """Returns the place of a variable among those of a built rule, which has no getter.

    On TensorFlow `variable` may be the backend's own.
    """
    return int(rule._get_variable_index(variable))


def has_decay_exclusion(optimizer: Any) -> bool:
    """Returns whether `exclude_from_weight_decay` was called, which no config holds."""
    return bool(
        getattr(optimizer, "_exclude_from_weight_decay", None)
        or getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    )


def is_decayed(optimizer: Any, variable: keras.Variable) -> bool:
    """Returns whether an optimizer with a `weight_decay` decays a variable.

    Exclusions have no getter. On TensorFlow Keras searches the name of the backend's variable,
    which is a path.
    """
    asked = variable.value if keras.backend.backend() == "tensorflow" else variable
    return bool(optimizer._use_weight_decay(asked))


def built_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns the model's variables that an optimizer was built with.

    `variables` holds the optimizer's own.
    """
    return list(optimizer._trainable_variables)


def inner_optimizer_of(multi: Any, variable: keras.Variable) -> Any:
    """Returns the optimizer that a `MultiOptimizer` trains a variable with, or `None`.

    Its map has no getter, and must not be called again if it makes an optimizer per call.
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


def track_all_state(optimizer: Any) -> None:
    """Adds every variable that an optimizer holds to its `variables`.

    Keras builds the optimizer inside a `LossScaleOptimizer` with tracking switched off, and so
    misses variables that are set as attributes, such as the running product of Nadam.
    """
    known = {id(variable) for variable in (*optimizer.variables, *optimizer._trainable_variables)}
    for value in list(vars(optimizer).values()):
        for variable in _variables_in(value):
            if id(variable) not in known:
                known.add(id(variable))
                optimizer._track_variable(variable)


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


def untrack(optimizer: Any, variable: keras.Variable) -> None:
    """Takes a variable out of an optimizer's `variables`; Keras only ever adds to them."""
    optimizer._tracker.untrack(variable)


def replace_built_variables(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Gives a built optimizer other variables of the model, as if it had been built with them.

    The base class' `build` only registers variables; that of `LossScaleOptimizer` would make its
    state anew. It adds to the places it knows, so those are cleared first. It would also make
    averages and accumulators from arguments that mean something else here, so those are hidden.
    """
    optimizer._trainable_variables_indices.clear()
    own = vars(optimizer)
    names = ("use_ema", "gradient_accumulation_steps")
    declared = {name: own[name] for name in names}
    own.update(dict.fromkeys(names))
    try:
        keras.optimizers.Optimizer.build(optimizer, list(variables))
    finally:
        own.update(declared)
