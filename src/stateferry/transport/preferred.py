"""Several transports as one: each peer is read by the first of them that reaches it.

What cannot be made or cannot register here is left out, and what cannot reach a peer is passed over; the
reasons are logged once, and all of them are in the error where nothing is left.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated

import msgspec

from stateferry.errors import ProtocolError, TransportClosed, TransportError, TransportUnavailable
from stateferry.transport.base import Capabilities, MemoryRegion, Peer, Transport
from stateferry.transport.registrations import decode_registration

logger = logging.getLogger(__name__)


_Name = Annotated[str, msgspec.Meta(max_length=64)]


class _Registrations(msgspec.Struct, frozen=True, tag="several/1", forbid_unknown_fields=True):
    """The registration of each transport that the peer has, by name."""

    by_name: dict[_Name, bytes]


class PreferredTransport(Transport):
    """Tries its transports in order, the preferred one first."""

    def __init__(self, makers: Mapping[str, Callable[[], Transport]]) -> None:
        """Raises TransportUnavailable with every reason when none can be made."""
        self.name = "+".join(makers)
        self._transports: dict[str, Transport] = {}
        self._refused: dict[str, str] = {}
        for name, make in makers.items():
            try:
                self._transports[name] = make()
            except TransportUnavailable as e:
                self._leave_out(name, e)
        if not self._transports:
            raise TransportUnavailable(self._reasons())
        self.capabilities = _together([t.capabilities for t in self._transports.values()])

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        """As the base says; raises only when no transport is left that can."""
        registrations: dict[str, bytes] = {}
        for name, transport in list(self._transports.items()):
            try:
                registrations[name] = transport.register(regions)
            except TransportClosed:
                raise
            except TransportError as e:
                self._leave_out(name, e)
                if len(self._transports) == 1:
                    raise type(e)(self._reasons()) from e
                transport.close()
                del self._transports[name]
        return msgspec.msgpack.encode(_Registrations(registrations))

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """As the base says; the deadline is for all tries together."""
        theirs = decode_registration(self.name, registration, _Registrations)
        deadline_s = time.monotonic() + timeout_s
        reasons = []
        for name, transport in self._transports.items():
            if name not in theirs.by_name:
                reasons.append(f"{name}: the peer has none")
                continue
            try:
                peer = transport.connect(theirs.by_name[name], max(deadline_s - time.monotonic(), 0.001))
            except (ProtocolError, TransportClosed):
                raise
            except TransportError as e:
                reasons.append(str(e))
                continue
            if reasons:
                logger.warning("a peer is read with %s: %s", name, "; ".join(reasons))
            return peer
        raise TransportUnavailable(f"no transport reaches the peer: {'; '.join(reasons)}")

    def close(self) -> None:
        """Close all of them, whatever one of them says to that."""
        with ExitStack() as closing:
            for transport in self._transports.values():
                closing.callback(transport.close)

    def _leave_out(self, name: str, error: TransportError) -> None:
        self._refused[name] = str(error)
        logger.warning("transport %s is not used here: %s", name, error)

    def _reasons(self) -> str:
        return "; ".join(self._refused.values())


def _together(all_of_them: Sequence[Capabilities]) -> Capabilities:
    """What holds whichever of them reads."""
    return Capabilities(
        memory_kinds=frozenset.intersection(*(c.memory_kinds for c in all_of_them)),
        cancel=all(c.cancel for c in all_of_them),
        self_progressing=all(c.self_progressing for c in all_of_them),
        same_host_only=all(c.same_host_only for c in all_of_them),
        max_piece_bytes=min(c.max_piece_bytes for c in all_of_them),
    )
