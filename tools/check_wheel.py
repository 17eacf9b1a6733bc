"""Looks into a wheel, and uses the installed package beside one backend and nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pathlib
import pkgutil
import sys
import zipfile

BACKENDS = ("tensorflow", "jax", "torch")


def check_contents(wheel: pathlib.Path, checkout: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        notices = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    source = checkout / "keras_groupopt"
    expected = {
        path.relative_to(checkout).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == expected, f"not the package's files and only those: {held ^ expected}"
    assert "keras_groupopt/py.typed" in held
    assert notices, "the licence is missing"


def check_alone(checkout: pathlib.Path, backend: str) -> None:
    others = [name for name in BACKENDS if name != backend]
    for name in others:
        assert importlib.util.find_spec(name) is None, f"{name} is installed here too"

    import keras

    import keras_groupopt as kgo

    assert keras.backend.backend() == backend
    assert pathlib.Path(kgo.__file__).parent != checkout / "keras_groupopt", "not the wheel"
    assert importlib.metadata.version("keras-groupopt") == kgo.__version__
    for module in pkgutil.walk_packages(kgo.__path__, "keras_groupopt."):
        if not any(name in module.name for name in others):
            importlib.import_module(module.name)

    train_one_step(keras, kgo)


def train_one_step(keras, kgo) -> None:
    import numpy as np

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, name="body"), keras.layers.Dense(1, name="head")]
    )
    before = [np.array(weight) for weight in model.get_weights()]
    optimizer = kgo.GroupedOptimizer(
        groups=[kgo.Group("body", "body", learning_rate_ratio=0.1), kgo.Group("head", "head")],
        model=model,
        learning_rate=1e-2,
    )
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    moved = [bool(np.any(a != b)) for a, b in zip(before, model.get_weights(), strict=True)]
    assert all(moved), moved
    model.save("model.keras")
    restored = keras.models.load_model("model.keras")
    assert int(restored.optimizer.iterations) == int(optimizer.iterations) == 1


def main() -> None:
    wheel, checkout, backend = sys.argv[1:]
    check_contents(pathlib.Path(wheel), pathlib.Path(checkout))
    check_alone(pathlib.Path(checkout), backend)
    print(f"{pathlib.Path(wheel).name}: holds the package, and works with {backend} alone")


if __name__ == "__main__":
    main()
