"""The direction of the imports, read from the source, so that nothing has to be imported."""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "keras_groupopt"
BACKENDS = ("tensorflow", "jax", "torch")

# From the bottom up. A part may import parts of the rows above it in this table, and of its own
# row; `ALONE` import nothing of ours at all.
ROWS = (
    ("variable_info", "views", "arguments", "base_rate", "naming", "wording", "_compat", "atomic"),
    ("selectors", "ema", "horizon"),
    ("groups", "ratios"),
    ("bindings", "curves"),
    ("plan",),
    ("resolve",),
    ("walk",),
    ("kernels",),
    ("rules", "schedules", "registered"),
    ("slots", "hyperparameters"),
    ("decay", "clipping", "accumulation", "averaging", "finiteness", "sharpness"),
    ("memory", "anchors", "gradient_state", "measures", "variable_rates"),
    ("updates",),
    ("group_parts", "run_length"),
    ("parts",),
    ("step", "declaration", "config"),
    ("state",),
    ("binding", "running_values", "persistence", "rebuilding", "measuring"),
    ("freezing",),
    ("grouped_optimizer",),
    ("loss_scale",),
    (
        "training",
        "callbacks",
        "recipes",
        "converters",
        "transfer",
        "checkpoints",
        "averaged_weights",
        "batch_norm",
        "model_xml",
    ),
    ("__init__",),
)
ALONE = ("variable_info", "views", "arguments", "base_rate", "naming", "_compat", "atomic")
PURE = (
    "variable_info",
    "views",
    "arguments",
    "base_rate",
    "naming",
    "wording",
    "selectors",
    "ema",
    "horizon",
    "curves",
    "groups",
    "ratios",
    "bindings",
    "plan",
    "resolve",
)
# Rich and h5py come with Keras, which needs both.
INSTALLED = ("keras", "numpy", "rich", "h5py")
OPTIONAL = ("matplotlib", "IPython", "elementpath")
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}

SOURCES = sorted((REPOSITORY / PACKAGE).rglob("*.py"))
IDS = [path.relative_to(REPOSITORY).as_posix() for path in SOURCES]
each_module = pytest.mark.parametrize("path", SOURCES, ids=IDS)


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def part_of(module: str) -> str:
    """`keras_groupopt.views.table` is of the part `views`; the package itself is `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def only(condition: Callable[[pathlib.Path], bool]) -> dict[str, list]:
    chosen = [(path, name) for path, name in zip(SOURCES, IDS, strict=True) if condition(path)]
    return {"argvalues": [path for path, _ in chosen], "ids": [name for _, name in chosen]}


MODULES = {module_name(path) for path in SOURCES}


def imports(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Full names of all that a module imports, inside functions too, with their lines."""
    package = PACKAGE if path.parent.name == PACKAGE else f"{PACKAGE}.{path.parent.name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                # What follows `from … import` may be a module or a name in one.
                yield (full if full in MODULES or base == "keras" else base), node.lineno


def top(module: str) -> str:
    return module.split(".")[0]


@each_module
def test_a_module_has_a_place_in_the_direction(path):
    assert part_of(module_name(path)) in ROW_OF, "add the part to ROWS in this test, and say why"


@each_module
def test_a_module_imports_only_what_is_below_it(path):
    own = part_of(module_name(path))
    wrong = []
    for module, line in imports(path):
        if top(module) != PACKAGE or part_of(module) == own:
            continue
        if own in ALONE or ROW_OF[part_of(module)] > ROW_OF[own]:
            wrong.append(f"{path.name}:{line} imports {module}")
    assert wrong == []


def test_no_two_modules_import_each_other_in_a_circle():
    graph = {
        module_name(path): {module for module, _ in imports(path) if module in MODULES}
        for path in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", **only(lambda path: part_of(module_name(path)) in PURE))
def test_a_pure_module_imports_neither_keras_nor_a_backend(path):
    for module, line in imports(path):
        assert top(module) not in ("keras", *BACKENDS), f"{path.name}:{line}"
        assert top(module) != PACKAGE or part_of(module) in PURE, f"{path.name}:{line}: {module}"


@pytest.mark.parametrize("path", **only(lambda path: path.name != "_compat.py"))
def test_only_the_compatibility_module_reaches_into_keras(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    }
    for module, line in imports(path):
        assert not f"{module}.".startswith("keras.src."), f"{path.name}:{line}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("keras", "src"), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            assert "keras.src" not in node.value, f"{path.name}:{node.lineno}"


@each_module
def test_a_backend_is_imported_only_by_a_module_named_after_it(path):
    for module, line in imports(path):
        for backend in BACKENDS:
            if top(module) in (backend, f"{backend}lib"):
                assert backend in path.name, f"{path.name}:{line} imports {module}"


@each_module
def test_a_module_named_after_a_backend_is_imported_only_where_it_is_needed(path):
    for module, line in imports(path):
        for backend in BACKENDS:
            if top(module) == PACKAGE and backend in module.rpartition(".")[2]:
                assert backend in path.name or is_deferred(path, line), (
                    f"{path.name}:{line} imports {module} on every backend: move the import into "
                    f"the function that needs it"
                )


@each_module
def test_a_module_imports_only_what_is_installed_with_the_package(path):
    for module, line in imports(path):
        name = top(module)
        if name in (PACKAGE, *BACKENDS) or name in sys.stdlib_module_names:
            continue
        if name in OPTIONAL:
            assert is_deferred(path, line), f"{path.name}:{line}: {name} may be absent"
        else:
            assert name in INSTALLED, f"{path.name}:{line}: {name} is no dependency"


def is_deferred(path: pathlib.Path, line: int) -> bool:
    """Whether the line runs only when a function is called, or under a condition."""
    return any(
        isinstance(node, ast.FunctionDef | ast.If | ast.Try)
        and node.lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
