"""The public names of the package, as plain text: `python public_surface.py` writes them down.

`public_names.json` holds them as they were before the package's modules were taken apart. Only
what this package defines is listed: what a class has from Keras changes with the version of that.
The file was written on torch: on JAX alone the models have a `make_train_function` of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
import types
from typing import Any

import keras

import keras_groupopt as kgo

FILE = pathlib.Path(__file__).resolve().parent / "public_names.json"
MODULES = ("recipes", "schedules")


def surface() -> dict[str, Any]:
    """Names as they are written after `kgo.`, how they are called, and what classes have."""
    found = public()
    called = {name: member for name, member in found.items() if is_called(member)}
    classes = {name: member for name, member in called.items() if inspect.isclass(member)}
    return {
        "names": sorted(found),
        "signatures": {name: signature(member) for name, member in sorted(called.items())},
        "members": {name: members(cls) for name, cls in sorted(classes.items())},
    }


def public() -> dict[str, Any]:
    """Everything public but the modules behind the names, which move."""
    found = {}
    for name in dir(kgo):
        member = getattr(kgo, name)
        if name.startswith("_") or (isinstance(member, types.ModuleType) and name not in MODULES):
            continue
        found[name] = member
    for module in MODULES:
        for name in dir(found[module]):
            member = getattr(found[module], name)
            if not name.startswith("_") and not isinstance(member, types.ModuleType):
                found[f"{module}.{name}"] = member
    return found


def is_called(member: Any) -> bool:
    return inspect.isclass(member) or inspect.isfunction(member)


def signature(member: Any) -> list[str]:
    """The parameters, one text each, without annotations; `"*"` stands before those by name."""
    texts, by_name = [], False
    # Python 3.10 shows `__new__`, which Keras' models have, in place of `__init__`.
    model = inspect.isclass(member) and issubclass(member, keras.Model)
    called = inspect.signature(member.__init__ if model else member).parameters.values()
    for parameter in list(called)[model:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            by_name = True
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            texts.append("*")
            by_name = True
        texts.append(str(parameter.replace(annotation=parameter.empty)))
    return texts


def members(cls: type) -> list[str]:
    """Public methods, properties and fields that classes of this package give it."""
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == kgo.__name__]
    names = {name for base in own for name in vars(base)}
    if dataclasses.is_dataclass(cls):
        names |= {field.name for field in dataclasses.fields(cls)}
    return sorted(name for name in names if not name.startswith("_"))


if __name__ == "__main__":
    FILE.write_text(f"{json.dumps(surface(), indent=1)}\n", encoding="utf-8")
