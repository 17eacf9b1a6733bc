"""Keras' own underscore names are used in `base/compat` alone, which gives the reasons."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pathlib
import textwrap
from collections.abc import Iterator

import keras
import pytest

from keras_groupopt.base import compat

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((REPOSITORY / "keras_groupopt").rglob("*.py"))
    if path.parent.name != "compat"
}
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
KERAS_CLASSES = [
    *(value for value in vars(keras.optimizers).values() if isinstance(value, type)),
    *(value for value in vars(keras.distribution).values() if isinstance(value, type)),
    compat.Functional,
    keras.Sequential,
    keras.Variable,
    keras.KerasTensor,
    keras.StatelessScope,
    keras.metrics.Mean,
    keras.callbacks.Callback,
    keras.callbacks.CallbackList,
]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def defined_by_keras(cls: type) -> frozenset[str]:
    """The underscore names of a class' Keras bases: methods, and attributes that methods set."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("keras.src."):
            names.update(vars(base))
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            names.update(
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            )
    return frozenset(filter(is_private, names))


ALL = frozenset().union(*map(defined_by_keras, KERAS_CLASSES))


def is_own(node: ast.AST) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def used(node: ast.AST, of_self: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yields the Keras names that code uses or defines, with lines.

    Args:
        node: The code. Classes in it are left out.
        of_self: The names that Keras gives to `self` there.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            continue
        if isinstance(child, ast.Attribute):
            if child.attr in (of_self if is_own(child.value) else ALL):
                yield child.attr, child.lineno
        elif isinstance(child, ast.FunctionDef) and isinstance(node, ast.ClassDef):
            if child.name in of_self:
                yield child.name, child.lineno
        elif isinstance(child, ast.Call) and getattr(child.func, "id", None) in BY_NAME:
            name = child.args[1].value if isinstance(child.args[1], ast.Constant) else None
            if name in (of_self if is_own(child.args[0]) else ALL):
                yield name, child.lineno
        yield from used(child, of_self)


def names_of_self(cls: type) -> frozenset[str]:
    """What Keras gives to a class, or to a class that it is mixed into."""
    mixed_into = [cls]
    for each in mixed_into:
        mixed_into += each.__subclasses__()
    return frozenset().union(*map(defined_by_keras, mixed_into)) - compat.OVERRIDDEN.keys()


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_uses_no_underscore_name_of_keras(module):
    backends = {"tensorflow", "jax", "torch"} - {keras.backend.backend()}
    if any(name in module for name in backends):
        pytest.skip("the module is of another backend")
    loaded = vars(importlib.import_module(module))
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    found = list(used(tree, ALL))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            # A class within a function may be any.
            cls = loaded.get(node.name)
            found += used(node, ALL if cls is None else names_of_self(cls))
    assert [f"{name} in line {line}" for name, line in sorted(found)] == []
