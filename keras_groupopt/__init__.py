"""Train different parts of a Keras 3 model differently, with one optimizer."""

__version__ = "0.1.0"
