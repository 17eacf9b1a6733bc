"""Each backend's operations on lists, against the generic ones and against NumPy in float64."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_groupopt import backend
from keras_groupopt.backend import generic

FLOATS = ("float32", "bfloat16", "float16")

# Shapes of the tensors in one list, and their dtypes: one dtype, or one for each tensor.
SHAPES = {
    "no tensor": [],
    "a scalar": [()],
    "one tensor": [(4, 3)],
    "an empty tensor": [(0, 3), (2,)],
    "many tensors": [(4, 3), (), (5,), (2, 1, 3), (1,), (7, 2)],
}
LISTS = [
    pytest.param([(shape, dtype) for shape in shapes], id=f"{name}, {dtype}")
    for name, shapes in SHAPES.items()
    for dtype in FLOATS
] + [
    pytest.param(
        [((4, 3), "float32"), ((2,), "bfloat16"), ((), "float16"), ((3, 1), "bfloat16")],
        id="mixed dtypes",
    )
]
SOME = [case for case in LISTS if not case.id.startswith("no tensor")]

# Not a power of two, so that each dtype rounds it; large, so that a decay left out shows.
FACTOR = 0.3


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


@pytest.mark.parametrize("described", SOME)
def test_the_global_norm_is_that_of_all_elements_in_float32(described):
    gradients = tensors(described)
    expected = np.sqrt(sum(np.sum(np.square(double(gradient))) for gradient in gradients))
    actual = backend.global_norm(gradients)
    assert dtypes([actual]) == ["float32"]
    assert actual.shape == ()
    np.testing.assert_allclose(double(actual), expected, rtol=1e-6)
    np.testing.assert_allclose(double(actual), double(generic.global_norm(gradients)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_global_norm_does_not_overflow_in_a_low_precision(dtype):
    gradients = [ops.cast(ops.full((1000,), 300.0), dtype) for _ in range(3)]
    expected = np.sqrt(3000.0) * float(double(gradients[0])[0])
    np.testing.assert_allclose(double(backend.global_norm(gradients)), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_global_norm_shows_an_element_that_is_not_finite(bad):
    gradients = [ops.ones((3,)), ops.convert_to_tensor(np.array([1.0, bad], "float32"))]
    assert not np.isfinite(double(backend.global_norm(gradients)))


@pytest.mark.parametrize("described", SOME)
def test_the_distance_is_the_norm_of_all_differences_in_float32(described):
    values, moved = tensors(described), variables(described, 1)
    differences = [
        (double(value) - double(variable)).ravel()
        for value, variable in zip(values, moved, strict=True)
    ]
    found = backend.distance(values, moved)
    assert dtypes([found]) == ["float32"]
    low = max(epsilon(dtype) for _, dtype in described)
    np.testing.assert_allclose(double(found), np.linalg.norm(np.concatenate(differences)), 2 * low)


@pytest.mark.parametrize("described", SOME)
def test_the_largest_element_is_found_by_its_absolute_value(described):
    gradients = tensors(described)
    expected = max(np.max(np.abs(double(gradient)), initial=0.0) for gradient in gradients)
    found = backend.largest([-gradient for gradient in gradients])
    assert dtypes([found]) == ["float32"]
    assert double(found) == expected


@pytest.mark.parametrize("described", LISTS)
def test_scale_multiplies_in_the_dtype_of_each_gradient(described):
    gradients = tensors(described)
    before = [double(gradient) for gradient in gradients]
    actual = backend.scale(gradients, scalar(FACTOR))
    assert dtypes(actual) == [dtype for _, dtype in described]
    assert_within([value * FACTOR for value in before], actual, described, 2)
    assert_within(
        [double(v) for v in generic.scale(gradients, scalar(FACTOR))], actual, described, 2
    )
    # The caller's gradients stay.
    for value, gradient in zip(before, gradients, strict=True):
        np.testing.assert_array_equal(value, double(gradient))


def test_scale_takes_a_python_number():
    (actual,) = backend.scale([ops.convert_to_tensor(np.float32([4.0, -2.0]))], 0.25)
    np.testing.assert_array_equal([1.0, -0.5], double(actual))


@pytest.mark.parametrize("described", SOME)
def test_clip_by_value_limits_each_element(described):
    for gradient, (_, dtype) in zip(tensors(described), described, strict=True):
        actual = backend.clip_by_value(gradient, 0.5)
        assert dtypes([actual]) == [dtype]
        np.testing.assert_array_equal(np.clip(double(gradient), -0.5, 0.5), double(actual))
        np.testing.assert_array_equal(double(generic.clip_by_value(gradient, 0.5)), double(actual))


@pytest.mark.parametrize("described", LISTS)
def test_shrink_takes_a_share_of_each_weight(described):
    weights = variables(described)
    expected = [double(weight) * (1.0 - FACTOR) for weight in weights]
    backend.decay_to_zero(weights, scalar(FACTOR))
    assert dtypes(weights) == [dtype for _, dtype in described]
    assert_within(expected, weights, described, 4)
    plain = variables(described)
    generic.decay_to_zero(plain, scalar(FACTOR))
    assert_within([double(weight) for weight in plain], weights, described, 4)


@pytest.mark.parametrize("described", LISTS)
def test_pull_moves_each_weight_toward_its_anchor(described):
    weights, anchors = variables(described), variables(described, seed=1)
    kept = [double(anchor) for anchor in anchors]
    expected = [
        double(weight) - FACTOR * (double(weight) - anchor)
        for weight, anchor in zip(weights, kept, strict=True)
    ]
    backend.decay_to_anchor(weights, anchors, scalar(FACTOR))
    assert dtypes(weights) == [dtype for _, dtype in described]
    assert_within(expected, weights, described, 8)
    plain = variables(described)
    generic.decay_to_anchor(plain, anchors, scalar(FACTOR))
    assert_within([double(weight) for weight in plain], weights, described, 8)
    for value, anchor in zip(kept, anchors, strict=True):
        np.testing.assert_array_equal(value, double(anchor))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pull_keeps_the_precision_of_a_float32_anchor(dtype):
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


@pytest.mark.parametrize("operation", ["decay_to_zero", "decay_to_anchor"])
def test_a_factor_of_zero_leaves_the_bits_of_a_weight(operation):
    described = [((4, 3), dtype) for dtype in FLOATS]
    weights = variables(described)
    before = [double(weight) for weight in weights]
    more = [variables(described, seed=1)] if operation == "decay_to_anchor" else []
    getattr(backend, operation)(weights, *more, scalar(0.0))
    for value, weight in zip(before, weights, strict=True):
        np.testing.assert_array_equal(value, double(weight))


def test_a_weight_on_its_anchor_stays_to_the_bit():
    described = [((50,), dtype) for dtype in FLOATS]
    weights, anchors = variables(described), variables(described)
    backend.decay_to_anchor(weights, anchors, scalar(FACTOR))
    for weight, anchor in zip(weights, anchors, strict=True):
        np.testing.assert_array_equal(double(anchor), double(weight))


WIDE = {"float32": "float32", "bfloat16": "float32", "float16": "float32"}


def wide(described: Any) -> Any:
    """The same shapes, in the dtypes that sums and averages have."""
    return [(shape, WIDE[dtype]) for shape, dtype in described]


@pytest.mark.parametrize("described", LISTS)
@pytest.mark.parametrize("keep", [None, True, False], ids=["", "kept", "dropped"])
def test_accumulate_adds_weighted_gradients_in_the_dtype_of_the_sums(described, keep):
    for weight in (None, scalar(FACTOR)):
        sums, gradients = variables(wide(described)), tensors(described, seed=1)
        before = [double(gradient) for gradient in gradients]
        factor = (1.0 if weight is None else np.float64(np.float32(FACTOR))) * (keep is not False)
        expected = [
            double(total) + factor * value for total, value in zip(sums, before, strict=True)
        ]
        kept = None if keep is None else ops.convert_to_tensor(keep)
        backend.accumulate(sums, gradients, weight, kept)
        assert_within(expected, sums, wide(described), 4)
        plain = variables(wide(described))
        generic.accumulate(plain, gradients, weight, kept)
        assert_within([double(total) for total in plain], sums, wide(described), 2)
        # The caller's gradients stay.
        for value, gradient in zip(before, gradients, strict=True):
            np.testing.assert_array_equal(value, double(gradient))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_accumulate_lets_nothing_of_a_dropped_gradient_in(bad):
    (total,) = variables([((3,), "float32")])
    before = double(total)
    no = ops.convert_to_tensor(False)
    backend.accumulate([total], [ops.full((3,), bad)], scalar(2.0), no)
    np.testing.assert_array_equal(before, double(total))


@pytest.mark.parametrize("described", LISTS)
def test_average_moves_a_share_of_the_way_to_each_weight(described):
    for share in (FACTOR, 1e-3, 0.75):
        means, weights = variables(wide(described)), variables(described, seed=1)
        kept = [double(weight) for weight in weights]
        expected = [
            double(mean) + np.float64(np.float32(share)) * (value - double(mean))
            for mean, value in zip(means, kept, strict=True)
        ]
        backend.average(means, weights, scalar(share), True)
        assert_within(expected, means, wide(described), 4)
        plain = variables(wide(described))
        generic.average(plain, weights, scalar(share), True)
        assert_within([double(mean) for mean in plain], means, wide(described), 4)
        for value, weight in zip(kept, weights, strict=True):
            np.testing.assert_array_equal(value, double(weight))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_average_stays_or_is_the_weight_to_the_bit(share):
    described = [((4, 3), dtype) for dtype in FLOATS]
    means, weights = variables(wide(described)), variables(described, seed=1)
    expected = [double(each) for each in (means, weights)[int(share)]]
    backend.average(means, weights, scalar(share), True)
    for value, mean in zip(expected, means, strict=True):
        np.testing.assert_array_equal(value, double(mean))
    # A copy: the next change of the weight is not one of the average.
    for weight in weights:
        weight.assign(weight * 0.0)
    for value, mean in zip(expected, means, strict=True):
        np.testing.assert_array_equal(value, double(mean))


@pytest.mark.parametrize("described", SOME)
def test_dot_is_the_inner_product_of_all_elements_in_float32(described):
    first, second = tensors(described), tensors(described, seed=1)
    products = [double(a) * double(b) for a, b in zip(first, second, strict=True)]
    actual = backend.dot(first, second)
    assert dtypes([actual]) == ["float32"]
    assert actual.shape == ()
    size = sum(np.sum(np.abs(product)) for product in products)
    expected = sum(np.sum(product) for product in products)
    np.testing.assert_allclose(double(actual), expected, atol=1e-6 * size)
    np.testing.assert_allclose(double(generic.dot(first, second)), expected, atol=1e-6 * size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dot_does_not_overflow_in_a_low_precision(dtype):
    values = [ops.cast(ops.full((1000,), 300.0), dtype) for _ in range(3)]
    expected = 3000.0 * float(double(values[0])[0]) ** 2
    np.testing.assert_allclose(double(backend.dot(values, values)), expected, rtol=1e-6)


@pytest.mark.parametrize("described", LISTS)
def test_add_scaled_adds_in_the_dtype_of_the_first(described):
    first, second = tensors(described), tensors(wide(described), seed=1)
    before = [(double(a), double(b)) for a, b in zip(first, second, strict=True)]
    expected = [a + FACTOR * b for a, b in before]
    actual = backend.add_scaled(first, second, scalar(FACTOR))
    assert dtypes(actual) == [dtype for _, dtype in described]
    assert_within(expected, actual, described, 8)
    plain = generic.add_scaled(first, second, scalar(FACTOR))
    assert_within([double(value) for value in plain], actual, described, 8)
    # The caller's tensors stay.
    for (a, b), left, right in zip(before, first, second, strict=True):
        np.testing.assert_array_equal(a, double(left))
        np.testing.assert_array_equal(b, double(right))


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
def test_a_condition_is_known_where_nothing_is_compiled(value):
    assert backend.concrete(ops.convert_to_tensor(value)) is value
    done = []
    backend.run_if(ops.convert_to_tensor(value), lambda: done.append(1), [])
    assert done == [1] * value


def test_in_a_compiled_step_a_condition_is_not_known_and_either_branch_is_taken():
    first, second = variables([((3,), "float32"), ((), "bfloat16")])
    count = keras.Variable(0, trainable=False)
    own = [first, second, count]
    seen = []

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

    run = compiled(step, own)
    start = [double(each) for each in own]
    expected = {0: start, 1: [start[0] * 2, start[1], start[2] + 1]}
    second_after = double(ops.cast(ops.convert_to_tensor(second) + 2, "bfloat16"))
    expected[2] = [start[0] * 4, second_after, start[2] + 2]
    done = 0
    for value in (False, True, False, True, False):
        run(ops.convert_to_tensor(value))
        done += value
        for right, variable in zip(expected[done], own, strict=True):
            np.testing.assert_array_equal(right, double(variable))
    assert set(seen) == {None}


@pytest.mark.parametrize("value", [True, False])
def test_where_nothing_is_compiled_only_one_of_two_functions_runs(value):
    ran = []
    (chosen,) = backend.cond(
        ops.convert_to_tensor(value),
        lambda: [ran.append("then") or ops.ones((2,))],
        lambda: [ran.append("otherwise") or ops.zeros((2,))],
    )
    assert ran == ["then" if value else "otherwise"]
    np.testing.assert_array_equal(double(chosen), [float(value)] * 2)


def test_in_a_compiled_step_the_tensors_are_those_of_the_branch_that_is_taken():
    own = variables([((3,), "float32"), ((), "bfloat16")])
    start = [double(each) for each in own]

    def step(predicate: Any) -> None:
        results = backend.cond(
            predicate,
            lambda: [ops.convert_to_tensor(v) * 2 for v in own],
            lambda: [ops.convert_to_tensor(v) * 1 for v in own],
        )
        for variable, result in zip(own, results, strict=True):
            variable.assign(result)

    run = compiled(step, own)
    factor = 1
    for value in (False, True, False, True):
        run(ops.convert_to_tensor(value))
        factor *= 1 + value
        for right, variable in zip(start, own, strict=True):
            np.testing.assert_array_equal(right * factor, double(variable))


def test_own_values_are_equal_and_not_written_through(backend):
    values = tensors([((3,), "float32"), ((), "bfloat16")])
    owned = backend.private_copies(values)
    for value, copy in zip(values, owned, strict=True):
        np.testing.assert_array_equal(double(value), double(copy))
    if backend == "torch":
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


@only_tensorflow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [[3], [0, 4], [2, 2], [1, 3, 1, 1, 0]], ids=str)
class TestSparseGradients:
    def test_repeated_rows_are_summed(self, rows, dtype):
        gradient, dense = slices(rows, dtype)
        actual = backend.combine_repeated_rows(gradient)
        indices = actual.indices.numpy().tolist()
        assert sorted(set(rows)) == sorted(indices)
        assert dtypes([actual]) == [dtype]
        assert_within([dense], [ops.convert_to_tensor(actual)], [((5, 2), dtype)], 6)

    def test_dense_has_the_rows_that_are_not_named(self, rows, dtype):
        gradient, dense = slices(rows, dtype)
        actual = backend.dense(gradient)
        assert dtypes([actual]) == [dtype]
        assert_within([dense], [actual], [((5, 2), dtype)], 6)

    def test_a_choice_of_it_is_dense(self, rows, dtype):
        import tensorflow as tf

        gradient, dense = slices(rows, dtype)

        @tf.function
        def chosen(predicate):
            return backend.cond(predicate, lambda: [gradient], lambda: [tf.zeros((5, 2), dtype)])

        for value in (True, False):
            (actual,) = chosen(tf.constant(value))
            assert_within([dense * value], [actual], [((5, 2), dtype)], 6)

    def test_the_norm_is_that_of_the_dense_gradient(self, rows, dtype):
        gradient, _ = slices(rows, dtype)
        combined = backend.combine_repeated_rows(gradient)
        dense = double(ops.convert_to_tensor(combined))
        (other,) = tensors([((3,), "float32")], seed=1)
        expected = np.sqrt(np.sum(np.square(dense)) + np.sum(np.square(double(other))))
        actual = backend.global_norm([combined, other])
        np.testing.assert_allclose(double(actual), expected, rtol=1e-6)

    def test_only_the_rows_it_names_are_added_to_a_sum(self, rows, dtype):
        gradient = backend.combine_repeated_rows(slices(rows, dtype)[0])
        dense = double(ops.convert_to_tensor(gradient))
        for keep in (None, ops.convert_to_tensor(True), ops.convert_to_tensor(False)):
            (total,) = variables([((5, 2), "float32")], seed=2)
            factor = FACTOR * (keep is None or bool(keep))
            expected = double(total) + factor * dense
            backend.accumulate([total], [gradient], scalar(FACTOR), keep)
            assert_within([expected], [total], [((5, 2), "float32")], 4)

    def test_scaling_and_clipping_keep_it_sparse(self, rows, dtype):
        import tensorflow as tf

        gradient = backend.combine_repeated_rows(slices(rows, dtype)[0])
        dense = double(ops.convert_to_tensor(gradient))
        (scaled,) = backend.scale([gradient], scalar(FACTOR))
        clipped = backend.clip_by_value(gradient, 0.5)
        for actual in (scaled, clipped):
            assert isinstance(actual, tf.IndexedSlices)
            assert dtypes([actual]) == [dtype]
        described = [((5, 2), dtype)]
        assert_within([dense * FACTOR], [ops.convert_to_tensor(scaled)], described, 2)
        assert_within([np.clip(dense, -0.5, 0.5)], [ops.convert_to_tensor(clipped)], described, 0)


@only_tensorflow
def test_the_operations_are_the_same_in_a_graph():
    import tensorflow as tf

    described = [((4, 3), "float32"), ((2,), "bfloat16")]
    weights, anchors = variables(described), variables(described, seed=1)
    same, same_anchors = variables(described), variables(described, seed=1)
    gradients = tensors(described)

    def step(factor):
        backend.decay_to_zero(weights[:1], factor)
        backend.decay_to_anchor(weights[1:], anchors[1:], factor)
        return backend.global_norm(backend.scale(gradients, factor))

    norm = tf.function(step)(scalar(FACTOR))
    generic.decay_to_zero(same[:1], scalar(FACTOR))
    generic.decay_to_anchor(same[1:], same_anchors[1:], scalar(FACTOR))
    assert_within([double(weight) for weight in same], weights, described, 4)
    expected = generic.global_norm(generic.scale(gradients, scalar(FACTOR)))
    np.testing.assert_allclose(double(norm), double(expected), rtol=1e-2)
