"""Digests: equal for equal contents, different for anything else."""

import itertools

import numpy as np
import pytest

from stateferry.layout.digest import bytes_digest, prefix_digest
from stateferry.layout.spec import Pieces


def test_every_part_of_a_prefix_counts() -> None:
    """No two of these are the same prefix, though many have the same bytes once glued together."""
    prefixes = [
        ([1, 2], None, None, []),
        ([2, 1], None, None, []),
        ([1], None, None, []),
        ([1, 2, 0], None, None, []),
        ([258], None, None, []),
        ([1 + (2 << 32)], None, None, []),
        ([-1], None, None, []),
        ([1, 2], "", None, []),
        ([1, 2], "a", None, []),
        ([1, 2], None, "a", []),
        ([1, 2], "ab", "c", []),
        ([1, 2], "a", "bc", []),
        ([1, 2], None, None, [(0, 1, "x")]),
        ([1, 2], None, None, [(1, 1, "x")]),
        ([1, 2], None, None, [(0, 2, "x")]),
        ([1, 2], None, None, [(0, 1, "y")]),
        ([1, 2], None, None, [(0, 1, "x"), (1, 1, "x")]),
        ([], None, None, []),
    ]
    digests = [prefix_digest(*prefix) for prefix in prefixes]
    for (i, a), (j, b) in itertools.combinations(enumerate(digests), 2):
        assert a != b, f"{prefixes[i]} and {prefixes[j]}"


def test_a_prefix_has_one_digest_whatever_holds_its_tokens() -> None:
    digest = prefix_digest([1, 2, 3], "adapter", "salt", [(0, 2, "h")])
    assert digest == prefix_digest((1, 2, 3), "adapter", "salt", ((0, 2, "h"),))
    assert digest == prefix_digest(np.array([1, 2, 3], np.int32), "adapter", "salt", [(0, 2, "h")])  # type: ignore[arg-type]
    assert digest == "3c01f9d757fdc8fc501d9063fb706421"  # engines of two versions compare theirs
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")
    assert prefix_digest([], "\ud800", None, []) != prefix_digest([], None, None, [])


def pieces(local: list[int], remote: list[int], sizes: list[int]) -> Pieces:
    zeros = np.zeros(len(sizes), np.int64)
    return Pieces(zeros, np.array(local), zeros, np.array(remote), np.array(sizes))


def reader(memory: bytes):  # type: ignore[no-untyped-def]
    def read(region: int, offset: int, size: int) -> memoryview:
        assert region == 0
        return memoryview(memory)[offset : offset + size]

    return read


def test_two_sides_of_the_same_pieces_agree_when_the_bytes_do() -> None:
    moved = pieces([0, 4], [3, 9], [3, 2])
    ours, theirs = reader(b"abc-de"), reader(b"---abc---de")
    digest = bytes_digest(moved, "local", ours)
    assert digest == bytes_digest(moved, "remote", theirs)
    assert digest == bytes_digest(pieces([0, 1, 4], [0, 0, 0], [1, 2, 2]), "local", ours)


@pytest.mark.parametrize("memory", [b"abd-de", b"abc-dd", b"dec-ab"])
def test_one_wrong_byte_is_noticed(memory: bytes) -> None:
    moved = pieces([0, 4], [3, 9], [3, 2])
    assert bytes_digest(moved, "local", reader(memory)) != bytes_digest(
        moved, "remote", reader(b"---abc---de")
    )


def test_order_and_length_count() -> None:
    memory = reader(b"\0\0\0ab")
    digests = {
        bytes_digest(pieces(local, local, sizes), "local", memory)
        for local, sizes in (([3, 4], [1, 1]), ([4, 3], [1, 1]), ([0], [1]), ([0], [2]), ([], []))
    }
    assert len(digests) == 5
