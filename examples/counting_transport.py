"""A transport of one's own: reads with another one, and counts what it read of each peer.

Run it to see it pass the conformance suite that every transport must pass:

    python examples/counting_transport.py

`docs/writing_a_transport.md` says what each method promises, and how a transport becomes one of ours.
"""

from collections.abc import Sequence

from stateferry.layout.spec import Pieces
from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_rigs import MemoryRig
from stateferry.transport import MemoryRegion, Peer, Transfer, TransferState, Transport
from stateferry.transport.memory import MemoryTransport


class CountingTransport(Transport):
    """Everything that `inner` does, and how many bytes it brought."""

    name = "counting"

    def __init__(self, inner: Transport) -> None:
        self.capabilities = inner.capabilities
        self.bytes_read = 0
        """Of transfers that were seen to end well. Only the thread that owns the transport may look."""
        self._inner = inner

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return self._inner.register(regions)

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        return _CountingPeer(self, self._inner.connect(registration, timeout_s))

    def close(self) -> None:
        self._inner.close()


class _CountingPeer(Peer):
    def __init__(self, transport: CountingTransport, inner: Peer) -> None:
        self._transport = transport
        self._inner = inner

    @property
    def usable(self) -> bool:
        return self._inner.usable

    def post_read(self, pieces: Pieces) -> Transfer:
        return _CountingTransfer(self._transport, self._inner.post_read(pieces))

    def close(self) -> None:
        self._inner.close()


class _CountingTransfer(Transfer):
    def __init__(self, transport: CountingTransport, inner: Transfer) -> None:
        self._transport = transport
        self._inner = inner
        self._counted = False

    @property
    def bytes_done(self) -> int:
        return self._inner.bytes_done

    @property
    def quiet(self) -> bool:
        return self._inner.quiet

    def poll(self) -> TransferState:
        state = self._inner.poll()
        self.error = self._inner.error
        if state is TransferState.DONE and not self._counted:
            self._counted = True
            self._transport.bytes_read += self._inner.bytes_done
        return state

    def cancel(self) -> None:
        self._inner.cancel()
        self.error = self._inner.error


def main() -> None:
    """Run every check of the suite; the first that fails raises AssertionError with what was wrong."""
    with MemoryRig(lambda: CountingTransport(MemoryTransport()), "counting") as rig:
        for name, check in CHECKS.items():
            check(rig)
            print(f"{name}: passed")


if __name__ == "__main__":
    main()
