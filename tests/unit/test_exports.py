"""Every package says what it exports: all of it, sorted, and nothing that is not there."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "stateferry"
INITS = sorted(PACKAGE.rglob("__init__.py"))


def exported(tree: ast.Module) -> list[str] | None:
    """The value of `__all__`; None if there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return value
    return None


def defined(tree: ast.Module) -> set[str]:
    """Public names that a module's body imports from our package, defines or assigns."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("stateferry")):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def problems(source: str) -> list[str]:
    """What is wrong with the exports of one `__init__.py`."""
    tree = ast.parse(source)
    names = exported(tree)
    if names is None:
        return ["no __all__"] if defined(tree) else []  # a package may export nothing
    found = []
    if names != sorted(names, key=_order):
        found.append("__all__ is not sorted (constants, classes, functions)")
    if len(set(names)) != len(names):
        found.append("a name stands twice")
    public = {name for name in names if not name.startswith("__")}
    if missing := defined(tree) - public:
        found.append(f"not exported: {sorted(missing)}")
    if unknown := public - defined(tree):
        found.append(f"exported but not there: {sorted(unknown)}")
    return found


def _order(name: str) -> tuple[int, str]:
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


@pytest.mark.parametrize("path", INITS, ids=lambda path: path.parent.name)
def test_exports_are_complete_and_sorted(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize("path", INITS, ids=lambda path: path.parent.name)
def test_a_package_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "from .a import B",
        "from stateferry.errors import ConfigError\n__all__ = []",
        "__all__ = ['Gone']",
        "from .a import B, C\n__all__ = ['C', 'B']",
        "from .a import b, C\n__all__ = ['b', 'C']",
        "from .a import B\n__all__ = ['B', 'B']",
        "def f(): ...\n__all__ = []",
    ],
)
def test_a_wrong_export_list_is_caught(source: str) -> None:
    assert len(problems(source)) == 1
