"""What a type checker sees of the public API. Checked by `make check`, never run.

Each `assert_type` fails if a type is lost on its way to users. Each wrong use below carries the error
that must be reported: where it is not, the comment itself becomes an error (`warn_unused_ignores`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

from stateferry import __version__
from stateferry.config import Config, TransportName, Verify, control_port, parse_config
from stateferry.errors import ConfigError, LayoutMismatch, StateFerryError
from stateferry.ids import EngineId, RequestId
from stateferry.layout.spec import Pieces
from stateferry.models import RECALL_GDN
from stateferry.stack import Client, Engine, EngineSpec, Role, Router, Stack
from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_rigs import MemoryRig, Rig
from stateferry.transport import (
    Capabilities,
    MemoryKind,
    MemoryRegion,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
    create_transport,
)
from stateferry.wire import Offer, parse_offer

assert_type(__version__, str)


def settings(extra: Mapping[str, Any]) -> None:
    config = parse_config(extra)
    assert_type(config, Config)
    assert_type(config.lease_s, float)
    assert_type(config.transport, TransportName)
    assert_type(config.verify, Verify)
    assert_type(control_port(20000, 0, 1, 0), int)
    config.lease_s = 3.0  # type: ignore[misc]
    parse_config(3)  # type: ignore[arg-type]


def errors(error: LayoutMismatch) -> None:
    base: StateFerryError = error
    assert_type(error.field, str)
    other: ConfigError = base  # type: ignore[assignment]
    del other


def ids(engine: EngineId) -> None:
    request: RequestId = engine  # type: ignore[assignment]
    del request


def transports(pieces: Pieces, memory: Sequence[MemoryRegion]) -> None:
    with create_transport("cma", TransportOptions()) as transport:
        assert_type(transport, Transport)
        assert_type(transport.register(memory), bytes)
        peer = transport.connect(b"", timeout_s=1.0)
        assert_type(peer, Peer)
        transfer = peer.post_read(pieces)
        assert_type(transfer, Transfer)
        assert_type(transfer.poll(), TransferState)
        assert_type(transfer.quiet, bool)
        transport.connect("address", 1.0)  # type: ignore[arg-type]
    Capabilities(memory_kinds=MemoryKind.CPU)  # type: ignore[arg-type]


class Incomplete(Transport):
    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return b""


def incomplete() -> None:
    Incomplete()  # type: ignore[abstract]


def conformance(rig: Rig) -> None:
    for check in CHECKS.values():
        assert_type(check(rig), None)
    MemoryRig(3)  # type: ignore[arg-type]


def servers() -> None:
    with Stack() as stack, Client(timeout_s=10.0) as client:
        engine = stack.start(EngineSpec(model=RECALL_GDN, role=Role.PREFILL))
        assert_type(engine, Engine)
        assert_type(engine.url, str)
        router = stack.start_router([engine], [engine])
        assert_type(router, Router)
        assert_type(client.models(router.url), list[str])
        assert_type(RECALL_GDN, Path)
        EngineSpec(model=RECALL_GDN, role="prefill")  # type: ignore[arg-type]


def params(answer: Mapping[str, Any]) -> None:
    offer = parse_offer(answer)
    assert_type(offer, Offer)
    assert_type(offer.engine_id, EngineId)
    offer.num_tokens = 3  # type: ignore[misc]
