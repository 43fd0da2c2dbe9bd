"""`stateferry top` over pages that a real registry made (tests/scheduler/test_metrics.py records them)."""

import dataclasses
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.command import run

from stateferry.cli.top_tables import ago, duration, size
from stateferry.errors import EngineError
from stateferry.telemetry import METRICS, TOLD
from stateferry.testing.local_server import LocalServer
from stateferry.watch import Engines, Found, Snapshot, discover, figures_of, read_page

PAGES = Path(__file__).parents[1] / "pages"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
URL = "http://decode:8200"
WORKERS = {
    "workers": [
        {"url": "http://127.0.0.1:18102", "worker_type": "decode", "is_healthy": True, "load": 0},
        {"url": "http://127.0.0.1:18101", "worker_type": "prefill", "is_healthy": True, "load": 0},
    ],
    "total": 2,
}
"""What vllm-router 0.1.17 answers, less what nobody here reads."""


def page(name: str, at_s: float = 0.0, openmetrics: bool = True) -> list[Snapshot]:
    return read_page((PAGES / name).read_text(), URL, at_s, openmetrics)


def test_a_page_is_read_whole() -> None:
    (snapshot,) = page("decode_before.txt")
    assert snapshot.engine == "0"
    assert snapshot.ours
    assert snapshot.by_label("stateferry_handoffs_total") == {"received": 3, "failed": 1, "abandoned": 0}
    assert snapshot.by_label("stateferry_handoff_seconds_count") == {
        "received": 3,
        "failed": 1,
        "abandoned": 0,
    }
    assert max(snapshot.buckets.values()) == 3, "one that failed at once would make its engine look quick"
    assert snapshot.value("stateferry_received_bytes_total", "state") > 0
    assert snapshot.value("stateferry_peers", "ready") == 1
    assert snapshot.value("no such series") == 0
    (failed,) = snapshot.failed
    assert failed.labels["cause"] == "deadline"
    assert failed.labels["request"] == "late"
    assert "no end of the read" in failed.labels["reason"]
    assert {"late": "failed"}.items() <= {
        e.labels["request"]: e.labels["outcome"] for e in snapshot.timed
    }.items()


def test_every_metric_is_read_under_its_own_label() -> None:
    (snapshot,) = page("decode_after.txt")
    for metric in METRICS.values():
        if metric.label and not metric.buckets:
            assert set(snapshot.by_label(metric.series)) == set(metric.values)


def test_the_plain_format_says_the_same_less_the_examples() -> None:
    (rich,), (plain,) = page("decode_after.txt"), page("decode_after_plain.txt", openmetrics=False)
    assert plain.values == rich.values
    assert plain.buckets == rich.buckets
    assert rich.timed
    assert plain.timed == plain.failed == ()


def test_engines_behind_one_page_are_told_apart() -> None:
    one, two = page("two_engines.txt")
    assert (one.engine, two.engine) == ("0", "1")
    assert figures_of(one, None, "").role == "decode"
    assert figures_of(two, None, "").role == "prefill"
    assert sum(figures_of(two, None, "").grants.values()) > 0


def test_rates_are_those_between_two_looks() -> None:
    (before,), (after,) = page("decode_before.txt", 100.0), page("decode_after.txt", 104.0)
    figures = figures_of(after, before, "decode")
    assert figures.handoffs == {"received": 5, "failed": 1, "abandoned": 0}
    assert figures.handoffs_rate == 0.5
    assert figures.bytes_rate is not None
    grown = after.value("stateferry_received_bytes_total", "state")
    grown -= before.value("stateferry_received_bytes_total", "state")
    assert figures.bytes_rate["state"] == grown / 4 > 0
    assert figures.median is not None
    assert figures.median.at_most_s is not None
    assert figures.median.at_most_s < 0.3, "the one that failed late was before the first look"
    assert figures.slowest[0].labels["request"] == "late", "examples are since the start"


def test_a_first_look_has_totals_and_no_rates() -> None:
    (now,) = page("decode_after.txt")
    figures = figures_of(now, None, "")
    assert figures.handoffs_rate is None
    assert figures.bytes_rate is None
    assert figures.slow is not None
    assert figures.failures == {"deadline": 1}


def test_an_engine_that_was_restarted_is_seen_for_the_first_time() -> None:
    (before,), (now,) = page("decode_after.txt", 100.0), page("decode_before.txt", 104.0)
    assert figures_of(now, before, "").handoffs_rate is None


def test_how_old_numbers_are_is_counted_by_the_engines_own_clock() -> None:
    (now,) = page("decode_after.txt")
    told_unix_s = now.value(TOLD)
    assert told_unix_s > 1.7e9
    read = dataclasses.replace(now, read_unix_s=told_unix_s + 90)
    assert figures_of(read, None, "").told_s_ago == 90
    assert figures_of(dataclasses.replace(now, read_unix_s=told_unix_s - 1), None, "").told_s_ago == 0
    assert figures_of(now, None, "").told_s_ago is None, "its server did not say what time it is"
    never = dataclasses.replace(read, values={**now.values, (TOLD, ""): 0.0})
    assert figures_of(never, None, "").told_s_ago is None


def test_numbers_for_people() -> None:
    assert [duration(s) for s in (None, 0.00123, 0.25, 1.5, 61.0)] == [
        "-",
        "1.23 ms",
        "250 ms",
        "1.5 s",
        "61 s",
    ]
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5e12)] == ["0 B", "999 B", "1 kB", "1.23 MB", "5 TB"]
    assert [ago(at, 1000.0) for at in (0.0, 990.0, 1001.0)] == ["-", "10 s ago", "0 s ago"]
    assert ago(1.0, 7201.0) == "2 h ago"


Answers = Mapping[str, tuple[int, str, str]]
"""Path -> status, content type, body."""


@contextmanager
def server(answers: Answers) -> Iterator[str]:
    """A web server on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = answers.get(self.path, (404, "text/plain", ""))
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Silent."""

    with LocalServer(Handler) as http:
        yield http.url


def engine(name: str) -> Answers:
    """As vLLM answers: examples only at `/metrics/`."""
    rich = (200, OPENMETRICS, (PAGES / name).read_text())
    return {"/metrics/": rich, "/metrics": (500, "text/plain", "not asked for")}


def plain_engine() -> Answers:
    return {"/metrics": (200, "text/plain; version=1.0.0", (PAGES / "decode_after_plain.txt").read_text())}


def test_engines_that_do_not_answer_take_nothing_from_the_others() -> None:
    with server(engine("decode_after.txt")) as good, server(plain_engine()) as plain, server({}) as empty:
        other = {"/metrics": (200, "text/plain", "# TYPE up gauge\nup 1\n")}
        broken = {"/metrics/": (200, OPENMETRICS, "stateferry_x{ 1\n")}
        with server(other) as stranger, server(broken) as garbled:
            urls = [good, plain, empty, stranger, garbled, "http://127.0.0.1:1"]
            with Engines([Found(url) for url in urls]) as engines:
                figures, silent = engines.look(0.0)
                again, _ = engines.look(1.0)
        assert [f.url for f in figures] == [good, plain]
        assert [f.handoffs_rate for f in again] == [0.0, 0.0]
        assert set(silent) == set(urls[2:])
        assert "HTTP 404" in silent[empty]
        assert "no metrics of StateFerry" in silent[stranger]


def as_json(value: object) -> tuple[int, str, str]:
    return (200, "application/json", json.dumps(value))


def test_a_router_says_which_engines_it_has() -> None:
    with server({"/workers": as_json(WORKERS)}) as router:
        found = discover(router + "/")
    assert found == [Found("http://127.0.0.1:18101", "prefill"), Found("http://127.0.0.1:18102", "decode")]


def test_an_older_router_and_data_parallel_ranks_are_understood() -> None:
    urls = {"urls": ["http://a:1@0", "http://a:1@1", "http://b:2"]}
    with server({"/list_workers": as_json(urls)}) as router:
        assert discover(router) == [Found("http://a:1"), Found("http://b:2")]


@pytest.mark.parametrize("answer", [None, [], {"workers": 3}, {"other": 1}, {"workers": [{"no": "url"}]}])
def test_a_router_that_says_nothing_useful_is_named(answer: object) -> None:
    with server({"/workers": as_json(answer)}) as router, pytest.raises(EngineError, match=router):
        discover(router)


def test_urls_that_are_none_are_named_like_engines_that_are_silent() -> None:
    with pytest.raises(EngineError, match="does not say which engines it has"):
        discover("http://[::1")
    with Engines([Found("http://engine:port")]) as engines:
        assert "Invalid port" in engines.look(0.0)[1]["http://engine:port"]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("top", *arguments)


def test_once_prints_a_plain_table_of_what_the_router_has() -> None:
    with server(engine("prefill.txt")) as prefill, server(engine("decode_after.txt")) as decode:
        workers = {
            "workers": [{"url": decode, "worker_type": "decode"}, {"url": prefill, "worker_type": "prefill"}]
        }
        with server({"/workers": as_json(workers)}) as router:
            result = top("--router", router, "--once")
    assert result.returncode == 0, result.stderr
    for words in ("prefill", "decode", "5 received", "1 failed", "deadline", "late", "<= ", "1 ready"):
        assert words in result.stdout
    assert "no answer" not in result.stdout.lower()
    assert "\x1b" not in result.stdout
    assert "too narrow" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 240, "tables are wider than what is in them"


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_once_with_one_engine_dead_shows_both_and_ends_with_3(form: tuple[str, ...]) -> None:
    """Symptom: a script that looks after the engines was told 0."""
    with server(engine("decode_after.txt")) as decode:
        workers = {
            "workers": [
                {"url": decode, "worker_type": "decode"},
                {"url": "http://127.0.0.1:1", "worker_type": "prefill"},
            ]
        }
        with server({"/workers": as_json(workers)}) as router:
            result = top("--router", router, "--once", *form)
    assert result.returncode == 3
    assert "only 1 of 2 engines answered: http://127.0.0.1:1: ConnectError" in result.stderr
    assert "Traceback" not in result.stderr
    if form:
        look = json.loads(result.stdout)
        assert [f["url"] for f in look["engines"]] == [decode]
        assert "ConnectError" in look["silent"]["http://127.0.0.1:1"]
        return
    (row,) = [line for line in result.stdout.splitlines() if "no answer" in line]
    assert row.split()[:2] == ["127.0.0.1:1", "prefill"]
    assert "5 received" in result.stdout
    (_, _, why) = result.stdout.partition("No answer")
    assert "ConnectError" in why


def test_the_code_for_a_dead_engine_is_documented() -> None:
    """In the help of the command and of all commands."""
    assert "3 an engine did not answer" in " ".join(run("top", "--help").stdout.split())
    assert "3 an engine did not start, died or did not answer" in " ".join(run("--help").stdout.split())


def test_json_is_one_object_for_each_look() -> None:
    with server(engine("decode_after.txt")) as decode:
        result = top(decode, "--once", "--json")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    look = json.loads(line)
    (found,) = look["engines"]
    assert found["handoffs"] == {"received": 5, "failed": 1, "abandoned": 0}
    assert found["failed"][0]["labels"]["request"] == "late"
    assert look["silent"] == {}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "which engines?"),
        (("decode:8200", "--once"), 2, "no URL of an engine"),
        (("http://127.0.0.1:1", "--once"), 3, "no engine answered"),
        (("--router", "http://127.0.0.1:1", "--once"), 3, "does not say which engines"),
    ],
)
def test_what_cannot_be_watched_is_said(arguments: tuple[str, ...], code: int, says: str) -> None:
    result = top(*arguments)
    assert result.returncode == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("width", [80, 150])
def test_live_it_draws_again_and_again_and_leaves_the_terminal_as_it_was(
    interrupts: None, width: int
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    code = "from stateferry.cli.main import main; main()"
    with server(engine("decode_after.txt")) as decode:
        command = [sys.executable, "-c", code, "top", decode, "http://127.0.0.1:1", "--every", "0.1"]
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
        try:
            os.close(theirs)
            seen = read_until(ours, lambda seen: seen.count(b"Slowest") >= 3)
            process.send_signal(signal.SIGINT)
            seen += read_until(ours, lambda _: False)
            code_of_exit = process.wait(timeout=30)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    assert code_of_exit == 130
    assert seen.count(b"Slowest") >= 3
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1, "the other screen was not left"
    assert b"Traceback" not in seen
    assert seen.count(b"no answer") >= 3, "the dead engine has no row"
    assert b"ConnectError" in seen, "nor a reason"
    row = next(line for line in seen.splitlines() if b"5 received" in line)
    assert decode.partition("://")[2].encode() in row, "an engine has no name"


def test_live_without_a_terminal_it_prints_each_look(interrupts: None) -> None:
    """Symptom: into a file or a pipe it printed nothing until Ctrl-C."""
    code = "from stateferry.cli.main import main; main()"
    with server(engine("decode_after.txt")) as decode:
        command = [sys.executable, "-c", code, "top", decode, "--every", "0.1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            seen = read_until(process.stdout.fileno(), lambda seen: seen.count(b"Slowest") >= 2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
            process.communicate()
    assert b"\x1b" not in seen


def read_until(descriptor: int, enough: Callable[[bytes], bool]) -> bytes:
    """What a terminal shows, until there is enough or its program has ended."""
    seen = b""
    while not enough(seen):
        try:
            new = os.read(descriptor, 65536)
        except OSError:  # how Linux says that nobody writes any more
            break
        if not new:
            break
        seen += new
    return seen
