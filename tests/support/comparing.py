"""How tests compare weights and state, and compile a step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from cases import by_path, numpy_of, tensors_of

Arrays = Mapping[str, np.ndarray]


def assert_same(actual: Arrays, expected: Arrays) -> None:
    """Equal bit for bit, dtypes included."""
    assert list(actual) == list(expected)
    different = [p for p in expected if actual[p].tobytes() != expected[p].tobytes()]
    assert not different, {p: (actual[p], expected[p]) for p in different}


def assert_close(actual: Arrays, expected: Arrays, tolerance: float = 2e-6) -> None:
    """Equal to rounding."""
    assert list(actual) == list(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(
            actual[path], value, rtol=tolerance, atol=tolerance, err_msg=path
        )


def state_of(optimizer: Any) -> dict[str, np.ndarray]:
    """All saved state but the manifest, by key."""
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return {key: np.array(store[key]) for key in sorted(store) if key != "@manifest"}


def counters_of(optimizer: Any) -> set[int]:
    """The values of all step counters: the optimizer's and each rule's."""
    own = [int(numpy_of(v)) for v in optimizer.variables if v.name == "iteration"]
    moving = [group for group in optimizer.plan.groups if not group.group.frozen]
    assert len(own) == 1 + len(moving)
    return {int(numpy_of(optimizer.iterations)), *own}


def compiled_step(
    optimizer: Any, variables: list[Any]
) -> tuple[Callable[..., None], Callable[[], int]]:
    """The step as the backend's training loop compiles it, and how often it was traced.

    Keras compiles no step on torch: there it is `stateless_apply`, and traces are the frames
    that `torch.compile` saw, plus one. Elsewhere the step takes a rate as a Python number too,
    which no step of ours does: it is traced again for each.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def graph(values: list[Any], sample_count: Any = None, rate: float | None = None) -> None:
            if rate is not None:
                optimizer.learning_rate = rate
            optimizer.apply(values, variables, *_given(sample_count))

        return graph, graph.experimental_get_tracing_count
    traces: list[int] = []

    def stateless(state: Any, values: Any, weights: Any, sample_count: Any, rate: Any) -> Any:
        traces.append(1)
        if rate is not None:
            names = [v.name for v in optimizer.variables]
            state[names.index("learning_rate")] = keras.ops.convert_to_tensor(rate, "float32")
        return optimizer.stateless_apply(state, values, weights, *_given(sample_count))

    if keras.backend.backend() == "jax":
        import jax

        stateless = jax.jit(stateless, static_argnums=4)

    def step(values: list[Any], sample_count: Any = None, rate: float | None = None) -> None:
        own = optimizer.variables
        weights = [v.value for v in variables]
        weights, state = stateless([v.value for v in own], values, weights, sample_count, rate)
        for variable, value in zip([*variables, *own], [*weights, *state], strict=True):
            variable.assign(value)

    if keras.backend.backend() == "jax":
        return step, lambda: len(traces)
    return step, lambda: 1 + _frames_seen_by_torch_compile()


def stepper(optimizer: Any, model: Any, way: str, traced_once: bool = False) -> Callable[..., None]:
    """A step on gradients by path; the paths that are left out are not brought to the step.

    Args:
        optimizer: It is built here.
        model: A model of `cases`.
        way: `"eager"`, or `"compiled"` as by `compiled_step`.
        traced_once: Whether to check that a compiled step is traced once. Default: no.
    """
    variables = by_path(model)
    optimizer.build(list(variables.values()))

    @functools.cache
    def compiled(paths: tuple[str, ...], missing: frozenset[str], counted: bool) -> Any:
        return compiled_step(optimizer, [variables[path] for path in paths])

    def step(given: Mapping[str, Any], sample_count: Any = None) -> None:
        own = {path: variables[path] for path in given}
        if way == "eager":
            optimizer.apply(tensors_of(given, own), list(own.values()), sample_count)
            return
        if sample_count is not None:
            sample_count = keras.ops.convert_to_tensor(sample_count, dtype="float32")
        missing = frozenset(path for path, value in given.items() if value is None)
        run, traces = compiled(tuple(own), missing, sample_count is not None)
        run(tensors_of(given, own), sample_count)
        assert not traced_once or traces() == 1

    return step


def _given(sample_count: Any) -> tuple[Any, ...]:
    """Returns arguments after the variables: a rule that stands alone takes no sample count."""
    return () if sample_count is None else (sample_count,)


def _frames_seen_by_torch_compile() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else sum(dynamo.counters["frames"].values())
