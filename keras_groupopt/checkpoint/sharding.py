"""The place of state on several devices: beside its weight, unless a layout map names it.

Keras gives a slot the layout of its weight. Moments, anchors, averages and accumulators may be
spread over more devices than the weight, since each part of them is needed in one place only
(ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054). The layout map of
`keras.distribution.ModelParallel` can name state by its keys. For example, an entry for
`backbone/.*/(velocity|@average)` lays out that state and leaves the weights alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from keras_groupopt.base import compat


def beside_weights() -> AbstractContextManager[Any]:
    """Returns a context that places new state beside its weight, and scalars on every device.

    State gets its keys once all of it is made. Until then its paths are others, so Keras must not
    ask the layout map for them.
    """
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, keras.distribution.ModelParallel):
        return nullcontext()
    scope: AbstractContextManager[Any] = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(distribution.device_mesh),
        batch_dim_name=distribution.batch_dim_name,
        auto_shard_dataset=False,
    ).scope()
    return scope


def place(entries: Mapping[str, Any]) -> None:
    """Lays state out over the devices as the present distribution's layout map says.

    An entry is used if its pattern matches the whole key, or the whole path of the variable, which
    is the optimizer's name and the key. If no entry matches, state stays beside its weight. Scalars
    stay on every device. If a layout names fewer axes than there are dimensions, the other
    dimensions are not divided.

    Args:
        entries: Every variable to save, by key.

    Raises:
        ValueError: If a layout does not fit its state, or if two entries match the same state. No
            state has moved then.
    """
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, keras.distribution.ModelParallel):
        return
    layout_map = compat.layout_map_of(distribution)
    layouts = {}
    for key, variable in entries.items():
        pattern = _pattern_of(key, variable.path, layout_map) if variable.shape else None
        if pattern is not None:
            layouts[key] = layout_map[pattern]
            _check(key, tuple(variable.shape), layouts[key], distribution.device_mesh)
    for key, layout in layouts.items():
        compat.set_layout(entries[key], layout)


def _pattern_of(key: str, path: str, layout_map: Mapping[str, Any]) -> str | None:
    found = [
        pattern
        for pattern in layout_map
        if pattern in (key, path) or re.fullmatch(pattern, key) or re.fullmatch(pattern, path)
    ]
    if len(found) > 1:
        raise ValueError(
            "At most one entry of the layout map must match state of the optimizer. Received: "
            f"{', '.join(map(repr, found))} for `{key}`. Narrow one of them: an entry for weights "
            "can end in the name of the weight, as `.*/kernel`."
        )
    return found[0] if found else None


def _check(key: str, shape: tuple[int, ...], layout: Any, mesh: Any) -> None:
    """Refuses a layout that does not fit. JAX would refuse it later, without naming the state."""
    axes = getattr(layout, "axes", None)
    if axes is None:  # it is a sharding of JAX, and JAX checks it
        return
    received = f"Received: {axes} for `{key}` of shape {list(shape)}"
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    named = [axis for axis in axes if axis is not None]
    unknown = [axis for axis in named if axis not in sizes]
    if unknown:
        raise ValueError(
            f"A layout of optimizer state must name axes of the distribution's mesh. {received}, "
            f"on a mesh of {', '.join(f'{axis}={size}' for axis, size in sizes.items())}."
        )
    if len(set(named)) < len(named):
        raise ValueError(
            f"A layout of optimizer state must name each axis once. {received}. Put `None` for a "
            "dimension that is not divided."
        )
    if len(axes) > len(shape):
        raise ValueError(
            "A layout of optimizer state must name at most one axis per dimension. "
            f"{received}. Give state of another rank an entry of its own."
        )
    for size, axis in zip(shape, axes, strict=False):
        if axis is not None and size % sizes[axis]:
            raise ValueError(
                "A layout of optimizer state must divide dimensions evenly. "
                f"{received}: {size} is not a multiple of {axis}={sizes[axis]}. Name the axis at "
                "another dimension, or narrow the pattern of the layout map so that it does not "
                "match this key."
            )
