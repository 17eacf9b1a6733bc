"""What every test, doctests of the package among them, starts from."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest

BACKENDS = ("tensorflow", "jax", "torch")

# Set before anything imports Keras. The choice of a plain `pytest` is what is installed; a
# `keras.json` in the home folder has no say.
if "KERAS_BACKEND" not in os.environ:
    os.environ["KERAS_BACKEND"] = next(name for name in BACKENDS if importlib.util.find_spec(name))
# Keras on JAX and torch loads TensorFlow where it finds it, to seed it: seconds for each process.
if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "tests" / "without_tensorflow"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """A package module of another backend is not imported to look for doctests in it."""
    if collection_path.name == "without_tensorflow":
        return True
    others = [name for name in BACKENDS if name != os.environ["KERAS_BACKEND"]]
    in_package = "keras_groupopt" in collection_path.parts
    if in_package and any(name in collection_path.stem for name in others):
        return True
    return None


@pytest.fixture(autouse=True)
def fresh_keras_state():
    """Same seed, dtype and automatic names for each test, whatever ran before it."""
    keras = sys.modules.get("keras")
    if keras is None:  # a test of a pure module, run alone, does not pay for the import
        yield
        return
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.config.set_image_data_format("channels_last")
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
