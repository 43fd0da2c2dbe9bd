"""NIXL's own: what it does to the process it runs in, how it refuses, and how batches are split."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from tests.unit.restless import restless_threads

from stateferry.errors import ProtocolError, TransportTimeout, TransportUnavailable
from stateferry.testing.transport_reads import finish, pieces
from stateferry.testing.transport_rigs import ProcessRig, Target, content, regions_of
from stateferry.transport import MemoryKind, MemoryRegion, TransferState, TransportOptions, nixl_agent
from stateferry.transport.nixl import NixlTransport
from stateferry.transport.nixl_transfer import PART_BYTES, PART_PIECES, QUIET_AFTER_S, Memory, split
from stateferry.transport.pieces import resolve_pieces

pytest.importorskip("nixl")

SIZES = (65536,)
HERE = content(2, SIZES)
"""Memory to read into; it outlives every transport."""
LOG_AND_PRINT = """
import json, logging, os
from stateferry.transport import MemoryRegion, TransportOptions, create_transport
before = logging.raiseExceptions
with create_transport("nixl", TransportOptions()) as transport:
    transport.register([])
    logging.getLogger("nixl.api").info("a record of NIXL's")
    print(json.dumps({
        "unchanged": logging.raiseExceptions == before,
        "keepalive": os.environ["UCX_KEEPALIVE_INTERVAL"],
        "log": os.environ["UCX_LOG_FILE"],
    }))
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[ProcessRig]:
    with ProcessRig("nixl") as rig:
        yield rig


@pytest.fixture(scope="module")
def target(rig: ProcessRig) -> Target:
    """One for all tests that leave it alive."""
    return rig.target(SIZES)


def test_stdout_and_logging_stay_ours() -> None:
    environment = os.environ | {"UCX_LOG_LEVEL": "info", "UCX_KEEPALIVE_INTERVAL": "7s"}
    command = [sys.executable, "-c", LOG_AND_PRINT]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(result.stdout) == {"unchanged": True, "keepalive": "7s", "log": "stderr"}
    assert "UCX  INFO" in result.stderr


def test_an_idle_transport_leaves_the_processor_alone() -> None:
    with NixlTransport() as transport:
        transport.register(regions_of(HERE))
        assert restless_threads() == []


def test_nixls_own_progress_thread_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NIXL's own pause of 0 its thread takes all that it can get."""
    monkeypatch.setattr(nixl_agent, "PROGRESS_PAUSE_US", 0)
    with NixlTransport() as transport:
        transport.register(regions_of(HERE))
        assert len(restless_threads()) == 1


def test_a_back_end_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(TransportUnavailable, match=r"no back end 'WARP' \(nixl_backends\); there are .*UCX"):
        NixlTransport(TransportOptions(nixl_backends=("WARP",)))


def test_a_peer_that_does_not_answer_is_a_timeout(rig: ProcessRig, target: Target) -> None:
    reader = rig.reader()
    reader.register(regions_of(HERE))
    os.kill(target.process_id, signal.SIGSTOP)
    try:
        with pytest.raises(TransportTimeout, match=r"did not answer within 0.3 s"):
            reader.connect(target.registration, 0.3)
    finally:
        os.kill(target.process_id, signal.SIGCONT)
    # It was only slow: the next attempt is a new connection.
    assert reader.connect(target.registration, 20.0).usable


def test_metadata_that_nixl_cannot_load_is_refused(rig: ProcessRig, target: Target) -> None:
    reader = rig.reader()
    blob = msgspec.msgpack.decode(target.registration)
    changed = msgspec.msgpack.encode(blob | {"agent": "other", "metadata": blob["metadata"][:-9]})
    with pytest.raises(TransportUnavailable, match="cannot be reached"):
        reader.connect(changed, 1.0)


def test_metadata_of_another_agent_is_refused(rig: ProcessRig, target: Target) -> None:
    reader = rig.reader()
    reader.register([])
    blob = msgspec.msgpack.decode(target.registration)
    with pytest.raises(ProtocolError, match="of agent other, its metadata of stateferry-"):
        reader.connect(msgspec.msgpack.encode(blob | {"agent": "other"}), 1.0)
    assert reader.connect(target.registration, 20.0).usable


def test_two_peers_of_one_agent_share_a_connection(rig: ProcessRig, target: Target) -> None:
    reader = rig.reader()
    reader.register(regions_of(HERE))
    first, second = (reader.connect(target.registration, 20.0) for _ in range(2))
    second.close()
    transfer = first.post_read(pieces([(0, 0, 0, 0, 64)]))
    assert finish([transfer], 20.0) == [TransferState.DONE]


def test_a_failed_read_is_quiet_only_after_a_while(rig: ProcessRig) -> None:
    now = [100.0]
    target = rig.target(SIZES)
    with NixlTransport(clock=lambda: now[0]) as reader:
        reader.register(regions_of(HERE))
        peer = reader.connect(target.registration, 20.0)
        target.kill()
        transfer = peer.post_read(pieces([(0, 0, 0, 0, 64)]))
        assert finish([transfer], 20.0) == [TransferState.FAILED]
        assert not transfer.quiet
        now[0] += QUIET_AFTER_S * 0.99
        assert not transfer.quiet
        now[0] += QUIET_AFTER_S
        assert transfer.quiet
        peer.close()


def test_pending_reads_end_when_the_agent_is_closed(rig: ProcessRig) -> None:
    target = rig.target((PART_BYTES * 3,))
    reader = NixlTransport()
    here = content(2, (PART_BYTES * 3,))
    reader.register(regions_of(here))
    peer = reader.connect(target.registration, 20.0)
    transfer = peer.post_read(pieces([(0, 0, 0, 0, PART_BYTES * 3)]))
    reader.close()
    assert transfer.poll() is TransferState.FAILED
    assert transfer.quiet
    assert "closed here" in transfer.error


def test_a_batch_is_split_by_kind_size_and_count() -> None:
    regions = [
        MemoryRegion(1 << 30, 1 << 30),
        MemoryRegion(1 << 40, 1 << 30, MemoryKind.CUDA, 0),
        MemoryRegion(1 << 41, 1 << 30, MemoryKind.CUDA, 3),
    ]
    ours, theirs = Memory.of("local", regions), Memory.of("remote", regions)
    rows = [(i % 3, 100 * i, (i // 3) % 3, 64 * i, 50) for i in range(3 * PART_PIECES)]
    rows.append((2, 1 << 29, 2, 0, PART_BYTES))
    spans = resolve_pieces(pieces(rows), ours.table, theirs.table)
    parts = list(split(spans, ours, theirs))

    found = []
    for part in parts:
        assert len(part.local) == len(part.remote) <= PART_PIECES
        assert part.size_bytes == part.local[:, 1].sum() <= PART_BYTES
        assert (part.local[:, 1] == part.remote[:, 1]).all()
        found += [
            (part.local_kind, *local, part.remote_kind, *remote)
            for local, remote in zip(part.local.tolist(), part.remote.tolist(), strict=True)
        ]
    expected = [
        (
            *(regions[a].kind, regions[a].address + b, size, regions[a].device_index),
            *(regions[c].kind, regions[c].address + d, size, regions[c].device_index),
        )
        for a, b, c, d, size in rows
    ]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_nixl_is_not_loaded_before_it_is_asked_for() -> None:
    code = "import sys, stateferry.transport.nixl; print('nixl' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_logs_of_nixl_go_where_ours_go() -> None:
    with NixlTransport():
        handlers = logging.getLogger("nixl").handlers
    assert not [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is sys.stdout]
