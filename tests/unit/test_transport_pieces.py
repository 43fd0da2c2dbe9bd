"""The arithmetic that every transport shares, against the same thing done one piece at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateferry.testing.transport_reads import pieces
from stateferry.transport.pieces import ADDRESS_LIMIT, RegionTable, Spans, batch_ends, cut, resolve_pieces

LOCAL = RegionTable("local", [(4096, 100), (1 << 40, 1 << 30)])
REMOTE = RegionTable("remote", [(8192, 50), (9000, 200)])


def spans(sizes: list[int]) -> Spans:
    """Spans of these sizes, far apart on both sides."""
    count = len(sizes)
    far = np.arange(count, dtype=np.uint64) * np.uint64(1 << 40)
    regions = np.arange(count, dtype=np.int64)
    return Spans(far + np.uint64(3), far + np.uint64(7), np.array(sizes, dtype=np.uint64), regions, -regions)


def test_pieces_become_addresses() -> None:
    found = resolve_pieces(pieces([(0, 99, 1, 0, 1), (1, 5, 0, 40, 10)]), LOCAL, REMOTE)
    assert found.local.tolist() == [4195, (1 << 40) + 5]
    assert found.remote.tolist() == [9000, 8232]
    assert found.sizes.tolist() == [1, 10]
    assert (found.local_regions.tolist(), found.remote_regions.tolist()) == ([0, 1], [1, 0])


def test_the_first_bad_piece_is_named() -> None:
    with pytest.raises(ValueError, match=r"piece 1: 11 bytes at offset 40 lie outside remote region 0 of 50"):
        resolve_pieces(pieces([(0, 0, 0, 0, 1), (0, 0, 0, 40, 11), (0, 0, 0, 50, 1)]), LOCAL, REMOTE)
    with pytest.raises(ValueError, match=r"piece 0: local region 2 of 2 does not exist"):
        resolve_pieces(pieces([(2, 0, 0, 0, 1)]), LOCAL, REMOTE)


def test_arrays_that_are_not_parallel_are_refused() -> None:
    good = pieces([(0, 0, 0, 0, 1), (0, 1, 0, 1, 1)])
    for wrong in (good.sizes[:1], good.sizes.astype(np.int32), good.sizes.reshape(2, 1)):
        bad = pieces([(0, 0, 0, 0, 1), (0, 1, 0, 1, 1)])
        object.__setattr__(bad, "remote_offsets", wrong)
        with pytest.raises(ValueError, match=r"pieces.remote_offsets is .* expected int64\[2\]"):
            resolve_pieces(bad, LOCAL, REMOTE)


@pytest.mark.parametrize(
    "span", [(0, 5), (-4096, 5), (4096, 0), (4096, -1), (ADDRESS_LIMIT, 1), (1, 1 << 62)]
)
def test_a_region_that_cannot_be_memory_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="remote region 1"):
        RegionTable("remote", [(4096, 4096), span])


def test_an_address_is_told_as_region_and_offset() -> None:
    assert REMOTE.locate(8192) == "remote region 0 offset 0"
    assert REMOTE.locate(9199) == "remote region 1 offset 199"
    assert REMOTE.locate(9200) == "address 0x23f0"


@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(1, 700))
def test_cutting_keeps_every_byte_in_order(sizes: list[int], limit: int) -> None:
    before = spans(sizes)
    after = cut(before, limit)
    expected = [
        (int(local) + start, int(remote) + start, min(limit, int(size) - start), region)
        for local, remote, size, region, _ in zip(*before, strict=True)
        for start in range(0, int(size), limit)
    ]
    found = zip(*(after[i].tolist() for i in range(4)), strict=True)
    assert list(found) == expected
    assert after.remote_regions.tolist() == (-after.local_regions).tolist()


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 300), st.integers(1, 7))
def test_batches_are_full_and_within_both_limits(sizes: list[int], max_bytes: int, max_pieces: int) -> None:
    ends = batch_ends(np.array(sizes, dtype=np.uint64), max_bytes, max_pieces)
    starts = [0, *ends[:-1]]
    batches = [sizes[start:end] for start, end in zip(starts, ends, strict=False)]
    assert [size for batch in batches for size in batch] == sizes
    for batch, following in zip(batches, [*batches[1:], []], strict=False):
        assert 0 < len(batch) <= max_pieces
        assert sum(batch) <= max_bytes
        # Full: the next piece would not have fitted.
        assert not following or len(batch) == max_pieces or sum(batch) + following[0] > max_bytes
