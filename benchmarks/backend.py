"""The steps and peers of the current backend of Keras."""

from __future__ import annotations

import importlib
from typing import Any

import keras

NAME = keras.backend.backend()

steps: Any = importlib.import_module(f"{NAME}_steps")


def peers() -> Any:
    """Returns the module of the backend's optimizers, or `None` if they are not installed."""
    try:
        return importlib.import_module(f"{NAME}_peers")
    except ModuleNotFoundError:
        return None
