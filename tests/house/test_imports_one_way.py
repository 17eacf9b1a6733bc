"""The direction of the imports, read from the source, so that nothing has to be imported."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import sys
from collections.abc import Iterator

import pytest

REPOSITORY = next(p for p in pathlib.Path(__file__).resolve().parents if (p / "README.md").exists())
PACKAGE = "keras_groupopt"
BACKENDS = ("tensorflow", "jax", "torch")

# A folder imports only folders before it. The package itself imports them all.
FOLDERS = (
    "base",
    "selectors",
    "schedules",
    "backend",
    "plan",
    "rules",
    "step",
    "checkpoint",
    "optimizer",
    "training",
    "recipes",
)
# These hold no tensors.
WITHOUT_KERAS = ("base.checks", "base.text", "plan")
# Rich, h5py and ml_dtypes come with Keras, which needs them.
INSTALLED = ("keras", "numpy", "rich", "h5py", "ml_dtypes")
OPTIONAL = ("matplotlib", "IPython", "elementpath")

SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py"))
}
each_module = pytest.mark.parametrize("module", SOURCES)


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Yields the full name of each import of a module, those inside functions too, and its line."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                # The name may be a module or something in one.
                yield (
                    (full if full in SOURCES or node.module == "keras" else node.module or ""),
                    (node.lineno),
                )


def folder(module: str) -> str:
    return f"{module}..".split(".")[1]


def top(module: str) -> str:
    return module.partition(".")[0]


def is_deferred(module: str, line: int) -> bool:
    """Whether the line runs only when a function is called, or under a condition."""
    return any(
        isinstance(node, ast.FunctionDef | ast.If | ast.Try)
        and node.lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8")))
    )


def test_the_package_has_at_most_twelve_entries():
    entries = {path.name for path in (REPOSITORY / PACKAGE).iterdir()} - {"__pycache__"}
    assert entries == {*FOLDERS, "__init__.py", "py.typed"}


@each_module
def test_a_folder_imports_only_folders_before_it(module):
    own = folder(module)
    for other, line in imports(module):
        if own and top(other) == PACKAGE and folder(other) != own:
            assert folder(other) in FOLDERS[: FOLDERS.index(own)], f"line {line} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: {other for other, _ in imports(module)} & set(SOURCES) for module in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()  # its error shows the circle


@pytest.mark.parametrize(
    "module",
    [m for m in SOURCES if m.removeprefix(f"{PACKAGE}.").startswith(WITHOUT_KERAS)],
)
def test_a_module_without_tensors_imports_neither_keras_nor_a_backend(module):
    for other, line in imports(module):
        assert top(other) not in ("keras", *BACKENDS), f"line {line} imports {other}"


@pytest.mark.parametrize("module", [m for m in SOURCES if f"{m}.".find(".base.compat.") < 0])
def test_only_the_compatibility_module_reaches_into_keras(module):
    text = SOURCES[module].read_text(encoding="utf-8")
    assert "keras.src" not in text
    assert "from keras import src" not in text


@each_module
def test_a_backend_or_a_module_named_after_one_is_imported_only_where_it_is_needed(module):
    for other, line in imports(module):
        for backend in BACKENDS:
            if top(other) in (backend, f"{backend}lib"):
                assert backend in module, f"line {line} imports {other}"
            if top(other) == PACKAGE and backend in other.rpartition(".")[2]:
                assert backend in module or is_deferred(module, line), (
                    f"line {line} imports {other} on every backend: move the import into the "
                    f"function that needs it"
                )


@each_module
def test_a_module_imports_only_what_is_installed_with_the_package(module):
    for other, line in imports(module):
        name = top(other)
        if name in (PACKAGE, *BACKENDS) or name in sys.stdlib_module_names:
            continue
        if name in OPTIONAL:
            assert is_deferred(module, line), f"line {line}: {name} may be absent"
        else:
            assert name in INSTALLED, f"line {line}: {name} is not a dependency"
