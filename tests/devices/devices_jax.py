"""Trains on 4 virtual CPU devices as on one, and prints as JSON what it found.

`test_several_devices.py` runs it once and has a test for each thing found.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

import keras
import numpy as np
from device_runs import ROWS, WHOLE, X, make, numbers

import keras_groupopt as kgo

Y = np.concatenate([X, X], axis=-1) ** 2
WEIGHTS = {
    ".*enc/kernel": (None, "model"),
    ".*enc/bias": ("model",),
    ".*head/kernel": ("model", None),
}
STATE = "(momentums|velocities|@anchor|@average|@accumulator|@gradient_rule:direction)"
# The mesh, and what the layout map says of weights and of state.
PLACES: dict[str, tuple[dict[str, int], dict[str, tuple[Any, ...]], dict[str, tuple[Any, ...]]]] = {
    "data parallel": ({"batch": 4}, {}, {}),
    "model parallel": ({"batch": 2, "model": 2}, WEIGHTS, {}),
    "data parallel, sharded state": ({"batch": 4}, {}, {f"(enc|default)/.*/{STATE}": ("batch",)}),
    "model parallel, sharded state": (
        {"batch": 2, "model": 2},
        WEIGHTS,
        {f"enc/enc/kernel/{STATE}": ("batch", "model"), "default/.*": ("batch",)},
    ),
}
# Each row in two of the places.
RUNS = [
    (place, row)
    for at, place in enumerate(PLACES)
    for number, row in enumerate(ROWS)
    if (at + number) % 2 == 0
]
LIVE = ("load_weights", "capture_anchors", "averaged_weights", "rebuild", "load_model")
LIVE_IN = ("model parallel", "model parallel, sharded state")
compiled = 0


def count_compilation(name: str, *_: Any, **__: Any) -> None:
    global compiled
    compiled += name == "/jax/core/compile/backend_compile_duration"


class CountCompiled(keras.callbacks.Callback):
    """What was compiled until the end of each batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.counts.append(compiled)


def fit(model: keras.Model, epochs: int = 1) -> CountCompiled:
    counter = CountCompiled()
    model.fit(
        X,
        Y[:, : model.output_shape[-1]],
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[counter],
    )
    return counter


def distribution(place: str) -> Any:
    sizes, weights, state = PLACES[place]
    mesh = keras.distribution.DeviceMesh(tuple(sizes.values()), list(sizes))
    if not weights and not state:
        return keras.distribution.DataParallel(mesh)
    layouts = keras.distribution.LayoutMap(mesh)
    for pattern, axes in (weights | state).items():
        layouts[pattern] = axes
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def misplaced(model: keras.Model, place: str) -> list[str]:
    """The keys of state that is neither where the layout map wants it nor where its weight is."""
    sizes, patterns, state = PLACES[place]
    assert all(len(v.value.addressable_shards) == 4 for v in model.weights)
    if patterns:
        assert model.get_layer("enc").kernel.value.addressable_shards[0].data.size == 16
    weights = {"/".join(v.path.split("/")[-2:]): v for v in model.weights}
    wrong = []
    for variable in model.optimizer.variables:
        key = variable.path.partition("/")[2]
        owner = weights.get(key.partition("/")[2].rpartition("/")[0])
        axes = [axes for pattern, axes in state.items() if re.fullmatch(pattern, key)]
        value = variable.value
        if variable.shape and axes:
            parts = np.prod([sizes[axis] for axis in axes[0] if axis])
            held = {shard.data.size * parts for shard in value.addressable_shards}
            right = held == {value.size} and len(value.addressable_shards) == 4
        elif variable.shape and owner is not None:
            right = value.sharding == owner.value.sharding
        else:
            right = not variable.shape and value.sharding.is_fully_replicated
        if not right:
            wrong.append(f"{key}: {value.sharding}")
    return wrong


def compare(alone: dict[str, np.ndarray]) -> dict[str, Any]:
    """For each place and row: the difference from one device, state misplaced, compiled anew."""
    found = {}
    for place, row in RUNS:
        with distribution(place).scope():
            model = make(*ROWS[row])
            model.optimizer.build(model.trainable_variables)
            wrong = misplaced(model, place)
            counts = [compiled, *fit(model, 2).counts]
            assert counts[0] < counts[1]
            found[f"{place}: {row}"] = {
                "difference": float(np.abs(numbers(model) - alone[row]).max()),
                "misplaced": wrong + misplaced(model, place),
                # The end of an epoch is more than a step.
                "compiled": counts[4] - counts[1] + counts[-1] - counts[5],
            }
    return found


def live(place: str) -> dict[str, Any]:
    """What is misplaced after each of `LIVE`, which replace state, and after one more epoch."""
    found = {}
    with distribution(place).scope():
        model = make(WHOLE, None)
        fit(model)

        def check(name: str, model: keras.Model) -> None:
            found[f"{place}: {name}"] = misplaced(model, place)
            fit(model)
            found[f"{place}: {name}, trained"] = misplaced(model, place)

        model.save_weights("state.weights.h5")
        before = numbers(model)
        fit(model)
        model.load_weights("state.weights.h5")
        assert np.array_equal(before, numbers(model))
        check("load_weights", model)
        model.optimizer.capture_anchors()
        check("capture_anchors", model)
        with kgo.averaged_weights(model):
            model.evaluate(X, X**2, verbose=0)
        check("averaged_weights", model)
        model.optimizer.rebuild(model)
        check("rebuild", model)
        model.save("model.keras")
        before = numbers(model)
        loaded = keras.saving.load_model("model.keras")
        assert np.array_equal(before, numbers(loaded))
        check("load_model", loaded)
    # A file says nothing of layouts.
    assert np.array_equal(before, numbers(keras.saving.load_model("model.keras")))
    return found


def custom_loop(place: str, alone: np.ndarray) -> dict[str, Any]:
    """A compiled loop over `stateless_apply` that does not name layouts."""
    import jax

    with distribution(place).scope():
        model = make(WHOLE, None)
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)

        def loss(weights: Any, x: Any, y: Any) -> Any:
            outputs, _ = model.stateless_call(weights, [], x)
            return keras.ops.mean(keras.ops.square(outputs - y))

        @jax.jit
        def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
            gradients = jax.grad(loss)(weights, x, y)
            return optimizer.stateless_apply(state, gradients, weights)

        weights = [v.value for v in model.trainable_variables]
        state = [v.value for v in optimizer.variables]
        layout = keras.distribution.distribution().get_data_layout((8, 4)).backend_layout
        counts = []
        for batch in [*range(4)] * 2:
            x = jax.device_put(X[8 * batch : 8 * batch + 8], layout)
            y = jax.device_put(X[8 * batch : 8 * batch + 8] ** 2, layout)
            weights, state = step(weights, state, x, y)
            counts.append(compiled)
        own = [*model.trainable_variables, *optimizer.variables]
        for variable, value in zip(own, [*weights, *state], strict=True):
            variable.assign(value)
        return {
            "difference": float(np.abs(numbers(model) - alone).max()),
            "misplaced": misplaced(model, place),
            "compiled": counts[-1] - counts[0],
        }


def half_precision(place: str) -> dict[str, Any]:
    """`mixed_float16`, in which `compile` puts Keras' own loss scale around the optimizer."""

    def train() -> np.ndarray:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, name="enc"), keras.layers.Dense(4, name="head")]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(kgo.GroupedOptimizer(rule="adam", global_clipnorm=0.1, **WHOLE), loss="mse")
        assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
        fit(model, 2)
        return np.concatenate([np.ravel(value) for value in model.get_weights()])

    keras.config.set_dtype_policy("mixed_float16")
    alone = train()
    with distribution(place).scope():
        several = train()
    keras.config.set_dtype_policy("float32")
    return {"difference": float(np.abs(several - alone).max())}


def refusals() -> dict[str, str]:
    """Errors of layouts that cannot be applied; a build without them then works."""
    other = keras.distribution.DeviceMesh((4,), ["other"])
    key = "default/head/kernel/momentums"
    bad = {
        "not in the mesh": {key: keras.distribution.TensorLayout(("other",), other)},
        "not divisible": {key: (None, "batch")},
        "rank": {key: (None, None, "batch")},
        "twice": {key: ("batch", "batch")},
        "two entries": {key: ("batch",), "default/.*/momentums": ("batch",)},
    }
    found = {}
    for name, entries in bad.items():
        layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((4,), ["batch"]))
        layouts.update(entries)
        with keras.distribution.ModelParallel(layout_map=layouts).scope():
            model = make({}, None, outputs=6)
            before = list(model.optimizer.variables)
            try:
                model.optimizer.build(model.trainable_variables)
            except ValueError as error:
                found[name] = str(error)
            assert [id(v) for v in model.optimizer.variables] == [id(v) for v in before]
            layouts.clear()
            model.optimizer.build(model.trainable_variables)
            before = list(model.optimizer.variables)
            layouts.update(entries)
            with contextlib.suppress(ValueError):
                model.optimizer.rebuild(model)
                found[name] = "accepted by `rebuild`"
            assert [id(v) for v in model.optimizer.variables] == [id(v) for v in before]
            layouts.clear()
            fit(model)
    return found


def main() -> None:
    import jax  # the suite of another backend reads the tables of this module

    jax.monitoring.register_event_duration_secs_listener(count_compilation)
    alone = {}
    for row, how in ROWS.items():
        model = make(*how)
        fit(model, 2)
        alone[row] = numbers(model)
    sharded = "model parallel, sharded state"
    found = {
        "rows": compare(alone),
        "live": {name: wrong for place in LIVE_IN for name, wrong in live(place).items()},
        "custom loop": custom_loop(sharded, alone["accumulation and averages"]),
        "half precision": half_precision("data parallel"),
        "refusals": refusals(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
