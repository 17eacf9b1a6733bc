"""Each backend's operations on lists, against the generic ones and against NumPy in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_groupopt import backend
from keras_groupopt.backend import generic

FLOATS = ("float32", "bfloat16", "float16")
Described = list[tuple[tuple[int, ...], str]]

# Lists of tensors: the shape and the dtype of each.
MANY = [(4, 3), (), (5,), (2, 1, 3), (1,), (7, 2)]
LISTS: dict[str, Described] = {
    "no tensor": [],
    "a scalar": [((), "float32")],
    "one tensor": [((4, 3), "bfloat16")],
    "an empty tensor": [((0, 3), "float32"), ((2,), "float32")],
    **{f"many in {dtype}": [(shape, dtype) for shape in MANY] for dtype in FLOATS},
    "mixed dtypes": [
        ((4, 3), "float32"), ((2,), "bfloat16"), ((), "float16"), ((3, 1), "bfloat16"),
    ],
}  # fmt: skip

# Not a power of two, so that each dtype rounds it; large, so that a decay left out shows.
FACTOR = 0.3
F32 = float(np.float32(FACTOR))


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number."""
    return {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]


def tensors(described: list[tuple[tuple[int, ...], str]], seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [
        ops.cast(ops.convert_to_tensor(generator.normal(size=shape).astype("float32")), dtype)
        for shape, dtype in described
    ]


def variables(described: list[tuple[tuple[int, ...], str]], seed: int = 0) -> list[Any]:
    made = []
    for value in tensors(described, seed):
        dtype = keras.backend.standardize_dtype(value.dtype)
        variable = keras.Variable(np.zeros(value.shape, "float32"), dtype=dtype)
        variable.assign(value)
        made.append(variable)
    return made


def double(tensor: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(ops.convert_to_tensor(tensor), "float32")).astype(float)


def dtypes(values: list[Any]) -> list[str]:
    return [keras.backend.standardize_dtype(value.dtype) for value in values]


def assert_within(
    expected: list[np.ndarray], actual: list[Any], described: Any, roundings: float
) -> None:
    """Each element is right to so many roundings of its tensor's dtype, at the size of 1 and up."""
    assert len(expected) == len(actual)
    for right, value, (shape, dtype) in zip(expected, actual, described, strict=True):
        found = double(value)
        assert shape == found.shape
        allowed = roundings * epsilon(dtype) / 2 * np.maximum(1.0, np.abs(right))
        assert np.all(np.abs(found - right) <= allowed), (found, right)


def scalar(value: float) -> Any:
    return ops.convert_to_tensor(np.float32(value))


def wide(described: Described) -> Described:
    """The same shapes, in the dtype that sums and averages have."""
    return [(shape, "float32") for shape, _ in described]


def same(described: Described) -> Described:
    return described


# Operations -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on lists, or a number of lists.

    Args:
        call: Calls it, of a module with operations, on lists.
        right: Its results in float64; of an operation that gives a number, it and what it may be
            off by.
        takes: How each list is made: of tensors or of variables, and in which dtypes.
        moves: Whether it moves the first list. Default: it returns a new one.
        spoils: Whether it may write to the first list, which is of no use after it. Default: no.
        roundings: How many roundings a result may be off by. Default: 4.
    """

    call: Callable[..., Any]
    right: Callable[..., Any]
    takes: tuple[tuple[Callable[..., list[Any]], Callable[[Described], Described]], ...]
    moves: bool = False
    spoils: bool = False
    roundings: float = 4


def each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    return lambda *lists: [function(*values) for values in zip(*lists, strict=True)]


def flat(values: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([value.ravel() for value in values])


def norm(values: list[np.ndarray]) -> tuple[float, float]:
    length = float(np.linalg.norm(flat(values)))
    return length, 1e-6 * length


def inner(first: list[np.ndarray], second: list[np.ndarray]) -> tuple[float, float]:
    products = flat(first) * flat(second)
    return products.sum(), 1e-6 * np.abs(products).sum()


def distance(first: list[np.ndarray], second: list[np.ndarray]) -> tuple[float, float]:
    length = np.linalg.norm(flat(first) - flat(second))
    return length, 2 * epsilon("bfloat16") * length


def share_of(share: float) -> Operation:
    """An average that moves by a share of the way."""
    return Operation(
        lambda b, means, w: b.average(means, w, scalar(share), True),
        each(lambda mean, w: mean + float(np.float32(share)) * (w - mean)),
        (MEANS, V),
        moves=True,
    )


def sum_of(weight: float | None, keep: bool | None) -> Operation:
    """A sum that takes gradients at a weight, or drops them."""
    factor = (1.0 if weight is None else F32) * (keep is not False)
    given = [
        None if value is None else ops.convert_to_tensor(value)
        for value in (weight if weight is None else np.float32(weight), keep)
    ]
    return Operation(
        lambda b, sums, g: b.accumulate(sums, g, *given),
        each(lambda total, g: total + factor * g),
        (MEANS, T),
        moves=True,
    )


T, V, MEANS = (tensors, same), (variables, same), (variables, wide)
NUMBERS = {
    "global_norm": Operation(lambda b, g: b.global_norm(g), norm, (T,)),
    "distance": Operation(lambda b, g, v: b.distance(g, v), distance, (T, V), spoils=True),
    "largest": Operation(lambda b, g: b.largest(g), lambda g: (np.abs(flat(g)).max(), 0.0), (T,)),
    "dot": Operation(lambda b, g, h: b.dot(g, h), inner, (T, T)),
}
OPERATIONS = {
    "scale": Operation(
        lambda b, g: b.scale(g, scalar(FACTOR)), each(lambda g: g * F32), (T,), roundings=2
    ),
    "scale by a number": Operation(
        lambda b, g: b.scale(g, 0.25), each(lambda g: g * 0.25), (T,), roundings=2
    ),
    "clip_by_value": Operation(
        lambda b, g: [b.clip_by_value(value, 0.5) for value in g],
        each(lambda g: np.clip(g, -0.5, 0.5)),
        (T,),
        roundings=0,
    ),
    "decay_to_zero": Operation(
        lambda b, w: b.decay_to_zero(w, scalar(FACTOR)), each(lambda w: w * (1.0 - F32)), (V,), True
    ),
    "decay_to_anchor": Operation(
        lambda b, w, a: b.decay_to_anchor(w, a, scalar(FACTOR)),
        each(lambda w, a: w - F32 * (w - a)),
        (V, V),
        moves=True,
        roundings=8,
    ),
    "add_scaled": Operation(
        lambda b, g, h: b.add_scaled(g, h, scalar(FACTOR)),
        each(lambda g, h: g + F32 * h),
        (T, (tensors, wide)),
        roundings=8,
    ),
    **{
        f"accumulate, weight {weight}, keep {keep}": sum_of(weight, keep)
        for weight, keep in ((None, None), (FACTOR, None), (None, True), (FACTOR, False))
    },
    **{f"average, share {share}": share_of(share) for share in (FACTOR, 1e-3, 0.75)},
}


def results(operation: Operation, module: Any, described: Described) -> tuple[Any, list[Any]]:
    """Returns what an operation returns or moves, and the lists in float64 before it.

    What it does not move must stay as it is.
    """
    lists = [
        make(dtypes_of(described), seed=place)
        for place, (make, dtypes_of) in enumerate(operation.takes)
    ]
    before = [[double(value) for value in values] for values in lists]
    found = operation.call(module, *lists)
    for values, old in list(zip(lists, before, strict=True))[operation.moves or operation.spoils :]:
        for value, right in zip(values, old, strict=True):
            np.testing.assert_array_equal(right, double(value))
    return (lists[0] if operation.moves else found), before


@pytest.mark.parametrize("described", LISTS.values(), ids=list(LISTS))
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_right_in_the_dtype_of_each_tensor(name, described):
    operation = OPERATIONS[name]
    expected_dtypes = operation.takes[0][1](described)
    for module in (backend, generic):
        found, before = results(operation, module, described)
        if module is backend:
            assert dtypes(found) == [dtype for _, dtype in expected_dtypes]
        assert_within(operation.right(*before), found, expected_dtypes, operation.roundings)


@pytest.mark.parametrize("described", list(LISTS.values())[1:], ids=list(LISTS)[1:])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_all_elements_is_right_in_float32(name, described):
    for module in (backend, generic):
        found, before = results(NUMBERS[name], module, described)
        expected, allowed = NUMBERS[name].right(*before)
        assert dtypes([found]) == ["float32"]
        assert found.shape == ()
        assert abs(double(found) - expected) <= allowed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_of_squares_does_not_overflow_in_a_low_precision(dtype):
    values = [ops.cast(ops.full((1000,), 300.0), dtype) for _ in range(3)]
    expected = np.sqrt(3000.0) * float(double(values[0])[0])
    np.testing.assert_allclose(double(backend.global_norm(values)), expected, rtol=1e-6)
    np.testing.assert_allclose(double(backend.dot(values, values)), expected**2, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_a_norm_and_stays_out_of_a_sum_that_drops_it(bad):
    gradients = [ops.ones((3,)), ops.convert_to_tensor(np.array([1.0, bad], "float32"))]
    assert not np.isfinite(double(backend.global_norm(gradients)))
    (total,) = variables([((3,), "float32")])
    before = double(total)
    no = ops.convert_to_tensor(False)
    backend.accumulate([total], [ops.full((3,), bad)], scalar(2.0), no)
    np.testing.assert_array_equal(before, double(total))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decay_keeps_the_precision_of_a_float32_anchor(dtype):
    # The difference is smaller than the weight's dtype can tell from the anchor's size.
    (weight,) = variables([((), dtype)])
    weight.assign(1.0)
    anchor = keras.Variable(1.0 + epsilon(dtype) / 8)
    for _ in range(2):
        backend.decay_to_anchor([weight], [anchor], scalar(0.5))
    assert float(double(weight)) == 1.0
    weight.assign(0.0)
    backend.decay_to_anchor([weight], [anchor], scalar(1.0))
    assert float(double(weight)) == 1.0


def test_decay_by_zero_or_at_the_anchor_leaves_the_bits_of_a_weight():
    described = [((50,), dtype) for dtype in FLOATS]
    weights, anchors = variables(described), variables(described)
    before = [double(weight) for weight in weights]
    backend.decay_to_anchor(weights, anchors, scalar(FACTOR))
    backend.decay_to_anchor(weights, variables(described, seed=1), scalar(0.0))
    backend.decay_to_zero(weights, scalar(0.0))
    for value, weight in zip(before, weights, strict=True):
        np.testing.assert_array_equal(value, double(weight))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_average_stays_or_is_a_copy_of_the_weight_to_the_bit(share):
    described = [((4, 3), dtype) for dtype in FLOATS]
    means, weights = variables(wide(described)), variables(described, seed=1)
    expected = [double(value) for value in (means, weights)[int(share)]]
    backend.average(means, weights, scalar(share), True)
    for weight in weights:
        weight.assign(weight * 0.0)
    for value, mean in zip(expected, means, strict=True):
        np.testing.assert_array_equal(value, double(mean))


# Conditions ----------------------------------------------------------------------------------


def compiled(function: Any, variables: list[Any]) -> Any:
    """The function of one tensor, as the backend compiles it; it may assign to the variables."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    if keras.backend.backend() == "torch":
        import torch

        torch._dynamo.reset()
        return torch.compile(function, backend="eager", fullgraph=True)
    import jax

    @jax.jit
    def stateless(values: Any, argument: Any) -> Any:
        with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
            function(argument)
        return [scope.get_current_value(variable) for variable in variables]

    def run(argument: Any) -> None:
        values = stateless([variable.value for variable in variables], argument)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    return run


@pytest.mark.parametrize("value", [True, False])
def test_where_nothing_is_compiled_a_condition_is_known_and_only_one_branch_runs(value):
    predicate = ops.convert_to_tensor(value)
    assert backend.concrete(predicate) is value
    ran = []
    backend.run_if(predicate, lambda: ran.append("if"), [])
    (chosen,) = backend.cond(
        predicate,
        lambda: [ran.append("then") or ops.ones((2,))],
        lambda: [ran.append("otherwise") or ops.zeros((2,))],
    )
    assert ran == (["if", "then"] if value else ["otherwise"])
    np.testing.assert_array_equal(double(chosen), [float(value)] * 2)


def test_in_a_compiled_step_a_condition_is_not_known_and_either_branch_is_taken():
    first, second, *chosen = variables([((3,), "float32"), ((), "bfloat16")] * 2)
    count = keras.Variable(0, trainable=False)
    own, seen = [first, second, count], []

    def inner() -> None:
        second.assign(second + ops.cast(count, second.dtype))

    def body() -> None:
        first.assign(first * 2.0)
        count.assign_add(1)
        # Within a condition another one reads what was assigned.
        backend.run_if(ops.equal(count, 2), inner, own)

    def step(predicate: Any) -> None:
        seen.append(backend.concrete(predicate))
        backend.run_if(predicate, body, own)
        values = backend.cond(
            predicate,
            lambda: [ops.convert_to_tensor(v) * 2 for v in own[:2]],
            lambda: [ops.convert_to_tensor(v) * 1 for v in own[:2]],
        )
        for variable, value in zip(chosen, values, strict=True):
            variable.assign(value)

    run = compiled(step, [*own, *chosen])
    start = [double(each) for each in own]
    expected = {0: start, 1: [start[0] * 2, start[1], start[2] + 1]}
    second_after = double(ops.cast(ops.convert_to_tensor(second) + 2, "bfloat16"))
    expected[2] = [start[0] * 4, second_after, start[2] + 2]
    done = 0
    for value in (False, True, False, True, False):
        run(ops.convert_to_tensor(value))
        done += value
        right = [*expected[done], *(each * (1 + value) for each in expected[done][:2])]
        for number, variable in zip(right, [*own, *chosen], strict=True):
            np.testing.assert_array_equal(number, double(variable))
    assert set(seen) == {None}


def test_own_values_are_equal_and_not_written_through():
    values = tensors([((3,), "float32"), ((), "bfloat16")])
    owned = backend.private_copies(values)
    for value, copy in zip(values, owned, strict=True):
        np.testing.assert_array_equal(double(value), double(copy))
    if keras.backend.backend() == "torch":
        owned[0].add_(1.0)
        assert not np.array_equal(double(values[0]), double(owned[0]))


def test_a_dense_gradient_has_no_repeated_rows_to_combine():
    (gradient,) = tensors([((4, 3), "float32")])
    assert backend.combine_repeated_rows(gradient) is gradient
    assert backend.dense(gradient) is gradient


def test_without_replicas_a_step_gets_its_gradients_as_they_are():
    gradients, received = tensors([((4, 3), "float32"), ((2,), "float32")]), []
    weight = keras.Variable(np.zeros(2))
    backend.over_replicas(received.extend, gradients, [weight])
    received += backend.sum_over_replicas(gradients)
    assert [id(each) for each in received] == [id(each) for each in gradients] * 2
    with backend.on_devices_of([weight]):
        backend.once_per_step(lambda: received.append(keras.Variable(1.0)))
    assert backend.on_host(received[-1]) == 1.0


def test_variables_can_be_made_outside_of_a_compiled_step():
    with backend.outside_compiled_step():
        variable = keras.Variable(2.0)
    assert float(double(variable)) == 2.0


# Sparse gradients ----------------------------------------------------------------------------

only_tensorflow = pytest.mark.backends("tensorflow", reason="sparse gradients")


def slices(rows: list[int], dtype: str, height: int = 5) -> tuple[Any, np.ndarray]:
    """A sparse gradient with these rows, and the dense one it stands for."""
    import tensorflow as tf

    (values,) = tensors([((len(rows), 2), dtype)])
    dense = np.zeros((height, 2))
    np.add.at(dense, rows, double(values))
    shape = tf.constant([height, 2], tf.int64)
    return tf.IndexedSlices(values, tf.constant(rows, tf.int64), shape), dense


# Of a gradient, what it should be of the dense one in float64, whether rows that are named several
# times must be summed before, and whether the result is sparse again.
SPARSE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool, bool, float]] = {
    "repeated rows are summed": (
        backend.combine_repeated_rows,
        *(lambda dense: dense, False, True, 6),
    ),
    "dense": (backend.dense, lambda dense: dense, False, False, 6),
    "scale": (
        lambda gradient: backend.scale([gradient], scalar(FACTOR))[0],
        *(lambda dense: dense * FACTOR, True, True, 2),
    ),
    "clip_by_value": (
        lambda gradient: backend.clip_by_value(gradient, 0.5),
        *(lambda dense: np.clip(dense, -0.5, 0.5), True, True, 0),
    ),
}


@only_tensorflow
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        *((rows, "float32") for rows in ([3], [0, 4], [2, 2], [1, 3, 1, 1, 0])),
        ([1, 3, 1, 1, 0], "bfloat16"),
        ([1, 3, 1, 1, 0], "float16"),
    ],
    ids=str,
)
class TestSparseGradients:
    @pytest.mark.parametrize("operation", SPARSE)
    def test_an_operation_is_right_and_keeps_it_sparse(self, rows, dtype, operation):
        import tensorflow as tf

        call, right, summed, sparse, roundings = SPARSE[operation]
        gradient, dense = slices(rows, dtype)
        if summed:
            gradient = backend.combine_repeated_rows(gradient)
            dense = double(ops.convert_to_tensor(gradient))
        actual = call(gradient)
        assert isinstance(actual, tf.IndexedSlices) == sparse
        assert not sparse or sorted(set(rows)) == sorted(actual.indices.numpy().tolist())
        assert dtypes([actual]) == [dtype]
        described = [((5, 2), dtype)]
        assert_within([right(dense)], [ops.convert_to_tensor(actual)], described, roundings)

    def test_a_choice_of_it_is_dense(self, rows, dtype):
        import tensorflow as tf

        gradient, dense = slices(rows, dtype)

        @tf.function
        def chosen(predicate):
            return backend.cond(predicate, lambda: [gradient], lambda: [tf.zeros((5, 2), dtype)])

        for value in (True, False):
            (actual,) = chosen(tf.constant(value))
            assert_within([dense * value], [actual], [((5, 2), dtype)], 6)

    def test_norms_and_sums_are_those_of_the_dense_gradient(self, rows, dtype):
        gradient = backend.combine_repeated_rows(slices(rows, dtype)[0])
        dense = double(ops.convert_to_tensor(gradient))
        (other,) = tensors([((3,), "float32")], seed=1)
        expected = np.sqrt(np.sum(np.square(dense)) + np.sum(np.square(double(other))))
        actual = backend.global_norm([gradient, other])
        np.testing.assert_allclose(double(actual), expected, rtol=1e-6)
        for keep in (None, ops.convert_to_tensor(True), ops.convert_to_tensor(False)):
            (total,) = variables([((5, 2), "float32")], seed=2)
            factor = FACTOR * (keep is None or bool(keep))
            expected = double(total) + factor * dense
            backend.accumulate([total], [gradient], scalar(FACTOR), keep)
            assert_within([expected], [total], [((5, 2), "float32")], 4)
