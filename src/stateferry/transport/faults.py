"""Wraps any transport and makes its reads go wrong on purpose, by rule and by seed. Never in production.

    {"transport": "cma", "seed": 7, "rules": [
        {"kind": "fail_writing", "reads": [1]},     the first read of every hand-off
        {"kind": "delay", "rate": 0.1, "polls": 50}]}    one read in ten, by the seed

A hand-off of an engine under test may bring rules of its own (`kv_transfer_params`); they come before
these. The first rule that applies to a read decides. Without one, reads are the inner transport's.
The peer sees the inner transport's name and registration, so the other engine needs none of this.

    kind          what becomes of the read
    fail          FAILED when posted, nothing was read
    break         FAILED when posted, and no later read over this connection works either
    fail_writing  FAILED after `polls`; half has arrived, the other half lands `polls` later
    land_late     FAILED at the first look; everything lands `polls` later all the same
    drop          DONE without the last piece; says so in `bytes_done`
    truncate      DONE without the last half of the last piece; says so in `bytes_done`
    corrupt       DONE with wrong bytes (the halves of the last piece change places), and says that all
                  is well: only digests can tell
    duplicate     everything is read twice
    delay         begins after `polls`
    hang          never ends; a cancel ends it
    never         never ends, never becomes quiet, hears no cancel
"""

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from stateferry.errors import ConfigError, ProtocolError
from stateferry.layout.spec import Pieces
from stateferry.transport.base import MemoryRegion, Peer, Transfer, Transport, TransportOptions
from stateferry.transport.faulty import Delayed, FailedAtOnce, Hanging, LateLanding, Several
from stateferry.transport.registry import choose, create_transport


class FaultKind(enum.Enum):
    """What becomes of a read; the table is in the module's text."""

    FAIL = "fail"
    BREAK = "break"
    FAIL_WRITING = "fail_writing"
    LAND_LATE = "land_late"
    DROP = "drop"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    HANG = "hang"
    NEVER = "never"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault, and which reads have it."""

    kind: FaultKind
    reads: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    """Which reads of a hand-off, the first is 1, reads that try again count on; empty: all."""
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """How many of those reads, drawn by the seed."""
    polls: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 20
    """How often the reader looks before it happens: about milliseconds, and the same on every machine."""


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of this transport."""

    transport: str = "auto"
    """What is wrapped."""
    seed: int = 0
    rules: tuple[Rule, ...] = ()


class FaultsTransport(Transport):
    """See the module."""

    def __init__(self, options: TransportOptions | None = None, inner: Transport | None = None) -> None:
        """`inner` is for tests; otherwise it is made by the name in the settings.

        Raises ConfigError for settings that cannot be used, and what making the inner transport raises.
        """
        options = options or TransportOptions()
        try:
            self.settings = msgspec.convert(dict(options.faults), Faults)
        except msgspec.ValidationError as e:
            raise ConfigError(f"key 'faults' in kv_connector_extra_config: {e}") from e
        if self.settings.transport == "faults":
            raise ConfigError("key 'faults.transport' is 'faults': it must name the transport to wrap")
        self.inner = inner or create_transport(
            choose(self.settings.transport, options.memory_kind, options.rocm), options
        )
        self.name = self.inner.name
        self.capabilities = self.inner.capabilities
        self._random = random.Random(self.settings.seed)

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return self.inner.register(regions)

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        return _FaultyPeer(self, self.inner.connect(registration, timeout_s))

    def close(self) -> None:
        self.inner.close()

    def rule_for(self, read: int, rules: Sequence[Rule]) -> Rule | None:
        """The rule that decides read number `read` of a hand-off. Draws from the seed."""
        for rule in (*rules, *self.settings.rules):
            if rule.reads and read not in rule.reads:
                continue
            if rule.rate >= 1.0 or self._random.random() < rule.rate:
                return rule
        return None


class _FaultyPeer(Peer):
    def __init__(self, transport: FaultsTransport, inner: Peer) -> None:
        self._transport = transport
        self._inner = inner
        self._broken = False
        self._read = 1
        self._rules: tuple[Rule, ...] = ()

    @property
    def usable(self) -> bool:
        return self._inner.usable and not self._broken

    def announce(self, read: int, orders: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._rules = msgspec.convert(list(orders), tuple[Rule, ...])
        except msgspec.ValidationError as e:
            raise ProtocolError(f"faults that were ordered for a hand-off: {e}") from e
        self._read = read

    def post_read(self, pieces: Pieces) -> Transfer:
        rule = self._transport.rule_for(self._read, self._rules)
        self._read, self._rules = 1, ()
        if self._broken:
            self._inner.post_read(_none_of(pieces))  # raises what the contract wants after a close
            return FailedAtOnce("the connection broke")
        if rule is None:
            return self._inner.post_read(pieces)
        self._broken = rule.kind is FaultKind.BREAK
        return _FAULTS[rule.kind](self._inner, pieces, rule)

    def close(self) -> None:
        self._inner.close()


def _none_of(pieces: Pieces) -> Pieces:
    return _rows(pieces, 0, 0)


def _rows(pieces: Pieces, start: int, end: int) -> Pieces:
    return Pieces(
        pieces.local_regions[start:end],
        pieces.local_offsets[start:end],
        pieces.remote_regions[start:end],
        pieces.remote_offsets[start:end],
        pieces.sizes[start:end],
    )


def _shortened(pieces: Pieces) -> Pieces:
    """Without the last half of the last piece (all of it, if it is one byte)."""
    if not len(pieces) or pieces.sizes[-1] == 1:
        return _rows(pieces, 0, max(0, len(pieces) - 1))
    sizes = np.array(pieces.sizes)
    sizes[-1] //= 2
    return Pieces(
        pieces.local_regions, pieces.local_offsets, pieces.remote_regions, pieces.remote_offsets, sizes
    )


def _fail_writing(inner: Peer, pieces: Pieces, rule: Rule) -> Transfer:
    half = (len(pieces) + 1) // 2
    first = inner.post_read(_rows(pieces, 0, half))
    rest = LateLanding(lambda: inner.post_read(_rows(pieces, half, len(pieces))), rule.polls, 2 * rule.polls)
    return Several([first, rest])


def _confused(pieces: Pieces) -> Pieces:
    """The two halves of the last piece change places. One byte has no halves and stays right."""
    if not len(pieces):
        return pieces
    kept, last = _rows(pieces, 0, len(pieces) - 1), _rows(pieces, len(pieces) - 1, len(pieces))
    size = int(last.sizes[0])
    half = size // 2
    parts = [(0, size - half, half), (size - half, 0, half), (half, half, size - 2 * half)]
    return _concatenated([kept, *(_shifted(last, *part) for part in parts if part[2])])


def _shifted(piece: Pieces, local: int, remote: int, size: int) -> Pieces:
    return Pieces(
        piece.local_regions,
        piece.local_offsets + local,
        piece.remote_regions,
        piece.remote_offsets + remote,
        np.full(1, size, np.int64),
    )


def _concatenated(parts: Sequence[Pieces]) -> Pieces:
    """All parts' pieces as one batch."""
    return Pieces(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("local_regions", "local_offsets", "remote_regions", "remote_offsets", "sizes")
        )
    )


_FAULTS: Mapping[FaultKind, Callable[[Peer, Pieces, Rule], Transfer]] = {
    FaultKind.FAIL: lambda inner, pieces, rule: FailedAtOnce("failed when it was posted"),
    FaultKind.BREAK: lambda inner, pieces, rule: FailedAtOnce("the connection broke"),
    FaultKind.FAIL_WRITING: _fail_writing,
    FaultKind.LAND_LATE: lambda inner, pieces, rule: LateLanding(
        lambda: inner.post_read(pieces), 0, rule.polls
    ),
    FaultKind.DROP: lambda inner, pieces, rule: inner.post_read(_rows(pieces, 0, max(0, len(pieces) - 1))),
    FaultKind.TRUNCATE: lambda inner, pieces, rule: inner.post_read(_shortened(pieces)),
    FaultKind.CORRUPT: lambda inner, pieces, rule: inner.post_read(_confused(pieces)),
    FaultKind.DUPLICATE: lambda inner, pieces, rule: Several(
        [inner.post_read(pieces), inner.post_read(pieces)], copies=2
    ),
    FaultKind.DELAY: lambda inner, pieces, rule: Delayed(lambda: inner.post_read(pieces), rule.polls),
    FaultKind.HANG: lambda inner, pieces, rule: Hanging(deaf=False),
    FaultKind.NEVER: lambda inner, pieces, rule: Hanging(deaf=True),
}
