"""What of the CUDA IPC transport can be tested without a device; tools/gpu_transports.py does the rest."""

import os
import subprocess
import sys

import numpy as np
import pytest

from stateferry.errors import TransportUnavailable
from stateferry.transport import TransportOptions, create_transport
from stateferry.transport.pieces import Spans

gather = pytest.importorskip("stateferry.transport.cuda_gather", reason="needs torch and triton")


def spans(rows: list[tuple[int, int, int]]) -> Spans:
    local, remote, sizes = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), np.int64)
    return Spans(local, remote, sizes, zeros, zeros)


def copied(rows: list[tuple[int, int, int]]) -> dict[int, int]:
    """Which source byte every program's row brings to which destination byte; each once."""
    found: dict[int, int] = {}
    for table, unit in zip(gather.tables(spans(rows)), (8, 1), strict=True):
        for source, target, count in table.tolist():
            assert count > 0
            assert count * unit <= gather.CHUNK_BYTES
            if unit == 8:
                assert source % 8 == target % 8 == 0
            for byte in range(count * unit):
                assert target + byte not in found
                found[target + byte] = source + byte
    return found


@pytest.mark.parametrize(
    "rows",
    [
        [(1 << 20, 2 << 20, 64)],
        [(1 << 20, 2 << 20, 200_000)],
        [((1 << 20) + 1, 2 << 20, 24), (3 << 20, (2 << 20) + 4, 24), (4 << 20, 5 << 20, 23)],
        [(1 << 20, 2 << 20, 70_001), (2 << 20, 1 << 20, 65_536), ((3 << 20) + 3, (4 << 20) + 3, 1)],
    ],
    ids=["one", "many chunks", "odd in each of three ways", "mixed"],
)
def test_every_byte_is_in_one_row(rows: list[tuple[int, int, int]]) -> None:
    expected = {local + i: remote + i for local, remote, size in rows for i in range(size)}
    assert copied(rows) == expected


def test_without_a_device_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(TransportUnavailable, match="needs an NVIDIA device"):
        create_transport("cudaipc", TransportOptions())


KERNEL = """
import numpy as np, torch
from stateferry.transport import cuda_gather as gather

source = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)
target = np.zeros_like(source)
expected = target.copy()
here, there = target.ctypes.data, source.ctypes.data
for unit, rows in ((8, [(0, 8, 3000), (40_000, 64_000, 17)]), (1, [(3, 100_001, 3001)])):
    table = np.array([(there + a, here + b, count) for a, b, count in rows], np.int64)
    gather._gather[(len(rows),)](torch.from_numpy(table), unit, gather.LANES)
    for a, b, count in rows:
        expected[b : b + count * unit] = source[a : a + count * unit]
assert expected.any() and (target == expected).all(), np.flatnonzero(target != expected)[:10]
"""


def test_the_kernel_copies_whole_words_and_single_bytes() -> None:
    """In Triton's interpreter, which must be chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
