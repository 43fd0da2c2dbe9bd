"""Cross-memory attach: refusals that say why, short reads, and peers that are not who they were."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stateferry.errors import ProtocolError, TransportUnavailable
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import ProcessRig, content, regions_of
from stateferry.transport import MemoryKind, MemoryRegion, Peer, Transfer, TransferState, linux
from stateferry.transport.cma import SLICE_BYTES, CmaTransport

SIZES = (4096 * 8, 5000)
STRANGER = 65534
"""A uid that owns nothing here."""
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


class FakeProc(linux.ProcView):
    """A /proc that shows what a test wants, and the real one otherwise."""

    def __init__(self, root: Path, files: dict[str, str], namespace: str = "") -> None:
        super().__init__(root)
        self._namespace = namespace
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        if namespace:
            (root / "self/ns").mkdir(parents=True)
            (root / "self/ns/pid").symlink_to(namespace)


def own_registration(**changes: object) -> bytes:
    """The registration of a transport in this process, with some fields changed."""
    transport = CmaTransport()
    KEEP.append(transport)
    blob = msgspec.msgpack.decode(transport.register(regions_of(MEMORY)))
    return msgspec.msgpack.encode(blob | changes)


KEEP: list[CmaTransport] = []
MEMORY = content(5, SIZES)


def refusal(registration: bytes, transport: CmaTransport | None = None) -> str:
    with transport or CmaTransport() as reader, pytest.raises(TransportUnavailable) as caught:
        reader.connect(registration, 1.0)
    return str(caught.value)


STRANGERS_SCRIPT = """
import os, sys
from stateferry.errors import TransportUnavailable
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import content, regions_of
from stateferry.transport.cma import CmaTransport

registration, before_connect, uid = bytes.fromhex(sys.argv[1]), sys.argv[2] == "before", int(sys.argv[3])
memory = content(6, [4096])
reader = CmaTransport()
reader.register(regions_of(memory))
if before_connect:
    os.setuid(uid)
try:
    peer = reader.connect(registration, 1.0)
    os.setuid(uid)
    transfer = peer.post_read(pieces([(0, 0, 0, 0, 100)]))
    print(transfer.poll().name, transfer.quiet, transfer.error)
except TransportUnavailable as e:
    print("refused", e)
"""


def stranger(registration: bytes, when: str) -> str:
    """What a process sees that becomes another user before or after it connects to us."""
    command = [sys.executable, "-c", STRANGERS_SCRIPT, registration.hex(), when, str(STRANGER)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_another_host_is_refused_by_its_boot_id() -> None:
    text = refusal(own_registration(boot_id="0f0f", hostname="elsewhere"))
    assert "another host (elsewhere, boot id 0f0f" in text
    assert "nixl" in text


def test_another_pid_namespace_is_refused_by_its_name() -> None:
    text = refusal(own_registration(pid_namespace="pid:[42]"))
    assert "another PID namespace (pid:[42]" in text
    assert "shareProcessNamespace" in text


def test_a_recycled_pid_is_refused_by_its_start_time() -> None:
    text = refusal(own_registration(start_time=1))
    assert f"no such process: {os.getpid()} is another process now" in text


def test_a_recycled_pid_is_refused_by_the_cookie_where_proc_is_hidden(tmp_path: Path) -> None:
    view = FakeProc(tmp_path, {})
    registration = own_registration(boot_id="", pid_namespace="", cookie=bytes(32))
    assert "does not hold the registration's cookie" in refusal(registration, CmaTransport(view=view))


def test_a_dead_process_is_refused() -> None:
    with ProcessRig("cma") as rig:
        target = rig.target(SIZES)
        target.kill()
        assert "no such process" in refusal(target.registration)


@root
def test_another_user_is_refused_by_uid() -> None:
    text = stranger(own_registration(), "before")
    assert text.startswith("refused cma: ")
    assert f"runs as uid 0, this one as uid {STRANGER}" in text
    assert "CAP_SYS_PTRACE" in text


@root
def test_permission_taken_away_during_a_read_fails_it() -> None:
    text = stranger(own_registration(), "after")
    assert text.startswith("FAILED True cma: ")
    assert "EPERM" in text


@pytest.mark.parametrize(
    ("scope", "cure"), [("1", "PR_SET_PTRACER"), ("2", "only CAP_SYS_PTRACE"), ("3", "until the next boot")]
)
def test_yama_is_named_with_its_value_and_the_cure(tmp_path: Path, scope: str, cure: str) -> None:
    view = FakeProc(tmp_path, {"sys/kernel/yama/ptrace_scope": f"{scope}\n"})
    text = linux.explain_permission(1234, os.geteuid(), view)
    assert f"ptrace_scope is {scope}" in text
    assert cure in text
    assert "sysctl kernel.yama.ptrace_scope=0" in text


def test_an_unexplained_refusal_lists_what_is_left(tmp_path: Path) -> None:
    text = linux.explain_permission(1234, os.geteuid(), FakeProc(tmp_path, {}))
    assert "seccomp" in text
    assert "dumpable" in text


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (errno.EPERM, "forbids reading process"),
        (errno.ESRCH, "no such process"),
        (errno.ENOSYS, "CONFIG_CROSS_MEMORY_ATTACH"),
        (errno.EFAULT, "does not hold the registration's cookie"),
        (errno.ENOMEM, "ENOMEM"),
    ],
)
def test_each_errno_of_the_first_read_has_its_text(code: int, part: str, tmp_path: Path) -> None:
    registration = own_registration(boot_id="", pid_namespace="")
    view = FakeProc(tmp_path, {})
    assert part in refusal(registration, CmaTransport(view=view, read=lambda *_: -code))


def test_what_proc_says_is_parsed(tmp_path: Path) -> None:
    fields = " ".join(str(i) for i in range(4, 53))
    view = FakeProc(
        tmp_path,
        {
            "7/stat": f"7 (a (b) c) S {fields}\n",
            "8/stat": "8 (x) S 1\n",
            "9/stat": "nonsense",
            "sys/kernel/yama/ptrace_scope": "nonsense",
            "sys/kernel/random/boot_id": "abc\n",
        },
        namespace="pid:[1]",
    )
    assert view.start_time(7) == 22
    assert [view.start_time(8), view.start_time(9), view.start_time(10)] == [None, None, None]
    assert view.ptrace_scope() is None
    assert (view.boot_id(), view.pid_namespace()) == ("abc", "pid:[1]")
    assert linux.ProcView().start_time(os.getpid()) is not None
    cut_in_a_character = "Prozeß".encode()[:-1]
    (tmp_path / "7/stat").write_bytes(b"7 (" + cut_in_a_character + f") S {fields}".encode())
    assert view.start_time(7) == 22


def test_under_yama_1_the_registering_side_lets_its_user_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(linux, "allow_readers", lambda: calls.append(True))
    for scope, expected in (("0", 0), ("1", 1), ("2", 1)):
        view = FakeProc(tmp_path / scope, {"sys/kernel/yama/ptrace_scope": scope})
        with CmaTransport(view=view) as transport:
            transport.register(regions_of(MEMORY))
        assert len(calls) == expected


def test_allowing_readers_is_harmless_where_there_is_no_yama() -> None:
    assert linux.allow_readers() in (True, False)


def test_cuda_memory_is_refused() -> None:
    region = MemoryRegion(1 << 20, 4096, MemoryKind.CUDA)
    with CmaTransport() as transport, pytest.raises(TransportUnavailable, match="cma moves cpu memory only"):
        transport.register([region])


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 0},
        {"pid": 1 << 31},
        {"cookie": b"short"},
        {"regions": [[0, 4096]]},
        {"regions": [[4096, 1 << 60]]},
        {"regions": [[1 << 63, 4096]]},
        {"cookie_address": 0},
        {"extra": 1},
    ],
)
def test_a_registration_with_impossible_fields_is_refused(changes: dict[str, object]) -> None:
    with CmaTransport() as reader, pytest.raises(ProtocolError):
        reader.connect(own_registration(**changes), 1.0)


class Stingy:
    """process_vm_readv that returns short as often as it is told, after some bytes."""

    def __init__(self, shorts: int, after: int) -> None:
        self.real = linux.load_process_vm_readv()
        self.shorts, self.after = shorts, after
        self.counts: list[int] = []
        self.armed = False

    def __call__(self, pid: int, local: int, remote: int, count: int) -> int:
        self.counts.append(count)
        if not self.armed or not self.shorts:
            return self.real(pid, local, remote, count)
        self.shorts -= 1
        # As the kernel does it: whole pieces and then a part of one.
        ours = np.frombuffer((ctypes.c_char * (16 * count)).from_address(local), dtype=linux.IOVEC).copy()
        theirs = np.frombuffer((ctypes.c_char * (16 * count)).from_address(remote), dtype=linux.IOVEC).copy()
        room = self.after
        for i in range(count):
            size = min(room, int(ours["size"][i]))
            ours["size"][i] = theirs["size"][i] = size
            room -= size
        return self.real(pid, ours.ctypes.data, theirs.ctypes.data, count)


def stingy_read(shorts: int, after: int) -> tuple[Transfer, TransferState, bool]:
    """Read 300 pieces from this process with a call that returns short; whether all bytes are right."""
    call = Stingy(shorts, after)
    here = content(6, SIZES)
    reader = CmaTransport(read=call)
    KEEP.append(reader)
    reader.register(regions_of(here))
    peer: Peer = reader.connect(own_registration(), 1.0)
    call.armed = True
    transfer = peer.post_read(pieces([(0, 100 * i, 0, 100 * i, 99) for i in range(300)]))
    state = transfer.poll()
    right = all((here[0][i : i + 99] == MEMORY[0][i : i + 99]).all() for i in range(0, 30000, 100))
    return transfer, state, right


@pytest.mark.parametrize("after", [0, 1, 98, 99, 100, 15000, 99 * 300 - 1, 99 * 300, 99 * 300 + 31])
def test_a_short_read_is_resumed_from_the_exact_byte(after: int) -> None:
    transfer, state, right = stingy_read(shorts=1, after=after)
    assert (state, transfer.error, right) == (TransferState.DONE, "", True)
    assert transfer.bytes_done == 99 * 300


def test_a_second_short_read_fails_and_names_the_place() -> None:
    transfer, state, _ = stingy_read(shorts=2, after=1000)
    assert state is TransferState.FAILED
    # 2,000 bytes are 20 pieces of 99 and 20 bytes of the next, which starts at 2,000.
    assert "stopped twice at remote region 0 offset 2020" in transfer.error
    assert transfer.quiet
    assert transfer.bytes_done == 0


def test_memory_that_is_gone_fails_the_read_and_names_the_place() -> None:
    page = 4096
    registration = msgspec.msgpack.decode(own_registration())
    # A region that is registered but not mapped: the page at 64 KiB is below what Linux hands out.
    registration["regions"].append([65536, page])
    here = content(6, SIZES)
    with CmaTransport() as reader:
        reader.register(regions_of(here))
        peer = reader.connect(msgspec.msgpack.encode(registration), 1.0)
        transfer = peer.post_read(pieces([(0, 0, 0, 0, 64), (0, 64, 2, 10, 64)]))
        assert transfer.poll() is TransferState.FAILED
        assert "remote region 2 offset 10: EFAULT" in transfer.error
        assert not peer.usable


def test_a_poll_moves_a_bounded_slice() -> None:
    size = 80 << 20
    there, here = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    with CmaTransport() as target, CmaTransport() as reader:
        registration = target.register(regions_of([there]))
        reader.register(regions_of([here]))
        transfer = reader.connect(registration, 1.0).post_read(pieces([(0, 0, 0, 0, size)]))
        moved = []
        while transfer.poll() is TransferState.PENDING:
            moved.append(transfer.bytes_done)
        assert moved == [n * SLICE_BYTES for n in range(1, size // SLICE_BYTES)]
        assert here.all()


def test_many_small_pieces_take_few_calls() -> None:
    call = Stingy(0, 0)
    count = 3000
    here = content(6, SIZES)
    with CmaTransport(read=call) as reader:
        reader.register(regions_of(here))
        peer = reader.connect(own_registration(), 1.0)
        call.counts.clear()
        transfer = peer.post_read(pieces([(0, 10 * i, 0, 10 * i, 9) for i in range(count)]))
        assert transfer.poll() is TransferState.DONE
    assert call.counts == [1024, 1024, count - 2 * 1023 + 1]
