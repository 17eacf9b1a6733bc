"""The steps and peers of the backend that Keras runs on."""

from __future__ import annotations

import importlib
from typing import Any

import keras

NAME = keras.backend.backend()

steps: Any = importlib.import_module(f"{NAME}_steps")


def peers() -> Any:
    """Returns the module of the backend's own optimizers; `None` where those are not installed."""
    try:
        return importlib.import_module(f"{NAME}_peers")
    except ModuleNotFoundError:
        return None
