"""Whatever happens to us, what we started ends. Small fake servers stand in for engines."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stateferry.errors import EngineError
from stateferry.stack import Progress, Server, Stack
from stateferry.stack.guard import session_members
from stateferry.stack.ports import HeldPort

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
"""How long a child may take to start or to end on a crowded machine; otherwise it takes moments."""

SERVER = """
import http.server, os, signal, socket, subprocess, sys, time
{before}
# A child in a process group of its own, as an engine's workers may be.
subprocess.Popen(["sleep", "600"], process_group=0)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): ...
class Reusing(http.server.HTTPServer):
    allow_reuse_address = True
Reusing(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServer(Server):
    """A server that answers /health after doing `before`."""

    def __init__(self, name: str, folder: Path, before: str = "") -> None:
        self._script = SERVER.format(before=before)
        super().__init__(name, folder / f"{name}.log")

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-S", "-c", self._script, str(port)], dict(os.environ)


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, grace_s=1.0) as stack:
        yield stack


def started(stack: Stack, folder: Path, name: str = "fake", before: str = "") -> FakeServer:
    server = FakeServer(name, folder, before)
    stack.add(server)
    return server


def test_servers_start_side_by_side_and_end_with_all_their_children(tmp_path: Path) -> None:
    seen: list[Progress] = []
    with Stack(tmp_path) as stack:
        servers = [started(stack, tmp_path, name) for name in ("one", "two")]
        stack.wait_ready(PATIENCE_S, seen.append)
        assert all(server.ready and server.running for server in servers)
        assert all(len(session_members(server.pid)) == 2 for server in servers)
        assert {progress.name for progress in seen if progress.ready} == {"one", "two"}
    assert not any(session_members(server.pid) for server in servers)
    assert stack.servers == ()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_ends_the_servers(tmp_path: Path, error: type[BaseException]) -> None:
    pids = []

    def use() -> None:
        with Stack(tmp_path) as stack:
            pids.append(started(stack, tmp_path).pid)
            raise error

    with pytest.raises(error):
        use()
    assert session_members(pids[0]) == []


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Stack(tmp_path, grace_s=0.3) as stack:
        server = started(stack, tmp_path, before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        stack.wait_ready(PATIENCE_S)
    assert session_members(server.pid) == []
    assert server.child.exit_code == -signal.SIGKILL


def test_a_frozen_server_is_ended(tmp_path: Path) -> None:
    with Stack(tmp_path, grace_s=0.3) as stack:
        server = started(stack, tmp_path)
        stack.wait_ready(PATIENCE_S)
        server.child.freeze()
    assert session_members(server.pid) == []


def test_one_server_can_be_stopped_and_the_others_stay(stack: Stack, tmp_path: Path) -> None:
    one, two = started(stack, tmp_path, "one"), started(stack, tmp_path, "two")
    stack.wait_ready(PATIENCE_S)
    stack.stop(one)
    assert not one.running
    assert two.running
    assert stack.servers == (two,)


def test_who_watches_hears_of_every_server_that_starts_and_of_those_that_still_run(tmp_path: Path) -> None:
    heard: list[tuple[list[str], bool]] = []
    with Stack(tmp_path, watch=lambda names, ending: heard.append((list(names), ending))) as stack:
        one, _ = started(stack, tmp_path, "one"), started(stack, tmp_path, "two")
        stack.wait_ready(30)
        assert heard == [(["one"], False), (["one", "two"], False)]
        stack.stop(one)
        assert heard[2:] == [(["one"], True), ([], True)]
        started(stack, tmp_path, "three")
        del heard[:]
    assert heard[0] == (["two", "three"], True)
    assert [len(names) for names, _ in heard] == [2, 1, 0]


def test_kill_leaves_nothing_of_a_server(stack: Stack, tmp_path: Path) -> None:
    server = started(stack, tmp_path)
    stack.wait_ready(PATIENCE_S)
    server.child.kill()
    assert session_members(server.pid) == []
    with pytest.raises(EngineError, match="ended with signal 9 after it was ready"):
        stack.check_alive()


OWNER = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and inherited
from pathlib import Path
sys.path.insert(0, {folder!r})
from {module} import FakeServer
from stateferry.stack import Stack
stack = Stack(Path({logs!r}), grace_s=0.5)
server = FakeServer("fake", Path({logs!r}))
stack.add(server)
stack.wait_ready(120)
print(server.pid, flush=True)
{then}
"""


def owner(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], int]:
    """Another process that owns a stack, and the pid of the server in it."""
    here = Path(__file__)
    script = OWNER.format(folder=str(here.parent), module=here.stem, logs=str(tmp_path), then=then)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_servers_end_when_their_owner_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    process, server = owner(tmp_path, "time.sleep(600)")
    with process:
        assert session_members(server)
        process.send_signal(number)
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()  # or leaving the block waits for it
    assert until(lambda: session_members(server) == [])


def test_servers_end_when_their_owner_forgets_them(tmp_path: Path) -> None:
    process, server = owner(tmp_path, "")
    with process:
        assert process.wait(PATIENCE_S) == 0
    assert session_members(server) == []


def test_a_server_that_dies_is_reported_with_its_log_and_a_hint(stack: Stack, tmp_path: Path) -> None:
    before = "print('RuntimeError: operator torchvision::nms does not exist'); sys.exit(3)"
    started(stack, tmp_path, before=before)
    with pytest.raises(EngineError) as caught:
        stack.wait_ready(PATIENCE_S)
    text = str(caught.value)
    assert "fake ended with exit code 3 before it was ready" in text
    assert "Hint: torchvision does not fit" in text
    assert "operator torchvision::nms does not exist" in text
    assert str(tmp_path / "fake.log") in text


def test_a_server_that_failed_but_does_not_end_is_not_waited_for(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateferry.stack.server.GIVEN_UP_S", 0.0)
    # In two halves, because the log begins with the command, and so with this script.
    words = "ValueError: no such thing\\nEngineCore failed ' + 'to start."
    server = started(stack, tmp_path, before=f"print('{words}', flush=True); time.sleep(600)")
    assert until(lambda: "failed to start" in server.log_tail())
    with pytest.raises(EngineError, match="failed to start, and hangs") as caught:
        stack.wait_ready(PATIENCE_S)
    assert "Errors in its log:\n  ValueError: no such thing" in str(caught.value)


def test_a_server_that_is_late_is_reported_with_its_log(stack: Stack, tmp_path: Path) -> None:
    server = started(stack, tmp_path, before="print('loading', flush=True); time.sleep(600)")
    assert until(lambda: server.log_tail().endswith("loading"))
    with pytest.raises(EngineError, match="not ready after 1 s") as caught:
        stack.wait_ready(1.0)
    assert "loading" in str(caught.value)


def test_a_taken_port_is_answered_with_another_try(stack: Stack, tmp_path: Path) -> None:
    marker = tmp_path / "tried"
    before = (
        f"marker = {str(marker)!r}\n"
        "if not os.path.exists(marker):\n"
        "    open(marker, 'w').close()\n"
        "    sys.exit('OSError: [Errno 98] Address already in use')"
    )
    server = started(stack, tmp_path, before=before)
    first = server.pid
    stack.wait_ready(PATIENCE_S)
    assert server.pid != first
    assert server.running
    assert "Address already in use" in (tmp_path / "fake.1.log").read_text()


def test_who_found_its_port_taken_is_forgotten_with_all_it_started(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: at the end the helper signalled whoever had its pid by then."""
    told: list[str] = []
    monkeypatch.setattr(stack._guardian, "_tell", told.append)
    marker = tmp_path / "tried"
    before = (
        f"marker = {str(marker)!r}\n"
        "if not os.path.exists(marker):\n"
        "    open(marker, 'w').close()\n"
        "    subprocess.Popen(['sleep', '600'])\n"
        "    sys.exit('OSError: [Errno 98] Address already in use')"
    )
    server = started(stack, tmp_path, before=before)
    first = server.pid
    stack.wait_ready(PATIENCE_S)
    assert told == [f"+{first}\n", f"-{first}\n", f"+{server.pid}\n"]
    assert not session_members(first)


def test_a_port_that_stays_taken_is_an_error_at_last(stack: Stack, tmp_path: Path) -> None:
    started(stack, tmp_path, before="sys.exit('Address already in use')")
    with pytest.raises(EngineError, match="Address already in use"):
        stack.wait_ready(PATIENCE_S)


def test_temporary_logs_are_kept_only_when_they_explain_something() -> None:
    with Stack() as stack:
        kept = stack.log_folder
    assert not kept.exists()
    failed = Stack()
    with pytest.raises(EngineError) as caught, failed:
        raise EngineError("it died")
    assert failed.log_folder.exists()
    assert caught.value.__notes__ == [f"Logs are in {failed.log_folder}"]
    failed.log_folder.rmdir()


def test_a_held_port_goes_to_nobody_but_the_server_it_is_for() -> None:
    with HeldPort() as held:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", held.number))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", held.number))
            server.listen()
            with socket.create_connection(("127.0.0.1", held.number)):
                server.accept()[0].close()
