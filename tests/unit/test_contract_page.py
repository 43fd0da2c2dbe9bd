"""`docs/contract.md`: every item of the READ contract is there, and tests that exist cite its number."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contract.md"
ITEMS = [f"F{part}.{number}" for part, last in ((1, 10), (2, 9), (3, 15)) for number in range(1, last + 1)]
OPEN = ("being built", "not built")
STATUSES = ("done otherwise", "done", "needs a GPU", *OPEN)
REASONED = ("done otherwise", "needs a GPU", *OPEN)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CITED = re.compile(r"\bF([1-3])\.(\d+)(?: to F\1\.(\d+))?\b")
COLUMNS = 4
MIN_REASON_WORDS = 2

Row = tuple[str, str, str, str]


def cited(text: str) -> set[str]:
    """Items in a text; `F1.1 to F1.4` is four of them."""
    found = set()
    for part, first, last in CITED.findall(text):
        found |= {f"F{part}.{number}" for number in range(int(first), int(last or first) + 1)}
    return found


@cache
def citations() -> dict[str, set[str]]:
    """Every test, as `file::name`, and the items that its own docstring cites."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                found[name] = cited(ast.get_docstring(node) or "")
    return found


def rows_of(page: str) -> list[Row]:
    """Item, what it asks, status, tests: of every row of a table that begins with an item."""
    rows: list[Row] = []
    for line in page.splitlines():
        if re.match(r"\| F\d+\.\d+ ", line):
            cells = [cell.strip() for cell in re.sub(r"^\||\|$", "", line.strip()).split("|")]
            assert len(cells) == COLUMNS, f"expected {COLUMNS} cells: {line}"
            rows.append((cells[0], cells[1], cells[2], cells[3]))
    return rows


def problems_of(page: str, tests: dict[str, set[str]]) -> list[str]:
    """What is wrong with a page; empty: nothing."""
    rows = rows_of(page)
    found = [row[0] for row in rows]
    problems = [f"{item} is missing" for item in ITEMS if item not in found]
    problems += [f"{item} is no known item" for item in found if item not in ITEMS]
    problems += [f"{item} comes twice" for item in sorted(set(found)) if found.count(item) > 1]
    every_citation = set().union(*tests.values())
    problems += [f"a test cites {item}, which is no known item" for item in every_citation - set(ITEMS)]
    for item, asks, status, proof in rows:
        word, _, reason = status.partition(":")
        if not asks:
            problems.append(f"{item} does not say what it asks")
        if word not in STATUSES:
            problems.append(f"{item} has status {word!r}: expected one of {', '.join(STATUSES)}")
        if word in REASONED and len(reason.split()) < MIN_REASON_WORDS:
            problems.append(f"{item} does not say why it is {word}")
        named = [f"{path}::{test}" for path, test in TEST.findall(proof)]
        if TEST.sub("", proof).strip():
            problems.append(f"{item} has more in its last column than `tests/file.py::test_name`")
        for name in named:
            if name not in tests:
                problems.append(f"{item} names {name}, which does not exist")
            elif item not in tests[name]:
                problems.append(f"{item} names {name}, which does not cite it")
        if word not in OPEN and not named:
            problems.append(f"{item} has no test")
    return problems


def test_every_item_has_a_test_that_cites_it() -> None:
    assert problems_of(PAGE.read_text(), citations()) == []


def test_a_range_is_all_of_its_items() -> None:
    assert cited("W28, F3.1 to F3.3; F2.10 and F13, but not F4.1") == {"F3.1", "F3.2", "F3.3", "F2.10"}


def a_row(page: str, item: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| {item} "))


GOOD = "`tests/unit/test_moriio_settings.py::test_timeouts_may_be_text`"


@pytest.mark.parametrize(
    ("item", "instead", "problem"),
    [
        ("F1.10", None, "F1.10 is missing"),
        ("F3.15", None, "F3.15 is missing"),
        ("F1.10", f"| F1.9 | a | done | {GOOD} |", "F1.9 comes twice"),
        ("F1.10", f"| F1.11 | a | done | {GOOD} |", "F1.11 is no known item"),
        ("F1.10", f"| F1.10 | | done | {GOOD} |", "does not say what it asks"),
        ("F1.10", f"| F1.10 | a | surely | {GOOD} |", "has status 'surely'"),
        ("F1.10", f"| F1.10 | a | done otherwise | {GOOD} |", "does not say why"),
        ("F1.10", "| F1.10 | a | not built: soon | |", "does not say why"),
        ("F1.10", "| F1.10 | a | done | |", "F1.10 has no test"),
        ("F1.10", "| F1.10 | a | done | tests/unit/test_moriio_settings.py |", "has more in its last column"),
        ("F1.10", "| F1.10 | a | done | `tests/unit/test_wire.py::test_gone` |", "does not exist"),
        (
            "F1.10",
            "| F1.10 | a | done | `tests/unit/test_bans.py::test_the_package_has_no_banned_construct` |",
            "does not cite it",
        ),
    ],
)
def test_a_page_that_says_what_is_not_so_is_noticed(item: str, instead: str | None, problem: str) -> None:
    page = PAGE.read_text()
    damaged = page.replace(a_row(page, item) + "\n", f"{instead}\n" if instead else "")
    assert damaged != page
    assert any(problem in found for found in problems_of(damaged, citations()))


def test_a_test_that_cites_what_there_is_not_is_noticed() -> None:
    tests = {**citations(), "tests/x.py::test_x": {"F2.10"}}
    assert problems_of(PAGE.read_text(), tests) == ["a test cites F2.10, which is no known item"]
