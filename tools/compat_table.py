"""What of vLLM this connector touches, and what other versions of vLLM have in its place.

    python tools/compat_table.py                           print the part of docs/compat.md that is made here
    python tools/compat_table.py --write                   put it there
    python tools/compat_table.py --take FOLDER 0.33.0      look at an unpacked wheel and keep what was seen

Looks at source text only: no vLLM is imported, so versions for other machines can be looked at, too. What was
seen of a version lies in `tools/compat/`. A unit test compares the page with this, and what was seen of the
installed version with what is installed.
"""

import argparse
import ast
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "src" / "stateferry" / "vllm"
SEEN = ROOT / "tools" / "compat"
PAGE = ROOT / "docs" / "compat.md"
START, END = "<!-- made by tools/compat_table.py -->\n", "<!-- end -->\n"

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BASES = ("KVConnectorBase_V1", "SupportsHMA")
CALLED = {
    "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": ("KVConnectorTransferResults",),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
}
"""Classes whose methods or fields we call or override, besides the bases."""
MESSAGE_QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
"""Where vLLM's processes wait for each other."""
WATCHED = (
    "vllm.config",
    "vllm.distributed.kv_transfer.kv_connector",
    "vllm.model_executor.layers.mamba.abstract",
    "vllm.plugins",
    "vllm.tracing",
    "vllm.v1.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.metrics",
    "vllm.v1.outputs",
    "vllm.v1.request",
)
"""Modules whose names are kept even where we do not import from them yet."""

Signature = list[str]
Seen = dict[str, Any]


# -- what we touch ---------------------------------------------------------------------------------


def imported() -> set[frozenset[tuple[str, str]]]:
    """Every (module, name) that our code imports from vLLM. Where a `try` has an import for each of
    several versions, those are alternatives, of which one must be there."""
    found = set()
    for path in OURS.glob("*.py"):
        tree = ast.parse(path.read_text())
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
        inside: set[int] = set()
        for node in tries:
            several = [inner for inner in ast.walk(node) if isinstance(inner, ast.ImportFrom)]
            inside |= {id(inner) for inner in several}
            names = {alias.name for inner in several for alias in inner.names}
            found |= {frozenset(p for inner in several for p in _pairs(inner) if p[1] == n) for n in names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in inside:
                found |= {frozenset([pair]) for pair in _pairs(node)}
    return found - {frozenset()}


def _pairs(node: ast.ImportFrom) -> list[tuple[str, str]]:
    module = node.module or ""
    return [(module, alias.name) for alias in node.names] if module.split(".")[0] == "vllm" else []


def hooks() -> dict[str, Signature]:
    """Methods of our connector, with their arguments."""
    tree = ast.parse((OURS / "connector.py").read_text())
    (connector,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "StateFerryConnector")
    return {name: arguments for name, (arguments, _) in methods(connector).items()}


# -- what a vLLM has -------------------------------------------------------------------------------


def methods(node: ast.ClassDef) -> dict[str, tuple[Signature, bool]]:
    """Name -> (arguments as written, without types; whether it is abstract)."""
    found = {}
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
            abstract = any("abstractmethod" in ast.unparse(d) for d in inner.decorator_list)
            found[inner.name] = (arguments_of(inner), abstract)
    return found


def arguments_of(node: ast.FunctionDef) -> Signature:
    """Arguments as written, without types; `x=` has a default."""
    a = node.args
    plain = [arg.arg for arg in [*a.posonlyargs, *a.args]]
    first_default = len(plain) - len(a.defaults)
    names = [name if i < first_default else f"{name}=" for i, name in enumerate(plain)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [f"{arg.arg}=" if d else arg.arg for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return names + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def fields(node: ast.ClassDef) -> list[str]:
    """Annotated names in a class's body."""
    return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def defined(tree: ast.Module) -> set[str]:
    """Names that a module offers: defined, assigned or imported, at its top or under an `if` or `try`."""
    return set(_defined(tree.body))


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined(node.body)
            yield from _defined(node.orelse)


def module_file(root: Path, module: str) -> Path | None:
    """A module's file under `root`, the folder that has `vllm` in it."""
    path = root.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def look(root: Path, version: str) -> Seen:
    """What a vLLM under `root` has of what we touch."""
    every = {pair for alternatives in imported() for pair in alternatives}
    wanted = {module for module, _ in every} | set(CALLED) | {BASE}
    wanted |= {m for watched in WATCHED for m in _below(root, watched)}
    wanted |= {f"{m}.{name}" for m, name in every if module_file(root, f"{m}.{name}") is not None}
    names: dict[str, list[str]] = {}
    classes: dict[str, Any] = {}
    functions: dict[str, Signature] = {}
    for module in sorted(wanted):
        path = module_file(root, module)
        if path is None:
            names[module] = []
            continue
        tree = ast.parse(path.read_text())
        names[module] = sorted(name for name in defined(tree) if name == "__version__" or name[:2] != "__")
        ours = {name for wanted_module, name in every if wanted_module == module}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in ours:
                functions[f"{module}.{node.name}"] = arguments_of(node)
        chosen = CALLED.get(module, ()) + (BASES if module == BASE else ())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in chosen:
                classes[node.name] = {"methods": methods(node), "fields": fields(node)}
    return {"version": version, "names": names, "classes": classes, "functions": functions}


def _below(root: Path, module: str) -> Iterator[str]:
    """A module, and those directly in it."""
    yield module
    folder = root.joinpath(*module.split("."))
    yield from (f"{module}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__")


# -- the table -------------------------------------------------------------------------------------


def fits(ours: Signature, theirs: Signature) -> str:
    """How our method takes what vLLM passes to the base class's; empty: as it is."""
    if any(name.startswith("*") for name in ours):
        plain = [name for name in ours if not name.startswith("*")]
        theirs, ours = [t for t in theirs if not t.startswith("*")][: len(plain)], plain
    bare = [name.rstrip("=") for name in theirs]
    mine = [name.rstrip("=") for name in ours]
    for index, name in enumerate(bare):
        if index >= len(mine):
            return f"argument {name} is new"
        if mine[index] != name:
            return f"argument {mine[index]} is {name} there"
    more = [name for name in ours[len(bare) :] if not name.endswith("=")]
    return f"argument {more[0]} is not passed" if more else ""


def rows(seen: Seen) -> dict[str, str]:
    """What we touch -> what that version makes of it; empty: as we have it."""
    found: dict[str, str] = {}
    bases = {name: m for base in BASES for name, m in seen["classes"][base]["methods"].items()}
    for name, ours in hooks().items():
        if name in bases and not name.startswith("__"):
            found[f"hook `{name}`"] = fits(ours, bases[name][0])
    found["constructor"] = fits(hooks()["__init__"], bases["__init__"][0])
    missing = [name for name, (_, abstract) in bases.items() if abstract and name not in hooks()]
    found["abstract hooks that we lack"] = ", ".join(f"`{name}`" for name in missing)
    gone = [text for pairs in imported() if (text := _missing(pairs, seen["names"]))]
    found["names that we import"] = ", ".join(sorted(gone))
    first = versions()[0]["functions"]
    for name, ours in seen["functions"].items():
        other = ours != first.get(name, ours)
        found[f"function `{name.rpartition('.')[2]}`"] = f"now takes {', '.join(ours)}" if other else ""
    results = seen["classes"]["KVConnectorTransferResults"]["fields"]
    lost = {"finished_sending", "finished_recving", "failed_recving"} - set(results)
    found["results of transfers"] = ", ".join(sorted(lost))
    queue = seen["names"].get(MESSAGE_QUEUE, [])
    found["wait that a pause replaces"] = (
        "" if "sched_yield" in queue else "no `sched_yield`: no pause is made"
    )
    register = seen["classes"]["KVConnectorFactory"]["methods"]["register_connector"][0]
    wanted = ["cls", "name", "module_path", "class_name"]
    found["registration"] = "" if register == wanted else f"takes {', '.join(register)}"
    return found


def _missing(alternatives: frozenset[tuple[str, str]], names: dict[str, list[str]]) -> str:
    """What is missing of one import; empty if one of its alternatives is there, or nobody looked."""
    known = [(module, name) for module, name in alternatives if module in names]
    if not known or any(name in names[module] or f"{module}.{name}" in names for module, name in known):
        return ""
    return " or ".join(sorted(f"`{module}.{name}`" for module, name in known))


def new_hooks(before: Seen, after: Seen) -> list[str]:
    """Hooks of the base classes that the later version added."""
    old, new = ({n for b in BASES for n in seen["classes"][b]["methods"]} for seen in (before, after))
    return sorted(new - old)


def versions() -> list[Seen]:
    """Everything that was seen, oldest first."""
    found = [json.loads(path.read_text()) for path in SEEN.glob("vllm-*.json")]
    return sorted(found, key=lambda seen: [int(part) for part in seen["version"].split(".")])


GROUPS = {
    "hook `": "hooks of the base classes that we override",
    "function `": "functions that we call",
}
"""Rows that the page shows as one, unless one of them does not fit."""


def gathered(column: dict[str, str]) -> dict[str, str]:
    """Rows as the page shows them: many that fit are one."""
    found = {}
    for name, text in column.items():
        group = next((title for start, title in GROUPS.items() if name.startswith(start)), name)
        found.setdefault(group, "")
        if text:
            found[group] += f"{'; ' if found[group] else ''}{name}: {text}" if group != name else text
    return found


def table(*, everything: bool = False) -> str:
    """The part of the page that is made here; `everything`: a row for each hook and function."""
    seen = versions()
    columns = {one["version"]: rows(one) if everything else gathered(rows(one)) for one in seen}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| what we touch | {' | '.join(f'vLLM {version}' for version in columns)} |"]
    lines += ["| --- |" + " --- |" * len(columns)]
    for name in names:
        cells = ["-" if name not in column else column[name] or "fits" for column in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for before, after in itertools.pairwise(seen):
        added = [f"`{name}`{' (answered)' if name in hooks() else ''}" for name in new_hooks(before, after)]
        if added:
            lines += ["", f"New hooks in {after['version']}: {', '.join(added)}."]
    return "\n".join(lines) + "\n"


def unseen() -> list[str]:
    """What we import from modules that nobody looked at in some version: take that version again."""
    return sorted(
        f"{one['version']}: {module}"
        for one in versions()
        for alternatives in imported()
        if not any(module in one["names"] for module, _ in alternatives)
        for module, _ in alternatives
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="What of vLLM this connector touches, by version.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compat.md")
    parser.add_argument("--take", nargs=2, metavar=("FOLDER", "VERSION"), help="look at an unpacked wheel")
    options = parser.parse_args()
    if options.take:
        folder, version = options.take
        SEEN.mkdir(exist_ok=True)
        text = json.dumps(look(Path(folder), version), indent=None, separators=(",", ":"))
        (SEEN / f"vllm-{version}.json").write_text(text.replace('],"', '],\n"') + "\n")
    elif options.write:
        page = PAGE.read_text()
        head, _, rest = page.partition(START)
        PAGE.write_text(head + START + "\n" + table() + "\n" + END + rest.partition(END)[2])
    else:
        print(table(everything=True), end="")
        for text in unseen():
            print(f"never looked at: {text}; take it again", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
