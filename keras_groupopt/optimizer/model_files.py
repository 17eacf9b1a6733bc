"""Files of models: what is in them, and loading them whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras
import numpy as np

from keras_groupopt import checkpoint
from keras_groupopt.base import files
from keras_groupopt.base.unwrap import unwrap
from keras_groupopt.checkpoint.checksums import differing_weights
from keras_groupopt.optimizer import building, saving
from keras_groupopt.optimizer.binding import check_is_model
from keras_groupopt.optimizer.grouped_optimizer import GroupedOptimizer

Path = str | os.PathLike[str]

_WEIGHTS = "model.weights.h5"
_ENDINGS = (".keras", ".weights.h5", ".weights.json", ".npz")


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns what a file says of the optimizer state in it, without loading weights or state.

    The dict is plain JSON:

        format          the number of the format
        keras_groupopt  the version that wrote it
        iterations      the optimizer step
        provisional     whether paths come from `variable.path`, as no model was given
        groups          per group: "rule", its "class", "variables" (layer path to shape and
                        dtype), and "anchors" (their SHA-256, or None)
        declared        what was declared for each scalar: a number or a schedule's config
        state           per key: shape, dtype and CRC-32 of the array
        weights         CRC-32s of the model's arrays, by shape, if the optimizer
                        had its model
        checksum        the CRC-32 of all this

    Args:
        path: A `.keras`, `.weights.h5` or `.weights.json` file of a model that was compiled with
            a `GroupedOptimizer`, also inside a `LossScaleOptimizer`; or what
            `optimizer.save_state` wrote.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is another kind of file, is damaged, holds no state of a
            `GroupedOptimizer`, or has another format.

    Example:
    >>> import os, tempfile, keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> model.compile(optimizer=kgo.GroupedOptimizer(model=model, rule="adam"), loss="mse")
    >>> model.optimizer.build(model.trainable_variables)
    >>> path = os.path.join(tempfile.mkdtemp(), "model.keras")
    >>> model.save(path)
    >>> manifest = kgo.read_manifest(path)
    >>> manifest["iterations"], manifest["groups"]["default"]["variables"]
    (0, {'head/kernel': [[4, 2], 'float32'], 'head/bias': [[2], 'float32']})
    """
    name = _checked(path)
    if name.endswith(".npz"):
        with checkpoint.opened(name) as arrays:
            return checkpoint.read_manifest(arrays)
    manifest: dict[str, Any] | None = _read(name, checkpoint.read_manifest)
    if manifest is None:
        raise ValueError(
            "`path` must hold the state of a GroupedOptimizer. Received: "
            f"path={name!r}, which holds none. Was the model compiled with one, and trained or "
            "built, before it was saved?"
        )
    return manifest


def read_state(path: Path) -> checkpoint.Saved | None:
    """Returns the optimizer state in a file of a model, after checking all of it.

    Args:
        path: As in `read_manifest`, of a model.

    Returns:
        The state; `None` if there is none of a `GroupedOptimizer`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is another kind of file, or is damaged.
    """
    saved: checkpoint.Saved | None = _read(_checked(path), checkpoint.read)
    return saved


def _read(name: str, read: Callable[[Any], Any]) -> Any:
    """Returns what a function reads from the optimizer state in a file; `None` if there is none."""
    try:
        with _opened(name) as files:
            group = _state_in(files)
            return None if group is None else read(group)
    except Exception as error:  # a damaged file may make h5py and zipfile raise anything
        if "optimizer state" in str(error):
            raise
        raise ValueError(
            f"`path` must be a whole file. Received: path={name!r}: {error}"
        ) from error


def load_weights(model: Any, path: Path, *, optimizer: bool = True) -> None:
    """Loads weights and optimizer state, or leaves everything bit-identical.

    Like `model.load_weights`, with three differences. The file is verified first: the checksums
    of a `.keras` archive, and those that a `GroupedOptimizer` with its model keeps of weights and
    state. On any exception, Ctrl-C too, all weights and all state are as they were. And the
    optimizer can be left alone. A surrounding `kgo.resuming` holds here too. If the file holds
    optimizer state, the optimizer is built with the model's trainable variables.

    It keeps a copy of the model and its optimizer in memory while it loads.

    Args:
        model: A built Keras model.
        path: A `.weights.h5`, `.weights.json` or `.keras` file.
        optimizer: Whether optimizer state is loaded. `False` takes the weights alone, for a new
            task: the step, moments and rates stay. Before the first step, these weights become
            the anchors of kind `"initial"`. Default: `True`.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If `model` is not a model.
        ValueError: If the file is damaged or does not fit.

    Example:
    >>> import os, tempfile, keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> model.compile(optimizer=kgo.GroupedOptimizer(model=model, rule="adam"), loss="mse")
    >>> path = os.path.join(tempfile.mkdtemp(), "model.weights.h5")
    >>> model.save_weights(path)
    >>> with open(path, "r+b") as file:
    ...     _ = file.truncate(os.path.getsize(path) // 2)
    >>> kgo.load_weights(model, path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: `path` must be a whole file that fits the model. Received: path=...
    """
    check_is_model(model, keras.Model)
    name = _checked(path)
    if name.endswith(".npz"):
        raise ValueError(
            f"`path` must be a file of a model. Received: path={name!r}. Use "
            "`optimizer.load_state(path)`."
        )
    terms = checkpoint.present_terms()
    terms.report.fill(checkpoint.Report())
    with _unharmed(model):
        try:
            holds_state = _verify(name)
            with checkpoint.on_terms(terms):
                _load(model, name, optimizer)
            if optimizer and holds_state and _grouped(model) is not None:
                _check_taken(terms)
                _settle(model)
        except Exception as error:
            raise ValueError(
                "`path` must be a whole file that fits the model. Received: "
                f"path={name!r}: {str(error).replace(saving.WEIGHTS_CAME_FIRST, '')}\nThe model "
                "and its optimizer are as they were."
            ) from error


def _checked(path: Path) -> str:
    name = os.fspath(path)
    if not isinstance(name, str) or not name.endswith(_ENDINGS):
        raise ValueError(
            f"`path` must be a file that ends in one of {', '.join(_ENDINGS)}. Received: "
            f"path={path!r}."
        )
    if not os.path.exists(name):
        raise FileNotFoundError(f"`path` must be an existing file. Received: path={name!r}.")
    return name


def _grouped(model: Any) -> GroupedOptimizer | None:
    found = unwrap(getattr(model, "optimizer", None))
    return found if isinstance(found, GroupedOptimizer) else None


def _load(model: Any, name: str, optimizer: bool) -> None:
    own = getattr(model, "optimizer", None)
    if optimizer or own is None:
        model.load_weights(name)
        return
    skipped = {"objects_to_skip": [own]}
    if name.endswith(".keras"):
        # Keras leaves objects out of weights files only.
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(name) as archive:
            model.load_weights(archive.extract(_WEIGHTS, folder), **skipped)
    else:
        model.load_weights(name, **skipped)
    grouped = _grouped(model)
    if grouped is not None:
        saving.note_new_weights(grouped)


def _check_taken(terms: checkpoint.Terms) -> None:
    """Refuses a load that ignored the state in the file: a damaged name hides it from Keras."""
    if terms.report.status not in ("loaded", "waits for the build"):
        raise ValueError("the optimizer state in it is not where Keras looks for it")


def _settle(model: Any) -> None:
    """Builds the optimizer if its state waits for that, so that what does not fit is refused."""
    grouped = _grouped(model)
    if grouped is None or grouped._built is not None or not model.built:
        return
    undo = building.note_unbuilt(grouped)
    try:
        grouped.build(model.trainable_variables)
    except BaseException:
        undo()
        raise


def _verify(name: str) -> bool:
    """Reads the whole file once; returns whether it holds state of a GroupedOptimizer."""
    if name.endswith(".keras"):
        with zipfile.ZipFile(name) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"the checksum of {bad} in it differs")
    with _opened(name) as files:
        group = _state_in(files)
        if group is None:
            return False
        arrays = (array for file in files for array in _arrays(file))
        saved = checkpoint.read_manifest(group).get("weights", {})
        wrong = differing_weights(saved, arrays) if saved else []
    if wrong:
        raise ValueError(f"the checksum of a weight of shape {wrong[0]} in it differs")
    return True


@contextlib.contextmanager
def _opened(name: str) -> Iterator[list[h5py.File]]:
    """Opens the H5 files of a saved model."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(h5py.File(file, "r")) for file in _files(name, stack)]


def _files(name: str, stack: contextlib.ExitStack) -> list[Any]:
    if name.endswith(".weights.json"):
        with open(name, encoding="utf-8") as file:
            places = json.load(file)["weight_map"].values()
        shards = {
            shard for place in places for shard in ([place] if isinstance(place, str) else place)
        }
        folder = pathlib.Path(name).parent
        return [folder / pathlib.PurePath(shard).name for shard in sorted(shards)]
    if name.endswith(".keras"):
        archive = stack.enter_context(zipfile.ZipFile(name))
        return [stack.enter_context(archive.open(_WEIGHTS))]
    return [name]


def _state_in(files: list[h5py.File]) -> h5py.Group | None:
    """Returns the state of the model's optimizer, which may be inside another one.

    A layer that is a compiled model, such as a pretrained backbone, has an optimizer of its own.
    """
    places: list[tuple[h5py.File, str]] = []
    for file in files:
        names: list[str] = []
        file.visit(names.append)
        places += [(file, name) for name in names if name.endswith("/@manifest")]
    places.sort(key=lambda place: not place[1].startswith("optimizer/"))
    return places[0][0][places[0][1].rpartition("/")[0]] if places else None


def _arrays(file: h5py.File) -> Iterator[np.ndarray]:
    """Yields every array outside of the optimizer, one at a time: models are large."""
    names: list[str] = []
    file.visit(names.append)
    for name in names:
        item = file[name]
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/"):
            yield np.asarray(item)


@contextlib.contextmanager
def _unharmed(model: Any) -> Iterator[None]:
    """Puts a model and its optimizer back if the block fails."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(() if optimizer is None else optimizer.variables)]
    values = [np.array(keras.ops.convert_to_numpy(v), copy=True) for v in variables]
    grouped = _grouped(model)
    put_back = None if grouped is None else saving.remember(grouped)
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if put_back is not None:
            put_back()
        raise


def save_weights(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes what `model.save_weights` writes, in one step that a kill cannot cut in two.

    `model.save_weights` empties a file that exists before it writes it anew: a process killed in
    between leaves neither the old weights nor the new. This writes a file beside it, brings it to
    the disk, and puts it in the old one's place. Whoever opens `path` finds a whole file, the old
    or the new. What a kill leaves is `.<name>.partial.weights.h5`, which the next save overwrites.

    Args:
        model: A built Keras model.
        path: Where to; it must end in `.weights.h5`.

    Raises:
        TypeError: If `model` is not a model.
        ValueError: If `path` ends otherwise, or the model is not built.

    Example:

    >>> import os, tempfile, keras, keras_groupopt as kgo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> folder = tempfile.mkdtemp()
    >>> kgo.save_weights(model, os.path.join(folder, "model.weights.h5"))
    >>> os.listdir(folder)
    ['model.weights.h5']
    """
    check_is_model(model, keras.Model)
    files.write(model.save_weights, path)
