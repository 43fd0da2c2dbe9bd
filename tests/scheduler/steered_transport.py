"""The memory transport with a hand on the tap: reads can be held back, failed, or refuse to be cancelled."""

from collections.abc import Sequence

from stateferry.config import Config
from stateferry.layout.spec import Pieces
from stateferry.transport.base import MemoryRegion, Peer, Transfer, TransferState
from stateferry.transport.memory import MemoryTransport

TRIES = 1 + Config().read_retries
"""So many reads must fail before their hand-off does."""


class Tap:
    """What happens to reads that one engine posts. Set by a test at any time, read by the ferry thread."""

    def __init__(self) -> None:
        self.held = False
        """Nothing arrives and nothing ends."""
        self.deaf = False
        """Held reads cannot be cancelled: they stay a danger to their blocks until the hold ends."""
        self.failing = 0
        """How many of the next reads fail instead of arriving (see `TRIES`)."""
        self.posted = 0


class SteeredTransport(MemoryTransport):
    """`memory`, obeying a tap."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self._tap = tap

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return super().register(regions)

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        return _SteeredPeer(self._tap, super().connect(registration, timeout_s))


class _SteeredPeer(Peer):
    def __init__(self, tap: Tap, peer: Peer) -> None:
        self._tap = tap
        self._peer = peer

    def post_read(self, pieces: Pieces) -> Transfer:
        self._tap.posted += 1
        fails = self._tap.failing > 0
        self._tap.failing -= fails
        return _SteeredTransfer(self._tap, self._peer.post_read(pieces), fails)

    def close(self) -> None:
        self._peer.close()


class _SteeredTransfer(Transfer):
    def __init__(self, tap: Tap, transfer: Transfer, fails: bool) -> None:
        self._tap = tap
        self._transfer = transfer
        self._fails = fails

    @property
    def bytes_done(self) -> int:
        return self._transfer.bytes_done

    @property
    def quiet(self) -> bool:
        return self._transfer.quiet

    def poll(self) -> TransferState:
        if self._tap.held:
            return TransferState.PENDING if not self.quiet else self._end()
        if self._fails:
            self._transfer.cancel()
        return self._end()

    def cancel(self) -> None:
        if not (self._tap.held and self._tap.deaf):
            self._transfer.cancel()

    def _end(self) -> TransferState:
        state = self._transfer.poll()
        self.error = self._transfer.error
        return state
