"""Whole benches against servers that only look like engines: what is asked, counted, kept and plotted."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.unit.fake_engine import FakeEngine, fake_arm
from typer.testing import CliRunner

from stateferry.bench import agentx, handoff, interference
from stateferry.bench.arms import IN_TREE, ONE_ENGINE, Arm, arm_spec, same_engines
from stateferry.bench.figures import QUANTILES, quantiles, spread
from stateferry.bench.report import page
from stateferry.bench.streams import Streamed
from stateferry.cli import bench_arms
from stateferry.cli.app import app
from stateferry.errors import ConfigError
from stateferry.pause import PAUSE_US
from stateferry.stack import Completion, Handoff

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def pairs() -> Iterator[list[tuple[Arm, FakeEngine, FakeEngine]]]:
    started = [fake_arm("cma"), fake_arm(IN_TREE)]
    yield started
    for _, prefill, decode in started:
        prefill.close()
        decode.close()


def test_interference_has_its_windows_and_every_arm_its_turns(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]],
) -> None:
    load = interference.Load(decodes=2, handoffs=3, tokens=20, alone_s=0.1, interval_s=0.01)
    result = interference.measure([arm for arm, *_ in pairs], 2, load)
    found = result.summary()
    assert list(found) == [ONE_ENGINE, "cma", IN_TREE]
    for name, arm in found.items():
        assert (arm["repeats"], arm["errors"]) == (2, 0), arm["error_texts"]
        assert arm["figures"]["arriving_over_alone_p50"]["median"] > 0
        assert len(arm["time_line"]["arrivals_s"]) == 3
        assert ("prefill_p50_s" in arm["figures"]) or name == ONE_ENGINE
        assert arm["figures"]["short_over_alone_p99"]["least"] > 0
        # The engines' own clock says two milliseconds, whatever this machine makes of them.
        assert arm["figures"]["refused_engine_mean_s"]["median"] == 0.002
        assert arm["figures"]["arriving_over_alone_engine_p99"]["most"] == 1.0
        assert arm["engine_gaps"]["bounds_s"] == [0.001, 0.01]
        assert all(counts[0] == counts[2] == 0 for counts in arm["engine_gaps"]["counts"].values())
        assert arm["engine_gaps"]["counts"]["alone"][1] > 0
    (_, prefill, decode), _ = pairs
    assert decode.refused == 2 * 3 + 2
    arrived = [b for b in decode.bodies if b.get("kv_transfer_params") and len(b["prompt"]) == 20]
    assert len(arrived) == 2 * 3 + 2  # the repeat that is not counted has two
    assert all(b["kv_transfer_params"]["do_remote_prefill"] for b in arrived)
    assert sum(len(b["prompt"]) == 20 and "kv_transfer_params" in b for b in prefill.bodies) == 2 * 3 + 2
    assert prefill.frozen


def test_what_the_api_server_should_refuse_and_does_not_is_an_error(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]],
) -> None:
    (arm, _, decode), _ = pairs
    decode.most_tokens = 1 << 40
    load = interference.Load(decodes=1, handoffs=2, tokens=20, alone_s=0.05, interval_s=0.0)
    result = interference.measure([arm], 1, load, one_engine=False)
    found = result.summary()["cma"]
    assert found["errors"] >= 2
    assert any("not refused: 200" in text for text in found["error_texts"])


def test_the_hand_off_bench_asks_both_and_takes_one_apart(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]],
) -> None:
    (arm, prefill, decode), _ = pairs
    result = handoff.measure([arm], [20], [2], repeats=3)
    (cell,) = result.summary()
    assert cell["errors"] == 0
    assert set(cell["figures"]) >= {"added_p50_s", "first_token_p50_s", "one_engine_p50_s"}
    assert sum(bool(b.get("stream")) for b in decode.bodies) == 4 * 2
    assert sum(bool(b.get("stream")) for b in prefill.bodies) == 4 * 2
    (line,) = result.time_lines()
    names = [bar[0] for bar in line["bars"]]
    assert names == ["prefill leg", "waiting to read", "post", "wire", "the rest of the decode leg"]
    assert [bar[1] for bar in line["bars"]][1:] == [bar[2] for bar in line["bars"]][:-1]


def test_a_time_line_does_not_put_legs_that_were_sent_at_once_one_after_the_other() -> None:
    """Symptom: its bars were longer than the request took."""

    def leg(seconds: float, **told: float) -> Completion:
        params = {"stateferry": {"received": told}} if told else None
        return Completion("", (), "length", 0, params, None, seconds, None)

    decode = leg(0.15, milliseconds=20.0, post_milliseconds=1.0, wire_milliseconds=9.0)
    parts = handoff.parts_ms(Handoff(leg(0.1), decode, 0.16, None))
    assert sum(parts.values()) == pytest.approx(160.0)
    assert parts["the rest of the decode leg"] == pytest.approx(40.0)


def test_an_arm_that_fails_a_close_look_does_not_end_the_bench(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]],
) -> None:
    (arm, prefill, _), _ = pairs
    prefill.fails = 1
    result = handoff.measure([arm], [20], [1], repeats=2)
    assert len(result.looked_at["cma", 20]) == 2
    (told,) = result.not_looked_at
    assert told.startswith("cma, 20 tokens: ")
    assert "HTTP 500" in told


def test_a_request_that_fails_in_a_cell_is_counted_and_the_bench_goes_on() -> None:
    answers = [Streamed(0.0, 9, [0.5]), Streamed(0.0, 9, error="HTTP 500")]
    cell = handoff.Cell("cma", 9, 2, one_engine=[answers[:1]], pair=[answers])
    found = cell.summary()
    assert (found["errors"], found["error_texts"]) == (1, ["HTTP 500"])
    assert found["figures"]["added_p50_s"]["median"] == 0.0


def test_agentx_replays_the_same_lengths_through_every_arm(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]],
) -> None:
    sessions = [agentx.make_session(number, 0, 256) for number in range(5)]
    settings = agentx.Settings(lanes=2, time_scale=0.0, longest_turns=6)
    result = agentx.measure([arm for arm, *_ in pairs], sessions, 1, settings)
    found = result.summary()
    assert agentx.verdict(found) == []
    counts = {name: arm["figures"]["requests"]["median"] for name, arm in found.items()}
    assert len(set(counts.values())) == 1
    assert counts[ONE_ENGINE] > 10
    assert found["cma"]["figures"]["bytes_per_request_state"]["median"] == 40
    assert found["cma"]["figures"]["handoffs"]["median"] >= counts["cma"]
    assert found[ONE_ENGINE]["figures"]["handoffs"]["median"] == 0


def test_arms_by_name() -> None:
    assert arm_spec("cma").extra_config == {"transport": "cma"}
    assert arm_spec("nixl-sync", lease_s=9).extra_config == {
        "transport": "nixl",
        "load_mode": "sync",
        "lease_s": 9,
    }
    both = arm_spec("cma-sync-at-once")
    assert both.extra_config == {"transport": "cma", "load_mode": "sync"}
    assert both.at_once
    assert same_engines(both, arm_spec("cma-sync"))
    assert not same_engines(both, arm_spec("cma"))
    assert (arm_spec("in-tree").name, arm_spec("in-tree").extra_config) == (IN_TREE, {})
    shipped, theirs = arm_spec("cma-sync-at-once-shipped"), arm_spec("in-tree-shipped")
    assert shipped.env == theirs.env == {PAUSE_US: "0"}
    assert (shipped.at_once, shipped.extra_config) == (True, both.extra_config)
    assert not same_engines(shipped, both)
    assert not same_engines(theirs, arm_spec("in-tree"))
    assert theirs.name == f"{IN_TREE} as shipped"
    with pytest.raises(ConfigError, match="unknown arm 'telepathy'; known: cma"):
        arm_spec("telepathy")


def test_spread_and_quantiles() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert spread([]) is None
    kept = quantiles([float(n) for n in range(1, 101)])
    assert len(kept) == len(QUANTILES)
    assert (kept[0], kept[25], kept[-1]) == (1.0, 50.0, 100.0)
    assert quantiles([]) == []


# -- the page --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Counts tags, and complains about any that is not closed in order, or that loads something. What a
    result says may have addresses in it."""

    EMPTY = frozenset({"meta", "line", "polyline", "path"})
    LOADS = re.compile(r"https?:|url\(|@import")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        for name, value in attrs:
            assert name not in ("src", "href", "xlink:href", "onload")
            assert name.startswith("xmlns") or not self.LOADS.search(value or "")

    def handle_data(self, data: str) -> None:
        assert self.open[-1:] != ["style"] or not self.LOADS.search(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_every_kept_result_makes_a_page_that_loads_nothing(file: Path) -> None:
    text = page([json.loads(file.read_text())])
    found = Page(text).seen
    assert "script" not in found
    if file.stem.startswith(
        ("added-latency", "bench-plan", "bench-transport", "interference", "agentx", "handoff")
    ):
        assert found["svg"] >= 1


def test_whatever_a_result_says_is_shown_as_text() -> None:
    text = page([{"bench": "<b>new</b>", "arms": {"<i>": {"a": 1.5}}, "commit": "0123456789abcdef"}])
    assert "<b>" not in text
    assert "<i>" not in text
    assert "&lt;i&gt; / a" in text
    assert "commit 0123456789ab" in text
    Page(text)


@pytest.mark.parametrize(
    "more",
    [
        '<img src="a.png"/>',
        '<p style="background: url(a.png)"></p>',
        '<svg><use xlink:href="#a"/></svg>',
        "<style>@import 'a.css';</style>",
        "<style>p { background: url(http://a/b.png) }</style>",
    ],
    ids=["image", "style attribute", "use", "import", "style"],
)
def test_a_page_that_loads_something_would_be_noticed(more: str) -> None:
    text = page([{"bench": "x"}])
    Page(text)
    with pytest.raises(AssertionError):
        Page(text.replace("</body>", f"{more}</body>"))


def test_a_page_that_is_not_well_formed_would_be_noticed() -> None:
    with pytest.raises((AssertionError, IndexError)):
        Page(page([{"bench": "x"}]).replace("</table>", ""))


# -- the commands ----------------------------------------------------------------------------------


def test_made_up_sessions_can_be_written_and_replayed_by_others(tmp_path: Path) -> None:
    printed = CliRunner().invoke(
        app, ["bench", "agentx-sessions", str(tmp_path), "--count", "2", "--scale", "64"]
    )
    assert printed.exit_code == 0, printed.output
    assert agentx.read_sessions(tmp_path) == [agentx.make_session(number, 0, 64) for number in range(2)]


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [
        ("handoff", ["--tokens", "20", "--concurrency", "1", "--no-router"]),
        ("interference", ["--alone-s", "0.1", "--handoffs", "2", "--tokens", "20"]),
        ("agentx", ["--count", "3", "--longest-turns", "4", "--time-scale", "0"]),
    ],
)
def test_a_bench_prints_a_result_that_can_be_kept_and_writes_its_page(
    bench: str,
    arguments: list[str],
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    @contextmanager
    def started(*args: object, **more: object) -> Iterator[list[Arm]]:
        yield [arm for arm, *_ in pairs]

    monkeypatch.setattr(bench_arms, "started_arms", started)
    command = ["bench", bench, "--arm", "cma", "--arm", "in-tree", "--repeats", "1", *arguments]
    out = tmp_path / "out.html"
    printed = CliRunner().invoke(app, [*command, "--json", "--report", str(out)])
    assert printed.exit_code == 0, printed.output
    result = json.loads(printed.stdout.strip().splitlines()[-1])
    assert result["bench"] == bench
    assert result["host"]["versions"]["numpy"]
    found = Page(out.read_text()).seen
    assert found["svg"] >= 2


def test_errors_end_the_agentx_bench_with_a_failure(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (arm, _, decode), _ = pairs

    @contextmanager
    def started(*args: object, **more: object) -> Iterator[list[Arm]]:
        yield [arm]

    monkeypatch.setattr(bench_arms, "started_arms", started)
    monkeypatch.setattr(agentx.bench, "counted", lambda client, arm: agentx.report.Counted())
    decode.fails = 1
    command = ["bench", "agentx", "--arm", "cma", "--repeats", "1", "--count", "3", "--no-one-engine"]
    printed = CliRunner().invoke(app, [*command, "--time-scale", "0"])
    assert printed.exit_code == 1
    assert "must be 0" in printed.output


def test_what_an_arm_is_called_is_no_markup(
    pairs: list[tuple[Arm, FakeEngine, FakeEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a verdict with brackets in it ended the bench with a traceback."""

    @contextmanager
    def started(*args: object, **more: object) -> Iterator[list[Arm]]:
        yield [arm for arm, *_ in pairs]

    monkeypatch.setattr(bench_arms, "started_arms", started)
    monkeypatch.setattr(agentx, "verdict", lambda summary: ["cma [/v1]: errors is 1"])
    command = ["bench", "agentx", "--arm", "cma", "--repeats", "1", "--count", "1", "--time-scale", "0"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 1
    assert "cma [/v1]: errors is 1" in printed.output
