"""What must not appear in our files, with a sample of each that must be found."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICKLES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve"})
SLEEP_ROOMS = ("src/stateferry/stack/", "src/stateferry/testing/", "src/stateferry/vllm/waits.py")
ABSOLUTE = re.compile(r"(?<![\w.:/~-])/(?:" + "|".join(("work", "root")) + r")/")
"""A path that exists on one machine only."""


def tracked() -> list[str]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in output.splitlines() if (ROOT / name).is_file()]


def code_bans(name: str, source: str) -> Iterator[str]:
    """Banned constructs of a Python file of the package."""
    for node in ast.walk(ast.parse(source)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{where} bare except: name what is expected"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if PICKLES & {module.split(".")[0] for module in modules}:
                yield f"{where} pickle: messages are msgspec structs"
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in names:
                yield from _sleep(name, where)
        elif isinstance(node, ast.Attribute) and node.attr == "sleep" and ast.unparse(node) == "time.sleep":
            yield from _sleep(name, where)


def _sleep(name: str, where: str) -> Iterator[str]:
    if not name.startswith(SLEEP_ROOMS):
        yield f"{where} time.sleep: wait for an event with a deadline"


def test_the_package_has_no_banned_construct() -> None:
    found = []
    for name in tracked():
        if name.startswith("src/") and name.endswith(".py"):
            found += code_bans(name, (ROOT / name).read_text())
    assert found == []


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    found = []
    for name in tracked():
        content = (ROOT / name).read_bytes()
        if b"\0" in content[:8000]:
            continue  # weights
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if ABSOLUTE.search(line):
                found.append(f"{name}:{number}")
    assert found == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("src/stateferry/ferry/x.py", "import time\ntime.sleep(1)"),
        ("src/stateferry/ferry/x.py", "from time import sleep"),
        ("src/stateferry/wire/x.py", "import pickle"),
        ("src/stateferry/wire/x.py", "from cloudpickle import dumps"),
        ("src/stateferry/wire/x.py", "try: ...\nexcept: ..."),
    ],
)
def test_a_banned_construct_is_caught(name: str, source: str) -> None:
    assert len(list(code_bans(name, source))) == 1


def test_sleeping_is_allowed_where_real_servers_are_waited_for() -> None:
    assert list(code_bans("src/stateferry/stack/x.py", "import time\ntime.sleep(1)")) == []


@pytest.mark.parametrize("folder", ["work", "root"])
def test_a_path_of_one_machine_is_caught(folder: str) -> None:
    assert ABSOLUTE.search(f'MODEL = "/{folder}/model"')
    assert not ABSOLUTE.search(f"https://example.org/{folder}/x and src/{folder}/y")
