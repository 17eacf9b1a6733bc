"""Given anchors: values from arrays or a file, matched to a group's variables and checked."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_groupopt.base import text
from keras_groupopt.plan.plan import Plan, PlannedGroup, PlannedVariable
from keras_groupopt.selectors import layer_paths


def given_values(planned: PlannedGroup, plan: Plan, model: Any) -> dict[int, np.ndarray]:
    """Returns, per position of each anchored variable of the group, its anchor's value.

    Args:
        planned: A group whose anchor is of kind `"given"` and has a source.
        plan: The plan it is in.
        model: The model, needed to read a `.weights.h5` file; may be `None` otherwise.

    Raises:
        ValueError: If a value is missing, too many, or of another shape.
        OSError: If a file cannot be read.
    """
    where = planned.group.where
    anchored = [variable for variable in planned.variables if variable.anchored]
    anchor = planned.group.anchor
    source = anchor.source
    if isinstance(source, str):
        read = _below_its_layer(_read(source, model, where), anchored)
        values = _from_mapping(read, anchored, f"{where}, file {source!r}")
    elif isinstance(source, Mapping):
        values = _from_mapping(source, anchored, where)
        known = {variable.path for variable in planned.variables}
        unknown = [path for path in source if path not in known]
        # Given for all groups, it may hold the whole model's weights.
        if unknown and anchor is not plan.defaults.anchor:
            near = difflib.get_close_matches(unknown[0], [v.path for v in anchored], n=3)
            raise ValueError(
                f"`anchor` must name variables of its group. Received: {unknown[0]!r} in {where}. "
                f"The nearest are: {', '.join(near) or ', '.join(v.path for v in anchored[:5])}."
            )
    else:
        values = _from_sequence(source, planned, anchored, where)
    for variable in anchored:
        shape = np.shape(values[variable.position])
        if shape != variable.shape:
            raise ValueError(
                "An anchor must have the shape of its variable. Received: shape "
                f"{list(shape)} for {variable.path} of shape {list(variable.shape)} in {where}."
            )
        if not np.all(np.isfinite(np.asarray(values[variable.position], dtype="float32"))):
            raise ValueError(
                f"An anchor must be finite. Received: NaN or infinity for {variable.path} in "
                f"{where}."
            )
    return values


def _from_mapping(
    source: Mapping[str, Any], anchored: Sequence[PlannedVariable], where: str
) -> dict[int, np.ndarray]:
    missing = [variable.path for variable in anchored if variable.path not in source]
    if missing:
        near = difflib.get_close_matches(missing[0], list(source), n=3)
        raise ValueError(
            f"`anchor` must have a value for each decayed variable. Received: none for "
            f"{text.listing(missing)} in {where}. "
            + (f"The nearest names are: {', '.join(near)}." if near else "")
        )
    return {variable.position: np.asarray(source[variable.path]) for variable in anchored}


def _below_its_layer(
    source: Mapping[str, Any], anchored: Sequence[PlannedVariable]
) -> Mapping[str, Any]:
    """Returns `source` by paths in the model, if its paths start at a layer in the model.

    The file of a pretrained backbone knows nothing of the model the backbone is put into.
    """
    paths = [variable.path for variable in anchored]
    places = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    levels = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, places)]
    for depth in range(1, len(levels) + 1):
        above = "/".join(levels[:depth]) + "/"
        if all(path not in source and path.removeprefix(above) in source for path in paths):
            return {path: source[path.removeprefix(above)] for path in paths}
    return source


def _from_sequence(
    source: Sequence[Any],
    planned: PlannedGroup,
    anchored: Sequence[PlannedVariable],
    where: str,
) -> dict[int, np.ndarray]:
    for variables in (planned.variables, anchored):
        if len(source) == len(variables):
            pairs = zip(variables, source, strict=True)
            return {variable.position: np.asarray(value) for variable, value in pairs}
    raise ValueError(
        "`anchor` as a list must have one array per variable of its group. Received: "
        f"{len(source)} arrays in {where}, which has {len(planned.variables)} variables, "
        f"{len(anchored)} of them decayed."
    )


def _read(path: str, model: Any, where: str) -> dict[str, np.ndarray]:
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"`anchor` must be an existing file. Received: {path!r} in {where}."
        )
    if path.endswith(".keras"):
        source = _load(path, where, lambda: keras.saving.load_model(path, compile=False))
    elif model is None:
        raise ValueError(
            "`anchor` as a `.weights.h5` file needs the model. Received: "
            f"{path!r} in {where}, without `model=`. Pass `GroupedOptimizer(model=...)`, or give "
            "a `.keras` file."
        )
    else:
        source = _twin(model, where)
        _load(path, where, lambda: source.load_weights(path))
    catalog = layer_paths.describe_model(source)
    by_identity = {id(variable): variable for variable in source.variables}
    return {
        info.path: keras.ops.convert_to_numpy(by_identity[info.identity])
        for info in catalog.infos
        if info.identity in by_identity
    }


def _load(path: str, where: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        raise ValueError(
            "`anchor` must be a file that Keras can load into a model like this one. Received: "
            f"{path!r} in {where}: {error}"
        ) from error


def _twin(model: Any, where: str) -> Any:
    """Returns a model of the same architecture, so that reading a file leaves `model` alone."""
    try:
        twin = type(model).from_config(model.get_config())
        if not twin.built:
            twin.build_from_config(model.get_build_config())
        return twin
    except Exception as error:
        raise ValueError(
            "`anchor` as a `.weights.h5` file needs a model that can be made from its config. "
            f"Received: {type(model).__name__} in {where}: {error} Give a `.keras` file, or a "
            "dict from layer path to array."
        ) from error
