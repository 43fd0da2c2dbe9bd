"""The `mori` transport over its double: what it does when MoRI does what MoRI does."""

import importlib
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.mori_pair import SOME, Pair
from tests.unit.mori_scenarios import SCENARIOS

from stateferry.errors import ProtocolError, TransportError, TransportTimeout, TransportUnavailable
from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import Behaviour, Kind, World
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import Buffer, content, regions_of
from stateferry.transport import (
    MemoryKind,
    MemoryRegion,
    TransferState,
    TransportOptions,
    create_transport,
)
from stateferry.transport.mori import MoriTransport
from stateferry.transport.mori_cookies import DevicePage, Landing
from stateferry.transport.mori_engine import SEVERAL_QUEUES
from stateferry.transport.mori_options import MoriBackend, MoriOptions


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    SCENARIOS[scenario]()


def test_sessions_are_made_once_a_pair_of_regions() -> None:
    """F2.1."""
    SCENARIOS["one_session_a_pair_of_regions"]()


def test_memory_is_registered_by_address_once_a_storage() -> None:
    """F2.4 and W28: no alias tensors; one region a storage and one for the cookie, which comes first."""
    pair = Pair()
    ours = [d for d in pair.world.registrations if d.engine_key == pair.reader.engine.name]
    assert [(d.data, d.size) for d in ours[1:]] == [(b.ctypes.data, b.nbytes) for b in pair.local.buffers]
    assert ours[0].id == 0


def test_everything_is_given_back() -> None:
    pair = Pair()
    engine = pair.world.engines[pair.reader.engine.name]
    pair.peer.close()
    assert not engine._remote
    pair.reader.close()
    assert not engine.memory
    assert not engine._backends


def test_a_peer_that_restarts_is_another_engine() -> None:
    """Section 6.2 and W16: MoRI remembers engines by name for ever, so no two lives share one."""
    pair = Pair()
    before = pair.target.engine.name
    assert before.startswith("stateferry-7-")
    pair.world.kill(before)
    transfer = pair.peer.post_read(SOME)
    assert pair.drive(transfer, SOME)[-1] is TransferState.FAILED
    again = pair.transport()
    registration = again.register(regions_of(pair.content))
    assert again.engine.name != before
    pair.peer.close()
    pair.local.reset()
    pair.peer = pair.reader.connect(registration, 1.0)
    assert pair.drive(pair.peer.post_read(SOME), SOME)[-1] is TransferState.DONE


def test_two_peers_of_one_engine_share_it() -> None:
    pair = Pair()
    second = pair.reader.connect(pair.registration, 1.0)
    second.close()
    assert pair.drive(pair.peer.post_read(SOME), SOME)[-1] is TransferState.DONE


def test_pending_reads_end_when_the_engine_is_closed() -> None:
    pair = Pair()
    transfer = pair.peer.post_read(SOME)
    pair.reader.close()
    assert transfer.poll() is TransferState.FAILED
    assert transfer.quiet
    assert "closed here" in transfer.error


def test_another_back_end_is_refused_with_the_cure() -> None:
    pair = Pair()
    other = MoriTransport(
        TransportOptions(mori=MoriOptions(MoriBackend.XGMI)), io=pair.double, clock=pair.world.clock
    )
    with pytest.raises(TransportUnavailable, match=r"uses back end xgmi, this engine rdma.*'mori_backend'"):
        pair.reader.connect(other.register([]), 1.0)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"engine": "other"}, ProtocolError, "of engine other, its descriptor of stateferry-7-"),
        ({"engine_descriptor": b"\xc1"}, TransportUnavailable, "same version of amd-mori"),
        ({"cookie_page": b"\xc1"}, TransportUnavailable, "same version of amd-mori"),
        ({"regions": [[1, 5, b"\xc1"]]}, TransportUnavailable, "same version of amd-mori"),
    ],
)
def test_a_registration_that_mori_does_not_read_is_refused(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Both engines need the same MoRI: a packed descriptor of one version is not read by another."""
    pair = Pair()
    fresh = pair.transport()
    fresh.register([])
    blob = msgspec.msgpack.decode(pair.registration)
    with pytest.raises(error, match=says):
        fresh.connect(msgspec.msgpack.encode(blob | change), 1.0)
    assert fresh.connect(pair.registration, 1.0).usable


def test_a_descriptor_of_another_size_is_refused() -> None:
    """Section 6.3: the size of a memory descriptor must be the peer's real one."""
    pair = Pair()
    blob = msgspec.msgpack.decode(pair.registration)
    address, size, descriptor = blob["regions"][0]
    changed = blob | {"regions": [[address, size - 1, descriptor]]}
    with pytest.raises(ProtocolError, match=rf"region of {size - 1} bytes.*and {size} bytes"):
        pair.reader.connect(msgspec.msgpack.encode(changed), 1.0)
    pair.peer.close()
    assert not pair.world.engines[pair.reader.engine.name]._remote


def test_options_reach_the_back_ends() -> None:
    """Section 2.1: RDMA without notifications, completion queues polled; XGMI's streams and events."""
    world = World()
    rdma = MoriOptions(qp_per_transfer=4, post_batch_size=64, num_workers=2)
    for options in (rdma, MoriOptions(MoriBackend.XGMI, num_streams=8, num_events=9)):
        with MoriTransport(
            TransportOptions(mori=options, host="10.0.0.9"), io=MoriDouble(world)
        ) as transport:
            engine = world.engines[transport.engine.name]
            assert (engine._config.host, engine._config.port) == ("10.0.0.9", 0)
            (config,) = engine._backends.values()
            found = {key: value for key, value in vars(config).items() if key != "poll_cq_mode"}
            if options is rdma:
                assert found == {
                    "qp_per_transfer": 4,
                    "post_batch_size": 64,
                    "num_worker_threads": 2,
                    "enable_notification": False,
                }
                assert config.poll_cq_mode.name == "POLLING"
            else:
                assert found == {"num_streams": 8, "num_events": 9}


def test_a_back_end_that_does_not_start_is_told_with_the_cure() -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no active RDMA device")

    io = SimpleNamespace(**vars(MoriDouble(World())))
    io.RdmaBackendConfig = fail
    with pytest.raises(TransportUnavailable, match=r"rdma back end does not start.*no active.*mori_backend"):
        MoriTransport(io=io)


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori.io", None)
    with pytest.raises(TransportUnavailable, match=r"needs the amd-mori package .*'stateferry\[rocm\]'"):
        create_transport("mori", TransportOptions())


def test_moris_own_wait_for_room_is_short_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Section 6.3: MoRI waits up to 5 s inside the call; the ferry thread has others to serve."""
    import os

    monkeypatch.setattr(importlib, "import_module", lambda name: MoriDouble(World()))
    for before, after in ((None, "1000"), ("70000", "70000")):
        monkeypatch.delenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", raising=False)
        if before:
            monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", before)
        MoriTransport().close()
        assert os.environ["MORI_IO_SQ_BACKOFF_TIMEOUT_US"] == after
    monkeypatch.delenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US")


def test_one_queue_pair_is_not_believed_in_where_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in SEVERAL_QUEUES:
        monkeypatch.delenv(name, raising=False)
    io = MoriDouble(World())
    assert MoriTransport(io=io).engine.ordered
    assert not MoriTransport(TransportOptions(mori=MoriOptions(qp_per_transfer=2)), io=io).engine.ordered
    assert not MoriTransport(TransportOptions(mori=MoriOptions(MoriBackend.XGMI)), io=io).engine.ordered
    for name in SEVERAL_QUEUES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert not MoriTransport(io=io).engine.ordered


def test_the_margin_is_longer_than_a_queue_pair_tries() -> None:
    """Section 6.4: 8 tries of 4.096 us x 2^20, each up to four times as long as it should be."""
    rdma = MoriOptions()
    assert rdma.quiet_after_s({}) > 8 * 4 * 4.096e-6 * 2**20
    shorter = {"MORI_IO_QP_TIMEOUT": "14", "MORI_IO_QP_RETRY_CNT": "1"}
    assert rdma.quiet_after_s(shorter) == rdma.quiet_after_s({})
    assert rdma.quiet_after_s({"MORI_IO_QP_TIMEOUT": "22"}) >= 8 * 4 * 4.096e-6 * 2**22
    assert rdma.quiet_after_s({"MORI_IO_QP_RETRY_CNT": "x"}) == rdma.quiet_after_s({})
    assert rdma.quiet_after_s({"MORI_IO_QP_TIMEOUT": "0"}) == math.inf
    assert MoriOptions(quiet_s=3.0).quiet_after_s({"MORI_IO_QP_TIMEOUT": "0"}) == 3.0
    assert MoriOptions(MoriBackend.XGMI).quiet_after_s({}) == 2.0


def test_a_transport_that_never_registered_does_not_connect() -> None:
    pair = Pair()
    with pytest.raises(TransportError, match="before register"):
        pair.transport().connect(pair.registration, 1.0)


def test_what_may_not_be_posted_is_nothing_to_wait_for() -> None:
    pair = Pair()
    with pytest.raises(ValueError, match="outside"):
        pair.peer.post_read(pieces([(0, 0, 0, 65000, 1000)]))
    assert not pair.posts()


def torch_without_a_gpu() -> SimpleNamespace:
    """As much of torch as the page on a device needs, its memory in this process."""
    import torch

    stream = SimpleNamespace(synchronize=lambda: None)
    return SimpleNamespace(
        uint8=torch.uint8,
        cuda=SimpleNamespace(Stream=lambda index: stream, stream=lambda stream: nullcontext()),
        zeros=lambda size, dtype, device: torch.zeros(size, dtype=dtype),
        frombuffer=torch.frombuffer,
    )


def test_over_xgmi_the_cookie_lies_with_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 6.2: that back end moves nothing but device memory."""
    world = World()
    io = MoriDouble(world)
    options = TransportOptions(mori=MoriOptions(MoriBackend.XGMI))
    monkeypatch.setitem(sys.modules, "torch", torch_without_a_gpu())
    here, there = content(1, (4096,)), content(2, (4096,))

    def transport(buffers: tuple[Buffer, ...]) -> tuple[MoriTransport, bytes]:
        made = MoriTransport(options, io=io, clock=world.clock, pause=world.advance)
        regions = [MemoryRegion(b.ctypes.data, b.nbytes, MemoryKind.CUDA, 3) for b in buffers]
        return made, made.register(regions)

    (reader, _), (target, registration) = transport(here), transport(there)
    page = reader._cookies.page if reader._cookies is not None else None
    assert isinstance(page, DevicePage)
    assert (page.region.kind, page.region.device_index) == (MemoryKind.CUDA, 3)
    peer = reader.connect(registration, 1.0)
    batch = pieces([(0, 0, 0, 0, 4096)])
    transfer = peer.post_read(batch)
    while transfer.poll() is TransferState.PENDING:
        world.advance(0.001)
    assert transfer.poll() is TransferState.DONE, transfer.error
    assert (here[0] == there[0]).all()
    assert target._cookies is not None
    target._cookies.wipe()
    transfer = peer.post_read(batch)
    while transfer.poll() is TransferState.PENDING:
        world.advance(0.001)
    assert "cookie" in transfer.error


def test_a_device_that_fails_fails_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` never raises, whatever torch does when the cookie is looked at."""
    pair = Pair()

    def fail(self: Landing) -> bytes:
        raise RuntimeError("HIP error: an illegal memory access")

    monkeypatch.setattr(Landing, "content", fail)
    transfer = pair.peer.post_read(SOME)
    assert pair.drive(transfer, SOME)[-1] is TransferState.FAILED
    assert "the device failed: HIP error" in transfer.error
    with pytest.raises(TransportUnavailable, match="HIP error"):
        pair.reader.connect(pair.registration, 1.0)


def test_a_connection_that_nobody_answers_says_which_setting_it_waited_for() -> None:
    pair = Pair()
    pair.world.cookie_script.append(Behaviour(Kind.NEVER))
    with pytest.raises(TransportTimeout, match=r"timed out after 0.3 s \(handshake_timeout_s\)"):
        pair.reader.connect(pair.registration, 0.3)
