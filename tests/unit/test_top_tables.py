"""The tables of `stateferry top` in terminals of any width."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from stateferry.cli import top_tables
from stateferry.cli.columns import Column, Fitted, shortened
from stateferry.cli.top_tables import (
    LOOK_AT,
    engine_table,
    failure_table,
    silent_table,
    slow_table,
    trouble_table,
)
from stateferry.watch import Figures, Found, figures_of, read_page

PAGES = Path(__file__).parents[1] / "pages"
POD = "http://decode-7f9c5d6b8-x2x9q.inference.svc.cluster.local:8200"
DEAD = "http://127.0.0.1:8101"
SILENT = {DEAD: "ConnectError: all connection attempts failed, for nobody listens there any more"}
WIDTHS = (60, 80, 120, 200)
REQUEST = "cmpl-7d9f3a52-5b0f-4c0e-8f44-0a52b3a7c1de-0-91a0c2d4"


def figures(name: str, url: str) -> Figures:
    (snapshot,) = read_page((PAGES / name).read_text(), url, 1.0, True)
    found = figures_of(snapshot, None, "")
    failed = (dataclasses.replace(e, labels={**e.labels, "request": REQUEST}) for e in found.failed)
    return dataclasses.replace(found, failed=tuple(failed))


def restarted(name: str, url: str) -> Figures:
    """An engine with a column full of trouble."""
    return dataclasses.replace(figures(name, url), refusals={"epoch": 4}, retries=12, lease_losses=3)


@pytest.fixture(scope="module", params=["http://127.0.0.1:8200", POD], ids=["address", "pod"])
def seen(request: pytest.FixtureRequest) -> list[Figures]:
    return [figures("prefill.txt", "http://127.0.0.1:8100"), restarted("decode_after.txt", request.param)]


def shown(table: RenderableType | None, width: int) -> list[str]:
    """The lines of a table on a terminal that is so wide."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def body(lines: Sequence[str]) -> list[str]:
    """What is below the headings."""
    (ruler,) = [number for number, line in enumerate(lines) if set(line.strip()) == {"─"}]
    return [line.strip() for line in lines[ruler + 1 :] if line.strip()]


def engines(seen: Sequence[Figures]) -> Fitted:
    return engine_table([*(Found(f.url) for f in seen), Found(DEAD, "prefill")], seen, SILENT)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_engine_has_one_line_with_its_name_and_its_trouble(seen: list[Figures], width: int) -> None:
    """Symptom: at 80 columns both were empty, at 120 they went down the screen a letter a line."""
    lines = shown(engines(seen), width)
    assert max(map(len, lines)) <= width
    well, restarted, dead = body(lines)
    assert well.startswith("127.0.0.1:8100 ")
    assert restarted.startswith(seen[1].url[7:17])
    assert ":8200 " in restarted
    assert "3 lease losses" in restarted
    assert dead.startswith("127.0.0.1:8101 ")
    assert dead.endswith("no answer")


@pytest.mark.parametrize(
    ("running", "waiting", "told_s_ago", "trouble"),
    [
        (1, 0, 3.0, ""),
        (1, 0, 300.0, "no step for 5 min"),
        (0, 2, 300.0, "no step for 5 min"),
        (0, 0, 300.0, ""),
        (1, 0, None, ""),
    ],
)
def test_an_engine_that_hangs_is_told_from_one_that_rests(
    running: int, waiting: int, told_s_ago: float | None, trouble: str
) -> None:
    f = figures("prefill.txt", "http://127.0.0.1:8100")
    f = dataclasses.replace(f, running=running, waiting=waiting, told_s_ago=told_s_ago)
    (line,) = body(shown(engine_table([Found(f.url)], [f], {}), 200))
    assert ("no step" in line) == bool(trouble)
    assert trouble in line
    assert {300.0: " 5 min ago ", 3.0: " 3 s ago ", None: "  - "}[told_s_ago] in line


@pytest.mark.parametrize(
    ("limit_s", "case"), [(1e9, (1, 0, 300.0, "no step for 5 min")), (1.0, (1, 0, 3.0, ""))]
)
def test_a_wrong_idea_of_an_engine_that_hangs_is_noticed(
    limit_s: float, case: tuple[int, int, float, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_tables, "HANGS_S", limit_s)
    with pytest.raises(AssertionError):
        test_an_engine_that_hangs_is_told_from_one_that_rests(*case)


def test_peers_that_hang_are_trouble() -> None:
    f = figures("decode_after.txt", "http://127.0.0.1:8200")
    f = dataclasses.replace(f, peers={**f.peers, "silent": 2})
    (line,) = body(shown(engine_table([Found(f.url)], [f], {}), 200))
    assert line.endswith("2 silent peers")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_trouble_has_a_line_that_says_where_to_look(seen: list[Figures], width: int) -> None:
    """Symptom: however wide the terminal, all but the first was cut off."""
    well, ill = seen
    assert trouble_table([well]) is None
    ill = dataclasses.replace(
        ill, running=1, told_s_ago=300.0, quarantined=1, refusals={"epoch": 4, "dtype": 1}
    )
    ill = dataclasses.replace(ill, refused_offers=2, grants={"expired": 5}, peers={"silent": 2})
    lines = shown(trouble_table([well, ill]), width)
    assert max(map(len, lines)) <= width
    words = "\n".join(lines)
    for what in ("no step for 5 min", "2 silent peers", "12 retries", "3 lease losses", "5 grants expired"):
        assert f" {what} " in f"{words} "
    rows = [line.split("  ")[-1].strip() for line in body(shown(trouble_table([ill]), 200))]
    assert sorted(rows) == sorted(LOOK_AT.values())


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_left_out_is_named_and_the_rest_is_whole(seen: list[Figures], width: int) -> None:
    table = engines(seen)
    title, _, headings, *_ = shown(table, width)
    for column in table.columns:
        left_out = f" {column.name} " not in f" {headings} "
        assert left_out == (column.name in title) or title.endswith("…"), column.name
    if width == 200:
        assert title.strip() == "Engines"
    if width >= 80:
        assert "5 received, 1 failed" in "\n".join(body(shown(table, width)))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_other_tables_fit_as_well(seen: list[Figures], width: int) -> None:
    for table in (silent_table(SILENT), failure_table(seen, 0.0), slow_table(seen, 0.0)):
        lines = shown(table, width)
        assert max(map(len, lines)) <= width
        assert len(body(lines)) < 12
    cause, *_ = body(shown(failure_table(seen, 0.0), width))
    assert "deadline" in cause
    assert "no end of the read" in cause
    if width >= 80:
        assert f" {REQUEST[:6]}" in cause
        assert f"{REQUEST[-6:]} " in cause
    why = " ".join(" ".join(body(shown(silent_table(SILENT), width))).split())
    assert why == f"127.0.0.1:8101 {SILENT[DEAD]}" or width == 60


def test_one_rule_drops_the_least_important_first() -> None:
    columns = [Column("a", 2), Column("b", 3), Column("c", 1, least=3)]
    table = Fitted("t", columns, [])
    rows = [[*map(Text, ("x" * 10, "y" * 10, "z" * 10))]]
    table = dataclasses.replace(table, rows=rows)
    assert [body(shown(table, width)) for width in (40, 33, 25, 20)] == [
        ["xxxxxxxxxx   yyyyyyyyyy   zzzzzzzzzz"],
        ["xxxxxxxxxx   yyyyyyyyyy   zz…zz"],
        ["xxxxxxxxxx   zzzzzzzzzz"],
        ["xxxxxxxxxx   zz…zz"],
    ]


def test_a_name_is_cut_in_the_middle_and_words_at_the_end() -> None:
    assert shortened("decode-1.cluster:8200", 11, 5) == "decod…:8200"
    assert shortened("12 retries, 3 lease losses", 12, 0) == "12 retries,…"
    assert shortened("short", 5, 2) == "short"


def test_a_table_that_only_folds_is_noticed(seen: list[Figures]) -> None:
    """As it was: the library decides, and nothing is left of an engine's name."""
    fitted = engines(seen)
    folds = Table()
    for column in fitted.columns:
        folds.add_column(column.name, overflow="fold", no_wrap=column.name not in ("engine", "trouble"))
    for row in fitted.rows:
        folds.add_row(*row)
    assert "127.0.0.1:8100" not in "".join(shown(folds, 120))
