"""Several transports as one: the first that reaches a peer reads it."""

import logging
from collections.abc import Iterator, Sequence

import pytest

from stateferry.errors import ProtocolError, TransportError, TransportUnavailable
from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import Local, MemoryRig, Target, content, regions_of
from stateferry.transport import MemoryRegion, Peer, Transport, TransportOptions, create_transport
from stateferry.transport.memory import MemoryTransport
from stateferry.transport.preferred import PreferredTransport


class Shy(MemoryTransport):
    """Registers, and reaches nobody."""

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        raise TransportUnavailable("shy: the peer runs on another host")


class Unable(MemoryTransport):
    """Cannot register."""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        raise TransportUnavailable("unable: memory of this kind cannot be exported")


class Refusing(MemoryTransport):
    """Cannot register either."""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        raise TransportError("refusing: no memory can be pinned")


def missing() -> Transport:
    raise TransportUnavailable("missing: its library is not installed")


def preferred(**makers: type[Transport]) -> PreferredTransport:
    return PreferredTransport(makers)


class WrappedTarget(Target):
    """In this process, registered with a memory transport behind one that reaches nobody."""

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self.content = content(seed, sizes)
        self.process_id = 0
        self.reopen()

    def close_transport(self) -> None:
        self._transport.close()

    def reopen(self) -> None:
        self._transport = preferred(shy=Shy, memory=MemoryTransport)
        self.registration = self._transport.register(regions_of(self.content))

    def kill(self) -> None:
        self._transport.close()

    def end(self) -> None:
        self._transport.close()


class WrappedRig(MemoryRig):
    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        return WrappedTarget(sizes, seed)


@pytest.fixture(scope="module")
def rig() -> Iterator[WrappedRig]:
    with WrappedRig(lambda: preferred(shy=Shy, memory=MemoryTransport)) as rig:
        yield rig


@pytest.mark.parametrize("check", CHECKS)
def test_it_conforms_while_falling_back(rig: WrappedRig, check: str) -> None:
    CHECKS[check](rig)


def test_the_first_that_can_be_made_registered_and_reached_is_used(caplog: pytest.LogCaptureFixture) -> None:
    local = Local((64,))
    target = WrappedTarget((64,), seed=3)
    makers = {"missing": missing, "unable": Unable, "shy": Shy, "memory": MemoryTransport}
    with PreferredTransport(makers) as transport:
        assert transport.name == "missing+unable+shy+memory"
        transport.register(local.regions())
        peer = transport.connect(target.registration, 1.0)
        transfer = peer.post_read(pieces([(0, 0, 0, 0, 64)]))
        while not transfer.quiet:
            transfer.poll()
        assert transfer.bytes_done == 64
    target.end()
    told = " ".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    for reason in ("missing: its library", "unable: memory of this kind", "shy: the peer runs"):
        assert told.count(reason) == 1, told


def test_the_preferred_one_is_used_where_it_can_be() -> None:
    used = []

    class Told(MemoryTransport):
        def connect(self, registration: bytes, timeout_s: float) -> Peer:
            used.append(self.name)
            return super().connect(registration, timeout_s)

    with preferred(first=Told, second=Shy) as transport, preferred(first=Told, second=Shy) as other:
        transport.register(Local((64,)).regions())
        transport.connect(other.register(Local((64,)).regions()), 1.0)
    assert used == ["memory"]


def test_where_nothing_is_left_every_reason_is_told() -> None:
    with pytest.raises(TransportUnavailable, match="missing: its library"):
        PreferredTransport({"missing": missing})
    makers = {"missing": missing, "unable": Unable, "other": Refusing}
    with (
        PreferredTransport(makers) as transport,
        pytest.raises(TransportError, match=r"missing: .*unable: .*refusing: "),
    ):
        transport.register(Local((64,)).regions())
    with preferred(shy=Shy, other=Shy) as transport, preferred(shy=Shy, third=MemoryTransport) as peer:
        transport.register(Local((64,)).regions())
        registration = peer.register(Local((64,)).regions())
        with pytest.raises(TransportUnavailable, match=r"shy: the peer runs.*other: the peer has none"):
            transport.connect(registration, 1.0)


def test_one_that_does_not_close_keeps_none_of_the_others_open() -> None:
    closed = []

    class Told(MemoryTransport):
        def close(self) -> None:
            closed.append(self)
            super().close()

    class Stuck(Told):
        def close(self) -> None:
            super().close()
            raise TransportError("stuck: the device failed")

    transport = preferred(a=Told, b=Stuck, c=Told)
    with pytest.raises(TransportError, match="the device failed"):
        transport.close()
    assert len(closed) == 3


def test_a_plain_registration_is_not_taken_for_one_of_several() -> None:
    with preferred(memory=MemoryTransport) as transport, MemoryTransport() as plain:
        transport.register(Local((64,)).regions())
        with pytest.raises(ProtocolError):
            transport.connect(plain.register(Local((64,)).regions()), 1.0)


def test_names_joined_by_plus_make_one() -> None:
    with create_transport("cma+memory", TransportOptions()) as made:
        assert isinstance(made, PreferredTransport)
        assert made.name == "cma+memory"
        assert made.capabilities.same_host_only
