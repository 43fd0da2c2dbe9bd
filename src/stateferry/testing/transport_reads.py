"""The conformance suite's tools: batches, waiting with a deadline, and proof of every byte."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from stateferry.layout.spec import Pieces
from stateferry.testing.transport_rigs import Link, Rig
from stateferry.transport import Transfer, TransferState

Row = tuple[int, int, int, int, int]
"""(local region, local offset, remote region, remote offset, size)."""

POLL_S = 0.0002


def pieces(rows: Sequence[Row]) -> Pieces:
    """Rows as the parallel arrays that transports take."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    return Pieces(*(np.ascontiguousarray(table[:, i]) for i in range(5)))


def random_rows(rng: np.random.Generator, sizes: Sequence[int], count: int) -> list[Row]:
    """About `count` pieces over all regions in random order; none overlap locally, few are aligned."""
    rows: list[Row] = []
    for region, room in enumerate(sizes):
        cuts = np.sort(rng.choice(room, size=min(2 * (count // len(sizes) + 1), room // 2), replace=False))
        for start, end in zip(cuts[:-1:2].tolist(), cuts[1::2].tolist(), strict=True):
            size = min(end - start, *sizes)
            remote = int(rng.integers(len(sizes)))
            rows.append((region, start, remote, int(rng.integers(sizes[remote] - size + 1)), size))
    return [rows[i] for i in rng.permutation(len(rows))]


def finish(transfers: Sequence[Transfer], timeout_s: float) -> list[TransferState]:
    """Poll all in turn until each is terminal. Fails past the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        states = [transfer.poll() for transfer in transfers]
        if TransferState.PENDING not in states:
            return states
        assert time.monotonic() < deadline, f"still pending after {timeout_s:g} s"
        time.sleep(POLL_S)


def wait_quiet(transfer: Transfer, timeout_s: float) -> None:
    """Poll until no byte can land any more. Fails past the deadline."""
    deadline = time.monotonic() + timeout_s
    while not transfer.quiet:
        assert time.monotonic() < deadline, f"not quiet after {timeout_s:g} s: {transfer.error}"
        transfer.poll()
        time.sleep(POLL_S)


def read(rig: Rig, link: Link, batch: Pieces) -> None:
    """Read a batch and prove every byte of local memory."""
    transfer = link.peer.post_read(batch)
    expect_done(rig, link, transfer, batch)


def expect_done(rig: Rig, link: Link, transfer: Transfer, batch: Pieces) -> None:
    """DONE in time, every byte of local memory right, and it stays so."""
    (state,) = finish([transfer], rig.timeout_s)
    # Compared at once: DONE means that the bytes are there now.
    found = link.local.differences(batch, link.target.content)
    assert state is TransferState.DONE, f"failed: {transfer.error}"
    assert not found, f"DONE, but {'; '.join(found)}"
    assert transfer.quiet, "DONE, but not quiet"
    assert transfer.bytes_done == batch.total_bytes, f"{transfer.bytes_done} of {batch.total_bytes} bytes"
    assert transfer.error == "", f"DONE, with an error: {transfer.error}"
    assert transfer.poll() is TransferState.DONE, "DONE did not last"


def expect_failed(rig: Rig, link: Link, batch: Pieces) -> None:
    """Read from a peer that is gone: FAILED in time, quiet in time, and it stays so."""
    transfer = link.peer.post_read(batch)
    (state,) = finish([transfer], rig.timeout_s)
    assert state is TransferState.FAILED, f"{state.name}, although the peer is gone"
    assert transfer.error, "FAILED without an error text"
    assert transfer.bytes_done < batch.total_bytes, "FAILED, but all bytes count as arrived"
    wait_quiet(transfer, rig.timeout_s)
    assert transfer.poll() is TransferState.FAILED, "FAILED did not last"
    assert not link.peer.usable, "the peer is gone, but counts as usable"


@contextmanager
def raises(kind: type[Exception], doing: str) -> Iterator[None]:
    """Exactly this kind of error must come, with a text."""
    raised: Exception | None = None
    try:
        yield
    except Exception as e:
        raised = e
    assert raised is not None, f"{doing}: nothing was raised, {kind.__name__} was expected"
    assert isinstance(raised, kind), f"{doing}: {raised!r}, not {kind.__name__}"
    assert str(raised), f"{doing}: {kind.__name__} without a text"
