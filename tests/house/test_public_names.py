"""What a public name owes its reader: a docstring that says all, and a way through saving."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
from public_surface import is_called, public

import keras_groupopt as kgo

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# No instance of these is saved; and how to make one of each class that has arguments without a
# default and a `get_config`.
BASES = ("GradientRule", "SharpnessAware", "schedules.Schedule")
# Bases that are inside, and what stands for rules of Keras while a step is taken.
INSIDE = ("UpdateRule", "Wrapping", "Ftrl", "SGD", "RMSprop")
EXAMPLES: dict[str, Callable[[], Any]] = {
    "SharpnessAwareModel": lambda: kgo.SharpnessAwareModel(
        i := keras.Input((2,)), keras.layers.Dense(2)(i)
    ),
    "ConstantRate": lambda: kgo.ConstantRate(1e-4),
    "LossScaleOptimizer": lambda: kgo.LossScaleOptimizer(kgo.GroupedOptimizer(), 1024),
    "schedules.Chained": lambda: kgo.schedules.Chained([0.1, kgo.constant(0.5)]),
    "schedules.Cyclic": lambda: kgo.schedules.Cyclic(0.1, 0.2),
    "schedules.Lambda": lambda: kgo.schedules.Lambda(halved),
    "schedules.Linear": lambda: kgo.schedules.Linear(0.1, "fit"),
    "schedules.MultiStep": lambda: kgo.schedules.MultiStep(0.1, [3, 5]),
    "schedules.OneCycle": lambda: kgo.schedules.OneCycle(0.1, 100),
    "schedules.Polynomial": lambda: kgo.schedules.Polynomial(0.1, 100),
    "schedules.SWA": lambda: kgo.schedules.SWA(0.1, 0.05, 80),
    "schedules.Scaled": lambda: kgo.schedules.Scaled(kgo.constant(0.1), 0.5),
    "schedules.Sequential": lambda: kgo.schedules.Sequential([0.1, 0.2], [10]),
    "schedules.Step": lambda: kgo.schedules.Step(0.1, 30),
    "schedules.UnfreezeAt": lambda: kgo.schedules.UnfreezeAt(100),
    "schedules.Warmup": lambda: kgo.schedules.Warmup(0.1, 10),
    "schedules.WarmupStableDecay": lambda: kgo.schedules.WarmupStableDecay(0.1, 100),
}


@keras.saving.register_keras_serializable(package="public_names")
def halved(step: Any) -> Any:
    return step / 2


DOCUMENTED = {name: member for name, member in public().items() if is_called(member)}


def is_saved_by_keras(member: Any) -> bool:
    """Selectors and groups have configs too, but write and read them within ours."""
    own_way = ("selectors", "groups", "plan", "variable_info")
    return (
        inspect.isclass(member)
        and hasattr(member, "get_config")
        and hasattr(member, "from_config")
        and member.__module__.split(".")[1] not in own_way
    )


SERIALISABLE = {
    name: member
    for name, member in DOCUMENTED.items()
    if name not in BASES and is_saved_by_keras(member)
}
each_documented = pytest.mark.parametrize("name", sorted(DOCUMENTED))


def section(docstring: str, *headings: str) -> str | None:
    """The indented text below `Heading:`, or None."""
    pattern = rf"^(?:{'|'.join(headings)}):[^\n]*\n((?:[ \t]+[^\n]*\n|\n)+)"
    found = re.search(pattern, inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    return found[1] if found else None


def parameters(member: Any) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(member).parameters.items()
        if name not in ("self", "cls") and parameter.kind is not parameter.VAR_KEYWORD
    ]


def own_methods(member: type) -> dict[str, Any]:
    """Public methods and properties that the class adds; what it overrides has its base's text."""
    inherited = {name for base in member.__mro__[1:] for name in vars(base)}
    return {
        name: value
        for name, value in vars(member).items()
        if not name.startswith("_")
        and name not in inherited
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    }


def test_the_version_is_that_of_the_changelog():
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d\S*?)\]?(?: |$)", changelog, re.MULTILINE)
    assert newest is not None
    assert kgo.__version__ == newest[1]


@each_documented
def test_a_public_name_starts_with_one_line(name):
    text = DOCUMENTED[name].__doc__ or ""
    assert len(text.strip().split("\n\n")[0].splitlines()) == 1, text


@each_documented
def test_a_public_name_explains_each_argument(name):
    text = section(DOCUMENTED[name].__doc__, "Args", "Attributes") or ""
    missing = [p for p in parameters(DOCUMENTED[name]) if not re.search(rf"\b{p}\b", text)]
    assert missing == []


@each_documented
def test_a_public_name_shows_an_example_that_is_run(name):
    text = inspect.cleandoc(DOCUMENTED[name].__doc__)
    assert re.search(r"^Examples?:\s+(?:.*\n)*?\s*>>> ", text, re.MULTILINE), text


@pytest.mark.parametrize("name", sorted(n for n, m in DOCUMENTED.items() if inspect.isfunction(m)))
def test_a_public_function_says_what_it_returns(name):
    if DOCUMENTED[name].__annotations__.get("return") != "None":
        assert section(DOCUMENTED[name].__doc__, "Returns", "Yields")


@pytest.mark.parametrize("name", sorted(n for n, m in DOCUMENTED.items() if inspect.isclass(m)))
def test_a_public_class_documents_the_methods_it_adds(name):
    bare = [m for m, value in own_methods(DOCUMENTED[name]).items() if not inspect.getdoc(value)]
    assert bare == []


@pytest.mark.parametrize("name", sorted(SERIALISABLE))
def test_a_serialisable_class_comes_back_by_its_name(name):
    cls = SERIALISABLE[name]
    made = EXAMPLES[name]() if name in EXAMPLES else cls()
    config = keras.saving.serialize_keras_object(made)
    restored = keras.saving.deserialize_keras_object(config)
    assert type(restored) is cls
    assert keras.saving.serialize_keras_object(restored) == config
    assert config["registered_name"] == f"{kgo.__name__}>{cls.__name__}"


def test_every_serialisable_class_of_the_package_is_public():
    hidden = []
    for info in pkgutil.walk_packages(kgo.__path__, f"{kgo.__name__}."):
        if any(backend in info.name for backend in ("tensorflow", "jax", "torch")):
            continue
        for name, member in vars(importlib.import_module(info.name)).items():
            own = getattr(member, "__module__", None) == info.name and not name.startswith("_")
            if (
                own
                and name not in INSIDE
                and is_saved_by_keras(member)
                and member not in DOCUMENTED.values()
            ):
                hidden.append(f"{info.name}.{name}")
    assert hidden == []


# Defaults --------------------------------------------------------------------------------------


def callables() -> Iterator[tuple[str, Any]]:
    """Public functions, classes and the methods that classes add, with their names."""
    for name, member in DOCUMENTED.items():
        yield name, member
        if inspect.isclass(member):
            for method, value in own_methods(member).items():
                if not isinstance(value, property):
                    yield f"{name}.{method}", getattr(member, method)


def entries(docstring: str) -> dict[str, str]:
    """What the section of arguments says of each."""
    text = textwrap.dedent(section(docstring or "", "Args", "Attributes") or "")
    parts = re.split(r"^(\w+(?:, \w+)*)(?: \([^)]*\))?: ", text, flags=re.MULTILINE)
    named = zip(parts[1::2], parts[2::2], strict=True)
    return {name: " ".join(said.split()) for names, said in named for name in names.split(", ")}


def states(said: str, default: Any) -> bool:
    """Whether a text has the word and, of a number, a switch or a text, the value."""
    after = re.search(r"\bdefaults?\b(.*)", said, re.IGNORECASE)
    if after is None or not isinstance(default, bool | int | float | str):
        return after is not None
    if isinstance(default, bool | str):
        return f"{default}" in after[1]
    return any(
        float(number.replace(",", "")) == default
        for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", after[1])
    )


@pytest.mark.parametrize(("name", "member"), list(callables()))
def test_an_optional_argument_states_its_default(name, member):
    said = entries(member.__doc__)
    missing = [
        argument
        for argument, parameter in inspect.signature(member).parameters.items()
        if parameter.default is not parameter.empty
        and not states(said.get(argument, ""), parameter.default)
    ]
    assert missing == []
