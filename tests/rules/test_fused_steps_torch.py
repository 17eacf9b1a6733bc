"""What a step on torch does beside the numbers: it asks nothing of the device, and takes little."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from models import assert_equal
from own_rules import table

import keras_groupopt as kgo

pytestmark = pytest.mark.backends("torch", reason="modes of torch")

SHAPES = [(300, 200), (200,), (200, 50), (), *[(40, 30)] * 20]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"global_clipnorm": 1.0},
    "decay": {"weight_decay": 0.1},
    "all": {
        "global_clipnorm": 1.0,
        "weight_decay": 0.1,
        "anchor": "initial",
        "ratios": [(kgo.rank(1), 0.5)],
        "ema": kgo.EMA(0.9),
        "gradient_accumulation_steps": 2,
    },
}
RULES = [name for name, row in table().items() if row.fused]
each_rule = pytest.mark.parametrize("rule", RULES)
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def built(rule: Any, **options: Any) -> tuple[kgo.GroupedOptimizer, list[Any], list[Any]]:
    """An optimizer that has made its first steps, its variables, and gradients."""
    generator = np.random.default_rng(0)
    weights = [
        keras.Variable(generator.normal(size=shape), dtype="float32", name=f"v{place}")
        for place, shape in enumerate(SHAPES)
    ]
    given = [
        ops.convert_to_tensor(generator.normal(size=shape).astype("float32")) for shape in SHAPES
    ]
    optimizer = kgo.GroupedOptimizer(rule=rule, on_nonfinite="propagate", **options)
    for _ in range(8):
        optimizer.apply(given, weights)
    return optimizer, weights, given


def watching(function: Any) -> Any:
    """Returns a mode in which `function(operation, inputs, outputs)` sees each operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, operation: Any, types: Any, inputs: Any = (), named: Any = None
        ) -> Any:
            outputs = operation(*inputs, **(named or {}))
            function(operation, (inputs, named), outputs)
            return outputs

    return Watching()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "radam"])
@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("plain", "clip", "decay")])
def test_no_value_of_the_device_is_read_on_the_host(rule: str, options: Any) -> None:
    optimizer, weights, given = built(rule, **options)
    read = []

    def note(operation: Any, _inputs: Any, _outputs: Any) -> None:
        if "_local_scalar_dense" in str(operation):
            read.append(operation)

    with watching(note):
        optimizer.apply(given, weights)
    assert not read
    with watching(note):
        float(optimizer.iterations.value)
    assert read


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_one_graph_for_torch_compile(rule: str) -> None:
    import torch

    optimizer, weights, given = built(rule, global_clipnorm=1.0, weight_decay=0.1)
    other, others, _ = built(rule, global_clipnorm=1.0, weight_decay=0.1)
    graphs = []

    def lower(graph: Any, examples: Any) -> Any:
        # As far as every compiler goes, which asks each operation for its shapes.
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    def step(values: Any) -> None:
        with torch.no_grad():
            optimizer.apply(values, weights)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=lower, fullgraph=True)
    for _ in range(3):
        compiled(given)
        other.apply(given, others)
    assert len(graphs) == 1
    for value, expected in zip(weights, others, strict=True):
        np.testing.assert_allclose(
            ops.convert_to_numpy(value), ops.convert_to_numpy(expected), rtol=2e-6, atol=2e-6
        )


@each_rule
@pytest.mark.parametrize("strided", ["gradients", "weights", "values"])
def test_memory_in_another_order_is_read_as_what_it_is(rule: str, strided: str) -> None:
    """torch's fused kernels do not look at strides."""
    moved = []
    for turned in (False, True):
        optimizer, weights, given = built(rule, global_clipnorm=1.0, weight_decay=0.1)

        def order(value: Any, turned: bool = turned) -> Any:
            return value.mT.contiguous().mT if turned and value.ndim == 2 else value.clone()

        if strided == "gradients":
            given = [order(gradient) for gradient in given]
        if strided == "weights":
            for weight in weights:
                weight.value.data = order(weight.value.data)
        if strided == "values":
            values = [order(v.value.detach()) for v in weights]
            own = [order(v.value.detach()) for v in optimizer.variables]
            values, _ = optimizer.stateless_apply(own, given, values)
        else:
            optimizer.apply(given, weights)
            values = weights
        moved.append([ops.convert_to_numpy(value) for value in values])
    assert_equal(*moved, rtol=1e-6, atol=1e-6)


def test_a_gradient_of_another_shape_or_dtype_is_left_to_the_rule() -> None:
    from keras_groupopt.backend import are_fusible

    _, weights, given = built("adam")
    others = [given[0], given[1][:-1], given[2].double(), given[3].reshape(1)]
    assert are_fusible(others, weights[:4]) == [True, False, False, False]


@each_option
@each_rule
def test_gradients_are_left_as_they_came(rule: str, options: Any) -> None:
    optimizer, weights, given = built(rule, **options)
    before = [gradient.clone() for gradient in given]
    optimizer.apply(given, weights)
    assert all((a == b).all() for a, b in zip(before, given, strict=True))


@pytest.fixture
def block_of_4096_values(monkeypatch: pytest.MonkeyPatch) -> int:
    from keras_groupopt.backend import torch_blocks

    monkeypatch.setitem(torch_blocks.BLOCK_SIZES, "cpu", 4096)
    return 4096


@each_rule
def test_a_step_takes_no_more_at_a_time_than_the_gradients(
    rule: str, block_of_4096_values: int
) -> None:
    """Temporaries that live at once are counted; blocks bound them."""
    import torch
    from torch.utils import _pytree as pytree

    optimizer, weights, given = built(rule, **OPTIONS["clip"], weight_decay=0.1)
    alive, most, known = 0, 0, set()

    def free(size: int, pointer: int) -> None:
        nonlocal alive
        alive -= size
        known.discard(pointer)

    def note(_operation: Any, inputs: Any, outputs: Any) -> None:
        nonlocal alive, most
        old = {
            leaf.untyped_storage().data_ptr()
            for leaf in pytree.tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in pytree.tree_leaves(outputs):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            pointer = storage.data_ptr()
            if pointer and pointer not in old | known:
                known.add(pointer)
                alive += storage.nbytes()
                most = max(most, alive)
                weakref.finalize(leaf, free, storage.nbytes(), pointer)

    with watching(note):
        optimizer.apply(given, weights)
    whole = sum(4 * gradient.numel() for gradient in given)
    assert 0 < most <= whole
