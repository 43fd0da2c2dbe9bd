"""Who may import whom. The table is docs/design.md's arrows; the mutants prove that it is enforced."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

ANYTHING = None
ALLOWED: Mapping[str, frozenset[str] | None] = {
    "errors": frozenset(),
    "ids": frozenset(),
    "block_ids": frozenset(),
    "config": frozenset({"errors"}),
    "bootstrap": frozenset({"errors", "ids", "wire"}),
    "pause": frozenset({"errors"}),
    "telemetry": frozenset({"errors", "ids"}),
    "layout": frozenset({"errors", "ids"}),
    "wire": frozenset({"block_ids", "errors", "ids"}),
    "transport": frozenset({"errors", "ids", "layout.spec"}),
    "session": frozenset({"block_ids", "errors", "ids", "layout", "wire"}),
    "ferry": frozenset(
        {"block_ids", "config", "errors", "ids", "layout", "session", "telemetry", "transport.base", "wire"}
    ),
    "moriio": frozenset({"block_ids", "config", "errors", "layout.spec", "wire"}),
    "vllm": frozenset(
        {"block_ids", "bootstrap", "config", "errors", "ferry", "ids", "layout", "moriio", "pause"}
        | {"session", "telemetry", "transport", "wire"}
        # What `testing: true` asks for: damage on purpose.
        | {"testing.mutants"}
    ),
    "models": frozenset({"errors"}),
    "stack": frozenset({"errors", "pause", "vllm.versions"}),
    "testing": frozenset(
        {"block_ids", "config", "errors", "ferry", "ids", "layout", "moriio", "session", "telemetry"}
        | {"transport", "wire"}
        # Tables without vLLM: made-up caches are described by what describes real ones.
        | {"vllm.kv_tables"}
    ),
    "gate": frozenset({"config", "errors", "ids", "layout", "models", "stack", "testing", "wire"}),
    "doctor": frozenset({"errors", "layout", "pause", "stack", "transport", "vllm.versions", "wire"}),
    "bench": frozenset(
        {"block_ids", "config", "errors", "ids", "layout", "models", "pause", "session", "stack"}
        | {"testing", "transport", "wire"}
    ),
    "watch": frozenset({"errors", "telemetry"}),
    "cli": ANYTHING,
}
"""Room -> what it may import of ours, itself aside. `layout` allows all of that room, `layout.spec` one
module. The version number in `stateferry` itself is for all."""

HEAVY = ("torch", "vllm")
LIBRARIES = ("mooncake", "mori", "nixl", "nixl_cu12", "nixl_cu13")
"""What transports bring; imported by one transport each, inside its class."""


@cache
def _read() -> Mapping[str, str]:
    files = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        files[".".join(parts)] = path.read_text()
    return files


def source_files() -> dict[str, str]:
    """Module name -> source text."""
    return dict(_read())


@cache
def broken_now() -> int:
    """How many rules are broken without any mutant: none, or the first test below fails."""
    return len(violations(source_files()))


@cache
def imports(module: str, text: str) -> tuple[tuple[str, ast.stmt, bool], ...]:
    """Every imported name of a module as (dotted name, statement, whether it runs at import)."""
    return tuple(_imports(module, text))


def _imports(module: str, text: str) -> Iterator[tuple[str, ast.stmt, bool]]:
    tree = ast.parse(text)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node, id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in a package's __init__ counts from the package, as elsewhere.
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            parent = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                yield f"{parent}.{alias.name}", node, id(node) not in late


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def room_of(module: str) -> str:
    """`stateferry.layout.spec` -> `layout`; `stateferry` itself -> an empty string."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else ""


def violations(files: Mapping[str, str]) -> list[str]:
    """Every import that breaks a rule, as text."""
    found = []
    ours = set(files) | {name.removesuffix(".__init__") for name in files}
    for module, text in files.items():
        room = room_of(module)
        for name, node, at_import in imports(module, text):
            where = f"{module}:{node.lineno} imports {name}"
            top = name.split(".")[0]
            if top == "stateferry":
                target = name if name in ours else name.rpartition(".")[0]
                if not _allowed(room, target):
                    found.append(f"{where}: {room or 'stateferry'} may not import {target}")
            elif top == "vllm" and room != "vllm":
                found.append(f"{where}: only the vllm room imports vllm")
            elif top in LIBRARIES and (room != "transport" or at_import):
                found.append(f"{where}: a transport imports its library inside its class")
    return found


def _allowed(room: str, target: str) -> bool:
    if target == "stateferry" or room_of(target) == room:
        return True
    allowed = ALLOWED.get(room, frozenset())
    if allowed is ANYTHING:
        return True
    inner = target.removeprefix("stateferry.")
    return any(inner == name or inner.startswith(f"{name}.") for name in allowed)


def circles(files: Mapping[str, str]) -> list[str]:
    """Modules that import one another in a circle, and what imports them."""
    known = {name.removesuffix(".__init__"): name for name in files}
    left = {}
    for short, module in known.items():
        names = [name for name, _, at_import in imports(module, files[module]) if at_import]
        targets = {name if name in known else name.rpartition(".")[0] for name in names}
        left[short] = targets & known.keys() - {short}
    while ends := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in ends:
            del left[module]
    return sorted(left)


def test_every_import_follows_the_arrows() -> None:
    assert violations(source_files()) == []


def test_inside_a_room_arrows_go_one_way_too() -> None:
    files = source_files()
    assert circles(files) == []
    module = "stateferry.ferry.links"
    late = f"def f():\n    import stateferry.ferry.asking\n{files[module]}"
    assert circles({**files, module: late}) == []
    back = f"from stateferry.ferry.asking import Asking\n{files[module]}"
    assert {module, "stateferry.ferry.asking"} <= set(circles({**files, module: back}))


def test_every_room_has_a_rule() -> None:
    rooms = {room_of(module) for module in source_files()} - {""}
    assert rooms <= set(ALLOWED)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("stateferry.layout.spec", "import stateferry.wire"),
        ("stateferry.layout.spec", "from stateferry.session import Producer"),
        ("stateferry.layout.spec", "from ..wire import codec"),
        ("stateferry.layout.__init__", "from .. import wire"),
        ("stateferry.wire.codec", "from stateferry.layout.spec import Pieces"),
        ("stateferry.transport.cma", "from stateferry.layout.plan import strips"),
        ("stateferry.session.clock", "from stateferry.transport.base import Transport"),
        ("stateferry.ferry.ferry", "from stateferry.transport import create_transport"),
        ("stateferry.ferry.ferry", "def f():\n    from stateferry.transport.cma import CmaTransport"),
        ("stateferry.vllm.worker", "from stateferry.stack import Stack"),
        ("stateferry.models.words", "from stateferry.config import Config"),
        ("stateferry.models.words", "from ..layout import spec"),
        ("stateferry.stack.client", "from stateferry.wire.params import x"),
        ("stateferry.stack.client", "from stateferry.models import RECALL_GDN"),
        ("stateferry.stack.client", "import vllm"),
        ("stateferry.doctor.packages", "from stateferry.vllm.compat import TESTED"),
        ("stateferry.ferry.ferry", "def f():\n    from vllm.config import VllmConfig"),
        ("stateferry.gate.run", "from stateferry.cli.app import app"),
        ("stateferry.errors", "from stateferry.ids import EngineId"),
        ("stateferry.transport.nixl", "import nixl"),
        ("stateferry.transport.nixl", "class T:\n    from nixl._api import nixl_agent"),
        ("stateferry.ferry.ferry", "def f():\n    import nixl"),
        ("stateferry.watch.page", "from stateferry.stack import Client"),
        ("stateferry.__init__", "from stateferry.vllm.plugin import register"),
    ],
)
def test_a_forbidden_import_is_caught(module: str, line: str) -> None:
    files = source_files()
    files[module] = f"{line}\n{files.get(module, '')}"
    assert len(violations(files)) == broken_now() + 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("stateferry.transport.nixl", "def f():\n    import nixl"),
        ("stateferry.vllm.worker", "from vllm.config import VllmConfig"),
        ("stateferry.session.clock", "from stateferry.layout.spec import Pieces"),
        ("stateferry.cli.demo", "from stateferry import __version__"),
    ],
)
def test_a_permitted_import_is_not_caught(module: str, line: str) -> None:
    assert violations({**source_files(), module: line}) == []


LIGHT = (
    "stateferry",
    "stateferry.config",
    "stateferry.layout",
    "stateferry.models",
    "stateferry.wire",
    "stateferry.session",
    "stateferry.transport",
    "stateferry.ferry",
    "stateferry.stack",
    "stateferry.doctor",
    "stateferry.watch",
    "stateferry.cli.main",
    "stateferry.cli.app",
)


def loaded_by(watched: tuple[str, ...]) -> dict[str, list[str]]:
    """Module of LIGHT -> those of `watched` that are loaded after it; one process imports them in order."""
    code = (
        "import importlib, json, sys\n"
        "found = {}\n"
        f"for module in {LIGHT!r}:\n"
        "    importlib.import_module(module)\n"
        f"    found[module] = [name for name in {watched!r} if name in sys.modules]\n"
        "print(json.dumps(found))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


def test_importing_loads_neither_torch_nor_vllm() -> None:
    found = loaded_by((*HEAVY, *LIBRARIES, "numpy"))
    assert not {name for names in found.values() for name in names} - {"numpy"}
    assert "numpy" in found["stateferry.session"], "what is loaded would not be seen"
