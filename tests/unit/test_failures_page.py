"""`docs/failures.md`: every known failure is there, with tests that exist or the reason why there is none."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
ITEMS = [
    *(f"F{number}" for number in (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 14, 15, 16, 17, 18, 19, 20)),
    *(f"W{number}" for number in range(1, 34)),
]
"""Every failure seen in the field, every weakness of the other connector. There is no 6, 10 or 12."""
COLUMNS = 4
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NO_TEST = "none: "
"""What the last column begins with where there is no test; the reason follows."""
MIN_REASON_WORDS = 5

Row = tuple[str, str, str, str]


def rows_of(page: str) -> list[Row]:
    """Item, symptom, what is done about it, tests: of every row of a table that begins with an item."""
    rows: list[Row] = []
    for line in page.splitlines():
        if re.match(r"\| [FW]\d+ ", line):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            assert len(cells) == COLUMNS, f"expected {COLUMNS} cells: {line}"
            rows.append((cells[0], cells[1], cells[2], cells[3]))
    return rows


@cache
def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file, from its text."""
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def problems_of(page: str) -> list[str]:
    """What is wrong with a page; empty: nothing."""
    rows = rows_of(page)
    found = [row[0] for row in rows]
    problems = [f"{item} is missing" for item in ITEMS if item not in found]
    problems += [f"{item} is no known item" for item in found if item not in ITEMS]
    problems += [f"{item} comes twice" for item in sorted(set(found)) if found.count(item) > 1]
    for item, symptom, answer, proof in rows:
        if not symptom or not answer:
            problems.append(f"{item} has an empty cell")
        named = TEST.findall(proof)
        if not named and len(proof.removeprefix(NO_TEST).split()) < MIN_REASON_WORDS:
            problems.append(f"{item} has neither a test nor a reason")
        if not named and not proof.startswith(NO_TEST):
            problems.append(f"{item} names no test and does not say {NO_TEST!r}")
        if TEST.sub("", proof).count("`tests/"):
            problems.append(f"{item} names a test in another form than `tests/file.py::test_name`")
        for name, test in named:
            path = ROOT / name
            if not path.is_file() or test not in names_in(path):
                problems.append(f"{item} names {name}::{test}, which does not exist")
    return problems


def test_every_failure_has_a_test_that_exists_or_a_reason() -> None:
    assert problems_of(PAGE.read_text()) == []


def a_row(page: str, item: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| {item} "))


@pytest.mark.parametrize(
    ("item", "instead", "problem"),
    [
        ("F1", None, "F1 is missing"),
        ("W33", None, "W33 is missing"),
        (
            "F3",
            "| F3 | a | b | `tests/unit/test_layout_defects.py::test_gone` |",
            "test_gone, which does not exist",
        ),
        ("F3", "| F3 | a | b | `tests/unit/test_nowhere.py::test_gone` |", "which does not exist"),
        (
            "F3",
            "| F3 | a | b | `tests/unit/test_layout_defects.py::handover` |",
            "handover, which does not exist",
        ),
        ("W4", "| W4 | a | b | |", "W4 has neither a test nor a reason"),
        ("W4", "| W4 | a | b | none: |", "W4 has neither a test nor a reason"),
        ("W4", "| W4 | a | b | there is nothing here to be tested |", "does not say"),
        ("W4", "| W4 | a | b | `tests/unit/test_bans.py` |", "another form"),
        ("W4", "| W4 | | b | none: there is nothing here to be tested |", "W4 has an empty cell"),
        ("W4", "| W3 | a | b | none: there is nothing here to be tested |", "W3 comes twice"),
        ("W4", "| W99 | a | b | none: there is nothing here to be tested |", "W99 is no known item"),
    ],
)
def test_a_page_that_says_what_is_not_so_is_noticed(item: str, instead: str | None, problem: str) -> None:
    page = PAGE.read_text()
    damaged = page.replace(a_row(page, item) + "\n", f"{instead}\n" if instead else "")
    assert damaged != page
    assert any(problem in found for found in problems_of(damaged))
